"""The planning problem as a linear program: how much of each value is kept, offloaded, made anew.

Shares are fractions and the copy lanes are fluids, so that its optimum is at most the time of any real plan
(`bound.py`), and so few shares come out broken that rounding them gives a good plan (`policies/auto.py`). Checkmate
(Jain et al., 2020) and POFO (Beaumont et al., 2021) solve such programs for recompute, and for both on chains.

Time is cut into moments, each a run of ops. Memory is written as differences from moment to moment, so that a value
appears in a few rows however long it lives.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array, vstack

from outgrow.planning.parks import Gap, sources_of_gradient
from outgrow.planning.prefetch import may_be_dropped
from outgrow.planning.problem import Candidate, Problem

# More moments than this make the program slower, and the answer hardly better.
_MOST_MOMENTS = 400
_UNIT = 1 << 20  # bytes; solvers like numbers of ordinary size
# How many values a branch and bound takes to be whole, and how far from the optimum it may stop.
_WHOLE_VALUES, _WHOLE_GAP = 60, 1e-3

_Terms = list[tuple[int, float]]


@dataclass(frozen=True)
class Shares:
    """The program's answer: the share of each candidate (by value) that is offloaded, and that is made anew.

    `seconds` is what the step takes beyond the plain step; infinite where no shares fit the budget.
    """

    offloaded: dict[int, float]
    recomputed: dict[int, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Item:
    """What may be away: a saved value, or one that is parked in a gap.

    Attributes:
        saved: the op from which on it can be copied.
        leaves, wanted: the first op at which it can be away, and the op at which it must be back.
        anew_seconds: what it takes to make it anew; None where that cannot be.
        candidate: the saved value; None for a gap.
        copies_out: False where the copy out may be another's: a saved value that is parked before it is offloaded.
    """

    nbytes: int
    saved: int
    leaves: int
    wanted: int
    anew_seconds: float | None
    candidate: Candidate | None = None
    copies_out: bool = True


class Relaxation:
    """The program of one problem; it can be solved again for tighter budgets."""

    def __init__(
        self,
        problem: Problem,
        curve: Sequence[float],
        gaps: Iterable[Gap] = (),
        *,
        optimistic: bool = False,
        chains: bool = True,
    ) -> None:
        """
        Args:
            problem: what is planned.
            curve: bytes alive at each op where every saved value is kept.
            gaps: what can be parked, for the price of its copies, or of being made anew.
            optimistic: round moments so that values are away longer than they can be, and let a source come twice
                if that is cheaper: the optimum is then a lower bound. Else values are away a little shorter, so
                that what fits the program is likely to fit the step.
            chains: whether a value may be made anew from another that is made anew itself.
        """
        self._problem = problem
        self._optimistic = optimistic
        self._chains = chains
        self._offloadable = {item.value for item in problem.candidates}
        items = [*map(self._saved_item, problem.candidates), *map(self._parked_item, gaps)]
        self._items = [item for item in items if item.leaves < item.wanted]
        self._moments = self._cut()
        self._curve: NDArray[np.float64] = np.asarray(curve or [problem.base_bytes], dtype=np.float64)
        # Of each moment, the op where most is alive; and where most is when all that can be away is away.
        self._worst, self._crowded = self._worst_ops(self._curve), self._worst_ops(self._least)
        self._ousted = self._find_ousted()

    def solve(self, budgets: Sequence[float] | None = None) -> Shares:
        """The cheapest shares. `budgets` has the bytes that may be alive at each op; the problem's if left out."""
        limit = np.full(len(self._curve), float(self._problem.budget_bytes))
        if budgets is not None:
            limit = np.minimum(limit, np.asarray(budgets, dtype=np.float64))
        # How far the plain step is over the budget, at the worst op of each moment.
        excess = np.maximum.reduceat(self._curve - limit, self._moments)
        if not self._items:
            return Shares({}, {}, 0.0 if excess.max() <= 0 else float("inf"))
        columns = self._program[1]
        costs, matrix, bounds = self._arrays
        answer = linprog(costs, A_ub=matrix, b_ub=self._limits(excess), bounds=bounds, method="highs")
        if answer.x is None:
            return Shares({}, {}, float("inf"))
        saved = [(k, item.candidate.value) for k, item in enumerate(self._items) if item.candidate is not None]
        out = {value: float(answer.x[columns.offloaded[k]]) for k, value in saved}
        anew = {value: float(answer.x[columns.recomputed[k]]) for k, value in saved}
        return Shares(out, anew, float(answer.fun))

    def least_seconds(self, seconds: float) -> float:
        """What any shares cost at least if those of the largest values are all or nothing, in seconds.

        A branch and bound that takes `seconds` at most; what it has proved by then.
        """
        relaxed = self.solve().seconds
        if not self._items or not isfinite(relaxed):
            return relaxed
        excess = np.maximum.reduceat(self._curve - self._problem.budget_bytes, self._moments)
        columns = self._program[1]
        costs, matrix, bounds = self._arrays
        whole = np.zeros(columns.count)
        largest = sorted(range(len(self._items)), key=lambda index: -self._items[index].nbytes)[:_WHOLE_VALUES]
        for index in largest:
            whole[[columns.offloaded[index], columns.recomputed[index]]] = 1
        answer = milp(
            costs,
            integrality=whole,
            bounds=Bounds(bounds[:, 0], bounds[:, 1]),
            constraints=LinearConstraint(matrix, -np.inf, self._limits(excess)),
            options={"time_limit": seconds, "mip_rel_gap": _WHOLE_GAP},
        )
        proved = getattr(answer, "mip_dual_bound", None)
        return max(relaxed, float(proved)) if proved is not None and isfinite(proved) else relaxed

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.float64], csr_array, NDArray[np.float64]]:
        """What is the same for all budgets: costs, rows and bounds.

        The last rows, one for each moment, say that what leaves is what the plain step is over the budget.
        """
        rows, columns = self._program
        within = _Rows()
        for now in range(len(self._moments)):
            away = [(columns.gone[now], 1.0), (columns.inside[now], -1.0), (columns.dropped[now], 1.0)]
            within.at_least(0.0, [*away, (columns.over[now], 1.0)])
        matrix = vstack([rows.matrix(columns.count), within.matrix(columns.count)], format="csr")
        return self._costs(columns), matrix, self._bounds(columns)

    def _limits(self, excess: NDArray[np.float64]) -> NDArray[np.float64]:
        """The limits of these rows. `excess`: how far the plain step is over, at the worst op of each moment."""
        return np.concatenate([np.asarray(self._program[0].limits), -(excess / _UNIT)])

    # --- time ---

    def _saved_item(self, item: Candidate) -> _Item:
        ops = self._problem.tick_ops
        leaves = max(item.held, ops[item.last_pack])
        recipe = self._problem.recipes.find(item.value) if may_be_dropped(self._problem, item) else None
        seconds = None if recipe is None else recipe.seconds
        # A copy that a park began may serve.
        saved = self._problem.trace.values[item.value].birth + 1 if self._optimistic else ops[item.first_pack]
        return _Item(item.nbytes, saved, leaves, ops[item.first_unpack], seconds, item)

    def _parked_item(self, gap: Gap) -> _Item:
        first = gap.after_op + 1
        anew = sources_of_gradient(self._problem, gap.value) is not None
        birth = self._problem.trace.values[gap.value].birth
        seconds = self._problem.trace.ops[birth].seconds if anew else None
        copies_out = gap.value not in self._offloadable
        return _Item(gap.nbytes, first, first, gap.before_op, seconds, copies_out=copies_out)

    def _cut(self) -> list[int]:
        """The first op of each moment: where values leave and come back, thinned out where there are too many."""
        end = max(1, len(self._problem.trace.ops))
        edges = {0} | {item.leaves for item in self._items} | {item.wanted for item in self._items}
        cuts = sorted(edge for edge in edges if edge < end)
        chosen = np.linspace(0, len(cuts) - 1, min(len(cuts), _MOST_MOMENTS)).round().astype(int)
        return [cuts[index] for index in dict.fromkeys(chosen.tolist())]

    def _begin(self, op: int) -> int:
        """The first moment in which what begins at `op` counts."""
        return bisect_right(self._moments, op) - 1 if self._optimistic else bisect_left(self._moments, op)

    def _end(self, op: int) -> int:
        """The first moment in which what ends at `op` counts no more."""
        return bisect_left(self._moments, op) if self._optimistic else bisect_right(self._moments, op) - 1

    def _copied(self, item: _Item) -> int:
        """The first moment at which a copy out that starts at once is over: half a copy frees nothing."""
        if self._optimistic:
            return 0
        times = self._problem.op_times
        done = times[item.saved] + self._problem.hardware.copy_out_seconds(item.nbytes)
        return bisect_left(self._moments, bisect_left(times, done))

    def _fetched(self, item: _Item) -> int:
        """The moment at which a copy back that comes just in time starts: half a copy takes all of its memory."""
        if self._optimistic:
            return len(self._moments)
        times = self._problem.op_times
        start = times[item.wanted] - self._problem.hardware.copy_in_seconds(item.nbytes)
        return max(0, bisect_right(self._moments, bisect_right(times, start) - 1) - 1)

    @cached_property
    def _least(self) -> NDArray[np.float64]:
        """Bytes alive at each op when all that can be away is away."""
        change = np.zeros(len(self._curve) + 2)
        for item in self._items:
            change[item.leaves] -= item.nbytes
            change[item.wanted] += item.nbytes
        return self._curve + np.cumsum(change)[: len(self._curve)]

    def _find_ousted(self) -> dict[int, tuple[int, int]]:
        """Items that cannot be there at some moments: the first and the last of these, by the number of the item.

        A value's memory is there as a whole or not at all: where it has no room even when all that can be away is
        away, it has left before, and its copy back, all of it, begins after that.
        """
        crowding = self._least - self._problem.budget_bytes
        worst = np.maximum.reduceat(crowding, self._moments)
        found: dict[int, tuple[int, int]] = {}
        for index, item in enumerate(self._items):
            begin = bisect_left(self._moments, item.leaves)
            end = bisect_right(self._moments, item.wanted) - 1  # moments that end before it is wanted
            without_room = np.flatnonzero(worst[begin:end] + item.nbytes > 0)
            if len(without_room):
                found[index] = (begin + int(without_room[0]), begin + int(without_room[-1]))
        return found

    def _worst_ops(self, levels: NDArray[np.float64]) -> list[int]:
        """The op of each moment with the highest level."""
        ends = [*self._moments[1:], len(levels)]
        return [begin + int(np.argmax(levels[begin:end])) for begin, end in zip(self._moments, ends, strict=True)]

    def _lane_seconds(self) -> tuple[list[float], list[float]]:
        """Time that each lane has had in a plain step since the moment before: the lane out, and the one back.

        What is back when a moment begins was loaded before it. What is gone at its worst op may have left in it.
        """
        times, end = self._problem.op_times, len(self._problem.trace.ops)
        lengths = [times[b] - times[a] for a, b in pairwise([*self._moments, end])]
        before = [0.0, *lengths[:-1]]
        return (lengths if self._optimistic else before), before

    # --- the program ---

    @cached_property
    def _program(self) -> tuple[_Rows, _Columns]:
        """All rows but those of the budget."""
        edges = self._sources
        columns = _Columns(len(self._items), len(edges), len(self._moments))
        rows = _Rows()
        for index, (offloaded, recomputed) in enumerate(zip(columns.offloaded, columns.recomputed, strict=True)):
            shares = [(offloaded, 1.0), (recomputed, 1.0)]
            rows.at_most(1.0, shares)
            if index in self._ousted:
                rows.at_least(1.0, shares)
        self._add_sources(rows, columns, edges)
        self._add_levels(rows, columns, edges)
        self._add_lanes(rows, columns)
        if self._optimistic:
            self._add_work(rows, columns)
        return rows, columns

    @cached_property
    def _sources(self) -> list[tuple[int, int]]:
        """(reader, source) for each candidate that is a source of another's recipe, readers in order of return."""
        saved = [(index, item.candidate) for index, item in enumerate(self._items) if item.candidate is not None]
        places = {item.value: index for index, item in saved}
        found: list[tuple[int, int]] = []
        for index, item in saved:
            recipe = self._problem.recipes.find(item.value) if may_be_dropped(self._problem, item) else None
            sources = [places[source] for source in (() if recipe is None else recipe.sources) if source in places]
            wanted = self._items[index].wanted
            found += [(index, source) for source in sources if wanted < self._items[source].wanted]
        return sorted(found, key=lambda edge: (edge[1], self._items[edge[0]].wanted))

    def _add_sources(self, rows: _Rows, columns: _Columns, edges: Sequence[tuple[int, int]]) -> None:
        """What a recipe starts from is back as soon as the recipe runs, and stays, unless it never left.

        The lower bound lets it come once more instead, which may serve later readers as well.
        """
        twice: dict[int, _Terms] = {}
        for number, (reader, source) in enumerate(edges):
            away = [(columns.offloaded[source], 1.0), (columns.recomputed[source], 1.0)]
            there = [(columns.early[number], -1.0)]
            if self._optimistic:
                again = twice.setdefault(source, [])
                again += [(columns.twice_made[number], -1.0), (columns.twice_copied[number], -1.0)]
                there += again
                moved = [(columns.offloaded[source], -1.0), (columns.recomputed[source], -1.0)]
                rows.at_most(0.0, [(columns.twice_copied[number], 1.0), *moved])
            rows.at_most(1.0, [(columns.recomputed[reader], 1.0), *away, *there])
            if number and edges[number - 1][1] == source:
                rows.at_most(0.0, [(columns.early[number - 1], 1.0), (columns.early[number], -1.0)])
            if not self._chains:
                rows.at_most(1.0, [(columns.recomputed[reader], 1.0), (columns.recomputed[source], 1.0)])

    def _add_levels(self, rows: _Rows, columns: _Columns, edges: Sequence[tuple[int, int]]) -> None:
        """What could be copied, could be gone, must be back and is dropped at each moment, from shares."""
        moments = len(self._moments)
        lists: list[list[_Terms]] = [[[] for _ in range(moments + 1)] for _ in range(8)]
        packed, given, held, due, coming, dropped, ousted, welcome = lists
        for index, item in enumerate(self._items):
            size = item.nbytes / _UNIT
            offloaded, recomputed = columns.offloaded[index], columns.recomputed[index]
            left, wanted = self._begin(item.leaves), self._end(item.wanted)
            (packed if item.copies_out else given)[self._begin(item.saved)].append((offloaded, size))
            held[max(left, self._copied(item))].append((offloaded, size))
            due[wanted].append((offloaded, size))
            without_room = self._ousted.get(index)
            if without_room is not None:
                ousted[without_room[0]].append((offloaded, size))
            room = 0 if without_room is None else min(wanted, without_room[1] + 1)
            welcome[room].append((offloaded, size))
            coming[min(wanted, max(room, self._fetched(item)))].append((offloaded, size))
            if left < wanted:
                dropped[left].append((recomputed, size))
                dropped[wanted].append((recomputed, -size))
        for number, (reader, source) in enumerate(edges):
            size = self._items[source].nbytes / _UNIT
            following = edges[number + 1] if number + 1 < len(edges) and edges[number + 1][1] == source else None
            until = self._items[source] if following is None else self._items[following[0]]
            start, end = self._end(self._items[reader].wanted), bisect_right(self._moments, until.wanted) - 1
            if self._optimistic:
                due[start].append((columns.twice_copied[number], size))
                welcome[0].append((columns.twice_copied[number], size))
            if start < end:
                dropped[start].append((columns.early[number], -size))
                dropped[end].append((columns.early[number], size))
        for level, changes in (
            (columns.packed, packed),
            (columns.given, given),
            (columns.held, held),
            (columns.due, due),
            (columns.coming, coming),
            (columns.dropped, dropped),
            (columns.ousted, ousted),
            (columns.welcome, welcome),
        ):
            for now in range(moments):
                before = [(level[now - 1], 1.0)] if now else []
                rows.equal(0.0, [(level[now], -1.0), *before, *changes[now]])

    def _add_lanes(self, rows: _Rows, columns: _Columns) -> None:
        """Copies: no sooner than there is something to copy, no faster than the lanes, unless the device waits."""
        hardware = self._problem.hardware
        out, into = hardware.copy_out_bandwidth / _UNIT, hardware.copy_in_bandwidth / _UNIT
        for now, (out_seconds, back_seconds) in enumerate(zip(*self._lane_seconds(), strict=True)):
            copied, gone, back = columns.copied[now], columns.gone[now], columns.back[now]
            rows.at_most(0.0, [(copied, 1.0), (columns.packed[now], -1.0)])
            rows.at_most(0.0, [(gone, 1.0), (copied, -1.0), (columns.given[now], -1.0)])
            rows.at_most(0.0, [(gone, 1.0), (columns.held[now], -1.0)])
            rows.at_most(0.0, [(columns.due[now], 1.0), (back, -1.0)])
            rows.at_most(0.0, [(columns.coming[now], 1.0), (columns.inside[now], -1.0)])
            rows.at_most(0.0, [(back, 1.0), (columns.inside[now], -1.0)])
            if not self._optimistic or self._worst[now] == self._crowded[now]:
                rows.at_most(0.0, [(columns.ousted[now], 1.0), (gone, -1.0), (columns.over[now], -1.0)])
            rows.at_most(0.0, [(back, 1.0), (columns.welcome[now], -1.0)])
            rows.at_most(0.0, [(columns.inside[now], 1.0), (gone, -1.0)])
            for level, capacity, bandwidth in (
                (columns.copied, out_seconds * out, out),
                (columns.back, back_seconds * into, into),
            ):
                before = [(level[now - 1], -1.0)] if now else []
                rows.at_most(capacity, [(level[now], 1.0), *before, *columns.extra(now, -bandwidth)])
            if self._optimistic:
                self._add_whole_copies(rows, columns, now)

    def _add_whole_copies(self, rows: _Rows, columns: _Columns, now: int) -> None:
        """A copy holds all of its memory while it lasts, and starts between two ops.

        So what is gone at the worst op of a moment was copied before that op, and what is loaded when the next moment
        begins was inside at that op, but for what the lane did after it. The same for what has no room at some op.
        """
        hardware, times = self._problem.hardware, self._problem.op_times
        out, into = hardware.copy_out_bandwidth / _UNIT, hardware.copy_in_bandwidth / _UNIT
        copied = [(columns.copied[now - 1], -1.0)] if now else []
        by_then = [*copied, (columns.given[now], -1.0), *columns.extra(now, -out)]
        for level, op in ((columns.gone, self._worst[now]), (columns.ousted, self._crowded[now])):
            rows.at_most(out * (times[op] - times[self._moments[now]]), [(level[now], 1.0), *by_then])
        if now:
            for level, op in ((columns.inside, self._worst[now - 1]), (columns.welcome, self._crowded[now - 1])):
                since = into * (times[self._moments[now]] - times[op + 1])
                rows.at_most(since, [(columns.back[now], 1.0), (level[now - 1], -1.0), *columns.extra(now, -into)])

    def _add_work(self, rows: _Rows, columns: _Columns) -> None:
        """While a value is made anew, or a copy takes the device's time, the lanes go on."""
        moments = len(self._moments)
        begun: list[_Terms] = [[] for _ in range(moments + 1)]
        ended: list[_Terms] = [[] for _ in range(moments + 1)]
        first_wanted = {index: item.wanted for index, item in enumerate(self._items)}
        for reader, source in sorted(self._sources, key=lambda edge: self._items[edge[0]].wanted):
            first_wanted[source] = min(first_wanted[source], first_wanted[reader])
        work = self._work(columns)
        shares = [
            *((columns.recomputed[index], index, first) for index, first in first_wanted.items()),
            *((columns.twice_made[number], edge[1], 0) for number, edge in enumerate(self._sources)),
        ]
        for column, index, first in shares:
            item = self._items[index]
            since = item.leaves if item.candidate is None else first
            if work[column]:
                begun[max(0, bisect_right(self._moments, since) - 1)].append((column, float(work[column])))
                ended[min(moments - 1, bisect_left(self._moments, item.wanted))].append((column, float(work[column])))
        for now in range(moments):
            for level, changes, sign in ((columns.begun, begun, 1.0), (columns.ended, ended, -1.0)):
                before = [(level[now - 1], 1.0)] if now else []
                rows.equal(0.0, [(level[now], -1.0), *before, *changes[now]])
                rows.at_most(0.0, [(columns.worked[now], sign), (level[now], -sign)])
            for level in (columns.worked, columns.handled):
                if now:
                    rows.at_most(0.0, [(level[now - 1], 1.0), (level[now], -1.0)])
        costs = self._costs(columns)
        handling = [(column, -float(costs[column])) for column in columns.offloaded if costs[column]]
        rows.at_most(0.0, [(columns.handled[moments - 1], 1.0), *handling])

    def _costs(self, columns: _Columns) -> NDArray[np.float64]:
        """Seconds that a whole share costs, and a second of stall."""
        costs = self._work(columns)
        hardware = self._problem.hardware
        for index, item in enumerate(self._items):
            copies = 2 if item.copies_out else 1
            costs[columns.offloaded[index]] = hardware.copying_costs(copies * item.nbytes)
        costs[list(columns.stall)] = 1.0
        costs[list(columns.over)] = _UNIT / hardware.copy_out_bandwidth + _UNIT / hardware.copy_in_bandwidth
        return costs

    def _work(self, columns: _Columns) -> NDArray[np.float64]:
        """Seconds of computation that it costs to make a whole share anew."""
        costs = np.zeros(columns.count)
        for index, item in enumerate(self._items):
            costs[columns.recomputed[index]] = item.anew_seconds or 0.0
        for number, (_, source) in enumerate(self._sources):
            costs[columns.twice_made[number]] = self._items[source].anew_seconds or 0.0
        return costs

    def _bounds(self, columns: _Columns) -> NDArray[np.float64]:
        bounds = np.zeros((columns.count, 2))
        bounds[:, 1] = np.inf
        bounds[: columns.twice_copied.stop, 1] = 1.0
        for number, (_, source) in enumerate(self._sources):
            if self._items[source].anew_seconds is None:
                bounds[columns.twice_made[number], 1] = 0.0
        for index, item in enumerate(self._items):
            if item.anew_seconds is None:
                bounds[columns.recomputed[index], 1] = 0.0
        bounds[list(columns.dropped), 0] = -np.inf  # what is back early may have been offloaded
        if self._optimistic:
            bounds[list(columns.over), 1] = 0.0
        else:
            bounds[columns.begun.start : columns.handled.stop, 1] = 0.0
        return bounds


