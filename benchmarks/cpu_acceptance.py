"""What a budget costs on a CPU: at half of the plain peak, and where the budget does not bind.

    python benchmarks/cpu_acceptance.py --output benchmarks/results/cpu-resnet-50.json

Steps of plain PyTorch and of both sessions take turns, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from interleave import Setup, Worker, interleave, ratio

import outgrow
from outgrow.units import format_bytes

_WARMUP = 4  # cold, recorded, planned anew, and one to see that it holds
_UNBOUNDED = 1 << 62


def plain_peak_bytes(network: str, batch: int, image_size: int) -> int:
    """The measured peak of a step that nothing limits, once its optimizer state is there."""
    worker = Worker(Setup("peak", network, batch, image_size, _UNBOUNDED))
    try:
        return max(int(worker.step()["measured_peak_bytes"]) for _ in range(2))
    finally:
        worker.close()


def environment() -> dict[str, Any]:
    """Where and with what the figures were measured."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "huge_pages": os.environ.get("THP_MEM_ALLOC_ENABLE") == "1",
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


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
    peak = plain_peak_bytes(given.network, given.batch, given.image_size)
    where = (given.network, given.batch, given.image_size)
    budget = int(peak * given.share)
    setups = [Setup("plain", *where), Setup("budget", *where, budget), Setup("not binding", *where, 2 * peak)]
    found = interleave(setups, _WARMUP, given.steps)
    result = {
        "network": given.network,
        "batch": given.batch,
        "image_size": given.image_size,
        "plain_peak_bytes": peak,
        "budget_bytes": budget,
        "measured_peak_bytes": max(row["measured_peak_bytes"] for row in found["budget"]),
        "ratio_at_budget": ratio(found, "budget", "plain"),
        "ratio_not_binding": ratio(found, "not binding", "plain"),
        "median_seconds": {name: median(row["seconds"] for row in rows) for name, rows in found.items()},
        "environment": environment() | {"outgrow": outgrow.__version__},
        "steps": found,
    }
    print(f"budget {format_bytes(budget)} of {format_bytes(peak)}: {result['ratio_at_budget']:.3f} x plain")
    print(f"budget that does not bind: {result['ratio_not_binding']:.3f} x plain")
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
