"""Runs candidates for real, and has the forecast and the records learn from that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rich.progress import Progress, TaskID

from outgrow.errors import BudgetTooSmall
from outgrow.runtime.faults import is_out_of_memory
from outgrow.session import Session
from outgrow.tracing.capture import TrainingStep, as_sequence
from outgrow.tuning.builder import Builder, rates_of
from outgrow.tuning.forecast import Forecast
from outgrow.tuning.noise import GradientNoise, NoiseScale
from outgrow.tuning.pace import FixedWork
from outgrow.tuning.rates import Rule
from outgrow.tuning.records import Records
from outgrow.tuning.trial import Terms, run_step, run_trial

_LOG = logging.getLogger(__name__)

# Gradients say little of the training before it has begun: so many steps are trained first, and then so many backward
# passes are compared.
_NOISE_STEPS, _NOISE_PASSES = 16, 16


@dataclass(frozen=True)
class Reporter:
    """Says what is done now. The whole is what is known to be left, and grows when more is."""

    bar: Progress
    task: TaskID

    def expect(self, more: int) -> None:
        """There is more to do."""
        total = self.bar.tasks[0].total or 0
        self.bar.update(self.task, total=total + more)

    def say(self, what: str) -> None:
        """Something else is done now."""
        self.bar.update(self.task, description=what)

    def advance(self) -> None:
        """One thing is done."""
        self.bar.advance(self.task)


class Runs:
    """The real runs of one search.

    Attributes:
        rates: the learning rates that the first step came with, one for each group of parameters.
        rule: how they go with the batch.
        noise: the gradient noise scale, once it was measured.
    """

    def __init__(
        self,
        builder: Builder,
        terms: Terms,
        steps: int,
        forecast: Forecast,
        records: Records,
        reporter: Reporter,
    ) -> None:
        """`steps` count in each run, more where they are short, and fewer where they are long."""
        self.rates: tuple[float, ...] = ()
        self.rule: Rule
        self.noise: NoiseScale | None = None
        self._builder = builder
        self._terms = terms
        self._steps = steps
        self._forecast = forecast
        self._records = records
        self._reporter = reporter
        self._fixed_work = FixedWork()

    def run(self, micro_batch: int, passes: int = 1) -> None:
        """Run a candidate and learn from it. One that does not fit after all is out of the race."""
        self._run(micro_batch, passes, self._steps, at_least=2)

    def run_and_measure_noise(self, batch: int) -> None:
        """The same, long enough for its gradients to tell how much larger batches are worth."""
        steps = max(self._steps, _NOISE_STEPS)
        self._run(batch, 1, steps, at_least=steps, afterwards=partial(self._measure_noise, batch))

    def _run(
        self,
        micro_batch: int,
        passes: int,
        steps: int,
        *,
        at_least: int,
        afterwards: Callable[[TrainingStep, Session], None] | None = None,
    ) -> None:
        key = micro_batch, passes
        self._forecast.will_run(micro_batch, passes)
        self._reporter.expect(steps)
        self._reporter.say(f"running batch {micro_batch * passes}")
        try:
            trial = run_trial(
                partial(self._make, micro_batch, passes),
                self._terms,
                steps,
                self._fixed_work,
                at_least=at_least,
                plan=self._forecast.plan_to_run(micro_batch, passes),
                on_step=self._reporter.advance,
                afterwards=afterwards,
            )
        except (BudgetTooSmall, RuntimeError, MemoryError) as error:
            if not isinstance(error, BudgetTooSmall) and not is_out_of_memory(error):
                raise
            _LOG.warning("%d samples in %d passes are out of the race: %s", micro_batch * passes, passes, error)
            self._records.fail(key, error)
            return
        self._records.add(key, trial)
        self._forecast.learn(trial.plan.problem.hardware)

    def _make(self, micro_batch: int, passes: int) -> TrainingStep:
        made = self._builder.make(micro_batch, passes)
        if not self.rates:  # the base batch comes first, and its rates are what others are derived from
            self.rates, self.rule = rates_of(made)
        return made

    def _measure_noise(self, batch: int, made: TrainingStep, session: Session) -> None:
        assert made.optimizer is not None, "the builder saw to it"
        self._reporter.expect(_NOISE_PASSES)
        self._reporter.say("measuring the noise of gradients")
        noise = GradientNoise(made.optimizer, batch_size=batch)
        try:
            with noise.held(*as_sequence(made.model)):
                for _ in range(_NOISE_PASSES):
                    run_step(made, session)
                    self._reporter.advance()
            self.noise = noise.scale
        except BudgetTooSmall as error:  # all gradients are there in all passes, which not every budget holds
            _LOG.warning(
                "the budget has no room to measure the noise of gradients, so none is reckoned with: %s", error
            )
        finally:
            noise.close()
