"""What comes of the steps of a session that are over: figures, plans, and what those to come have to mind."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outgrow.planning.plan import Plan
from outgrow.runtime.faults import is_out_of_memory
from outgrow.runtime.interrupts import Interrupts
from outgrow.runtime.outcome import StepOutcome
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.session.kind import StepKind
from outgrow.session.kinds import Kinds
from outgrow.session.learning import Planner, lost_to_moves
from outgrow.session.recorded import Recorded
from outgrow.summary import Summary
from outgrow.tracing.ir import Fit, Trace

_LOG = logging.getLogger(__name__)
# Summaries that are remembered: of a long training the last ones are what is looked at.
_MOST_SUMMARIES = 1000


class Aftermath:
    """Judges each step that is over.

    Attributes:
        history: the figures of the last steps, the oldest first.
        peak_bytes: the highest peak of any step so far.
        wary: for good: in a step that was not watched memory ran out, or its plan did not hold; or one passed the
            budget.
    """

    def __init__(
        self,
        budget_bytes: int,
        policy_name: str,
        kinds: Kinds,
        planner: Planner,
        recorded: Recorded,
        memory: DeviceMemory,
        interrupts: Interrupts,
    ) -> None:
        """`interrupts` are let in while plans are searched for."""
        self._budget = budget_bytes
        self._policy_name = policy_name
        self._kinds = kinds
        self._planner = planner
        self._recorded = recorded
        self._memory = memory
        self._interrupts = interrupts
        self.history: deque[Summary] = deque(maxlen=_MOST_SUMMARIES)
        self.peak_bytes = 0
        self.wary = False
        self._untimed: tuple[StepKind | None, Plan | None, StepOutcome, bool] | None = None
        self._oom_retries = self._replans = 0
        self._planned_budget = budget_bytes  # less where the allocator refused what the budget allows
        # What the last recorded step took, with planning for it, and what it took to come to the last plan.
        self._recording_seconds = self._plan_cost_seconds = math.inf

    def measured(self, outcome: StepOutcome) -> None:
        """A step is over, well or badly."""
        self.read_clock()
        expected = self._kinds.expected
        self._oom_retries += outcome.oom_retries
        if outcome.oom_retries:
            self._planned_budget = min(self._planned_budget, outcome.fault_level)
            if expected is not None:
                expected.distrust()
        if outcome.knows_peak:
            self.peak_bytes = max(self.peak_bytes, outcome.peak_bytes)
        elif outcome.followed and expected is not None:
            self.peak_bytes = max(self.peak_bytes, expected.likely_peak)

    def went_well(
        self, outcome: StepOutcome, begun: Plan | None, finish: Callable[[], Trace] | None, *, is_laid_out: bool
    ) -> None:
        """It went well, having begun by the plan `begun`; `finish` makes the trace of one that was recorded.

        `is_laid_out`: gradients lie where they will from now on.
        """
        kinds = self._kinds
        expected, followed = kinds.expected, outcome.followed
        went_by = expected.plan if kinds.has_turned and expected is not None else begun
        plan = went_by if followed else None
        kinds.count()
        is_over = followed and outcome.knows_peak and outcome.peak_bytes > self._budget
        self.wary = self.wary or outcome.unseen or outcome.had_garbage or is_over
        is_exact = outcome.fit is Fit.EXACT
        if expected is not None and plan is not None and finish is None and is_exact and not outcome.turned_late:
            _note_whether_it_fits(expected, plan, outcome)
        wants_plan = False
        if followed and not is_exact:
            assert expected is not None
            if outcome.fits and sum(outcome.packs) > sum(expected.largest_held):
                expected.largest_held = outcome.packs
            wants_plan = kinds.resembled(outcome.packs, outcome.fit)
            plan = None  # what it predicts is not for such sizes
        is_known_well = followed and expected is not None and expected.steady
        came = expected if followed else None
        if finish is not None and not is_known_well:
            came = self._learn(outcome, finish, is_laid_out=is_laid_out) or came
        elif not followed:
            came = kinds.departed(outcome.packs)
        elif wants_plan:
            assert expected is not None
            came = self._plan_for(expected, outcome) or came
        kinds.seen(came, expected, outcome.packs)
        # What was recorded is planned for by now.
        may_adapt = (finish is None or is_known_well) and not kinds.has_turned
        self._untimed = (expected, plan, outcome, may_adapt)
        if outcome.times is None:
            self.read_clock()

    def _learn(self, outcome: StepOutcome, finish: Callable[[], Trace], *, is_laid_out: bool) -> StepKind | None:
        """The kind of a step that was recorded; None where there is no memory to plan with."""
        start, kind = time.perf_counter(), None
        with self._where_memory_allows():
            kind = self._recorded.learn(outcome, finish(), self._planned_budget, is_laid_out=is_laid_out)
        self._recording_seconds = self._plan_cost_seconds = outcome.seconds + time.perf_counter() - start
        return kind

    def read_clock(self, *, adapt: bool = True) -> None:
        """Judge the last step by its times; a device that runs beside the host may still be at it, and is waited for.

        While the host prepares a step, the device does the one before: asking at once how long that took would have
        it wait for the host each time. Its plan is adapted, if that may be and nobody gave it up meanwhile.
        """
        if self._untimed is None:
            return
        (kind, plan, outcome, may_adapt), self._untimed = self._untimed, None
        is_late = outcome.times is not None
        outcome = outcome.timed()
        may_adapt = may_adapt and adapt and plan is not None
        if may_adapt and kind is not None and kind.plan is plan and (kind.steady or not is_late):
            with self._where_memory_allows():
                hardware = self._recorded.hardware()
                changed = self._planner.compare(kind, outcome, hardware, self._planned_budget)
                if not changed and self._planner.wants_room(kind, outcome):
                    changed = self._planner.leave_room(kind, self._planned_budget)
                self._replans += changed
        elif kind is not None and outcome.followed and outcome.fit is not Fit.EXACT:
            self._judge_other_size(kind, outcome, adapt=adapt)
        self._summarise(kind, plan, outcome)

    def _judge_other_size(self, kind: StepKind, outcome: StepOutcome, *, adapt: bool) -> None:
        """The last step went by the plan of a kind, but for its sizes."""
        with self._where_memory_allows():
            hardware = self._recorded.hardware()
            if adapt and outcome.fit is Fit.SMALLER and self._kinds.of(outcome.packs) is None:
                lost = lost_to_moves(outcome, kind.plan, hardware)
                if self._kinds.fared(kind, outcome.packs, lost / self._plan_cost_seconds):
                    self._plan_for(kind, outcome)
            if adapt:
                with self._interrupts.let_in():
                    self._replans += self._planner.refine(kind, outcome, hardware, self._planned_budget)

    def _plan_for(self, followed: StepKind, outcome: StepOutcome) -> StepKind | None:
        """Steps like one that went by another's plan are worth their own: make it, or else record the next."""
        kind, start = self._kinds.of(outcome.packs), time.perf_counter()
        if kind is not None:
            return kind
        with self._where_memory_allows():
            kind = self._recorded.foresee(followed, outcome, self._planned_budget)
        if kind is None:
            self._kinds.record_for_want_of_plan(outcome.packs)
            self._plan_cost_seconds = self._recording_seconds
        else:
            self._plan_cost_seconds = time.perf_counter() - start
        return kind

    @contextmanager
    def _where_memory_allows(self) -> Iterator[None]:
        """A step that went well does not fail for want of memory to plan the next one.

        Cycles of garbage wait meanwhile: planning leaves none, and while it makes much that goes again by itself the
        collector would look through all there is, traces with it, time and again.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._memory.relieve()
            _LOG.warning("no memory to plan with, so plans stay as they are: %s", error)
        finally:
            if collects:
                gc.enable()

    def _summarise(self, kind: StepKind | None, plan: Plan | None, outcome: StepOutcome) -> None:
        """`kind` is what the step was expected to be, `plan` its plan then if the step followed that."""
        away = outcome.planned_bytes + outcome.evicted_bytes
        peak = outcome.peak_bytes
        if kind is not None and plan is not None and not outcome.knows_peak:
            peak = kind.likely_peak
        summary = Summary(
            policy=self._policy_name,
            budget_bytes=self._budget,
            predicted_peak_bytes=None if plan is None else plan.expected_peak_bytes,
            measured_peak_bytes=peak,
            predicted_step_seconds=None if plan is None else plan.simulate().step_seconds,
            step_seconds=outcome.seconds,
            kept_bytes=outcome.kept_bytes,
            offloaded_bytes=away,
            recomputed_bytes=outcome.recomputed_bytes,
            stall_seconds=outcome.stall_seconds,
            recompute_seconds=outcome.recompute_seconds,
            plan_seconds=0.0 if self._kinds.expected is None else self._kinds.expected.plan_seconds,
            oom_retries=self._oom_retries,
            replans=self._replans + self._recorded.replans,
        )
        self.history.append(summary)


def _note_whether_it_fits(kind: StepKind, plan: Plan, outcome: StepOutcome) -> None:
    """A step was just what its plan is for: is that known to hold the next one?"""
    # What was proved will be dropped from now on, and wants room when it is made anew.
    fits = outcome.fits or (kind.fits and not outcome.proved)
    # The next one may be larger, or its ops may have other numbers.
    kind.loses_count = kind.loses_count or outcome.lost_count
    kind.fits = fits and not (plan.problem.trace.varies or kind.loses_count)
