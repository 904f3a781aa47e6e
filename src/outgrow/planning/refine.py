"""Local search: takes the waits of a plan one by one, and looks for small changes that shorten the step.

Just above the least budget most of what a linear program cannot see decides: a value's memory is there as a whole or
not at all, and copies come one after the other. The simulator sees both, and says where the device waits and for
what. Something else that leaves, so that there is room for a copy back in time, is what usually helps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from random import Random
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from outgrow.planning.levels import error_of_levels
from outgrow.planning.parks import Gap, gaps, park
from outgrow.planning.plan import Plan
from outgrow.planning.prefetch import dropped_early, may_be_dropped, with_prefetch
from outgrow.planning.problem import Candidate
from outgrow.planning.returns import in_turn
from outgrow.planning.walk import Wait

# Waits shorter than this share of the step are let be.
_LEAST_WAIT = 5e-4
# How many of the longest waits are looked at, and how many values for each that could make room.
_WAITS, _ROOMS = 12, 6
# How much earlier a late copy starts: in times that it takes.
_EARLIER = (1.1, 1.6, 2.5, 4.0)

_Sized = TypeVar("_Sized", Candidate, Gap)


# What plans of one problem differ in as far as a step goes, in plain numbers, which compare fast.
_Decisions = tuple[tuple[object, ...], ...]


class Refusals:
    """Changes and plans that were no better than what a search had then: none of its rounds looks at them again.

    What is best so far only gets better while one plan is refined, and several ways lead to the same plan.
    """

    def __init__(self) -> None:
        self._changes: dict[_Decisions, set[_Decisions]] = {}
        self._errors: dict[_Decisions, NDArray[np.int64]] = {}
        self._plans: dict[_Decisions, tuple[float, int]] = {}

    def changes_of(self, plan: Plan) -> tuple[set[_Decisions], NDArray[np.int64]]:
        """The changes that `plan` was not given up for, by what they move; and the error of its levels."""
        moves = _moves(plan)
        if moves not in self._errors:
            self._errors[moves] = error_of_levels(plan)
        return self._changes.setdefault(_decisions(plan), set()), self._errors[moves]

    def is_better(self, plan: Plan, best: Plan) -> bool:
        """Whether a plan fits and ranks before the best so far."""
        rank, decisions = _rank(best), _decisions(plan)
        refused = self._plans.get(decisions)
        if refused is not None and rank <= refused:
            return False
        if plan.simulate_within(rank[0]) is not None and _rank(plan) < rank:
            return True
        self._plans[decisions] = rank
        return False


def _moves(plan: Plan) -> _Decisions:
    """What leaves, and when; not when it comes back."""
    return (
        tuple(chain.from_iterable((item.value, item.out_tick, item.release_tick) for item in plan.offloads)),
        tuple(chain.from_iterable((item.value, item.drop_tick, item.replay) for item in plan.recomputes)),
        tuple(chain.from_iterable((item.value, item.out_tick, item.remade) for item in plan.parks)),
        plan.reuses,
        (plan.evicts,),
    )


def _decisions(plan: Plan) -> _Decisions:
    """What leaves, and when, and when it comes back."""
    returns = (tuple(item.in_tick for item in plan.offloads), tuple(item.in_tick for item in plan.parks))
    return (*_moves(plan), *returns)


def refined(plan: Plan, tries: int, shuffled: Random | None = None, refusals: Refusals | None = None) -> Plan:
    """The plan, or a faster one that at most `tries` changes lead to; of two as fast, the one that copies less.

    What helps most often is tried first: changes for the longest waits. Or, `shuffled`, any change at any time. With
    each change all copies back are put in turn again. Searches in one problem may share their `refusals`: they find
    the same, sooner.
    """
    known = Refusals() if refusals is None else refusals
    bare = replace(plan, evicts=False)  # is walked through sooner
    start = best = bare if bare.simulate().feasible else plan
    search = _Search(best)
    left = tries
    while left > 0:
        changes, (refused, error) = search.changes(best), known.changes_of(best)
        for other in islice(chain.from_iterable(changes) if shuffled is None else _mixed(changes, shuffled), left):
            left -= 1
            moves = _moves(other)
            if moves in refused:
                continue
            changed = in_turn(other, error)
            if known.is_better(changed, best):
                best = changed
                break
            refused.add(moves)
        else:
            break
    if best is start:
        return plan
    # Where the cache may send values away, a step is not always as fast.
    found = replace(best.laid_out(), evicts=plan.evicts)
    return found if found.simulate().feasible and _rank(found) < _rank(plan) else plan


def _rank(plan: Plan) -> tuple[float, int]:
    """Of two plans that take as long, the one that copies less is the better."""
    return plan.simulate().step_seconds, plan.simulate().offloaded_bytes


def _mixed(changes: list[Iterator[Plan]], shuffled: Random) -> Iterator[Plan]:
    """All of these, those of each in their order."""
    while changes:
        chosen = shuffled.randrange(len(changes))
        found = next(changes[chosen], None)
        if found is None:
            changes.pop(chosen)
        else:
            yield found


class _Search:
    """What changes to a plan are made of."""

    def __init__(self, plan: Plan) -> None:
        """Where `plan` parks nothing, no change does: to watch for parked values costs time in every step.

        Nor does any lend training state where the plan lends none: what a failing disk takes of that is lost.
        """
        self._problem = problem = plan.problem
        self._candidates = {item.value: item for item in problem.candidates}
        lends = any(problem.is_state(item.value) for item in plan.parks)
        self._gaps = [
            gap
            for gap in (gaps(problem) if plan.parks else ())
            if (lends or not gap.is_lent) and park(problem, gap) is not None
        ]

    def changes(self, plan: Plan) -> list[Iterator[Plan]]:
        """Plans that differ a little: for the longest waits, the most expensive work, the largest exchanges."""
        least = _LEAST_WAIT * plan.simulate().step_seconds
        waits = sorted(_joined(plan.simulate().waits), key=lambda wait: -wait.seconds)[:_WAITS]
        dropped = sorted((item.value for item in plan.recomputes), key=lambda value: -self._seconds(value))
        return [
            *chain.from_iterable(self._remedies(plan, wait) for wait in waits if wait.seconds >= least),
            *(self._not_dropping(plan, value) for value in dropped),
            *(self._exchanging(plan, out, anew) for out, anew in self._exchanges(plan)),
        ]

    def _not_dropping(self, plan: Plan, value: int) -> Iterator[Plan]:
        """What is made anew stays, or is copied."""
        item, kept = self._candidates[value], self._keeping(plan, value)
        yield kept
        yield self._offloading(kept, item)
        yield from self._in_its_place(plan, kept, value, item.first_pack, self._problem.tick_ops[item.first_unpack])

    def _exchanges(self, plan: Plan) -> list[tuple[int, int]]:
        """Pairs of a value that is copied and one that is made anew, one of which is made from the other."""
        copied = {item.value for item in plan.offloads}
        dropped = {item.value for item in plan.recomputes}
        pairs = [(value, source) for value in copied for source in self._sources(value) if source in dropped]
        pairs += [(source, value) for value in dropped for source in self._sources(value) if source in copied]
        possible = (pair for pair in pairs if may_be_dropped(self._problem, self._candidates[pair[0]]))
        return sorted(possible, key=lambda pair: (-sum(self._candidates[value].nbytes for value in pair), pair))

    def _exchanging(self, plan: Plan, out: int, anew: int) -> Iterator[Plan]:
        """What was copied is made anew, and what was made anew is copied."""
        swapped = self._dropping(self._keeping(plan, anew), self._candidates[out])
        swapped = self._offloading(swapped, self._candidates[anew])
        yield swapped
        # What would be made of it, and early, is copied too.
        readers = [item.value for item in swapped.recomputes if out in self._sources(item.value)]
        for value in readers:
            swapped = self._offloading(self._keeping(swapped, value), self._candidates[value])
        if readers:
            yield swapped

    def _seconds(self, value: int) -> float:
        recipe = self._problem.recipes.find(value)
        return 0.0 if recipe is None else recipe.seconds

    def _sources(self, value: int) -> tuple[int, ...]:
        recipe = self._problem.recipes.find(value)
        return () if recipe is None else recipe.sources

    def _remedies(self, plan: Plan, wait: Wait) -> Iterator[Iterator[Plan]]:
        if wait.value < 0:
            yield self._copying_out_later(plan, wait.op)
            for value in self._leaving_before(plan, wait):
                yield self._without_copy(plan, value)
                yield self._offloading_for(plan, value, wait.op)
            yield self._with_room(plan, wait.op, 0)
            return
        yield from (self._with_room(plan, op, excess) for op, excess in self._in_the_way(plan, wait))
        yield self._without_copy(plan, wait.value)
        yield self._staying(plan, wait)
        before = list(self._coming_before(plan, wait))
        yield from (self._without_copy(plan, value) for value in before)
        yield from (self._with_room_for(plan, wait, self._without_copy(plan, value)) for value in before)

    def _with_room_for(self, plan: Plan, wait: Wait, changed: Iterator[Plan]) -> Iterator[Plan]:
        """What has changed already for a copy back to start earlier, and something else is out of its way."""
        ways = self._in_the_way(plan, wait)
        for other in changed:
            yield from chain.from_iterable(islice(self._with_room(other, op, excess), _ROOMS) for op, excess in ways)

    def _in_the_way(self, plan: Plan, wait: Wait) -> list[tuple[int, int]]:
        """The ops without room for a copy back that starts earlier, and how many bytes are missing there."""
        nbytes = self._problem.trace.values[wait.value].nbytes
        seconds = self._problem.hardware.copy_in_seconds(nbytes)
        starts = (self._problem.op_times[wait.op] - times * seconds for times in _EARLIER)
        found = (
            self._worst(plan, max(0, self._problem.last_tick_before(start)), wait.op, nbytes) for start in starts
        )
        return [(op, excess) for op, excess in dict.fromkeys(found) if excess > 0]

    def _worst(self, plan: Plan, start: int, end_op: int, nbytes: int) -> tuple[int, int]:
        """The op, from a tick on, that has the least room for `nbytes` more; and how many are missing."""
        curve = plan.simulate().curve
        first = min(self._problem.tick_ops[start], max(0, end_op - 1))
        op = max(range(first, max(end_op, first + 1)), key=lambda op: curve[op])
        return op, curve[op] + nbytes - self._problem.budget_bytes

    # --- changes ---

    def _without_copy(self, plan: Plan, value: int) -> Iterator[Plan]:
        """The value is made anew, or stays."""
        item = self._candidates.get(value)
        if item is not None and any(other.value == value for other in plan.offloads):
            if may_be_dropped(self._problem, item):
                yield self._dropping(plan, item)
            yield self._keeping(plan, value)
        for parked in plan.parks:
            if parked.value == value:
                yield replace(plan, parks=tuple(other for other in plan.parks if other is not parked))

    def _staying(self, plan: Plan, wait: Wait) -> Iterator[Plan]:
        """The value stays, and something else leaves in its place."""
        moves = [(item.out_tick, item.value) for item in plan.offloads]
        moves += [(item.out_tick, item.value) for item in plan.parks]
        first = min((tick for tick, value in moves if value == wait.value), default=-1)
        for without in self._without_copy(plan, wait.value) if first >= 0 else ():
            if not any(item.value == wait.value for item in without.recomputes):
                yield from self._in_its_place(plan, without, wait.value, first, wait.op)

    def _in_its_place(self, plan: Plan, kept: Plan, value: int, first: int, until: int) -> Iterator[Plan]:
        """Something else leaves where there is no room for `value` from tick `first` to op `until`."""
        op, excess = self._worst(plan, first, until, self._problem.trace.values[value].nbytes)
        yield from self._with_room(kept, op, excess)

    def _coming_before(self, plan: Plan, wait: Wait) -> Iterator[int]:
        """Values whose copies back may have kept the lane busy, the latest first."""
        ops = self._problem.tick_ops
        times = self._problem.op_times
        since = times[wait.op] - 4 * wait.seconds
        moves = [(item.in_tick, item.value) for item in plan.offloads]
        moves += [(item.in_tick, item.value) for item in plan.parks]
        for tick, value in sorted(moves, reverse=True):
            if tick >= 0 and value != wait.value and since <= times[ops[tick]] <= times[wait.op]:
                yield value

    def _leaving_before(self, plan: Plan, wait: Wait) -> Iterator[int]:
        """Values whose copies out may have kept that lane busy, the latest first."""
        ops = self._problem.tick_ops
        moves = [(item.out_tick, item.value) for item in plan.offloads]
        moves += [(item.out_tick, item.value) for item in plan.parks]
        before = [value for tick, value in sorted(moves, reverse=True) if ops[tick] <= wait.op]
        yield from islice(dict.fromkeys(before), 2 * _ROOMS)

    def _copying_out_later(self, plan: Plan, op: int) -> Iterator[Plan]:
        """What the program holds until after `op` leaves the lane to what has to go before it; all of it, or one."""
        ops = self._problem.tick_ops
        later = self._problem.first_tick_at(op + 1)
        held = {
            item.value
            for item in plan.offloads
            if ops[item.out_tick] <= op
            and later < self._candidates[item.value].first_unpack
            and max(self._candidates[item.value].held, ops[self._candidates[item.value].last_pack]) > op
        }
        for chosen in (held, *({value} for value in held)) if len(held) > 1 else (held,):
            if chosen:
                moved = (replace(item, out_tick=later) if item.value in chosen else item for item in plan.offloads)
                yield replace(plan, offloads=tuple(moved))

    def _offloading_for(self, plan: Plan, value: int, op: int) -> Iterator[Plan]:
        """A copy out less: the value is made anew, or something else that is there at `op` leaves in its place."""
        for without in self._without_copy(plan, value):
            yield without
            yield from islice(self._with_room(without, op, self._problem.trace.values[value].nbytes), _ROOMS)

    def _with_room(self, plan: Plan, op: int, missing_bytes: int) -> Iterator[Plan]:
        """Something that is there at `op` and that the op does not need is away; or two, where one is not enough."""
        for roomy, nbytes in self._without_something(plan, op, missing_bytes):
            yield roomy
            if nbytes < missing_bytes:
                second = self._without_something(roomy, op, missing_bytes - nbytes)
                yield from (roomier for roomier, _ in islice(second, _ROOMS))

    def _without_something(self, plan: Plan, op: int, missing_bytes: int) -> Iterator[tuple[Plan, int]]:
        """The same, one at a time, with its bytes."""
        ops = self._problem.tick_ops
        moved = {item.value for item in plan.offloads} | {item.value for item in plan.recomputes}
        waiting = [
            item
            for item in self._candidates.values()
            if item.value not in moved and max(item.held, ops[item.last_pack]) <= op < ops[item.first_unpack]
        ]
        early = [
            item.value
            for item in plan.offloads
            if item.in_tick >= 0 and ops[item.in_tick] <= op < ops[self._candidates[item.value].first_unpack]
        ]
        parked = {item.value for item in plan.parks}
        idle = [gap for gap in self._gaps if gap.value not in parked and gap.after_op < op < gap.before_op]
        for item in _best_first(waiting, missing_bytes):
            yield self._offloading(plan, item), item.nbytes
            if may_be_dropped(self._problem, item):
                yield self._dropping(plan, item), item.nbytes
        for value in early[:_ROOMS]:
            item = self._candidates[value]
            if may_be_dropped(self._problem, item):
                yield self._dropping(plan, item), item.nbytes
        for gap in _best_first(idle, missing_bytes):
            parked_too = park(self._problem, gap)
            assert parked_too is not None, "these gaps can be parked in"
            yield replace(plan, parks=(*plan.parks, parked_too)), gap.nbytes

    def _offloading(self, plan: Plan, item: Candidate) -> Plan:
        dropped = [self._candidates[other.value] for other in plan.recomputes]
        copies = with_prefetch(self._problem, (item,), dropped)
        return replace(plan, offloads=(*plan.offloads, *copies))

    def _dropping(self, plan: Plan, item: Candidate) -> Plan:
        plan = self._keeping(plan, item.value)
        return replace(plan, recomputes=(*plan.recomputes, *dropped_early(self._problem, (item,))))

    def _keeping(self, plan: Plan, value: int) -> Plan:
        return replace(
            plan,
            offloads=tuple(item for item in plan.offloads if item.value != value),
            recomputes=tuple(item for item in plan.recomputes if item.value != value),
        )


def _best_first(items: Iterable[_Sized], missing_bytes: int) -> list[_Sized]:
    """Those that make enough room by themselves, the least first; then the largest of the others."""
    ordered = sorted(items, key=lambda item: (item.nbytes < missing_bytes, abs(item.nbytes - missing_bytes)))
    return ordered[:_ROOMS]


def _joined(waits: Iterable[Wait]) -> list[Wait]:
    """Waits of one op for one value, together."""
    total: dict[tuple[int, int], float] = {}
    for wait in waits:
        key = (wait.op, wait.value)
        total[key] = total.get(key, 0.0) + wait.seconds
    return [Wait(op, seconds, value) for (op, value), seconds in total.items()]
