"""Steps of kinds that nobody knows: which steps are recorded in the hope of meeting them again."""

from __future__ import annotations

from collections import deque

# After a step that nobody knew, so many are recorded.
_RECORDINGS = 8
# Where so many of so many steps were strangers, others will come.
_MANY, _LATEST_STEPS = 4, 16
# Sizes that came so often among so many steps are worth a plan of their own.
_OFTEN, _REMEMBERED_STEPS = 6, 32


class Strangers:
    """What is known of them.

    Attributes:
        recordings_left: how many of the next steps are recorded.
    """

    def __init__(self) -> None:
        self.recordings_left = 1
        self._at = self._gap = 0  # the last step that was one, and how long it was after the one before
        self._latest: deque[bool] = deque(maxlen=_LATEST_STEPS)
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED_STEPS)  # hashes of what steps saved
        # What steps without a good plan lost so far, in recorded steps, and how much of that has one recorded.
        self._lost, self._patience = 0.0, 1

    def may_come(self, step: int) -> bool:
        """Whether a step should be recorded: a stranger came lately, or may come again as late as the last one."""
        return self.recordings_left > 0 or (self._at > 0 and step - self._at == self._gap)

    def came(self, step: int) -> None:
        """A step was one: its kind may come again soon, or as far ahead as the last such was ago."""
        self.record_next()
        self._gap, self._at = step - self._at, step

    def had_no_good_plan(self, lost: float = 1.0) -> bool:
        """A step was one among many. Whether another plan is worth its while, ever more seldom if none comes of it.

        Not before such steps `lost` as much as recording one takes, of which this is a share.
        """
        self._lost += lost
        is_worth_it = self._lost >= self._patience
        if is_worth_it:
            self._lost, self._patience = 0.0, 2 * self._patience
        return is_worth_it

    def was_met(self) -> None:
        """One has a plan, and is none any more."""
        self._lost, self._patience = 0.0, 1

    def record_no_more(self) -> None:
        """Plans for other sizes are made without: none of the next steps need be recorded for their sake."""
        self.recordings_left = 0

    def record_next(self, steps: int = _RECORDINGS) -> None:
        """So many of the next steps are recorded at least."""
        self.recordings_left = max(self.recordings_left, steps)

    def count(self) -> None:
        """A step ended without an error."""
        self.recordings_left = max(0, self.recordings_left - 1)

    def seen(self, packs: tuple[int, ...], *, is_strange: bool) -> None:
        """A step saved tensors of so many bytes."""
        self._latest.append(is_strange)
        self._sizes.append(hash(packs))

    @property
    def are_many(self) -> bool:
        """Whether many of the latest steps were."""
        return len(self._latest) == _LATEST_STEPS and sum(self._latest) >= _MANY

    def come_often(self, packs: tuple[int, ...]) -> bool:
        """Whether steps that save tensors of so many bytes do."""
        return self._sizes.count(hash(packs)) >= _OFTEN
