"""When the copies back of a plan start, all of them together: one lane brings saved values, skips and training state.

Each kind planned for itself would find the lane taken by the others just when it is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outgrow.planning.levels import landed_ops, levels_on_demand, walked_levels
from outgrow.planning.parks import gap_of
from outgrow.planning.plan import Offload, Park, Plan
from outgrow.planning.prefetch import CAUTION, LEAD_SHARE, wanted_first
from outgrow.planning.problem import Problem

_ON_DEMAND = -1


class _Copy(NamedTuple):
    """A copy back: of an offloaded value, or of one that was parked at tick `parked` (-1 if it was not).

    It can start at tick `earliest`, and is wanted at tick `wanted` (the number of ticks: after all of them), by `op`.
    """

    value: int
    nbytes: int
    parked: int
    earliest: int
    wanted: int
    op: int


def in_turn(plan: Plan, error: NDArray[np.int64] | None = None) -> Plan:
    """The plan with copies back that come one after the other, as late as they can, but not before there is room.

    Planned from the end of the step to its beginning: of those that may come last, the one that has no room before
    comes last. So what is due at the end (training state that left for the backward pass) comes in between, where
    there is room, and what finds room at the last moment only has the lane for itself then. `error` is what levels
    without a walk are off by, in bytes by op, where that is known.
    """
    problem = plan.problem
    landed = landed_ops(plan)
    levels = walked_levels(plan) if error is None else levels_on_demand(plan, landed) + error
    room = problem.budget_bytes - levels
    lead = LEAD_SHARE * problem.op_times[-1]
    waiting = sorted(_copies(plan, landed), key=lambda copy: copy.op)
    may_be_last: list[tuple[int, int, int, _Copy]] = []
    starts: dict[tuple[int, int], int] = {}
    lane_free = float("inf")
    while waiting or may_be_last:
        while waiting and (not may_be_last or problem.op_times[waiting[-1].op] >= lane_free):
            copy = waiting.pop()
            heappush(may_be_last, (-_first_room(problem, room, copy), len(waiting), len(starts), copy))
        before, _, placed, copy = heappop(may_be_last)
        # Others may have been given room meanwhile.
        first = -before if placed == len(starts) else _first_room(problem, room, copy)
        if first >= copy.wanted:
            continue
        finish = min(problem.op_times[copy.op] - lead, lane_free)
        lane_free = finish - CAUTION * problem.hardware.copy_in_seconds(copy.nbytes)
        start = max(first, min(problem.last_tick_before(lane_free), copy.wanted - 1))
        starts[copy.value, copy.parked] = start
        room[problem.tick_ops[start] : copy.op] -= copy.nbytes
        lane_free = min(finish, max(lane_free, problem.tick_time(start)))
    return replace(
        plan,
        offloads=tuple(
            _offload_back(item, starts.get((item.value, _ON_DEMAND), _ON_DEMAND)) for item in plan.offloads
        ),
        parks=tuple(_park_back(item, starts.get((item.value, item.out_tick), _ON_DEMAND)) for item in plan.parks),
    )


# A search makes a hundred thousand of these, most of which come back when they did: `replace` would take its time.
def _offload_back(item: Offload, tick: int) -> Offload:
    """The same with its copy back at another tick."""
    if item.in_tick == tick:
        return item
    return Offload(item.value, item.out_tick, item.release_tick, tick, item.offset)


def _park_back(item: Park, tick: int) -> Park:
    """The same with its copy back at another tick."""
    return item if item.in_tick == tick else Park(item.value, item.out_tick, tick, item.offset, item.remade)


def _first_room(problem: Problem, room: NDArray[np.int64], copy: _Copy) -> int:
    """The first tick from which on there is room for a copy until it is wanted."""
    begin = problem.tick_ops[copy.earliest]
    (full,) = (room[begin : copy.op] < copy.nbytes).nonzero()
    return max(copy.earliest, problem.first_tick_at(begin + int(full[-1]) + 1)) if len(full) else copy.earliest


def _copies(plan: Plan, landed: Mapping[tuple[int, int], int]) -> Iterator[_Copy]:
    """All copies back of a plan. None can start before its value is gone: it would be passed over."""
    problem = plan.problem
    known, ops = problem.candidates_by_value, problem.tick_ops
    offloaded = [known[item.value] for item in plan.offloads]
    wanted = wanted_first(problem, offloaded, [known[item.value] for item in plan.recomputes])
    for item, moved in zip(offloaded, plan.offloads, strict=True):
        tick = wanted[item.value]
        gone = problem.first_tick_at(max(item.held, landed[item.value, moved.out_tick]))
        earliest = max(item.last_pack, moved.out_tick + 1, gone)
        if earliest < tick:
            yield _Copy(item.value, item.nbytes, _ON_DEMAND, earliest, tick, ops[tick])
    copied = {item.value for item in offloaded}
    for parked in plan.parks:
        gap = gap_of(problem, parked)
        if gap is None or parked.remade:
            continue
        tick, op = problem.first_tick_at(gap.before_op), gap.before_op
        if gap.is_last:  # the program uses it no more, but autograd may want it
            saved = known.get(gap.value)
            if saved is None or gap.value in copied:
                continue
            tick, op = saved.first_unpack, ops[saved.first_unpack]
        earliest = max(parked.out_tick + 1, problem.first_tick_at(landed[parked.value, parked.out_tick]))
        if earliest < tick:
            yield _Copy(gap.value, gap.nbytes, parked.out_tick, earliest, tick, op)
