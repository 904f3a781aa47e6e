"""Runs a candidate for real: some steps inside the budget, and what they took."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from outgrow.planning.plan import Plan
from outgrow.session import Session
from outgrow.tracing.capture import TrainingStep, as_sequence, training_state
from outgrow.tracing.ir import Trace
from outgrow.tuning.pace import FixedWork, Run

# The first two steps are recorded, and the third proves recipes.
_WARM_UP_STEPS = 3
# A machine's speed wavers from second to second: short steps are run for so long, but at most so many times as often.
_LEAST_SECONDS = 4.0
_MOST_TIMES = 5
# In a long step that evens out by itself: after so many seconds few are enough.
_ENOUGH_SECONDS = 10.0
# Before a step that counts the machine's own pace is measured, for this share of its time; where steps are short, as
# often as takes no longer than they do.
_SHARE_OF_PACE = 0.05


@dataclass(frozen=True)
class Terms:
    """What every run is held to: the terms of a `Session`. `budget_bytes` is in bytes."""

    budget_bytes: int
    policy: str
    spill_dir: Path | None = None
    allow_tmpfs: bool = False

    def open(self, made: TrainingStep, plan: Plan | None = None) -> Session:
        """A session over what was made."""
        return Session(
            made.model,
            made.optimizer,
            budget=self.budget_bytes,
            policy=self.policy,
            plan=plan,
            spill_dir=self.spill_dir,
            allow_tmpfs=self.allow_tmpfs,
        )


@dataclass(frozen=True)
class Trial:
    """What steps of one candidate took.

    Attributes:
        runs: one after the other.
        peak_bytes: the highest of all steps, the first ones too.
        plan: what the last step followed, with the trace and the device as they were measured.
    """

    runs: tuple[Run, ...]
    peak_bytes: int
    plan: Plan

    def after(self, earlier: Trial) -> Trial:
        """All runs of a candidate, and their highest peak."""
        peak = max(earlier.peak_bytes, self.peak_bytes)
        return replace(self, runs=(*earlier.runs, *self.runs), peak_bytes=peak)

    def trace_of(self, step_seconds: float) -> Trace:
        """The step as it was recorded, at the pace of one that takes so many seconds under the plan."""
        recorded = self.plan.problem.trace
        prediction = self.plan.simulate()
        took, foretold = step_seconds, prediction.step_seconds
        stalled, foretold_stall = median(run.stall_seconds for run in self.runs), prediction.stall_seconds
        if stalled < took and foretold_stall < foretold:  # a disk does not wait longer because ops take longer
            took, foretold = took - stalled, foretold - foretold_stall
        pace = took / foretold
        return recorded.with_ops([replace(op, seconds=op.seconds * pace) for op in recorded.ops])


def run_step(made: TrainingStep, session: Session) -> float:
    """Run the next step in a session; its time in seconds, without that of drawing its batch."""
    step = made.drawn()
    began = time.perf_counter()
    with session.step():
        step()
    return time.perf_counter() - began


def run_trial(
    make: Callable[[], TrainingStep],
    terms: Terms,
    steps: int,
    fixed_work: FixedWork,
    *,
    at_least: int = 2,
    plan: Plan | None = None,
    on_step: Callable[[], None] = lambda: None,
    afterwards: Callable[[TrainingStep, Session], None] | None = None,
) -> Trial:
    """Build the step, run it a few times to settle and then about `steps` times; everything is let go of at the end.

    Short steps are run more often, and long ones less, but `at_least` so often; the fixed work runs between them, and
    tells the machine's pace. `plan` is what the first step follows, if there is one. `on_step` is called `steps`
    times, in all; `afterwards` may do more with what was built.

    Raises:
        BudgetTooSmall, SpillError: see `Session`.
    """
    made = make()
    parts = _parts_of(made)
    seconds: list[float] = []
    stalls: list[float] = []
    paces: list[float] = []
    paced = 0.0
    session: Session | None = None
    try:
        with terms.open(made, plan) as session:
            for _ in range(_WARM_UP_STEPS):
                last = run_step(made, session)
            while not _are_enough(seconds, steps, at_least):
                if paced <= sum(seconds):
                    began = time.perf_counter()
                    paces.append(fixed_work.seconds(_SHARE_OF_PACE * last))
                    paced += time.perf_counter() - began
                last = run_step(made, session)
                summary = session.summary()  # without the time of setting the plan right, as later steps are
                seconds.append(summary.step_seconds)
                stalls.append(summary.stall_seconds)
                if len(seconds) <= steps:
                    on_step()
            for _ in range(len(seconds), steps):
                on_step()
            plan = session.plan
            peak = session.peak_bytes
            if afterwards is not None:
                afterwards(made, session)
    finally:
        del made, session
        if any(part() is not None for part in parts):  # they hold themselves in a cycle
            gc.collect()  # of all that there is, which takes tenths of a second
    assert plan is not None, "every step that was recorded has a plan"
    return Trial((Run(median(seconds), median(stalls), median(paces)),), peak, plan)


def _parts_of(made: TrainingStep) -> list[weakref.ref[object]]:
    """What was built for one candidate, and must be gone before the next one is built."""
    models, optimizers = as_sequence(made.model), as_sequence(made.optimizer)
    state = (tensor for tensor, _ in training_state(models, optimizers))
    return [weakref.ref(part) for part in (*models, *optimizers, *state)]


def _are_enough(seconds: Sequence[float], steps: int, at_least: int) -> bool:
    """Whether steps that took so long tell what one takes, where `steps` were asked for."""
    if len(seconds) < steps:
        return len(seconds) >= at_least and sum(seconds) >= _ENOUGH_SECONDS
    return sum(seconds) >= _LEAST_SECONDS or len(seconds) >= _MOST_TIMES * steps
