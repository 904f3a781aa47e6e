"""Time against memory: what each policy costs at each budget, predicted from a fake trace or measured.

`outgrow compare` prints and draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import psutil

import outgrow
from outgrow.cli.interleave import PLAIN_WARMUP, SESSION_WARMUP, Run, Setup, SetupFailed, interleave, live_peak_bytes
from outgrow.cli.options import Options
from outgrow.cost.hardware import Hardware
from outgrow.cost.workspaces import Workspace
from outgrow.tracing.ir import Trace
from outgrow.tracing.liveness import plain_profile

_MOST_WORKERS = 4  # that live at once beside the plain one
# A worker's resident set: its peak of live bytes, what a heap wastes, and PyTorch itself.
_HEAP_SHARE = 1.3
_LIBRARIES_BYTES = 400 << 20
_MEMORY_SHARE = 0.8  # of what is free, for all workers together


@dataclass(frozen=True)
class Point:
    """One policy at one budget. Sizes in bytes, times in seconds.

    Attributes:
        policy: its name.
        budget_percent: the budget as a percentage of the plain peak.
        budget_bytes: the same in bytes.
        fits: whether the policy keeps the step inside the budget; if not, the figures below are None.
        peak_bytes, step_seconds, offloaded_bytes, recomputed_bytes, stall_seconds: of a step.
        peak_ratio, time_ratio: peak and time relative to the plain step's.
        least_budget_bytes: where it does not fit, the least budget that would do, as far as that is known.
        problem: where it does not fit, what went wrong in words; None if it is simply too small.
        predicted_peak_bytes, predicted_step_seconds: what the session's own plan, made from a real trace, foretold;
            None for points that are predictions themselves.
    """

    policy: str
    budget_percent: float
    budget_bytes: int
    fits: bool
    peak_bytes: int | None = None
    step_seconds: float | None = None
    peak_ratio: float | None = None
    time_ratio: float | None = None
    offloaded_bytes: int | None = None
    recomputed_bytes: int | None = None
    stall_seconds: float | None = None
    least_budget_bytes: int | None = None
    problem: str | None = None
    predicted_peak_bytes: int | None = None
    predicted_step_seconds: float | None = None


@dataclass(frozen=True)
class Curves:
    """All points of one comparison, by policy and then by budget, and the plain step's peak and time."""

    plain_peak_bytes: int
    plain_step_seconds: float
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Pair:
    """One policy at one budget, in percent of the plain peak."""

    policy: str
    percent: float

    def budget_bytes(self, plain_peak_bytes: int) -> int:
        """The budget in bytes, one at least."""
        return max(1, int(plain_peak_bytes * self.percent / 100))


def predict(
    trace: Trace,
    hardware: Hardware,
    pairs: Sequence[Pair],
    *,
    workspace: Workspace | None = None,
    on_pair: Callable[[Pair], None] = lambda pair: None,
) -> Curves:
    """What the simulator says of each pair, all from one trace; `on_pair` is called after each.

    Convolutions take workspaces of that kind under the policies; the plain step is the trace's.
    """
    profile = plain_profile(trace)
    points: list[Point] = []
    for pair in pairs:
        points.append(_predicted(trace, hardware, pair, profile.peak_bytes, workspace))
        on_pair(pair)
    return Curves(profile.peak_bytes, sum(op.seconds for op in trace.ops), tuple(points))


def measure(
    options: Options,
    pairs: Sequence[Pair],
    rounds: int,
    *,
    on_step: Callable[[Setup], None] = lambda setup: None,
) -> Curves:
    """Train each pair for real, a few at a time, in turns with plain steps; `on_step` is called after each step.

    Raises:
        SetupFailed: the plain steps failed.
    """
    plain = Setup("plain", replace(options, budget=None, policy=None, spill_dir=None, allow_tmpfs=False))
    peak = live_peak_bytes(plain)
    points: list[Point] = []
    plain_seconds: list[float] = []
    for some in _in_groups(pairs, _workers_that_fit(peak)):
        setups = {pair: _setup(options, pair, peak) for pair in some}
        found = interleave([plain, *setups.values()], rounds, on_step=on_step)
        base = found[plain.name]
        if base.failure is not None:
            raise SetupFailed(plain.name, base.failure)
        plain_seconds += [row.seconds for row in base.rows]
        points += [_measured(pair, found[setup.name], base, peak) for pair, setup in setups.items()]
    return Curves(peak, median(plain_seconds), tuple(points))


