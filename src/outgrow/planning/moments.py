"""Time as the linear program sees it: moments, each a run of ops, and how full memory is at the worst op of each."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from outgrow.planning.absences import Absence
from outgrow.planning.problem import Problem

# More moments than this make the program slower, and the answer hardly better; the finer ones are for who can wait.
_MOST_MOMENTS, _MOST_FINE_MOMENTS = 400, 800


class Moments:
    """The moments of one problem.

    Attributes:
        problem: what is planned.
        items: what may be away.
        optimistic: whether moments are rounded so that values are away longer than they can be; else a little
            shorter.
        starts: the first op of each moment: where values leave and come back, thinned out where there are too many.
            Fine ones end after the op where memory is fullest too: time before it is not taken for time after.
        curve: bytes alive at each op where nothing is away.
    """

    def __init__(
        self, problem: Problem, items: Sequence[Absence], curve: Sequence[float], *, optimistic: bool, fine: bool
    ) -> None:
        self.problem = problem
        self.items = items
        self.optimistic = optimistic
        self.curve: NDArray[np.float64] = np.asarray(curve or [problem.base_bytes], dtype=np.float64)
        edges = {0} | {op for item in items for op in (item.leaves, item.dropped, item.wanted)}
        cuts = sorted(edge for edge in edges if edge < max(1, len(problem.trace.ops)))
        most = _MOST_FINE_MOMENTS if fine else _MOST_MOMENTS
        chosen = np.linspace(0, len(cuts) - 1, min(len(cuts), most)).round().astype(int)
        self.starts = [cuts[index] for index in dict.fromkeys(chosen.tolist())]
        if fine:
            ends = {op + 1 for op in self._highest(self.least)}
            self.starts = sorted({*self.starts, *(end for end in ends if end < len(self.curve))})

    def __len__(self) -> int:
        return len(self.starts)

    def begin(self, op: int) -> int:
        """The first moment in which what begins at `op` counts."""
        return bisect_right(self.starts, op) - 1 if self.optimistic else bisect_left(self.starts, op)

    def end(self, op: int) -> int:
        """The first moment in which what ends at `op` counts no more."""
        return bisect_left(self.starts, op) if self.optimistic else bisect_right(self.starts, op) - 1

    def copied(self, item: Absence) -> int:
        """The first moment at which a copy out that starts at once is over: half a copy frees nothing."""
        if self.optimistic:
            return 0
        times = self.problem.op_times
        done = times[item.saved] + self.problem.hardware.copy_out_seconds(item.nbytes)
        return bisect_left(self.starts, bisect_left(times, done))

    def fetched(self, item: Absence) -> int:
        """The moment at which a copy back that comes just in time starts: half a copy takes all of its memory."""
        if self.optimistic:
            return len(self)
        times = self.problem.op_times
        start = times[item.wanted] - self.problem.hardware.copy_in_seconds(item.nbytes)
        return max(0, bisect_right(self.starts, bisect_right(times, start) - 1) - 1)

    def lane_seconds(self) -> tuple[list[float], list[float]]:
        """Time that each lane has had in a plain step since the moment before: the lane out, and the one back.

        What is back when a moment begins was loaded before it. What is gone at its worst op may have left in it.
        """
        times, end = self.problem.op_times, len(self.problem.trace.ops)
        lengths = [times[b] - times[a] for a, b in pairwise([*self.starts, end])]
        before = [0.0, *lengths[:-1]]
        return (lengths if self.optimistic else before), before

    def excess(self, limit: NDArray[np.float64]) -> NDArray[np.float64]:
        """How far the step without absences is over a limit of each op, at the worst op of each moment, in bytes."""
        return np.maximum.reduceat(self.curve - limit, self.starts)

    def after(self, now: int, op: int) -> int:
        """The first moment with time after an op of moment `now`."""
        return now + 1 if self.starts[now + 1 : now + 2] == [op + 1] else now

    @cached_property
    def worst(self) -> list[int]:
        """Of each moment, the op where most is alive."""
        return self._highest(self.curve)

    @cached_property
    def crowded(self) -> list[int]:
        """Of each moment, the op where most is alive when all that can be away is away."""
        return self._highest(self.least)

    @cached_property
    def least(self) -> NDArray[np.float64]:
        """Bytes alive at each op when all that can be away is away."""
        change = np.zeros(len(self.curve) + 2)
        coming = {item.value for item in self.items if not item.is_one_way}
        for item in self.items:
            if not item.is_one_way or item.value not in coming:  # else another absence of the value says the same
                change[item.leaves] -= item.nbytes
                change[item.wanted] += item.nbytes
        return self.curve + np.cumsum(change)[: len(self.curve)]

    @cached_property
    def ousted(self) -> dict[int, tuple[int, int]]:
        """Items that cannot be there at some moments: the first and the last of these, by the number of the item.

        A value's memory is there as a whole or not at all: where it has no room even when all that can be away is
        away, it has left before, and its copy back, all of it, begins after that.
        """
        worst = np.maximum.reduceat(self.least - self.problem.budget_bytes, self.starts)
        found: dict[int, tuple[int, int]] = {}
        for index, item in enumerate(self.items):
            if item.is_one_way:
                continue
            begin = bisect_left(self.starts, item.dropped)
            end = bisect_right(self.starts, item.wanted) - 1  # moments that end before it is wanted
            without_room = np.flatnonzero(worst[begin:end] + item.nbytes > 0)
            if len(without_room):
                found[index] = (begin + int(without_room[0]), begin + int(without_room[-1]))
        return found

    def _highest(self, levels: NDArray[np.float64]) -> list[int]:
        """The op of each moment with the highest level."""
        ends = [*self.starts[1:], len(levels)]
        return [begin + int(np.argmax(levels[begin:end])) for begin, end in zip(self.starts, ends, strict=True)]
