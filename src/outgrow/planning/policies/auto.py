"""The default policy: plain PyTorch when it fits, else the fastest plan that the simulator finds.

Besides the named policies it tries plans that offload just enough. Values that are saved first are wanted back
last, so they are away the longest for one copy out and one copy in; the shortest run of them that fits stalls
the least.
"""

from __future__ import annotations

from outgrow.planning.plan import Plan, make_plan
from outgrow.planning.policies.cache import Keep, Lru
from outgrow.planning.policies.prefetch import with_prefetch
from outgrow.planning.policies.vdnn import VdnnAll, VdnnConv, VdnnDyn
from outgrow.planning.problem import Problem

_SEARCH_STEPS = 7


class Auto:
    """Keep when it fits, else the best plan found."""

    name = "auto"

    def plan(self, problem: Problem) -> Plan:
        keep = Keep().plan(problem)
        if keep.simulate().feasible:
            return _renamed(keep)
        tried = [_just_enough(problem)]
        tried += [policy.plan(problem) for policy in (Lru(), VdnnConv(), VdnnAll(), VdnnDyn())]
        return _renamed(min(tried, key=_rank))


def _just_enough(problem: Problem) -> Plan:
    """The shortest run of earliest-saved values whose plan holds the budget without help from the cache."""
    candidates = problem.candidates
    low, high = 0, len(candidates)
    best = make_plan("auto", problem, with_prefetch(problem, candidates))
    for _ in range(_SEARCH_STEPS):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        plan = make_plan("auto", problem, with_prefetch(problem, candidates[:middle]))
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
    return make_plan("auto", plan.problem, plan.offloads)
