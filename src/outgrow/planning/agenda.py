"""What happens when in a step, as far as plan and trace tell it before the step is walked through.

By op or by tick: what the plan does, bytes that appear and go, what ends, and which parked values ops want.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

from outgrow.planning.plan import Plan
from outgrow.planning.problem import Problem, reading
from outgrow.planning.reuse import overwritten


def actions_of(plan: Plan) -> dict[int, list[tuple[str, int, int]]]:
    """What the plan does at each tick, with which value, and where that has its place in the spill file, in bytes.

    Values "drop", go "out", are waited for ("release"), come back "in", "park" and "unpark".
    """
    table: dict[int, list[tuple[str, int, int]]] = {}
    for dropped in plan.recomputes:
        table.setdefault(dropped.drop_tick, []).append(("drop", dropped.value, 0))
    for item in plan.offloads:
        table.setdefault(item.out_tick, []).append(("out", item.value, item.offset))
        if item.release_tick >= 0:
            table.setdefault(item.release_tick, []).append(("release", item.value, item.offset))
        if item.in_tick >= 0:
            table.setdefault(item.in_tick, []).append(("in", item.value, item.offset))
    for parked in plan.parks:
        table.setdefault(parked.out_tick, []).append(("park", parked.value, parked.offset))
        if parked.in_tick >= 0:
            table.setdefault(parked.in_tick, []).append(("unpark", parked.value, parked.offset))
    return table


@reading
def saved_values(problem: Problem) -> list[tuple[int, int, int, bool]]:
    """Of each value that autograd saves: its number, bytes, the op from which on it is autograd's, if it may move."""
    values = problem.trace.values
    return [
        (index, values[index].nbytes, values[index].held, problem.is_movable(index))
        for index in dict.fromkeys(saved.value for saved in problem.trace.saved)
    ]


@reading
def resident_bytes(problem: Problem) -> int:
    """Bytes of what is there before the step."""
    return sum(value.nbytes for value in problem.trace.values if value.birth < 0)


def births_and_deaths(plan: Plan, entries: Collection[int]) -> tuple[list[int], list[int]]:
    """Bytes that appear with each op, and bytes of values without an entry that are gone before each op.

    An in-place write is a death and a birth at the same op, so that live bytes stay as they are. A result that takes
    the place of an input is not born, and the input does not die.
    """
    problem = plan.problem
    births, deaths = map(list, _plain_births_and_deaths(problem))
    for index in entries:
        value = problem.trace.values[index]
        deaths[value.death] -= value.nbytes
    for op in dict.fromkeys(plan.reuses):
        source = overwritten(problem, op)
        if source is not None and source not in entries:
            births[op] -= problem.trace.values[source].nbytes
            deaths[op + 1] -= problem.trace.values[source].nbytes
    return births, deaths


@reading
def _plain_births_and_deaths(problem: Problem) -> tuple[list[int], list[int]]:
    """The same where no value has an entry, and none takes another's place."""
    size = len(problem.trace.ops) + 1
    births, deaths = [0] * size, [0] * size
    for value in problem.trace.values:
        if value.birth >= 0:
            births[value.birth] += value.nbytes
        deaths[value.death] += value.nbytes
    return births, deaths


_Ends = dict[int, list[tuple[bool, int]]]


def ends_of(problem: Problem, parks: Iterable[int]) -> tuple[_Ends, _Ends]:
    """Releases of saved tensors, deaths of saved and parked values by op: before that op's ticks, or after them."""
    saved_early, saved_late, saved = _saved_ends(problem)
    early = dict(saved_early)
    for value in parks:
        if value not in saved:
            death = problem.trace.values[value].death
            early[death] = [*early.get(death, ()), (False, value)]
    return early, saved_late


@reading
def _saved_ends(problem: Problem) -> tuple[_Ends, _Ends, Collection[int]]:
    """The same of saved tensors and their values alone, and which those values are."""
    early: _Ends = {}
    late: _Ends = {}
    last_tick: dict[int, int] = {}
    for index, saved in enumerate(problem.trace.saved):
        last = saved.unpacked[-1] if saved.unpacked else saved.packed
        last_tick[saved.value] = max(last_tick.get(saved.value, -1), last)
        (late if last >= saved.released else early).setdefault(saved.released, []).append((True, index))
    for value, last in last_tick.items():
        death = problem.trace.values[value].death
        (late if last >= death else early).setdefault(death, []).append((False, value))
    return early, late, last_tick.keys()


def wanted(problem: Problem, parks: Set[int]) -> dict[int, list[int]]:
    """The parked values that each op reads or writes."""
    if not parks:
        return {}
    return {
        now: [value for value in values if value in parks]
        for now, values in enumerate(_used(problem))
        if not parks.isdisjoint(values)
    }


@reading
def _used(problem: Problem) -> list[tuple[int, ...]]:
    """The values that each op reads or writes, each once."""
    return [tuple(dict.fromkeys((*op.inputs, *op.outputs))) for op in problem.trace.ops]
