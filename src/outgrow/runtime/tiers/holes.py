"""A free list that joins its holes again: which bytes of a region nobody has."""

from __future__ import annotations

from bisect import bisect_left


class Holes:
    """The free bytes of a region [first, end), given out by best fit in multiples of an alignment."""

    def __init__(self, first: int, end: int, alignment: int) -> None:
        self._alignment = alignment
        self._first, self._end = first, max(first, end)
        # Where holes begin, in order, and where each ends.
        self._starts = [first] if end > first else []
        self._ends = [end] if end > first else []

    @property
    def is_untouched(self) -> bool:
        """Whether nothing is given out."""
        return self.free_bytes == self._end - self._first

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has."""
        return sum(self._ends) - sum(self._starts)

    def take(self, nbytes: int) -> int | None:
        """Where `nbytes` lie from now on: in the smallest hole that has room; None if none has."""
        room = self._rounded(nbytes)
        holes = enumerate(zip(self._starts, self._ends, strict=True))
        fitting = [(end - start, index) for index, (start, end) in holes if end - start >= room]
        if not fitting:
            return None
        size, index = min(fitting)
        start = self._starts[index]
        if size == room:
            del self._starts[index], self._ends[index]
        else:
            self._starts[index] += room
        return start

    def give(self, offset: int, nbytes: int) -> None:
        """What was taken is free again, as one hole with its neighbours."""
        start, end = offset, offset + self._rounded(nbytes)
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == end:
            end = self._ends[index]
            del self._starts[index], self._ends[index]
        if index > 0 and self._ends[index - 1] == start:
            index -= 1
            start = self._starts[index]
            del self._starts[index], self._ends[index]
        self._starts.insert(index, start)
        self._ends.insert(index, end)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._alignment) * self._alignment
