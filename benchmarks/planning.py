"""How good and how fast planning is, in the simulator: `auto` beside every other policy and the lower bound.

    python benchmarks/planning.py --output benchmarks/results/planning.json

Each network is traced without its memory, its ops are costed for this machine, and planned for at shares of its plain
peak (those that are feasible). Nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpu_acceptance import environment

import outgrow
from outgrow.cost.hardware import Hardware
from outgrow.cost.measure import this_machine
from outgrow.networks import find
from outgrow.planning.bound import least_step_seconds
from outgrow.planning.plan import Plan
from outgrow.tuning.steps import synthetic_step

# Name, batch, input size.
_NETWORKS = (
    ("resnet-50", 16, 224),
    ("resnet-152", 8, 224),
    ("vgg-16", 16, 224),
    ("googlenet", 32, 224),
    ("densenet-121", 16, 224),
    ("unet", 4, 256),
    ("vit-b16", 8, 224),
    ("gpt-12x384", 8, 256),
)
_TIMED = (("resnet-50", 16, 224, 0.5), ("gpt-48x384", 8, 256, 0.5), ("resnet-2504", 16, 224, 12 << 30))
_SHARES = (1.0, 0.8, 0.66, 0.6, 0.53, 0.5, 0.4, 0.33, 0.25)
_UNBOUNDED = 1 << 62
# Where the bound is this far below the plan, a higher one is searched for.
_FAR, _SEARCH_SECONDS = 1.02, 150.0


def fake_trace(name: str, batch: int, size: int) -> outgrow.Trace:
    """The trace of a step with plain SGD with momentum."""
    return outgrow.trace(lambda: synthetic_step(find(name), batch, size, momentum=0.9))


def rows_of(name: str, trace: outgrow.Trace, hardware: Hardware) -> Iterator[dict[str, Any]]:
    """One row for each feasible share of the plain peak."""
    keep = outgrow.plan(trace, budget=_UNBOUNDED, policy="keep", hardware=hardware)
    plain = keep.simulate()
    for share in _SHARES:
        budget = int(plain.peak_bytes * share)
        if budget < keep.least_budget_bytes:
            continue
        plans: dict[str, Plan] = {
            policy: outgrow.plan(trace, budget=budget, policy=policy, hardware=hardware)
            for policy in outgrow.policies()
            if policy != "auto"
        }
        start = time.perf_counter()
        auto = outgrow.plan(trace, budget=budget, policy="auto", hardware=hardware)
        seconds = time.perf_counter() - start
        bound = least_step_seconds(auto.problem)
        if auto.simulate().step_seconds > _FAR * bound:
            bound = max(bound, least_step_seconds(auto.problem, _SEARCH_SECONDS))
        fitting = {policy: plan.simulate().step_seconds for policy, plan in plans.items() if plan.simulate().feasible}
        yield {
            "network": name,
            "share": share,
            "budget_bytes": budget,
            "plain_step_seconds": plain.step_seconds,
            "least_step_seconds": bound,
            "auto_step_seconds": auto.simulate().step_seconds,
            "auto_feasible": auto.simulate().feasible,
            "others_step_seconds": fitting,
            "plan_seconds": seconds,
        }


def timed(name: str, batch: int, size: int, budget: float, hardware: Hardware) -> dict[str, Any]:
    """How long tracing and planning take; a budget below 1 is a share of the plain peak."""
    start = time.perf_counter()
    trace = fake_trace(name, batch, size)
    traced = time.perf_counter() - start
    if budget < 1:
        plain = outgrow.plan(trace, budget=_UNBOUNDED, policy="keep", hardware=hardware).simulate()
        budget *= plain.peak_bytes
    start = time.perf_counter()
    plan = outgrow.plan(trace, budget=int(budget), policy="auto", hardware=hardware)
    return {
        "network": name,
        "budget_bytes": int(budget),
        "feasible": plan.simulate().feasible,
        "trace_seconds": traced,
        "plan_seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Plan, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the figures go, as JSON")
    given = parser.parse_args()
    hardware = this_machine()
    times = [timed(*item, hardware) for item in _TIMED]
    for item in times:
        print(f"{item['network']}: traced in {item['trace_seconds']:.1f} s, planned in {item['plan_seconds']:.2f} s")
    rows: list[dict[str, Any]] = []
    for name, batch, size in _NETWORKS:
        trace = fake_trace(name, batch, size)
        for row in rows_of(name, trace, hardware):
            rows.append(row)
            plain, auto = row["plain_step_seconds"], row["auto_step_seconds"]
            best = min(row["others_step_seconds"].values(), default=float("inf"))
            print(
                f"{name} at {row['share']:.0%}: auto {auto / plain:.4f} x plain,"
                f" {auto / row['least_step_seconds']:.4f} x the bound, the best other policy {best / plain:.4f},"
                f" planned in {row['plan_seconds']:.2f} s",
                flush=True,
            )
    gaps = [row["auto_step_seconds"] / row["least_step_seconds"] for row in rows]
    slower = [
        row for row in rows if min(row["others_step_seconds"].values(), default=1e99) < row["auto_step_seconds"]
    ]
    print(f"{len(rows)} problems: at most {max(gaps):.4f} x the bound; slower than another policy in {len(slower)}")
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        document = {"environment": environment(), "hardware": hardware.to_document(), "times": times, "rows": rows}
        given.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