class _Columns:
    """Where each variable stands: shares by item, early returns by edge, levels (in `_UNIT`) by moment."""

    def __init__(self, items: int, edges: int, moments: int) -> None:
        self.offloaded = range(items)
        self.recomputed = range(items, 2 * items)
        self.early = range(2 * items, 2 * items + edges)
        self.twice_made = range(self.early.stop, self.early.stop + edges)
        self.twice_copied = range(self.twice_made.stop, self.twice_made.stop + edges)
        self.count = self.twice_copied.stop
        # Of what is offloaded: saved, free to go, copied, gone.
        self.packed, self.held, self.copied, self.gone = (self._levels(moments) for _ in range(4))
        # And: wanted, on its way, loaded, taking memory again.
        self.due, self.coming, self.back, self.inside = (self._levels(moments) for _ in range(4))
        # And: copied by others, must be gone as it has no room, has room again.
        self.given, self.ousted, self.welcome = (self._levels(moments) for _ in range(3))
        # Seconds of work that may be, that must be, and that is done; and of copies that take the device's time.
        self.begun, self.ended, self.worked, self.handled = (self._levels(moments) for _ in range(4))
        # What is dropped, time that the device waits, and bytes that fit only because it waits for them to leave.
        self.dropped, self.stall, self.over = (self._levels(moments) for _ in range(3))

    def extra(self, now: int, factor: float) -> _Terms:
        """Time of a moment beyond that of its ops, times `factor`."""
        terms = [(self.stall[now], factor)]
        for level in (self.worked, self.handled):
            terms.append((level[now], factor))
            if now:
                terms.append((level[now - 1], -factor))
        return terms

    def _levels(self, moments: int) -> range:
        start, self.count = self.count, self.count + moments
        return range(start, self.count)


class _Rows:
    """Rows of a sparse program, all "at most"."""

    def __init__(self) -> None:
        self.limits: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._factors: list[float] = []

    def at_most(self, limit: float, terms: Iterable[tuple[int, float]]) -> None:
        for column, factor in terms:
            self._rows.append(len(self.limits))
            self._columns.append(column)
            self._factors.append(factor)
        self.limits.append(limit)

    def at_least(self, limit: float, terms: Iterable[tuple[int, float]]) -> None:
        self.at_most(-limit, [(column, -factor) for column, factor in terms])

    def equal(self, limit: float, terms: _Terms) -> None:
        self.at_most(limit, terms)
        self.at_least(limit, terms)

    def matrix(self, columns: int) -> csr_array:
        return csr_array((self._factors, (self._rows, self._columns)), shape=(len(self.limits), columns))
