"""Copies out that are in flight."""

from __future__ import annotations

from collections import deque

import torch

from outgrow.runtime.copies.copy import Copy
from outgrow.runtime.entry import Entry


class Departures:
    """Values on their way out, first in first out, each with a hold on its memory until it has landed.

    Attributes:
        nbytes: what they hold now, and `most_bytes` the most of this step.
    """

    def __init__(self) -> None:
        self._copies: deque[tuple[Copy, Entry, torch.UntypedStorage]] = deque()
        self.nbytes = self.most_bytes = 0

    def reset(self) -> None:
        """A step begins."""
        self.most_bytes = self.nbytes

    def add(self, copy: Copy, entry: Entry, storage: torch.UntypedStorage) -> None:
        """The copy of a value out of a storage was asked for."""
        self._copies.append((copy, entry, storage))
        self.nbytes += entry.nbytes
        self.most_bytes = max(self.most_bytes, self.nbytes)

    @property
    def first(self) -> Copy | None:
        """The copy that lands next."""
        return self._copies[0][0] if self._copies else None

    def land(self) -> tuple[Copy, Entry]:
        """The first one is over: its memory is nobody's here any more."""
        copy, entry, _ = self._copies.popleft()
        self.nbytes -= entry.nbytes
        return copy, entry

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
