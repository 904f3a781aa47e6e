"""How near the simulator comes to what is measured: peak and step time of planned steps, network by network.

    python benchmarks/predictions.py --output benchmarks/results/cpu-predictions.json

Budgets lie between the least feasible one and the plain peak, so that each plan has to move something.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cpu_acceptance import environment
from interleave import Setup, Worker

from outgrow.units import format_bytes

# Name, batch, input size, and budgets as shares of the plain peak; VGG-16 has hardly anything to move at its peak.
_NETWORKS = (
    ("resnet-50", 8, 160, (0.8, 0.65)),
    ("vgg-16", 16, 192, (0.975,)),
    ("unet", 2, 160, (0.95, 0.85)),
    ("gpt-4x256", 8, 256, (0.7, 0.5)),
)
_STEPS = 7
_UNBOUNDED = 1 << 62


def measure(network: str, batch: int, image_size: int, budget: int) -> list[dict[str, Any]]:
    """The summaries of some steps under a budget."""
    worker = Worker(Setup(network, network, batch, image_size, budget))
    try:
        return [worker.step() for _ in range(_STEPS)]
    finally:
        worker.close()


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the figures go, as JSON")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for network, batch, image_size, shares in _NETWORKS:
        plain = measure(network, batch, image_size, _UNBOUNDED)[-1]["measured_peak_bytes"]
        for share in shares:
            steps = measure(network, batch, image_size, int(plain * share))
            last = steps[-1]
            rows.append(
                {
                    "network": network,
                    "batch": batch,
                    "image_size": image_size,
                    "plain_peak_bytes": plain,
                    "highest_peak_bytes": max(row["measured_peak_bytes"] for row in steps),
                }
                | last
            )
            print(
                f"{network} at {share:.0%} of {format_bytes(plain)}:"
                f" peak {last['measured_peak_bytes'] / last['predicted_peak_bytes']:.4f} x predicted,"
                f" step {last['step_seconds'] / last['predicted_step_seconds']:.2f} x predicted,"
                f" {format_bytes(last['offloaded_bytes'])} offloaded,"
                f" {format_bytes(last['recomputed_bytes'])} recomputed",
                flush=True,
            )
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
