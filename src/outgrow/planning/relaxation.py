"""The planning problem as a linear program: how much of each value is kept, offloaded, made anew.

Shares are fractions and the copy lanes are fluids, so that its optimum is at most the time of any real plan
(`bound.py`), and so few shares come out broken that rounding them gives a good plan (`policies/auto.py`). Checkmate
(Jain et al., 2020) and POFO (Beaumont et al., 2021) solve such programs for recompute, and for both on chains.

Time is cut into moments, each a run of ops. Memory is written as differences from moment to moment, so that a value
appears in a few rows however long it lives.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, linprog, milp
from scipy.sparse import csr_array, vstack

from outgrow.planning.absences import Absence
from outgrow.planning.columns import UNIT, Columns, Rows, Terms
from outgrow.planning.moments import Moments
from outgrow.planning.problem import Problem
from outgrow.planning.tightening import add_covers, add_own_copies, add_returns, add_whole_copies

# How many values a branch and bound takes to be whole, and how far from the optimum it may stop.
_WHOLE_VALUES, _WHOLE_GAP = 6, 1e-3
# By how much a row must be broken to count, and what more rows must tell, as a share of the step.
_BROKEN, _NEWS = 1e-6, 1e-5
# Solvers, and how long each may take, in seconds; and what they say in the end (`OptimizeResult.status`).
_SOLVERS = (("highs-ds", 20.0), ("highs-ipm", 60.0))
_SOLVED, _INFEASIBLE = 0, 2


@dataclass(frozen=True)
class Shares:
    """The program's answer: the share of each candidate (by value) that is offloaded, and that is made anew.

    `seconds` is what the step takes beyond the plain step; infinite where no shares fit the budget. `has_chains` says
    that something is made anew from what is made anew itself; else the program without chains has the same answer.
    """

    offloaded: dict[int, float]
    recomputed: dict[int, float]
    seconds: float
    has_chains: bool = False


class Relaxation:
    """The program of one problem."""

    def __init__(
        self,
        problem: Problem,
        curve: Sequence[float],
        absences: Iterable[Absence],
        *,
        optimistic: bool = False,
        fine: bool = False,
        chains: bool = True,
    ) -> None:
        """
        Args:
            problem: what is planned.
            curve: bytes alive at each op where nothing is away.
            absences: what may be away, for the price of its copies, or of being made anew.
            optimistic: round moments so that values are away longer than they can be, and let a source come twice
                if that is cheaper: the optimum is then a lower bound. Else values are away a little shorter, so
                that what fits the program is likely to fit the step.
            fine: cut time more finely, which takes longer.
            chains: whether a value may be made anew from another that is made anew itself.
        """
        self._problem = problem
        self._optimistic = optimistic
        self._chains = chains
        self._items = [item for item in absences if item.leaves < item.wanted]
        self._moments = Moments(problem, self._items, curve, optimistic=optimistic, fine=fine)

    def solve(self) -> Shares:
        """The cheapest shares."""
        excess = self._excess()
        if not self._items:
            return Shares({}, {}, 0.0 if excess.max() <= 0 else float("inf"))
        return self._shares(excess)

    def _shares(self, excess: NDArray[np.float64]) -> Shares:
        columns = self._program[1]
        answer, _ = self._optimum(excess)
        if answer.status != _SOLVED:
            return Shares({}, {}, self._unsolved(answer))
        out = {value: float(answer.x[columns.offloaded[place]]) for value, place in self._places.items()}
        anew = {value: float(answer.x[columns.recomputed[place]]) for value, place in self._places.items()}
        made = answer.x[list(columns.recomputed)]
        has_chains = any(made[reader] + made[source] > 1 + _BROKEN for reader, source in self._sources)
        return Shares(out, anew, float(answer.fun), has_chains)

    def _optimum(self, excess: NDArray[np.float64]) -> tuple[OptimizeResult, LinearConstraint]:
        """The solver's answer, and the rows that it was found with.

        Of the rows that tighten the program most hold anyhow: those that an answer breaks are added, and it is solved
        again, until there are none or they tell nothing new. All at once can take a solver minutes.
        """
        matrix = self._arrays[1]
        cuts, most = self._cuts
        limits = self._limits(excess)
        unused = np.arange(len(most))
        answer = self._answer(matrix, limits)
        found = LinearConstraint(matrix, -np.inf, limits)
        while answer.status == _SOLVED and len(unused):
            is_broken = cuts[unused] @ answer.x > most[unused] + _BROKEN
            broken, unused = unused[is_broken], unused[~is_broken]
            matrix = vstack([matrix, cuts[broken]], format="csr")
            limits = np.concatenate([limits, most[broken]])
            tighter = self._answer(matrix, limits) if len(broken) else answer
            if tighter.status not in (_SOLVED, _INFEASIBLE):
                break
            news = float("inf") if tighter.status == _INFEASIBLE else tighter.fun - answer.fun
            answer, found = tighter, LinearConstraint(matrix, -np.inf, limits)
            if news < _NEWS * self._problem.op_times[-1]:
                break
        return answer, found

    def _answer(self, matrix: csr_array, limits: NDArray[np.float64]) -> OptimizeResult:
        """What a solver says; a second one, where the first goes round in circles."""
        costs, _, bounds = self._arrays
        for method, seconds in _SOLVERS:
            options = {"time_limit": seconds}
            answer = linprog(costs, A_ub=matrix, b_ub=limits, bounds=bounds, method=method, options=options)
            if answer.status in (_SOLVED, _INFEASIBLE):
                break
        return answer

    def _unsolved(self, answer: OptimizeResult) -> float:
        """Seconds where there is no optimum: infinite where nothing fits; a bound that nobody could find is none."""
        return 0.0 if self._optimistic and answer.status != _INFEASIBLE else float("inf")

    def least_seconds(self, seconds: float) -> float:
        """What any shares cost at least if those of the largest values are all or nothing, in seconds.

        A branch and bound that takes `seconds` at most; what it has proved by then.
        """
        if not self._items:
            return self.solve().seconds
        relaxed, constraints = self._optimum(self._excess())
        if relaxed.status != _SOLVED:
            return self._unsolved(relaxed)
        columns = self._program[1]
        costs, _, bounds = self._arrays
        whole = np.zeros(columns.count)
        largest = sorted(range(len(self._items)), key=lambda index: -self._items[index].nbytes)[:_WHOLE_VALUES]
        for index in largest:
            whole[[columns.offloaded[index], columns.recomputed[index]]] = 1
        answer = milp(
            costs,
            integrality=whole,
            bounds=Bounds(bounds[:, 0], bounds[:, 1]),
            constraints=constraints,
            options={"time_limit": seconds, "mip_rel_gap": _WHOLE_GAP},
        )
        proved = getattr(answer, "mip_dual_bound", None)
        found = float(relaxed.fun)
        return max(found, float(proved)) if proved is not None and isfinite(proved) else found

    def _excess(self) -> NDArray[np.float64]:
        """How far the plain step is over the budget, at the worst op of each moment."""
        return self._moments.excess(np.full(len(self._moments.curve), float(self._problem.budget_bytes)))

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.float64], csr_array, NDArray[np.float64]]:
        """Costs, rows and bounds.

        The last rows, one for each moment, say that what leaves is what the plain step is over the budget.
        """
        rows, columns = self._program
        within = Rows()
        for now in range(len(self._moments)):
            away = [(columns.gone[now], 1.0), (columns.inside[now], -1.0), (columns.dropped[now], 1.0)]
            within.at_least(0.0, [*away, (columns.over[now], 1.0)])
        matrix = vstack([rows.matrix(columns.count), within.matrix(columns.count)], format="csr")
        return self._costs(columns), matrix, self._bounds(columns)

    def _limits(self, excess: NDArray[np.float64]) -> NDArray[np.float64]:
        """The limits of these rows. `excess`: how far the plain step is over, at the worst op of each moment."""
        return np.concatenate([np.asarray(self._program[0].limits), -(excess / UNIT)])

    # --- the program ---

    @cached_property
    def _program(self) -> tuple[Rows, Columns]:
        """All rows but those of the budget."""
        edges = self._sources
        columns = Columns(len(self._items), self._earlier, len(edges), len(self._moments))
        rows = Rows()
        for index, (offloaded, recomputed) in enumerate(zip(columns.offloaded, columns.recomputed, strict=True)):
            shares = [(offloaded, 1.0), (recomputed, 1.0)]
            rows.at_most(1.0, shares)
            if index in self._moments.ousted:
                rows.at_least(1.0, shares)
            item = self._items[index]
            if item.is_one_way and item.value in self._places:
                made_anew = columns.recomputed[self._places[item.value]]
                rows.at_most(0.0, [(offloaded, 1.0), (made_anew, -1.0)])
                if item.is_certain:
                    rows.at_least(0.0, [(offloaded, 1.0), (made_anew, -1.0)])
            elif item.is_certain and self._has_time(item):
                rows.at_least(1.0, shares)
        self._add_shared_copies(rows, columns)
        self._add_sources(rows, columns, edges)
        self._add_levels(rows, columns, edges)
        self._add_lanes(rows, columns)
        if self._optimistic:
            self._add_work(rows, columns)
            self._add_handling(rows, columns)
            self._add_order(rows, columns)
        return rows, columns

    def _has_time(self, item: Absence) -> bool:
        """Whether there are moments for an item to leave, be away and come back."""
        left = max(self._moments.begin(item.leaves), self._moments.copied(item))
        return left <= min(self._moments.end(item.wanted), self._moments.fetched(item))

    @cached_property
    def _cuts(self) -> tuple[csr_array, NDArray[np.float64]]:
        """Rows that tighten the program, and their limits."""
        rows, columns = Rows(), self._program[1]
        if self._optimistic:
            add_whole_copies(rows, columns, self._moments)
            add_own_copies(rows, columns, self._moments)
            add_covers(rows, columns, self._moments)
        else:
            add_returns(rows, columns, self._moments)
        return rows.matrix(columns.count), np.asarray(rows.limits)

    @cached_property
    def _places(self) -> dict[int, int]:
        """The number of each candidate's item."""
        return {item.value: index for index, item in enumerate(self._items) if item.candidate is not None}

    @cached_property
    def _sources(self) -> list[tuple[int, int]]:
        """(reader, source) for each candidate that is a source of another's recipe, readers in order of return."""
        places = self._places
        found: list[tuple[int, int]] = []
        for value, index in places.items():
            recipe = None if self._items[index].anew_seconds is None else self._problem.recipes.find(value)
            sources = [places[source] for source in (() if recipe is None else recipe.sources) if source in places]
            wanted = self._items[index].wanted
            found += [(index, source) for source in sources if wanted < self._items[source].wanted]
        return sorted(found, key=lambda edge: (edge[1], self._items[edge[0]].wanted))

    @cached_property
    def _earlier(self) -> dict[int, list[int]]:
        """For each absence that an earlier one's copy out may serve: those earlier ones.

        What is copied out and made anew is not copied back before its first use as well: it serves later ones alone.
        """
        found: dict[int, list[int]] = {}
        absences: dict[int, list[int]] = {}
        for index in sorted(range(len(self._items)), key=lambda index: self._items[index].wanted):
            item = self._items[index]
            if item.shares_copy:
                others = absences.setdefault(item.value, [])
                serving = [other for other in others if item.candidate is None or not self._items[other].is_one_way]
                if serving:
                    found[index] = serving
                others.append(index)
        return found

    def _add_shared_copies(self, rows: Rows, columns: Columns) -> None:
        """What left before has a copy already."""
        offloaded = columns.offloaded
        for index, others in self._earlier.items():
            rows.at_most(0.0, [(columns.served[index], 1.0), (offloaded[index], -1.0)])
            rows.at_most(0.0, [(columns.served[index], 1.0), *((offloaded[other], -1.0) for other in others)])

    def _add_sources(self, rows: Rows, columns: Columns, edges: Sequence[tuple[int, int]]) -> None:
        """What a recipe starts from is back as soon as the recipe runs, and stays, unless it never left.

        The lower bound lets it come once more instead, which may serve later readers as well.
        """
        twice: dict[int, Terms] = {}
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

    def _add_levels(self, rows: Rows, columns: Columns, edges: Sequence[tuple[int, int]]) -> None:
        """What could be copied, could be gone, must be back and is dropped at each moment, from shares."""
        moments = len(self._moments)
        lists: list[list[Terms]] = [[[] for _ in range(moments + 1)] for _ in range(8)]
        packed, given, held, due, coming, dropped, ousted, welcome = lists
        for index, item in enumerate(self._items):
            size = item.nbytes / UNIT
            offloaded, recomputed = columns.offloaded[index], columns.recomputed[index]
            left, wanted = self._moments.begin(item.leaves), self._moments.end(item.wanted)
            packed[self._moments.begin(item.saved)].append((offloaded, size))
            if index in columns.served:
                packed[self._moments.begin(item.saved)].append((columns.served[index], -size))
                given[left].append((columns.served[index], size))
            held[max(left, self._moments.copied(item))].append((offloaded, size))
            if item.is_one_way:
                dropped[wanted].append((offloaded, -size))
                continue
            due[wanted].append((offloaded, size))
            without_room = self._moments.ousted.get(index)
            if without_room is not None:
                ousted[without_room[0]].append((offloaded, size))
            room = 0 if without_room is None else min(wanted, without_room[1] + 1)
            welcome[room].append((offloaded, size))
            coming[min(wanted, max(room, self._moments.fetched(item)))].append((offloaded, size))
            if self._moments.begin(item.dropped) < wanted:
                dropped[self._moments.begin(item.dropped)].append((recomputed, size))
                dropped[wanted].append((recomputed, -size))
        for number, (reader, source) in enumerate(edges):
            size = self._items[source].nbytes / UNIT
            following = edges[number + 1] if number + 1 < len(edges) and edges[number + 1][1] == source else None
            until = self._items[source] if following is None else self._items[following[0]]
            start = self._moments.end(self._items[reader].wanted)
            end = bisect_right(self._moments.starts, until.wanted) - 1
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

    def _add_lanes(self, rows: Rows, columns: Columns) -> None:
        """Copies: no sooner than there is something to copy, no faster than the lanes, unless the device waits."""
        hardware = self._problem.hardware
        out, into = hardware.copy_out_bandwidth / UNIT, hardware.copy_in_bandwidth / UNIT
        for now, (out_seconds, back_seconds) in enumerate(zip(*self._moments.lane_seconds(), strict=True)):
            copied, gone, back = columns.copied[now], columns.gone[now], columns.back[now]
            rows.at_most(0.0, [(copied, 1.0), (columns.packed[now], -1.0)])
            rows.at_most(0.0, [(gone, 1.0), (copied, -1.0), (columns.given[now], -1.0)])
            rows.at_most(0.0, [(gone, 1.0), (columns.held[now], -1.0)])
            rows.at_most(0.0, [(columns.due[now], 1.0), (back, -1.0)])
            rows.at_most(0.0, [(columns.coming[now], 1.0), (columns.inside[now], -1.0)])
            rows.at_most(0.0, [(back, 1.0), (columns.inside[now], -1.0)])
            if not self._optimistic or self._moments.worst[now] == self._moments.crowded[now]:
                rows.at_most(0.0, [(columns.ousted[now], 1.0), (gone, -1.0), (columns.over[now], -1.0)])
            rows.at_most(0.0, [(back, 1.0), (columns.welcome[now], -1.0)])
            rows.at_most(0.0, [(columns.inside[now], 1.0), (gone, -1.0)])
            for level, capacity, bandwidth in (
                (columns.copied, out_seconds * out, out),
                (columns.back, back_seconds * into, into),
            ):
                before = [(level[now - 1], -1.0)] if now else []
                rows.at_most(capacity, [(level[now], 1.0), *before, *columns.extra(now, -bandwidth)])

    def _add_work(self, rows: Rows, columns: Columns) -> None:
        """While a value is made anew, the lanes go on."""
        starts = self._moments.starts
        begun: list[Terms] = [[] for _ in starts]
        ended: list[Terms] = [[] for _ in starts]
        for column, since, until, seconds in self._works(columns):
            begun[max(0, bisect_right(starts, since) - 1)].append((column, seconds))
            ended[min(len(starts) - 1, bisect_left(starts, until))].append((column, seconds))
        for now in range(len(starts)):
            for level, changes, sign in ((columns.begun, begun, 1.0), (columns.ended, ended, -1.0)):
                before = [(level[now - 1], 1.0)] if now else []
                rows.equal(0.0, [(level[now], -1.0), *before, *changes[now]])
                rows.at_most(0.0, [(columns.worked[now], sign), (level[now], -sign)])

    def _works(self, columns: Columns) -> Iterator[tuple[int, int, int, float]]:
        """Shares that are made anew: the column, the ops from and until which they can be, and the seconds of all."""
        first_wanted = {index: item.wanted for index, item in enumerate(self._items)}
        for reader, source in sorted(self._sources, key=lambda edge: self._items[edge[0]].wanted):
            first_wanted[source] = min(first_wanted[source], first_wanted[reader])
        shares = [
            *((columns.recomputed[index], index, first) for index, first in first_wanted.items()),
            *(
                (column, source, first_wanted[reader])
                for column, (reader, source) in zip(columns.twice_made, self._sources, strict=True)
            ),
        ]
        for column, index, first in shares:
            item = self._items[index]
            if item.anew_seconds:
                yield column, item.dropped if item.candidate is None else first, item.wanted, item.anew_seconds

    def _add_handling(self, rows: Rows, columns: Columns) -> None:
        """While a copy takes the device's time, the lanes go on."""
        cost = UNIT * self._problem.hardware.copy_cost_seconds_per_byte
        # What a copy takes however small it is, and saved tensors do, may be taken at any time.
        beside: Terms = []
        for index in range(len(self._items)) if self._problem.hardware.handling_seconds else ():
            copying = self._copies(index) * self._problem.hardware.handling_seconds
            leaving = self._leaving_seconds(index)
            beside += [(columns.offloaded[index], copying + leaving), (columns.recomputed[index], leaving)]
        rows.equal(0.0, [(columns.beside, -1.0), *beside])
        last = len(self._moments) - 1
        for now in range(last + 1):
            # Copies that have not begun by the end of a moment have not taken any of that time.
            rows.at_most(0.0, [(columns.handled_out[now], 1.0), (columns.packed[now], -cost), (columns.beside, -1.0)])
            begun = columns.inside[now + 1] if now < last else columns.held[now]
            rows.at_most(0.0, [(columns.handled_back[now], 1.0), (begun, -cost)])
            # And those that are done have.
            rows.at_most(0.0, [(columns.copied[now], cost), (columns.handled_out[now], -1.0)])
            if now:
                rows.at_most(0.0, [(columns.back[now], cost), (columns.handled_back[now - 1], -1.0)])

    def _add_order(self, rows: Rows, columns: Columns) -> None:
        """What is done stays done."""
        done = (columns.worked, columns.handled_out, columns.handled_back)
        for level in (*done, columns.copied, columns.gone, columns.inside, columns.back):
            for before, now in pairwise(level):
                rows.at_most(0.0, [(before, 1.0), (now, -1.0)])

    def _costs(self, columns: Columns) -> NDArray[np.float64]:
        """Seconds that a whole share costs, and a second of stall."""
        costs = self._work(columns)
        hardware = self._problem.hardware
        for index, item in enumerate(self._items):
            leaving = self._leaving_seconds(index)
            costs[columns.offloaded[index]] = self._copies(index) * hardware.copying_costs(item.nbytes) + leaving
            costs[columns.recomputed[index]] += leaving
            if index in columns.served:
                costs[columns.served[index]] = -hardware.copying_costs(item.nbytes)
        costs[list(columns.stall)] = 1.0
        costs[list(columns.over)] = UNIT * self._evicting_seconds()
        return costs

    def _evicting_seconds(self) -> float:
        """What a byte costs that the cache sends away and brings back: the device waits, and it is handled as others.

        Which values these are nobody knows: the mean of all that may leave.
        """
        hardware = self._problem.hardware
        nbytes = sum(item.nbytes for item in self._items)
        latency = 2 * hardware.copy_latency_seconds
        handled = sum(
            2 * hardware.copying_costs(item.nbytes) + self._leaving_seconds(index) + latency
            for index, item in enumerate(self._items)
        )
        return 1 / hardware.copy_out_bandwidth + 1 / hardware.copy_in_bandwidth + handled / nbytes

    def _copies(self, index: int) -> int:
        """How many copies it takes that an item is away."""
        return 1 if self._items[index].is_one_way else 2

    def _leaving_seconds(self, index: int) -> float:
        """What the saved tensors of an item take of the device's time, if it leaves."""
        item = self._items[index]
        return 0.0 if item.candidate is None else self._problem.handling_seconds(item.value)

    def _work(self, columns: Columns) -> NDArray[np.float64]:
        """Seconds of computation that it costs to make a whole share anew."""
        costs = np.zeros(columns.count)
        for index, item in enumerate(self._items):
            costs[columns.recomputed[index]] = item.anew_seconds or 0.0
        for number, (_, source) in enumerate(self._sources):
            costs[columns.twice_made[number]] = self._items[source].anew_seconds or 0.0
        return costs

    def _bounds(self, columns: Columns) -> NDArray[np.float64]:
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
            bounds[columns.begun.start : columns.handled_back.stop, 1] = 0.0
        return bounds
