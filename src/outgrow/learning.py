"""What a session learns of its kinds of step: how each is planned, and how its plan fares."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from outgrow.cost.hardware import Hardware
from outgrow.kinds import TIMED_STEPS, StepKind
from outgrow.planning.plan import Plan
from outgrow.planning.policies import Policy
from outgrow.planning.policies.auto import Auto
from outgrow.planning.policies.cache import Lru
from outgrow.planning.problem import Problem
from outgrow.planning.releases import with_releases
from outgrow.runtime.outcome import StepOutcome
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.tracing.ir import Trace
from outgrow.units import format_bytes, format_seconds

_LOG = logging.getLogger(__name__)

# Times are set right when the median of so many steps is this far from the prediction, and another plan is searched
# for when it is that far. Each time that they were and the plan stayed, twice as many steps are asked the next time,
# up to the most: a machine whose speed wavers is never right for long, and predicting a step anew takes its time.
# A change as large as the last one is no wavering, and shows in the fewest.
_MOST_TIMED_STEPS = 24
_TIME_TOLERANCE = 0.05
_LARGE_CHANGE = 0.25
# A step that peaks this much higher than predicted is recorded anew.
_PEAK_TOLERANCE = 0.02
# So often at most a plan is searched for with other times: a machine whose speed wavers would be planned for without
# end.
_MOST_SEARCHES = 4
# Another plan must be this much faster: its recipes have to be proved, and memory has to settle once more.
_WORTH_CHANGING = 0.97


class Planner:
    """Makes plans with a policy, and keeps them true."""

    # What planning takes for its linear programs: 145 MB were seen for the 49,319 ops of a ResNet-2504.
    _BYTES_PER_OP = 4 << 10

    def __init__(self, policy: Policy, memory: DeviceMemory | None = None, *, margin_bytes: int = 0) -> None:
        """A planner.

        Args:
            policy: how plans are made.
            memory: is told what a plan takes while it is made: a session has none to spare. None for no session.
            margin_bytes: what plans leave free of the budget where they can.
        """
        self._policy = policy
        self._memory = memory
        self._margin_bytes = margin_bytes

    def plan(self, problem: Problem) -> Plan:
        """The policy's plan, ready for a session. It leaves the margin free if there is one that does."""
        if self._memory is not None:
            self._memory.make_room_beside(len(problem.trace.ops) * self._BYTES_PER_OP)
        plan = self._plan(problem.with_budget(problem.budget_bytes - self._margin_bytes))
        if self._margin_bytes and not plan.simulate().feasible:
            plan = self._plan(problem)
        if self._memory is not None:
            self._memory.give_back_beside()
        return replace(plan, problem=plan.problem.with_budget(problem.budget_bytes))

    @property
    def searches(self) -> bool:
        """Whether a plan takes a search, which may not be worth its time."""
        return isinstance(self._policy, Auto)

    def without_search(self, problem: Problem) -> Plan:
        """The cache's plan, for a kind of step that may never come again."""
        return Lru().plan(problem).laid_out()

    def _plan(self, problem: Problem) -> Plan:
        plan = self._policy.plan(problem).laid_out()
        return plan if problem.on_cpu else with_releases(plan)

    def compare(self, kind: StepKind, outcome: StepOutcome, hardware: Hardware, budget_bytes: int) -> bool:
        """Adapt: a step under a plan was measured. Whether the plan is now another one.

        A peak that was not foreseen means that the trace is not the step's, unless copies out that took longer than
        foreseen make up for it: the next one is recorded. A time that was not means that the machine is faster or
        slower than it was then, or the disk is: the trace's times are set right, and if another plan is clearly
        better in those, it is taken.
        """
        if outcome.proved:
            return False
        prediction = kind.plan.simulate()
        peak = outcome.peak_bytes - outcome.leaving_bytes
        if outcome.knows_peak and peak > kind.plan.expected_peak_bytes * (1 + _PEAK_TOLERANCE):
            kind.distrust()
            if not kind.steady:
                peaks = (format_bytes(outcome.peak_bytes), format_bytes(kind.plan.expected_peak_bytes))
                _LOG.info("a step peaked at %s and was predicted at %s: the next one is recorded", *peaks)
            return False
        if prediction.step_seconds <= 0:  # a step without ops
            return False
        kind.recent = [*kind.recent, (outcome.seconds, outcome.stall_seconds)][-kind.timed_steps :]
        if len(kind.recent) < TIMED_STEPS:
            return False
        seconds, stall = _medians(kind.recent[-TIMED_STEPS:])
        if abs(seconds / prediction.step_seconds - 1) <= _LARGE_CHANGE:
            if len(kind.recent) < kind.timed_steps:
                return False
            seconds, stall = _medians(kind.recent)
        own = prediction.step_seconds - prediction.stall_seconds
        error = abs(seconds / prediction.step_seconds - 1)
        if error <= _TIME_TOLERANCE or own <= 0 or seconds <= stall:
            return False
        kind.recent.clear()
        kind.timed_steps = min(2 * kind.timed_steps, _MOST_TIMED_STEPS)
        trace = _paced(kind.plan.problem.trace, (seconds - stall) / own)
        problem = replace(kind.plan.problem, trace=trace, hardware=hardware)
        kind.plan = replace(kind.plan, problem=problem)
        if error <= kind.tolerance or kind.plan.keeps_everything or kind.searches >= _MOST_SEARCHES:
            return False
        now = kind.plan.simulate()
        if now.plain_step_seconds > now.step_seconds * _WORTH_CHANGING:  # no plan is faster than the plain step
            return False
        kind.searches += 1
        other = self.plan(problem.with_budget(budget_bytes))
        then = other.simulate()
        if not then.feasible or then.step_seconds > now.step_seconds * _WORTH_CHANGING:
            kind.tolerance *= 2
            return False
        kind.plan, kind.fits, kind.timed_steps = other, False, TIMED_STEPS
        kind.verdicts.cramped.clear()
        times = (format_seconds(seconds), format_seconds(prediction.step_seconds))
        _LOG.info("re-planned, as steps take %s and were predicted at %s: %s", *times, in_a_line(other))
        return True


def in_a_line(plan: Plan, plan_seconds: float | None = None) -> str:
    """A plan in one line of a log; `plan_seconds` is what planning took."""
    prediction = plan.simulate()
    peak, budget = format_bytes(plan.expected_peak_bytes), format_bytes(plan.budget_bytes)
    parts = [
        f"{plan.policy}, predicted peak {peak} of {budget}",
        f"step {format_seconds(prediction.step_seconds)} (plain {format_seconds(prediction.plain_step_seconds)})",
        f"{len(plan.offloads)} values offloaded, {len(plan.recomputes)} recomputed, {len(plan.parks)} parked",
    ]
    if plan_seconds is not None:
        parts.append(f"planning took {format_seconds(plan_seconds)}")
    return "; ".join(parts)


def _medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The median time and the median stall of some steps, in seconds."""
    seconds, stall = (median(column) for column in zip(*times, strict=True))
    return seconds, stall


def _paced(trace: Trace, factor: float) -> Trace:
    return trace.with_ops([replace(op, seconds=op.seconds * factor) for op in trace.ops])
