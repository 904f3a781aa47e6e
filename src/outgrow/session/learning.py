"""What a session learns of its kinds of step: how each is planned, and how its plan fares."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from outgrow.cost.hardware import Hardware
from outgrow.planning.check import plan_by
from outgrow.planning.plan import Plan
from outgrow.planning.policies import Policy
from outgrow.planning.policies.auto import Auto
from outgrow.planning.policies.cache import Lru
from outgrow.planning.problem import Problem
from outgrow.planning.releases import with_releases
from outgrow.runtime.outcome import StepOutcome
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.session.kind import MUCH_SMALLER, SEARCH_TOLERANCE, TIMED_STEPS, StepKind
from outgrow.tracing.ir import Fit
from outgrow.units import format_bytes, format_seconds

_LOG = logging.getLogger(__name__)

# Times are set right when the median of so many steps is this far from the prediction, and another plan is searched
# for when it is that far. Each time that they were and the plan stayed, twice as many steps are asked the next time,
# up to the most: a machine whose speed wavers is never right for long, and predicting a step anew takes its time.
# A change as large as the last one is no wavering, and shows in the fewest.
_MOST_TIMED_STEPS = 24
_TIME_TOLERANCE = 0.05
_LARGE_CHANGE = 0.25
# So many smaller steps are asked how long their plan takes: the first ones go through Python.
_TELLING_STEPS = 8
# A step that peaks this much higher than predicted is recorded anew.
_PEAK_TOLERANCE = 0.02
# So often at most a plan is searched for with other times: a machine whose speed wavers would be planned for without
# end.
_MOST_SEARCHES = 4
# Nor is it before steps took so many times as long as the last search: there may be few left.
_TRAINING_PER_SEARCH = 5
# So many steps are looked at: a plan is for too much if an allocator had to give free blocks back in half of them.
_RESTLESS_STEPS = 8
# Then plans leave this share of the budget, and so many times as much at the most; they take no longer than this.
_ROOM_SHARE, _MOST_ROOMS = 64, 4
_MOST_FOR_ROOM = 1.03
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

    def plan(self, problem: Problem, *, at_once: bool = False) -> Plan:
        """The policy's plan, ready for a session. It leaves the margin free if there is one that does.

        Where it is wanted `at_once`, as another will soon follow, it is not refined.
        """
        policy = Auto(refines=False) if at_once and self.searches else self._policy
        if self._memory is not None:
            self._memory.make_room_beside(len(problem.trace.ops) * self._BYTES_PER_OP)
        plan = _made_by(policy, problem.with_budget(problem.budget_bytes - self._margin_bytes))
        if self._margin_bytes and not plan.simulate().feasible:
            plan = _made_by(policy, problem)
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

    def compare(self, kind: StepKind, outcome: StepOutcome, hardware: Hardware, budget_bytes: int) -> bool:
        """Adapt: a step under a plan was measured. Whether the plan is now another one.

        A peak that was not foreseen means that the trace is not the step's, unless copies out that took longer than
        foreseen make up for it: the next one is recorded. A time that was not means that the machine is faster or
        slower than it was then, or the disk is: the trace's times are set right, and if another plan is clearly
        better in those, it is taken.
        """
        if outcome.proved:
            return False
        peak = outcome.peak_bytes - outcome.leaving_bytes
        if outcome.knows_peak and peak > kind.plan.expected_peak_bytes * (1 + _PEAK_TOLERANCE):
            kind.distrust()
            if not kind.steady:
                peaks = (format_bytes(outcome.peak_bytes), format_bytes(kind.plan.expected_peak_bytes))
                _LOG.info("a step peaked at %s and was predicted at %s: the next one is recorded", *peaks)
            return False
        kind.seconds_since += outcome.seconds
        if self._sets_right(kind, outcome, hardware):
            kind.wants_search = True
        if not (kind.wants_search and self.is_worth_a_search(kind)):
            return False
        return self.search_again(kind, budget_bytes)

    def refine(self, kind: StepKind, outcome: StepOutcome, hardware: Hardware, budget_bytes: int) -> bool:
        """A step of other sizes went by a kind's plan: plan better for those. Whether the plan is now another one.

        The kind itself may never come again, and was recorded when all was cold. Smaller steps that are nearly as
        large tell what it would take: as much longer as it saves more.
        """
        kind.seconds_since += outcome.seconds
        share = sum(outcome.packs) / max(1, kind.saved_bytes)
        if outcome.fit is Fit.SMALLER and share >= MUCH_SMALLER and not (outcome.proved or outcome.turned_late):
            whole = (outcome.seconds / share, outcome.stall_seconds / share)
            kind.recent = [*kind.recent, whole][-_MOST_TIMED_STEPS:]
        is_known = len(kind.recent) >= _TELLING_STEPS and self.is_worth_a_search(kind)
        if not (kind.is_rough and self.searches and is_known):
            return False
        kind.is_rough = False
        _pace(kind, *_medians(kind.recent), hardware)
        return self.search_again(kind, budget_bytes)

    def wants_room(self, kind: StepKind, outcome: StepOutcome) -> bool:
        """Whether its plan comes so near to the budget that the allocator gives free blocks back again and again.

        A device stands still for that, and has to map them anew. Not before steps took as long as planning does, nor
        where the user's own plan is followed.
        """
        if outcome.proved or not kind.steady:
            return False
        kind.gave_back = [*kind.gave_back, outcome.gave_back][-_RESTLESS_STEPS:]
        is_restless = 2 * sum(kind.gave_back) >= _RESTLESS_STEPS
        may_leave = kind.rooms < _MOST_ROOMS and not (kind.is_foreign or kind.plan.keeps_everything)
        return is_restless and may_leave and kind.seconds_since >= kind.plan_seconds

    def leave_room(self, kind: StepKind, budget_bytes: int) -> bool:
        """Take a plan for a budget that is a little smaller each time, if there is one that is hardly slower."""
        now, started = kind.plan, time.perf_counter()
        kind.rooms += 1
        kind.gave_back.clear()
        room = kind.rooms * (budget_bytes // _ROOM_SHARE)
        other = self.plan(now.problem.with_budget(budget_bytes - room))
        kind.plan_seconds, kind.seconds_since = time.perf_counter() - started, 0.0
        then = other.simulate()
        is_slow = then.step_seconds > now.simulate().step_seconds * _MOST_FOR_ROOM
        if is_slow or not then.feasible or (other.offloads, other.recomputes) == (now.offloads, now.recomputes):
            return False
        kind.go_by(other)
        kind.room_bytes = room
        _LOG.info("re-planned, as the allocator kept giving memory back: %s", in_a_line(other, kind.plan_seconds))
        return True

    def is_worth_a_search(self, kind: StepKind) -> bool:
        """Whether steps took long enough since the last search for another one."""
        return kind.seconds_since >= _TRAINING_PER_SEARCH * kind.plan_seconds

    def _sets_right(self, kind: StepKind, outcome: StepOutcome, hardware: Hardware) -> bool:
        """Set the times of a kind's trace right, if they are not; whether another plan may be better in those."""
        prediction = kind.plan.simulate()
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
        error = abs(seconds / prediction.step_seconds - 1)
        if error <= _TIME_TOLERANCE or not _pace(kind, seconds, stall, hardware):
            return False
        kind.recent.clear()
        kind.timed_steps = min(2 * kind.timed_steps, _MOST_TIMED_STEPS)
        if error <= kind.tolerance or kind.plan.keeps_everything or kind.searches >= _MOST_SEARCHES:
            return False
        now = kind.plan.simulate()
        # No plan is faster than the plain step.
        return now.plain_step_seconds <= now.step_seconds * _WORTH_CHANGING

    def search_again(self, kind: StepKind, budget_bytes: int) -> bool:
        """Take another plan, if a search finds one that is clearly better."""
        kind.wants_search = False
        now, started = kind.plan.simulate(), time.perf_counter()
        if kind.searched_seconds > 0 and abs(now.step_seconds / kind.searched_seconds - 1) <= SEARCH_TOLERANCE:
            return False  # the machine is as fast as it was then once more
        kind.searches += 1
        kind.searched_seconds = now.step_seconds
        other = self.plan(kind.plan.problem.with_budget(budget_bytes - kind.room_bytes))
        then = other.simulate()
        kind.plan_seconds, kind.seconds_since = time.perf_counter() - started, 0.0
        if not then.feasible or then.step_seconds > now.step_seconds * _WORTH_CHANGING:
            kind.tolerance *= 2
            return False
        kind.go_by(other)
        is_said = format_seconds(now.step_seconds)
        _LOG.info("re-planned, as steps take %s by now: %s", is_said, in_a_line(other, kind.plan_seconds))
        return True


