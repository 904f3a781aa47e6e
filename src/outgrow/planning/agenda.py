"""What happens when in a step, as far as plan and trace tell it before the step is walked through.

By op or by tick: what the plan does, bytes that appear and go, what ends, and which parked values ops want.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Set
from itertools import chain

from outgrow.planning.parks import gap_of
from outgrow.planning.plan import Plan
from outgrow.planning.prefetch import wanted_first
from outgrow.planning.problem import Problem, reading
from outgrow.planning.reuse import overwritten
from outgrow.tracing.ir import Event

# Actions by which something comes back; by the others something leaves.
BACK = ("in", "unpark")


def actions_of(plan: Plan) -> dict[int, list[tuple[str, int, int]]]:
    """What the plan does at each tick, with which value, and where that has its place in the spill file, in bytes.

    Values "drop", go "out", are waited for ("release"), come back "in", "park" and "unpark". Of those that come
    back at one tick, what is wanted first comes first.
    """
    table: defaultdict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for dropped in plan.recomputes:
        table[dropped.drop_tick].append(("drop", dropped.value, 0))
    for item in plan.offloads:
        table[item.out_tick].append(("out", item.value, item.offset))
        if item.release_tick >= 0:
            table[item.release_tick].append(("release", item.value, item.offset))
        if item.in_tick >= 0:
            table[item.in_tick].append(("in", item.value, item.offset))
    for parked in plan.parks:
        table[parked.out_tick].append(("park", parked.value, parked.offset))
        if parked.in_tick >= 0:
            table[parked.in_tick].append(("unpark", parked.value, parked.offset))
    crowded = [tick for tick, actions in table.items() if len(actions) > 1 and _come_back(actions) > 1]
    if crowded:
        wanted = _wanted_back(plan)
        for tick in crowded:
            table[tick].sort(key=lambda action: wanted.get((tick, *action[:2]), -1))
    return dict(table)


def _come_back(actions: Iterable[tuple[str, int, int]]) -> int:
    """How many of these bring something back."""
    return sum(kind in BACK for kind, _, _ in actions)


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


def stays_of(plan: Plan) -> list[int]:
    """Of each saved tensor, whether it stays: the plan neither moves its value nor makes anything anew from that.

    -1 for those that do not. Of the others the bytes of the value, if this is its first saved tensor and it could
    leave, else 0. What the cache is foretold to send away does not stay.
    """
    problem = plan.problem
    saved = problem.trace.saved
    recipes = (problem.recipes.find(item.value) for item in plan.recomputes)
    moved = {item.value for items in (plan.offloads, plan.recomputes, plan.parks) for item in items}
    moved.update(*(recipe.sources for recipe in recipes if recipe is not None))
    moved.update(plan.prediction.evicted)
    counted = set(moved)
    found: list[int] = []
    for item in saved:
        is_new = item.value not in counted and problem.is_movable(item.value)
        counted.add(item.value)
        nbytes = problem.trace.values[item.value].nbytes if is_new else 0
        found.append(-1 if item.value in moved else nbytes)
    return found


def ops_of_recipes(plan: Plan) -> dict[int, str]:
    """The ops that recipes run again, with their names."""
    ops = plan.problem.trace.ops
    recipes = (plan.problem.recipes.find(item.value) for item in plan.recomputes)
    return {number: ops[number].name for recipe in recipes if recipe is not None for number in recipe.ops}


def makers_of(plan: Plan, value: int) -> Iterator[int]:
    """The op that makes a value's storage. Where that writes over an input instead, who made that one, and so on."""
    trace = plan.problem.trace
    source: int | None = value
    while source is not None:
        maker = trace.storage_births[trace.values[source].storage]
        yield maker
        source = overwritten(plan.problem, maker) if maker in plan.reuses else None