def steps_to_measure(pairs: int, rounds: int, predicted: Curves) -> int:
    """How many steps `measure` takes at most, for a progress bar."""
    groups = -(-pairs // _workers_that_fit(predicted.plain_peak_bytes))
    return groups * (PLAIN_WARMUP + rounds) + pairs * (SESSION_WARMUP + rounds)


def _predicted(
    trace: Trace, hardware: Hardware, pair: Pair, plain_peak_bytes: int, workspace: Workspace | None
) -> Point:
    budget = pair.budget_bytes(plain_peak_bytes)
    plan = outgrow.plan(trace, budget=budget, policy=pair.policy, hardware=hardware, workspace=workspace)
    prediction = plan.simulate()
    if not prediction.feasible:
        # Where another policy would do with this budget, what this one asks for is the peak of its plan.
        floor = plan.least_budget_bytes
        least = floor if plan.evicts and floor > budget else prediction.peak_bytes
        return Point(pair.policy, pair.percent, budget, fits=False, least_budget_bytes=least)
    return Point(
        policy=pair.policy,
        budget_percent=pair.percent,
        budget_bytes=budget,
        fits=True,
        peak_bytes=prediction.peak_bytes,
        step_seconds=prediction.step_seconds,
        peak_ratio=prediction.peak_bytes / plain_peak_bytes,
        time_ratio=prediction.step_seconds / prediction.plain_step_seconds,
        offloaded_bytes=prediction.offloaded_bytes + prediction.evicted_bytes,
        recomputed_bytes=prediction.recomputed_bytes,
        stall_seconds=prediction.stall_seconds,
    )


def _setup(options: Options, pair: Pair, plain_peak_bytes: int) -> Setup:
    budget = str(pair.budget_bytes(plain_peak_bytes))
    return Setup(f"{pair.policy} at {pair.percent:g}%", replace(options, budget=budget, policy=pair.policy))


def _measured(pair: Pair, run: Run, plain: Run, plain_peak_bytes: int) -> Point:
    budget = pair.budget_bytes(plain_peak_bytes)
    if run.failure is not None:
        too_small = run.failure.kind == outgrow.BudgetTooSmall.__name__
        return Point(
            pair.policy,
            pair.percent,
            budget,
            fits=False,
            least_budget_bytes=run.failure.least_bytes,
            problem=None if too_small else f"{run.failure.kind}: {run.failure.message}",
        )
    last = run.summaries[-1]
    return Point(
        policy=pair.policy,
        budget_percent=pair.percent,
        budget_bytes=budget,
        fits=True,
        peak_bytes=run.peak_bytes,
        step_seconds=run.seconds,
        peak_ratio=run.peak_bytes / plain_peak_bytes,
        time_ratio=run.seconds / plain.seconds,
        offloaded_bytes=last.offloaded_bytes,
        recomputed_bytes=last.recomputed_bytes,
        stall_seconds=last.stall_seconds,
        predicted_peak_bytes=last.predicted_peak_bytes,
        predicted_step_seconds=last.predicted_step_seconds,
    )


def _workers_that_fit(plain_peak_bytes: int) -> int:
    """How many workers may live at once beside the plain one."""
    each = plain_peak_bytes * _HEAP_SHARE + _LIBRARIES_BYTES
    room = psutil.virtual_memory().available * _MEMORY_SHARE
    return max(1, min(_MOST_WORKERS, int(room / each) - 1))


def _in_groups(pairs: Sequence[Pair], size: int) -> Iterator[Sequence[Pair]]:
    for start in range(0, len(pairs), size):
        yield pairs[start : start + size]
