"""Recipes: the least run of ops that makes a saved value anew from what is still there (design, section 4).

Sources are training state, which is there or comes back for them, and other saved values, which the pool has
somewhere: on the device, on the disk, or dropped with a recipe of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from outgrow.planning.problem import Problem
from outgrow.tracing.ir import COMPILED_OP, Event, Kind, Trace

# A longer run is seldom worth it, and its intermediate values add up.
_MOST_OPS = 12
_STATE = frozenset({Kind.PARAMETER, Kind.BUFFER, Kind.SHARED})

_Item = TypeVar("_Item", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make a value anew.

    `ops` in the order in which they run, `sources` the saved values that they read, `seconds` their time if all
    sources are there. `held` are the bytes that the burst has made and still needs before each op, `born` those that
    the op makes.
    """

    value: int
    ops: tuple[int, ...]
    sources: tuple[int, ...]
    seconds: float
    held: tuple[int, ...]
    born: tuple[int, ...]


class Recipes:
    """The recipes of a problem's candidates, found once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._saved: set[int] = set()
        self._wanted_until: dict[int, int] = {}
        self._first_unpack: dict[int, int] = {}
        self._found: dict[int, Recipe | None] = {}
        self._together: dict[tuple[int, int], tuple[int, ...]] = {}  # by the op that makes them and the first wanted
        trace = problem.trace
        for saved in trace.saved:
            self._saved.add(saved.value)
            until = min(saved.released, trace.values[saved.value].death)  # an op may write over what was saved
            self._wanted_until[saved.value] = max(self._wanted_until.get(saved.value, 0), until)
        for tick in trace.ticks:
            if tick.event is Event.UNPACK:
                self._first_unpack.setdefault(trace.saved[tick.saved].value, tick.op)
        for value, wanted in self._first_unpack.items():
            birth = trace.values[value].birth
            if birth >= 0 and trace.ops[birth].name == COMPILED_OP:
                self._together[birth, wanted] = (*self._together.get((birth, wanted), ()), value)

    def find(self, value: int) -> Recipe | None:
        """The recipe of a value, None if it has none."""
        if value not in self._found:
            self._found[value] = self._search(value)
        return self._found[value]

    def together(self, value: int) -> tuple[int, ...]:
        """Values that come back with this one, itself among them, where all of them were dropped.

        They are what one call of compiled code made, and are first wanted at the same op: to run that call once more
        makes them all.
        """
        birth = self._problem.trace.values[value].birth
        return self._together.get((birth, self._first_unpack.get(value, -1)), (value,))

    def own_seconds(self, value: int) -> float | None:
        """A value's part of the time that it takes to make it anew with those that come back together, by its bytes.

        None if it has no recipe.
        """
        recipe = self.find(value)
        if recipe is None:
            return None
        values = self._problem.trace.values
        together = self.together(value)
        return recipe.seconds * values[value].nbytes / sum(values[index].nbytes for index in together)

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
        held, born = _sizes(trace, value, order)
        seconds = sum(trace.ops[op].seconds for op in order) + self._problem.hardware.replaying_costs(len(order))
        return Recipe(value, order, tuple(sorted(sources)), seconds, held, born)


def _sizes(trace: Trace, value: int, ops: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a burst holds before each of its ops, and what each makes, in bytes."""
    last_use = {index: op for op in ops for index in trace.ops[op].inputs}
    inside: dict[int, int] = {}  # by storage
    held: list[int] = []
    born: list[int] = []
    for number in ops:
        op = trace.ops[number]
        made = {trace.values[index].storage: trace.values[index].nbytes for index in op.outputs}
        held.append(sum(inside.values()))
        born.append(sum(nbytes for storage, nbytes in made.items() if storage not in inside))
        inside = made | inside
        touched = (*op.inputs, *op.outputs)
        alive = {trace.values[index].storage for index in touched if last_use.get(index, -1) > number}
        done = {trace.values[index].storage for index in touched} - alive - {trace.values[value].storage}
        inside = {storage: nbytes for storage, nbytes in inside.items() if storage not in done}
    return tuple(held), tuple(born)


def burst(
    target: _Item, missing: Callable[[_Item], Sequence[_Item]]
) -> tuple[list[tuple[_Item, list[_Item]]], list[_Item]]:
    """What must be made before `target` can be, in order, and what nothing reads from some moment on.

    `missing` gives the sources of an item that are not there. Each item is made once in a burst and comes with
    those that no recipe of the burst reads after its own has run; so does, at the end, the target. Without recursion:
    chains are as long as the network is deep. The simulator and the pool both go by this.
    """
    sources: dict[_Item, Sequence[_Item]] = {}
    order: dict[_Item, None] = {}
    waiting = [target]
    while waiting:
        last = waiting[-1]
        if last not in sources:
            sources[last] = missing(last)
            waiting.extend(item for item in reversed(sources[last]) if item not in sources)
        else:
            order[last] = None  # what it is made of stands before it
            waiting.pop()
    reader = {source: item for item in order for source in sources[item]}  # the last one
    unread: dict[_Item, list[_Item]] = {item: [] for item in order}
    for source, item in reader.items():
        unread[item].append(source)
    after_target = unread.pop(target)
    return list(unread.items()), after_target


def recipe_of(problem: Problem, value: int) -> Recipe | None:
    """The recipe of one value, None if it has none."""
    return problem.recipes.find(value)