def ops_to_see(plan: Plan) -> frozenset[int]:
    """The ops that whoever carries the plan out has to see.

    Those that recipes run again, that write over an input, and that make what is parked, or where that lies.
    """
    births = (plan.problem.trace.values[item.value].birth for item in plan.parks)
    makers = chain.from_iterable(makers_of(plan, item.value) for item in plan.parks)
    return frozenset(number for number in chain(ops_of_recipes(plan), plan.reuses, births, makers) if number >= 0)


@reading
def saved_values(problem: Problem) -> dict[int, tuple[int, int, bool]]:
    """Of each value that autograd saves: its bytes, the op from which on it is autograd's, if it may move."""
    values = problem.trace.values
    return {
        saved.value: (values[saved.value].nbytes, values[saved.value].held, problem.is_movable(saved.value))
        for saved in problem.trace.saved
    }


@reading
def resident_bytes(problem: Problem) -> int:
    """Bytes of what is there before the step."""
    return sum(value.nbytes for value in problem.trace.values if value.birth < 0)


def births_and_deaths(plan: Plan, entries: Collection[int]) -> tuple[list[int], list[int], list[int]]:
    """Bytes that appear with each op, and bytes of values without an entry that are gone before and after its ticks.

    An in-place write is a death and a birth at the same op, so that live bytes stay as they are. A result that takes
    the place of an input is not born, and the input does not die.
    """
    problem = plan.problem
    values, late_values = problem.trace.values, _late_values(problem)
    births, deaths, late = (list(column) for column in _plain_births_and_deaths(problem))
    for index in entries:
        value = values[index]
        if index in late_values:
            late[late_values[index]] -= value.nbytes
        else:
            deaths[value.death] -= value.nbytes
    for op in dict.fromkeys(plan.reuses):
        source = _overwritten(problem)[op]
        if source is not None and source not in entries:
            births[op] -= values[source].nbytes
            deaths[op + 1] -= values[source].nbytes
    return births, deaths, late


@reading
def _overwritten(problem: Problem) -> list[int | None]:
    """The value whose place the result of each op may take."""
    return [overwritten(problem, op) for op in range(len(problem.trace.ops))]


@reading
def _plain_births_and_deaths(problem: Problem) -> tuple[list[int], list[int], list[int]]:
    """The same where no value has an entry, and none takes another's place."""
    size = len(problem.trace.ops) + 1
    births, deaths, late = [0] * size, [0] * size, [0] * size
    late_values = _late_values(problem)
    for index, value in enumerate(problem.trace.values):
        if value.birth >= 0:
            births[value.birth] += value.nbytes
        if index in late_values:
            late[late_values[index]] += value.nbytes
        else:
            deaths[value.death] += value.nbytes
    return births, deaths, late


@reading
def _late_values(problem: Problem) -> dict[int, int]:
    """Saved values that die after the ticks of an op, and that op: one of its ticks is the last that shows them."""
    return {
        value: op
        for value, ends in _saved_ends(problem).items()
        for op, is_late, uses in ends
        if is_late and not uses
    }


_Ends = dict[int, list[tuple[int, int]]]


def ends_of(problem: Problem, entries: Iterable[int]) -> tuple[_Ends, _Ends]:
    """Ends of uses by autograd, deaths of values with an entry by op: before that op's ticks, or after them.

    As how many uses end, 0 for a death, with the value.
    """
    early: _Ends = {}
    late: _Ends = {}
    saved = _saved_ends(problem)
    for value in entries:
        if value not in saved:
            early.setdefault(problem.trace.values[value].death, []).append((0, value))
            continue
        for op, is_late, uses in saved[value]:
            ends = late if is_late else early
            if op in ends:
                ends[op].append((uses, value))
            else:
                ends[op] = [(uses, value)]
    return early, late


