"""Whether training under a budget is plain training to the bit: every network of the tests under every policy.

    python benchmarks/equality.py --output benchmarks/results/equality.json
    python benchmarks/equality.py --networks resnet-18 unet --policies auto lru --output /tmp/equality.json

Each pair trains for 4 steps at 60% of the plain peak, or at the least budget where that is more, and is compared with
plain PyTorch: all losses, and in the end parameters, buffers and the optimizer's state. The tests take one policy of
each family; this takes all, and one that recomputes whatever has a recipe. The exit status is 1 if any pair differs.
Inputs are small, so that in some networks parameters and gradients are most of the peak: there the least budget may
be the plain peak or more, and policies that move no more than they must move nothing.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from environment import environment, write

import outgrow
from outgrow.errors import BudgetTooSmall
from outgrow.planning.policies import Policy
from outgrow.units import format_bytes, format_seconds

# The networks, small, and how they train in turn with plain PyTorch are the tests'.
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from cases import CASES, training_of
from steps import Make, ParkAll, RecomputeAll, Result, bounds_of, train_in_session, train_plain

_CASES = (*CASES, ("vgg-116", 32, 1))
_STEPS = 4
_SHARE = 0.6
_LEAST_MOVED_BYTES = 4096
_POLICIES: Mapping[str, str | Policy] = {name: name for name in outgrow.policies()} | {
    policy.name: policy for policy in (RecomputeAll(), ParkAll())
}


@dataclass(frozen=True)
class Comparison:
    """One network under one policy. Sizes in bytes.

    Attributes:
        peak_bytes: the highest live bytes of any step.
        equal: whether losses and state are plain PyTorch's to the bit; None where the policy refused the budget.
        offloaded_bytes, recomputed_bytes: of the last step.
        seconds: of all steps under the policy, planning included.
        note: why there are no figures; None if there are.
    """

    network: str
    policy: str
    plain_peak_bytes: int
    budget_bytes: int
    peak_bytes: int | None = None
    equal: bool | None = None
    within_budget: bool | None = None
    offloaded_bytes: int | None = None
    recomputed_bytes: int | None = None
    seconds: float | None = None
    note: str | None = None


def compare(row: Comparison, make: Make, plain: Result) -> Comparison:
    """Train the network of a row under its policy and budget, and hold the result against plain training's."""
    began = time.perf_counter()
    try:
        ours, summaries = train_in_session(
            make,
            _STEPS,
            budget=row.budget_bytes,
            policy=_POLICIES[row.policy],
            least_moved_bytes=_LEAST_MOVED_BYTES,
        )
    except BudgetTooSmall as error:  # `keep` moves nothing: it has to refuse
        return replace(row, note=" ".join(str(error).split()))
    peak = max(summary.measured_peak_bytes for summary in summaries)
    return replace(
        row,
        peak_bytes=peak,
        equal=ours == plain,
        within_budget=peak <= row.budget_bytes,
        offloaded_bytes=summaries[-1].offloaded_bytes,
        recomputed_bytes=summaries[-1].recomputed_bytes,
        seconds=time.perf_counter() - began,
    )


def compare_all(name: str, policies: Sequence[str]) -> list[Comparison]:
    """One network under all policies; a line is printed for each."""
    size, batch = next(case[1:] for case in _CASES if case[0] == name)
    make = training_of(name, size, batch)
    plain = train_plain(make, _STEPS)
    plain_peak, least = bounds_of(make, least_moved_bytes=_LEAST_MOVED_BYTES)
    budget = max(int(plain_peak * _SHARE), least)
    found: list[Comparison] = []
    for policy in policies:
        found.append(compare(Comparison(name, policy, plain_peak, budget), make, plain))
        print(_in_words(found[-1]), flush=True)
        gc.collect()  # an optimizer is a cycle, and holds its model
    return found


def _in_words(row: Comparison) -> str:
    where = f"{row.network} at {row.budget_bytes / row.plain_peak_bytes:.0%}, {row.policy}"
    if row.peak_bytes is None or row.offloaded_bytes is None or row.recomputed_bytes is None or row.seconds is None:
        return f"{where}: refused, {row.note}"
    return (
        f"{where}: {'equal' if row.equal else 'DIFFERS'}, peak {format_bytes(row.peak_bytes)}"
        f" {'of' if row.within_budget else 'OVER'} {format_bytes(row.budget_bytes)},"
        f" {format_bytes(row.offloaded_bytes)} offloaded, {format_bytes(row.recomputed_bytes)} recomputed,"
        f" {format_seconds(row.seconds)}"
    )


def main() -> int:
    """Compare, print, and write the figures; the exit status."""
    networks = [case[0] for case in _CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=networks, default=networks, metavar="NAME")
    parser.add_argument("--policies", nargs="+", choices=list(_POLICIES), default=list(_POLICIES), metavar="NAME")
    parser.add_argument("--output", type=Path, help="where the figures go, as JSON")
    given = parser.parse_args()
    rows: list[Comparison] = []
    for name in given.networks:
        rows += compare_all(name, given.policies)
        if given.output is not None:  # after each network: a run of all takes long
            document = {"steps": _STEPS, "share": _SHARE, "environment": environment()}
            write(given.output, document | {"rows": [asdict(row) for row in rows]})
    differing = sum(row.equal is False for row in rows)
    over = sum(row.within_budget is False for row in rows)
    refused = sum(row.equal is None for row in rows)
    print(f"{len(rows)} pairs: {differing} differ, {over} over budget, {refused} refused")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
