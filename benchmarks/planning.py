"""How good and how fast planning is, in the simulator: `auto` beside every other policy and the lower bound.

    python benchmarks/planning.py --output benchmarks/results/planning.json

Each network is traced without its memory, its ops are costed for two machines, and planned for at shares of its plain
peak (those that are feasible): for this machine as `outgrow doctor` measures it, and for a harder one, whose
processor reaches its roofline in every op beside a disk of 1.5 GB/s out and 1.0 GB/s back. Nothing is trained but the
few steps by which the machine is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from environment import environment, write

import outgrow
from outgrow.cost.hardware import Hardware
from outgrow.networks import find
from outgrow.planning.bound import least_step_seconds
from outgrow.planning.plan import Plan
from outgrow.planning.problem import STATE
from outgrow.tuning.machine import measure_machine
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
_FAR, _SEARCH_SECONDS = 1.02, 60.0
_NEAR = 1.03


def machines() -> dict[str, Hardware]:
    """What is planned for, by name."""
    measured = measure_machine(None)
    slow_disk = {"copy_out_bandwidth": 1.5e9, "copy_in_bandwidth": 1.0e9, "copy_cost_seconds_per_byte": 5e-11}
    return {
        "this machine": measured,
        "slow disk": replace(measured, name="slow disk", efficiency={}, **slow_disk),
    }


def fake_trace(name: str, batch: int, size: int) -> outgrow.Trace:
    """The trace of a step with plain SGD with momentum."""
    return outgrow.trace(lambda: synthetic_step(find(name), batch, size, momentum=0.9))


def floor_of(name: str, trace: outgrow.Trace, hardware: Hardware) -> dict[str, Any]:
    """The least feasible budget beside training state and the largest working set of one op, in bytes.

    What an op reads of the training state is not counted once more in its working set.
    """
    state: dict[int, int] = {}
    for value in trace.values:
        if value.kind in STATE:
            state[value.storage] = max(value.nbytes, state.get(value.storage, 0))
    working_set = 0
    for op in trace.ops:
        touched = {trace.values[index].storage: trace.values[index].nbytes for index in (*op.inputs, *op.outputs)}
        nbytes = sum(size for storage, size in touched.items() if storage not in state)
        working_set = max(working_set, nbytes + op.workspace_bytes)
    return {
        "network": name,
        "least_budget_bytes": _planned(trace, _UNBOUNDED, "keep", hardware).least_budget_bytes,
        "state_bytes": sum(state.values()),
        "largest_working_set_bytes": working_set,
    }


def rows_of(name: str, trace: outgrow.Trace, machine: str, hardware: Hardware) -> Iterator[dict[str, Any]]:
    """One row for each feasible share of the plain peak."""
    keep = _planned(trace, _UNBOUNDED, "keep", hardware)
    plain = keep.simulate()
    for share in _SHARES:
        budget = int(plain.peak_bytes * share)
        if budget < keep.least_budget_bytes:
            continue
        others = (policy for policy in outgrow.policies() if policy != "auto")
        plans: dict[str, Plan] = {policy: _planned(trace, budget, policy, hardware) for policy in others}
        start = time.perf_counter()
        auto = _planned(trace, budget, "auto", hardware)
        seconds = time.perf_counter() - start
        bound = least_step_seconds(auto.problem)
        if auto.simulate().step_seconds > _FAR * bound:
            bound = max(bound, least_step_seconds(auto.problem, _SEARCH_SECONDS))
        fitting = {policy: plan.simulate().step_seconds for policy, plan in plans.items() if plan.simulate().feasible}
        yield {
            "network": name,
            "machine": machine,
            "share": share,
            "budget_bytes": budget,
            "plain_step_seconds": plain.step_seconds,
            "least_step_seconds": bound,
            "auto_step_seconds": auto.simulate().step_seconds,
            "auto_feasible": auto.simulate().feasible,
            "others_step_seconds": fitting,
            "plan_seconds": seconds,
        }


def _planned(trace: outgrow.Trace, budget: int, policy: str, hardware: Hardware) -> Plan:
    return outgrow.plan(trace, budget=budget, policy=policy, hardware=hardware)


def timed(name: str, batch: int, size: int, budget: float, hardware: Hardware) -> dict[str, Any]:
    """How long tracing and planning take; a budget below 1 is a share of the plain peak."""
    start = time.perf_counter()
    trace = fake_trace(name, batch, size)
    traced = time.perf_counter() - start
    if budget < 1:
        budget *= _planned(trace, _UNBOUNDED, "keep", hardware).simulate().peak_bytes
    start = time.perf_counter()
    plan = _planned(trace, int(budget), "auto", hardware)
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
    hardware = machines()
    here = hardware["this machine"]
    times = [timed(name, batch, size, budget, here) for name, batch, size, budget in _TIMED]
    for item in times:
        print(f"{item['network']}: traced in {item['trace_seconds']:.1f} s, planned in {item['plan_seconds']:.2f} s")
    floors: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for name, batch, size in _NETWORKS:
        trace = fake_trace(name, batch, size)
        floors.append(floor_of(name, trace, hardware["this machine"]))
        print(_floor_in_words(floors[-1]))
        for machine, profile in hardware.items():
            for row in rows_of(name, trace, machine, profile):
                rows.append(row)
                print(_row_in_words(row), flush=True)
    for machine in hardware:
        print(_all_in_words(machine, [row for row in rows if row["machine"] == machine]))
    if given.output is not None:
        profiles = {machine: profile.to_document() for machine, profile in hardware.items()}
        document = {
            "environment": environment(),
            "hardware": profiles,
            "times": times,
            "floors": floors,
            "rows": rows,
        }
        write(given.output, document)


def _floor_in_words(floor: Mapping[str, Any]) -> str:
    ratio = floor["least_budget_bytes"] / (floor["state_bytes"] + floor["largest_working_set_bytes"])
    return f"{floor['network']}: least budget {ratio:.3f} x training state and the largest working set of one op"


def _row_in_words(row: Mapping[str, Any]) -> str:
    plain, auto = row["plain_step_seconds"], row["auto_step_seconds"]
    best = min(row["others_step_seconds"].values(), default=float("inf"))
    return (
        f"{row['network']} at {row['share']:.0%}, {row['machine']}: auto {auto / plain:.4f} x plain,"
        f" {auto / row['least_step_seconds']:.4f} x the bound, the best other policy {best / plain:.4f},"
        f" planned in {row['plan_seconds']:.2f} s"
    )


def _all_in_words(machine: str, rows: Sequence[Mapping[str, Any]]) -> str:
    slowest = max(row["plan_seconds"] for row in rows)
    gap = max(row["auto_step_seconds"] / row["least_step_seconds"] for row in rows)
    near = sum(row["auto_step_seconds"] <= _NEAR * row["least_step_seconds"] for row in rows)
    slower = sum(min(row["others_step_seconds"].values(), default=1e99) < row["auto_step_seconds"] for row in rows)
    return (
        f"{machine}: {len(rows)} problems, {near} within {_NEAR - 1:.0%} of the bound, at most {gap:.4f} x,"
        f" slower than another policy in {slower}; planned in at most {slowest:.1f} s"
    )


if __name__ == "__main__":
    main()