@reading
def spans_of_uses(problem: Problem) -> list[list[tuple[int, int]]]:
    """Of each saved tensor the ops from each unpacking on, as far as its value has to be there for that.

    A node needs it until it has run, and autograd holds it until it lets go of it. Of a graph that is gone through
    once more, or that outlives the step, it may be away in between.
    """
    trace = problem.trace
    last_node = max((start for saved in trace.saved for start in saved.unpacked), default=-1)
    found: list[list[tuple[int, int]]] = []
    for saved in trace.saved:
        spans = [(start, start + 1) for start in saved.unpacked]
        outlives = saved.released == len(trace.ops)
        if spans and not (outlives and spans[-1][0] < last_node):
            spans[-1] = (spans[-1][0], saved.released)
        found.append(spans)
    return found


@reading
def _saved_ends(problem: Problem) -> dict[int, list[tuple[int, bool, int]]]:
    """Of each saved value the op at which each use ends, and of its death, and whether that is after the op's ticks.

    With how many uses end there: 1; 0 for the death.
    """
    found: dict[int, list[tuple[int, bool, int]]] = {}
    last_tick: dict[int, int] = {}
    for saved, spans in zip(problem.trace.saved, spans_of_uses(problem), strict=True):
        last = saved.unpacked[-1] if saved.unpacked else saved.packed
        last_tick[saved.value] = max(last_tick.get(saved.value, -1), last)
        found.setdefault(saved.value, []).extend((stop, start >= stop, 1) for start, stop in spans)
    for value, last in last_tick.items():
        death = problem.trace.values[value].death
        found[value].append((death, last >= death, 0))
    return found


def ticks_of(problem: Problem, entries: Iterable[int], actions: Iterable[int], *, all_shown: bool) -> bytearray:
    """Of each tick whether anything happens there: it asks for a value with an entry, or the plan acts.

    Or, `all_shown`, it shows a value with an entry at all.
    """
    shown = _ticks(problem) if all_shown else _unpacks(problem)
    found = bytearray(len(problem.trace.ticks))
    for value in entries:
        for tick in shown.get(value, ()):
            found[tick] = 1
    for tick in actions:
        if 0 <= tick < len(found):
            found[tick] = 1
    return found


@reading
def shown_values(problem: Problem) -> list[tuple[int, bool]]:
    """The value that each tick shows, and whether it is asked for."""
    saved = problem.trace.saved
    return [(saved[tick.saved].value, tick.event is Event.UNPACK) for tick in problem.trace.ticks]


@reading
def _ticks(problem: Problem) -> dict[int, list[int]]:
    """The ticks that show each saved value."""
    shown: dict[int, list[int]] = {}
    for number, (value, _) in enumerate(shown_values(problem)):
        shown.setdefault(value, []).append(number)
    return shown


@reading
def _unpacks(problem: Problem) -> dict[int, list[int]]:
    """The ticks that ask for each saved value."""
    asked: dict[int, list[int]] = {}
    for number, (value, is_unpack) in enumerate(shown_values(problem)):
        if is_unpack:
            asked.setdefault(value, []).append(number)
    return asked


def wanted(plan: Plan, parks: Set[int]) -> dict[int, list[int]]:
    """The parked values that each op reads or writes, where they may not be there.

    A value is there again when an op has wanted it, until it is parked once more: where nothing else makes it leave
    only the first use after each park matters.
    """
    problem = plan.problem
    ops, uses = problem.tick_ops, _uses(problem)
    moved = {item.value for items in (plan.offloads, plan.recomputes) for item in items}
    found: dict[int, set[int]] = {}
    for item in plan.parks:
        if item.value not in parks:
            continue
        own = uses.get(item.value, [])
        if not plan.evicts and item.value not in moved and 0 <= item.out_tick < len(ops):
            first = bisect_left(own, ops[item.out_tick])
            own = own[first : first + 1]
        for op in own:
            found.setdefault(op, set()).add(item.value)
    return {
        op: list(values) if len(values) == 1 else [value for value in _used(problem)[op] if value in values]
        for op, values in found.items()
    }


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
