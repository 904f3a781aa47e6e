"""What a budget costs on a CPU: at half of the plain peak, and where the budget does not bind.

    python benchmarks/cpu_acceptance.py --output benchmarks/results/cpu-resnet-50.json

Steps of plain PyTorch and of both sessions take turns, each in a process of its own.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from environment import environment, write

from outgrow.cli.interleave import Setup, SetupFailed, interleave, live_peak_bytes, ratio
from outgrow.cli.options import Options
from outgrow.units import format_bytes


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet-50")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--share", type=float, default=0.5, help="the budget as a share of the plain peak")
    parser.add_argument("--steps", type=int, default=9, help="measured steps of each set-up")
    parser.add_argument("--output", type=Path, help="where the figures go, as JSON")
    given = parser.parse_args()
    plain = Setup("plain", Options(given.network, data="synthetic", batch=given.batch, image_size=given.image_size))
    peak = live_peak_bytes(plain)
    budget = int(peak * given.share)
    setups = [
        plain,
        Setup("budget", replace(plain.options, budget=str(budget))),
        Setup("not binding", replace(plain.options, budget=str(2 * peak))),
    ]
    found = interleave(setups, given.steps)
    for run in found.values():
        if run.failure is not None:
            raise SetupFailed(run.setup.name, run.failure)
    result = {
        "network": given.network,
        "batch": given.batch,
        "image_size": given.image_size,
        "plain_peak_bytes": peak,
        "budget_bytes": budget,
        "measured_peak_bytes": found["budget"].peak_bytes,
        "ratio_at_budget": ratio(found, "budget", "plain"),
        "ratio_not_binding": ratio(found, "not binding", "plain"),
        "median_seconds": {name: run.seconds for name, run in found.items()},
        "environment": environment(),
        "steps": {name: [row.to_document() for row in run.rows] for name, run in found.items()},
    }
    print(f"budget {format_bytes(budget)} of {format_bytes(peak)}: {result['ratio_at_budget']:.3f} x plain")
    print(f"budget that does not bind: {result['ratio_not_binding']:.3f} x plain")
    if given.output is not None:
        write(given.output, result)


if __name__ == "__main__":
    main()
