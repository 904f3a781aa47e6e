"""How full the device is when nothing comes back before it is wanted, without a walk through the step.

A walk tells the same, and exactly. This is for a search that asks a thousand times where there is room: copies out
land when their lane allows in a plain step, and recipes run on top of what is there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from outgrow.planning.parks import gap_of
from outgrow.planning.plan import Park, Plan, make_plan
from outgrow.planning.prefetch import wanted_first
from outgrow.planning.problem import BOUNDLESS, Problem, reading


def levels_where_nothing_moves(plan: Plan) -> NDArray[np.int64]:
    """Live bytes at the worst moment of each op if all stays but gradients that reuse memory or are made anew."""
    known = _known_levels(plan.problem)
    remade = tuple(item for item in plan.parks if item.remade)
    key = (plan.reuses, remade)
    if key not in known:
        boundless = plan.problem.with_budget(BOUNDLESS)
        kept = make_plan("keep", boundless, (), parks=remade, reuses=plan.reuses, evicts=False)
        known[key] = np.asarray(kept.simulate().curve, dtype=np.int64)
    return known[key]


@reading
def _known_levels(problem: Problem) -> dict[tuple[tuple[int, ...], tuple[Park, ...]], NDArray[np.int64]]:
    """These, by reuses and what is parked without a copy."""
    return {}


def levels_on_demand(plan: Plan, landed: Mapping[tuple[int, int], int] | None = None) -> NDArray[np.int64]:
    """The same if what the plan moves leaves when it can, and comes back when it is wanted.

    `landed` are its `landed_ops`, where they are known.
    """
    problem = plan.problem
    ops, known = problem.tick_ops, problem.candidates_by_value
    offloaded = [known[item.value] for item in plan.offloads]
    dropped = [known[item.value] for item in plan.recomputes]
    wanted = wanted_first(problem, offloaded, dropped)
    landed = landed_ops(plan) if landed is None else landed
    levels = levels_where_nothing_moves(plan)
    change = np.zeros(len(levels) + 2, dtype=np.int64)
    gone_since = {
        item.value: max(known[item.value].held, ops[known[item.value].last_pack], landed[item.value, item.out_tick])
        for item in plan.offloads
    }
    gone_since |= {item.value: max(known[item.value].held, ops[item.drop_tick]) for item in plan.recomputes}
    for parked in plan.parks:
        gap = gap_of(problem, parked)
        if gap is None or parked.remade:
            continue
        first = max(ops[parked.out_tick], landed[parked.value, parked.out_tick])
        until = gap.before_op
        if gap.is_last and gap.value in gone_since:  # it stays away
            until = max(first, gone_since[gap.value])
        elif gap.is_last:
            until = (
                ops[known[gap.value].first_unpack] if gap.value in known else problem.trace.values[gap.value].death
            )
        if first < until:
            change[first] -= gap.nbytes
            change[until] += gap.nbytes
    for value, first in gone_since.items():
        until = ops[wanted[value]]
        if first < until:
            change[first] -= known[value].nbytes
            change[until] += known[value].nbytes
    levels = levels + np.cumsum(change)[: len(levels)]
    bursts: dict[tuple[int, ...], list[int]] = {}
    for item in dropped:
        bursts.setdefault(problem.recipes.together(item.value), []).append(item.value)
    for together in bursts.values():
        first = min(ops[wanted[value]] for value in together)
        levels[min(first, len(levels) - 1)] += _rise(problem, together)
    return levels


def error_of_levels(plan: Plan) -> NDArray[np.int64]:
    """What a walk finds on top of these levels. It is nearly the same for plans that differ a little."""
    return walked_levels(plan) - levels_on_demand(plan)


def walked_levels(plan: Plan) -> NDArray[np.int64]:
    """These levels as a walk finds them."""
    on_demand = replace(
        plan,
        problem=plan.problem.with_budget(BOUNDLESS),
        offloads=tuple(replace(item, in_tick=-1) for item in plan.offloads),
        parks=tuple(replace(item, in_tick=-1) for item in plan.parks),
        evicts=False,
    )
    return np.asarray(on_demand.simulate().curve, dtype=np.int64)


def landed_ops(plan: Plan) -> dict[tuple[int, int], int]:
    """For each copy out, by value and tick, the first op that starts when it is done in a plain step."""
    problem = plan.problem
    leaving = [(item.out_tick, item.value) for item in plan.offloads]
    leaving += [(item.out_tick, item.value) for item in plan.parks if not item.remade]
    landed: dict[tuple[int, int], int] = {}
    values, ops, times = problem.trace.values, problem.tick_ops, problem.op_times
    lane_free = 0.0
    for tick, value in sorted(leaving):
        begins = times[ops[tick]]
        lane_free = max(begins, lane_free) + problem.hardware.copy_out_seconds(values[value].nbytes)
        landed[value, tick] = bisect_left(times, lane_free)
    return landed


def _rise(problem: Problem, together: Sequence[int]) -> int:
    """What a burst needs besides the values that come back with it, in bytes."""
    recipe = problem.recipes.find(together[0])
    assert recipe is not None, "only what has a recipe is dropped"
    rises = zip(recipe.ops, recipe.held, recipe.born, strict=True)
    most = max(held + born + problem.trace.ops[op].workspace_bytes for op, held, born in rises)
    return max(0, most - sum(problem.trace.values[value].nbytes for value in together))
