"""Copies out that are in flight."""

from __future__ import annotations

from collections import deque

import torch

from outgrow.runtime.copies.copy import Copy
from outgrow.runtime.entry import Entry


class Departures:
    """Values on their way out, as they were sent, each with a hold on its memory until it has landed.

    On a GPU some go to pinned memory, on a stream, and some to the disk, on a thread: they end in no order, but among
    their kind.

    Attributes:
        nbytes: what they hold now, and `most_bytes` the most of this step.
    """

    def __init__(self) -> None:
        self._copies: deque[tuple[Copy, Entry, torch.UntypedStorage]] = deque()
        self._kinds: set[type[Copy]] = set()
        self.nbytes = self.most_bytes = 0

    def reset(self) -> None:
        """A step begins."""
        self.most_bytes = self.nbytes

    def add(self, copy: Copy, entry: Entry, storage: torch.UntypedStorage) -> None:
        """The copy of a value out of a storage was asked for."""
        self._copies.append((copy, entry, storage))
        self._kinds.add(type(copy))
        self.nbytes += entry.nbytes
        self.most_bytes = max(self.most_bytes, self.nbytes)

    @property
    def first(self) -> Copy | None:
        """The copy that was asked for first."""
        return self._copies[0][0] if self._copies else None

    @property
    def over(self) -> Copy | None:
        """The first copy that is over."""
        under_way: set[type[Copy]] = set()
        for copy, _, _ in self._copies:
            if type(copy) in under_way:
                continue
            if copy.done:
                return copy
            under_way.add(type(copy))
            if len(under_way) == len(self._kinds):
                break
        return None

    def land(self, copy: Copy) -> Entry:
        """A copy is over: the memory of its value, which is returned, is nobody's here any more."""
        place, entry = next((place, entry) for place, (other, entry, _) in enumerate(self._copies) if other is copy)
        del self._copies[place]
        self.nbytes -= entry.nbytes
        return entry

    def is_reading(self, storage: torch.UntypedStorage) -> bool:
        """Whether a copy is under way that reads this memory."""
        return any(held is storage and not copy.done for copy, _, held in self._copies)

    @property
    def will_free(self) -> bool:
        """Whether the memory of any is free once it has landed."""
        return any(entry.record.other_holders() <= 0 for _, entry, _ in self._copies)

    def close(self) -> None:
        """All are over."""
        self._copies.clear()
