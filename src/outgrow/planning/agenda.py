"""What happens when in a step, as far as plan and trace tell it before the step is walked through.

By op or by tick: what the plan does, bytes that appear and go, what ends, and which parked values ops want.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

from outgrow.planning.parks import gap_of
from outgrow.planning.plan import Plan
from outgrow.planning.prefetch import wanted_first
from outgrow.planning.problem import Problem, reading
from outgrow.planning.reuse import overwritten

_BACK = ("in", "unpark")


def actions_of(plan: Plan) -> dict[int, list[tuple[str, int, int]]]:
    """What the plan does at each tick, with which value, and where that has its place in the spill file, in bytes.

    Values "drop", go "out", are waited for ("release"), come back "in", "park" and "unpark". Of those that come
    back at one tick, what is wanted first comes first.
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
    crowded = [tick for tick, actions in table.items() if sum(kind in _BACK for kind, _, _ in actions) > 1]
    if crowded:
        wanted = _wanted_back(plan)
        for tick in crowded:
            table[tick].sort(key=lambda action: wanted.get((tick, *action[:2]), -1))
    return table


def _wanted_back(plan: Plan) -> dict[tuple[int, str, int], int]:
    """The op that wants each copy back first, by tick, kind of action and value; plans may move what has none."""
    problem = plan.problem
    ops, known = problem.tick_ops, problem.candidates_by_value
    offloaded = [known[item.value] for item in plan.offloads if item.value in known]
    dropped = [known[item.value] for item in plan.recomputes if item.value in known]
    ticks = wanted_first(problem, offloaded, dropped)
    wanted = {
        (item.in_tick, "in", item.value): ops[ticks[item.value]] for item in plan.offloads if item.value in ticks
    }
    for item in plan.parks:
        gap = gap_of(problem, item)
        if gap is not None:
            is_saved = gap.is_last and gap.value in known  # the program uses it no more, but autograd wants it
            op = ops[known[gap.value].first_unpack] if is_saved else gap.before_op
            wanted[item.in_tick, "unpark", gap.value] = op
    return wanted


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


def births_and_deaths(plan: Plan, entries: Collection[int]) -> tuple[list[int], list[int], dict[int, int]]:
    """Bytes that appear with each op, and bytes of values without an entry that are gone before and after its ticks.

    An in-place write is a death and a birth at the same op, so that live bytes stay as they are. A result that takes
    the place of an input is not born, and the input does not die.
    """
    problem = plan.problem
    births, deaths = map(list, _plain_births_and_deaths(problem))
    late = dict(_late_deaths(problem))
    for index in entries:
        value = problem.trace.values[index]
        deaths[value.death] -= value.nbytes
    for index, op in _late_values(problem).items():
        nbytes = problem.trace.values[index].nbytes
        if index in entries:
            late[op] -= nbytes
        else:
            deaths[op] -= nbytes
    for op in dict.fromkeys(plan.reuses):
        source = overwritten(problem, op)
        if source is not None and source not in entries:
            births[op] -= problem.trace.values[source].nbytes
            deaths[op + 1] -= problem.trace.values[source].nbytes
    return births, deaths, late


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


@reading
def _late_deaths(problem: Problem) -> dict[int, int]:
    """Bytes of saved values that die after the ticks of each op."""
    late: dict[int, int] = {}
    for index, op in _late_values(problem).items():
        late[op] = late.get(op, 0) + problem.trace.values[index].nbytes
    return late


@reading
def _late_values(problem: Problem) -> dict[int, int]:
    """Saved values that die after the ticks of an op, and that op: one of its ticks is the last that shows them."""
    return {
        value: op
        for value, ends in _saved_ends(problem).items()
        for op, is_late, is_release, _ in ends
        if is_late and not is_release
    }


_Ends = dict[int, list[tuple[bool, int]]]


def ends_of(problem: Problem, entries: Iterable[int]) -> tuple[_Ends, _Ends]:
    """Releases of saved tensors, deaths of values with an entry by op: before that op's ticks, or after them."""
    early: _Ends = {}
    late: _Ends = {}
    saved = _saved_ends(problem)
    for value in entries:
        if value not in saved:
            early.setdefault(problem.trace.values[value].death, []).append((False, value))
            continue
        for op, is_late, is_release, index in saved[value]:
            (late if is_late else early).setdefault(op, []).append((is_release, index))
    return early, late


@reading
def _saved_ends(problem: Problem) -> dict[int, list[tuple[int, bool, bool, int]]]:
    """Of each saved value its releases (True, with the saved tensor's number) and its death (False, with its own).

    With the op, and whether that is after its ticks.
    """
    found: dict[int, list[tuple[int, bool, bool, int]]] = {}
    last_tick: dict[int, int] = {}
    for index, saved in enumerate(problem.trace.saved):
        last = saved.unpacked[-1] if saved.unpacked else saved.packed
        last_tick[saved.value] = max(last_tick.get(saved.value, -1), last)
        found.setdefault(saved.value, []).append((saved.released, last >= saved.released, True, index))
    for value, last in last_tick.items():
        death = problem.trace.values[value].death
        found[value].append((death, last >= death, False, value))
    return found


def ticks_of(problem: Problem, entries: Iterable[int], actions: Iterable[int]) -> bytearray:
    """Of each tick whether anything happens there: it shows a value with an entry, or the plan acts."""
    shown = _ticks(problem)
    found = bytearray(len(problem.trace.ticks))
    for value in entries:
        for tick in shown.get(value, ()):
            found[tick] = 1
    for tick in actions:
        if 0 <= tick < len(found):
            found[tick] = 1
    return found


@reading
def _ticks(problem: Problem) -> dict[int, list[int]]:
    """The ticks that show each saved value."""
    shown: dict[int, list[int]] = {}
    for number, tick in enumerate(problem.trace.ticks):
        shown.setdefault(problem.trace.saved[tick.saved].value, []).append(number)
    return shown


def wanted(problem: Problem, parks: Set[int]) -> dict[int, list[int]]:
    """The parked values that each op reads or writes."""
    ops = sorted({op for value in parks for op in _uses(problem).get(value, ())})
    return {op: [value for value in _used(problem)[op] if value in parks] for op in ops}


@reading
def _uses(problem: Problem) -> dict[int, list[int]]:
    """The ops that read or write each value."""
    uses: dict[int, list[int]] = {}
    for now, values in enumerate(_used(problem)):
        for value in values:
            uses.setdefault(value, []).append(now)
    return uses


@reading
def _used(problem: Problem) -> list[tuple[int, ...]]:
    """The values that each op reads or writes, each once."""
    return [tuple(dict.fromkeys((*op.inputs, *op.outputs))) for op in problem.trace.ops]
