"""Runs what is best as far as is known, and what may be better, until one is sure to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import sqrt
from typing import Literal

from outgrow.tuning.answer import Candidate
from outgrow.tuning.forecast import Forecast
from outgrow.tuning.noise import efficiency
from outgrow.tuning.records import Records
from outgrow.tuning.runs import Runs

Objective = Literal["goodput", "throughput"]

_MOST_PASSES = 16
_RUNS_OF_THE_BEST = 2  # no answer was run less
# What a batch is worth may be more by this share where it was foretold, which falls with the root of its runs.
_DOUBT = 0.1


class Race:
    """The second part of a search: from plans for every batch to the one that is worth most."""

    def __init__(
        self,
        forecast: Forecast,
        records: Records,
        objective: Objective,
        base_batch: int,
        noise_samples: float,
        *,
        divides: bool,
        only_divided: Sequence[int],
    ) -> None:
        """`divides` says that a batch may come in several passes, as those of `only_divided` have to."""
        self._forecast = forecast
        self._records = records
        self._objective = objective
        self._base = base_batch
        self._noise_samples = noise_samples
        self._divides = divides
        self._only_divided = only_divided

    def run(self, runs: Runs, trials: int) -> None:
        """Run candidates until nothing may be better than the best, but no more than so often.

        Of the best and of the one that may be better by most, the one that was run less (LUCB, Kalyanakrishnan et al.
        2012): a machine's speed wavers, and the best of some single runs was also the luckiest.
        """
        for _ in range(trials):
            known = [item for item in self.candidates() if item.feasible]
            if not known:
                return
            best = max(known, key=self._worth)
            rivals = [item for item in known if item is not best]
            rival = max(rivals, key=self._hope, default=best)
            if self._is_sure(best) and (rival is best or self._hope(rival) <= self._worth(best)):
                return
            following = rival if self._is_sure(best) and self._runs(rival) <= self._runs(best) else best
            runs.run(following.micro_batch, following.accumulation)

    def best(self) -> Candidate:
        """The best of what was run.

        Raises:
            BudgetTooSmall, RuntimeError, MemoryError: nothing that was run fits, as the first said that did not.
        """
        run = [item for item in self.candidates() if item.feasible and item.measured_step_seconds is not None]
        if not run:
            raise self._records.failures[0]
        return max([item for item in run if self._is_sure(item)] or run, key=self._worth)

    def candidates(self) -> Iterator[Candidate]:
        """Each batch in one pass, and in several where that is predicted to be faster."""
        plans = self._forecast.plans
        for size in [*plans, *self._only_divided]:
            whole = self._candidate(size, 1) if size in plans else None
            if whole is not None:
                yield whole
            if not self._divides:
                continue
            divided = [self._candidate(size // passes, passes) for passes in self._divisions(size)]
            fits = [item for item in divided if item.feasible]
            best = min(fits, key=lambda item: item.predicted_step_seconds, default=None)
            if best is not None and (whole is None or best.predicted_step_seconds < whole.predicted_step_seconds):
                yield best
            yield from (item for item in divided if item is not best and self._runs(item))

    def _divisions(self, size: int) -> Iterator[int]:
        for passes in range(2, _MOST_PASSES + 1):
            if size % passes == 0 and size // passes in self._forecast.plans:
                yield passes

    def _candidate(self, micro_batch: int, passes: int) -> Candidate:
        known = self._forecast.candidate(micro_batch, passes)
        return replace(known, efficiency=efficiency(known.batch_size, self._base, self._noise_samples))

    def _worth(self, candidate: Candidate) -> float:
        return candidate.goodput if self._objective == "goodput" else candidate.samples_per_second

    def _hope(self, candidate: Candidate) -> float:
        """What a candidate may be worth."""
        return self._worth(candidate) * (1 + _DOUBT / sqrt(1 + self._runs(candidate)))

    def _runs(self, candidate: Candidate) -> int:
        trial = self._records.trials.get((candidate.micro_batch, candidate.accumulation))
        return 0 if trial is None else len(trial.runs)

    def _is_sure(self, candidate: Candidate) -> bool:
        return self._runs(candidate) >= _RUNS_OF_THE_BEST