def _made_by(policy: Policy, problem: Problem) -> Plan:
    """A plan with places for what leaves, and for a device that runs beside the host with what frees its memory."""
    laid_out = plan_by(policy, problem).laid_out()
    return laid_out if problem.on_cpu else with_releases(laid_out)


def lost_to_moves(outcome: StepOutcome, plan: Plan, hardware: Hardware) -> float:
    """What a step may have taken longer under a plan than if all that it saved had stayed, in seconds."""
    away = [item.value for item in plan.offloads]
    handling = sum(2 * hardware.handling_seconds + plan.problem.handling_seconds(value) for value in away)
    moved = 2 * (outcome.planned_bytes + outcome.evicted_bytes) * hardware.copy_cost_seconds_per_byte
    return outcome.stall_seconds + outcome.recompute_seconds + handling + moved


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


def _pace(kind: StepKind, seconds: float, stall: float, hardware: Hardware) -> bool:
    """Set the times of a kind's trace right, whose steps take so many seconds and stall for some of them.

    False if that says nothing of its ops.
    """
    prediction, problem = kind.plan.simulate(), kind.plan.problem
    own = prediction.step_seconds - prediction.stall_seconds
    if own <= 0 or seconds <= stall:
        return False
    factor = (seconds - stall) / own
    trace = problem.trace.with_ops([replace(op, seconds=op.seconds * factor) for op in problem.trace.ops])
    kind.plan = replace(kind.plan, problem=replace(problem, trace=trace, hardware=hardware))
    return True
