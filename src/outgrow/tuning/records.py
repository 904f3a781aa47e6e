"""What candidates were run for real in a search, how long their steps took, and which did not fit."""

from __future__ import annotations

from statistics import median

from outgrow.tuning.pace import at_usual_pace
from outgrow.tuning.trial import Trial

# Of a candidate: samples in a pass, and passes in a step.
Key = tuple[int, int]


class Records:
    """The real runs of one search.

    Attributes:
        trials: what was run and fitted, all runs of a candidate in one.
        seconds: of a step of each, at the machine's usual pace.
        failures: why others did not fit, in order.
    """

    def __init__(self) -> None:
        self.trials: dict[Key, Trial] = {}
        self.seconds: dict[Key, float] = {}
        self.failures: list[Exception] = []
        self._failed: set[Key] = set()

    def add(self, key: Key, trial: Trial) -> None:
        """A candidate was run: that also says more of the pace which the machine had in all other runs."""
        before = self.trials.get(key)
        self.trials[key] = trial if before is None else trial.after(before)
        paced = at_usual_pace({key: trial.runs for key, trial in self.trials.items()})
        self.seconds = {key: median(seconds) for key, seconds in paced.items()}

    def fail(self, key: Key, error: Exception) -> None:
        """A candidate did not fit."""
        self._failed.add(key)
        error.__cause__ = error.__context__ = None  # their frames hold the model and its graph
        self.failures.append(error.with_traceback(None))

    def whole(self, batch: int) -> Trial | None:
        """The runs of a batch in one pass."""
        return self.trials.get((batch, 1))

    def batches(self) -> set[int]:
        """What was run, in samples of a pass."""
        return {batch for batch, _ in self.trials}

    def is_out(self, micro_batch: int, passes: int) -> bool:
        """Whether this, or a smaller batch in as many passes, was run and did not fit: whatever is predicted."""
        return any(batch <= micro_batch and passes == times for batch, times in self._failed)
