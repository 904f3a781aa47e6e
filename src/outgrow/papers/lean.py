"""A plan that leaves as much of the device free as it can at nearly the same speed, as vDNN measures averages."""

from __future__ import annotations

from outgrow.planning.plan import Plan, make_plan
from outgrow.planning.prefetch import with_prefetch
from outgrow.planning.reuse import reusable_ops

# How much slower the step may be for it.
_AT_MOST = 1.03
# What copies back are planned to take over what the profile says: those that come late hold memory for less time.
_HASTE = (1.0, 0.9, 0.8)


def lean(plan: Plan) -> Plan:
    """The plan with every other value offloaded that can leave and come back for little, the largest first.

    Gradients also take the place of those that they are made of (Layrub's intra-layer reuse).
    """
    limit = _AT_MOST * plan.simulate().step_seconds
    tried = [_offloading_more(plan, limit, haste) for haste in _HASTE]
    return min(tried, key=lambda other: other.simulate().average_bytes)


def _offloading_more(plan: Plan, limit_seconds: float, caution: float) -> Plan:
    problem = plan.problem
    away = {item.value for item in plan.offloads}
    dropped = {item.value for item in plan.recomputes}
    anew = [item for item in problem.candidates if item.value in dropped]
    for item in sorted(problem.candidates, key=lambda item: -item.nbytes):
        if item.value in away | dropped:
            continue
        chosen = [other for other in problem.candidates if other.value in away or other is item]
        more = make_plan(
            plan.policy,
            problem,
            with_prefetch(problem, chosen, anew, caution=caution),
            plan.recomputes,
            parks=plan.parks,
            reuses=reusable_ops(problem),
            evicts=plan.evicts,
        )
        now, then = plan.simulate(), more.simulate()
        if then.feasible and then.step_seconds <= limit_seconds and then.average_bytes < now.average_bytes:
            plan = more
            away.add(item.value)
    return plan
