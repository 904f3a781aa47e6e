"""Recipes: the least run of ops that makes a saved value anew from what is still there (design, section 4).

Sources are training state, which never leaves, and other saved values, which the pool has somewhere: on the device,
on the disk, or dropped with a recipe of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from outgrow.planning.problem import Problem
from outgrow.tracing.ir import Event, Kind

# A longer run is seldom worth it, and its intermediate values add up.
_MOST_OPS = 12
_STATE = frozenset({Kind.PARAMETER, Kind.BUFFER})


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make a value anew.

    `ops` in the order in which they run, `sources` the saved values that they read, `seconds` their time if all
    sources are there.
    """

    value: int
    ops: tuple[int, ...]
    sources: tuple[int, ...]
    seconds: float


class Recipes:
    """The recipes of a problem's candidates, found once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._saved: set[int] = set()
        self._wanted_until: dict[int, int] = {}
        self._first_unpack: dict[int, int] = {}
        self._found: dict[int, Recipe | None] = {}
        trace = problem.trace
        for saved in trace.saved:
            self._saved.add(saved.value)
            self._wanted_until[saved.value] = max(self._wanted_until.get(saved.value, 0), saved.released)
        for tick in trace.ticks:
            if tick.event is Event.UNPACK:
                self._first_unpack.setdefault(trace.saved[tick.saved].value, tick.op)

    def find(self, value: int) -> Recipe | None:
        """The recipe of a value, None if it has none."""
        if value not in self._found:
            self._found[value] = self._search(value)
        return self._found[value]

    def _search(self, value: int) -> Recipe | None:
        trace = self._problem.trace
        wanted = self._first_unpack.get(value)
        if wanted is None or trace.values[value].birth < 0:
            return None
        ops: set[int] = set()
        sources: set[int] = set()
        ask = [value]
        while ask:
            birth = trace.values[ask.pop()].birth
            if birth < 0 or not trace.ops[birth].repeatable:
                return None
            if birth in ops:
                continue
            ops.add(birth)
            if len(ops) > _MOST_OPS:
                return None
            for index in trace.ops[birth].inputs:
                if trace.values[index].kind in _STATE:
                    continue
                if index in self._saved and index != value:
                    if self._wanted_until[index] <= wanted:  # gone by then
                        return None
                    sources.add(index)
                else:
                    ask.append(index)
        order = tuple(sorted(ops))
        return Recipe(value, order, tuple(sorted(sources)), sum(trace.ops[op].seconds for op in order))


def recipe_of(problem: Problem, value: int) -> Recipe | None:
    """The recipe of one value, None if it has none."""
    return problem.recipes.find(value)
