"""Whether a plan that somebody else made is one: out of a file, or of a policy of the program's own."""

from __future__ import annotations

from outgrow.errors import InvalidPlan
from outgrow.planning.parks import sources_of_gradient
from outgrow.planning.plan import Plan
from outgrow.planning.policies.policy import Policy
from outgrow.planning.problem import Problem


def fault_of(plan: Plan) -> str:
    """What is wrong with a plan, in words that go on from its name; empty if a step can follow it.

    Where values lie on the disk is not looked at: places are given out anew.
    """
    for item in plan.offloads:
        if not _names(plan.problem, item.value, item.out_tick, item.release_tick, item.in_tick):
            return f"moves value {item.value!r} in a way that its trace does not allow"
    for parked in plan.parks:
        if not _names(plan.problem, parked.value, parked.out_tick, parked.in_tick):
            return f"moves value {parked.value!r} in a way that its trace does not allow"
        if parked.remade and sources_of_gradient(plan.problem, parked.value) is None:
            return f"drops value {parked.value}, which its trace cannot make anew"
    for dropped in plan.recomputes:
        is_named = _names(plan.problem, dropped.value, dropped.drop_tick) and dropped.drop_tick >= 0
        if not is_named or plan.problem.recipes.find(dropped.value) is None:
            return f"drops value {dropped.value!r}, which its trace cannot make anew"
    if not all(type(op) is int and 0 <= op < len(plan.problem.trace.ops) for op in plan.reuses):
        return "names ops that its trace does not have"
    try:
        plan.simulate()
    except (ArithmeticError, AssertionError, LookupError, ValueError) as error:
        return f"has decisions that contradict each other: {error!r}"
    return ""


def _names(problem: Problem, value: int, *moments: int) -> bool:
    """Whether a value and some ticks, -1 for none, are ones of the trace."""
    trace = problem.trace
    return (
        all(type(number) is int for number in (value, *moments))
        and 0 <= value < len(trace.values)
        and all(-1 <= moment < len(trace.ticks) for moment in moments)
    )


def plan_by(policy: Policy, problem: Problem) -> Plan:
    """What a policy makes for a problem, if that is a plan for it.

    Raises:
        InvalidPlan: it is not.
    """
    plan: object = policy.plan(problem)
    name = getattr(policy, "name", type(policy).__name__)
    if not isinstance(plan, Plan):
        kind = type(plan).__name__
        raise InvalidPlan(f"policy {name!r} gave {kind} for a plan: outgrow.planning.plan.make_plan makes plans")
    if plan.problem.trace.values is not problem.trace.values:
        raise InvalidPlan(f"policy {name!r} gave a plan for another step than it was asked for")
    fault = fault_of(plan)
    if fault:
        raise InvalidPlan(f"policy {name!r} gave a plan that {fault}")
    return plan
