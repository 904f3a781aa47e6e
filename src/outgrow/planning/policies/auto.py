"""The default policy: plain PyTorch when it fits, else the fastest plan that the simulator finds.

Besides the named policies it tries mixes. Values whose recipes cost least for each byte are dropped: none of them, a
few, more, all. Of the others just enough leave: values that are saved first are wanted back last, so they are away
the longest for one copy out and one copy in; the shortest run of them that fits stalls the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outgrow.planning.plan import Plan, make_plan
from outgrow.planning.policies.cache import Keep, Lru
from outgrow.planning.policies.checkpoint import Checkpoint
from outgrow.planning.policies.prefetch import dropped_early, may_be_dropped, with_prefetch
from outgrow.planning.policies.vdnn import VdnnAll, VdnnConv, VdnnDyn
from outgrow.planning.problem import Candidate, Problem

_SEARCH_STEPS = 7
# The shares of what can be recomputed, by bytes, that are tried.
_RECOMPUTED_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Recipes that cost more than so many times a copy out and back are not worth their while.
_MOST_OF_A_COPY = 2.0


class Auto:
    """Keep when it fits, else the best plan found."""

    name = "auto"

    def plan(self, problem: Problem) -> Plan:
        keep = Keep().plan(problem)
        if keep.simulate().feasible:
            return _renamed(keep)
        cheap = _cheapest_first(problem)
        total = sum(item.nbytes for item in cheap)
        shares = _RECOMPUTED_SHARES if cheap else (0.0,)
        tried = [_just_enough(problem, _run_of(cheap, share * total)) for share in shares]
        tried += [policy.plan(problem) for policy in (Lru(), VdnnConv(), VdnnAll(), VdnnDyn(), Checkpoint())]
        return _renamed(min(tried, key=_rank))


def _cheapest_first(problem: Problem) -> list[Candidate]:
    """Values with a recipe that is worth it, those with the least seconds a byte first."""
    priced: list[tuple[float, Candidate]] = []
    for item in problem.candidates:
        recipe = problem.recipes.find(item.value)
        if recipe is None or not may_be_dropped(problem, item):
            continue
        copies = problem.hardware.copy_out_seconds(item.nbytes) + problem.hardware.copy_in_seconds(item.nbytes)
        if recipe.seconds <= _MOST_OF_A_COPY * copies:
            priced.append((recipe.seconds / item.nbytes, item))
    return [item for _, item in sorted(priced, key=lambda pair: pair[0])]


def _run_of(items: Sequence[Candidate], nbytes: float) -> list[Candidate]:
    """The first of `items`, up to so many bytes."""
    chosen: list[Candidate] = []
    for item in items:
        if nbytes <= 0:
            break
        chosen.append(item)
        nbytes -= item.nbytes
    return chosen


def _just_enough(problem: Problem, dropped: Sequence[Candidate]) -> Plan:
    """The shortest run of earliest-saved values whose plan holds the budget without help from the cache."""
    recomputes = dropped_early(problem, dropped)
    gone = {item.value for item in dropped}
    candidates = [item for item in problem.candidates if item.value not in gone]

    def offloading(count: int) -> Plan:
        return make_plan("auto", problem, with_prefetch(problem, candidates[:count], dropped), recomputes)

    low, high = -1, len(candidates)
    best = offloading(high)
    for _ in range(_SEARCH_STEPS):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        plan = offloading(middle)
        prediction = plan.simulate()
        if prediction.feasible and prediction.evicted_bytes == 0:
            high = middle
        else:
            low = middle
        best = min(best, plan, key=_rank)
    return best


def _rank(plan: Plan) -> tuple[bool, int, int]:
    """Plans that fit come first, then fast ones, then those that copy least; equal to a thousandth is equal."""
    prediction = plan.simulate()
    thousandths = round(1000 * prediction.step_seconds / max(prediction.plain_step_seconds, 1e-9))
    return (not prediction.feasible, thousandths, prediction.offloaded_bytes + prediction.evicted_bytes)


def _renamed(plan: Plan) -> Plan:
    return replace(plan, policy="auto", evicts=True)
