"""Plans with workspaces for convolutions: vDNN's (m) and (p), and SuperNeurons' choice at each moment.

A plan's trace says what each op holds and how long it takes, so a kind of workspace is a trace with other costs.
Under `Workspace.DYNAMIC` those follow from the plan itself: it is made as if all convolutions held nothing, and as if
they held all they might want; the simulator then says which workspace is free at each of them (`settled`). Of these
two, and of the one in which all have what they want, the fastest counts.
"""

from __future__ import annotations

from dataclasses import replace

from outgrow.cost.estimate import estimate
from outgrow.cost.hardware import Hardware
from outgrow.cost.workspaces import Choice, Workspace, choices
from outgrow.errors import TraceMismatch, UnknownWorkspace
from outgrow.planning.check import plan_by
from outgrow.planning.plan import Plan
from outgrow.planning.policies.policy import Policy
from outgrow.planning.problem import Problem
from outgrow.planning.simulate import taken_ways
from outgrow.tracing.ir import Op, Trace


def costed(trace: Trace, hardware: Hardware, workspace: Workspace | None = None) -> Trace:
    """The trace with times and workspaces on `hardware`; under `DYNAMIC` those that are certain: without workspaces.

    Raises:
        UnknownWorkspace: the device is no GPU, where libraries take what they need.
        TraceMismatch: the trace was measured, and holds the workspaces that were seen.
    """
    if workspace is None:
        return estimate(trace, hardware)
    return _with_ways(trace, _ways(trace, hardware), fastest=workspace is Workspace.SPEED)


def plan_with(
    maker: Policy, trace: Trace, hardware: Hardware, budget_bytes: int, workspace: Workspace | None = None
) -> Plan:
    """What the policy makes of a step whose convolutions take workspaces of that kind.

    Raises:
        UnknownWorkspace, TraceMismatch: as `costed`.
        InvalidPlan: it makes no plan of it.
    """
    if workspace is None:
        return plan_by(maker, Problem(estimate(trace, hardware), hardware, budget_bytes))
    ways = _ways(trace, hardware)
    plain_seconds = sum(each[-1].seconds for each in ways)

    def made(fastest: bool) -> Plan:
        with_costs = _with_ways(trace, ways, fastest=fastest)
        return plan_by(maker, Problem(with_costs, hardware, budget_bytes, plain_seconds=plain_seconds))

    if workspace is not Workspace.DYNAMIC:
        return made(fastest=workspace is Workspace.SPEED)
    certain = _with_ways(trace, ways, fastest=False)
    slow, fast = made(False), made(True)
    return min(settled(slow, certain, ways), settled(fast, certain, ways), fast, key=_rank)


def settled(plan: Plan, certain: Trace, ways: tuple[tuple[Choice, ...], ...]) -> Plan:
    """The plan with each op as fast as the bytes that it leaves free at that moment allow.

    `certain` is the trace with the way that needs least memory at each op.
    """
    open_problem = replace(plan.problem, trace=certain, ways=ways)
    taken = taken_ways(replace(plan, problem=open_problem))
    ops = [_run_by(op, way) for op, way in zip(certain.ops, taken, strict=True)]
    return replace(plan, problem=replace(plan.problem, trace=certain.with_ops(ops)))


def _ways(trace: Trace, hardware: Hardware) -> tuple[tuple[Choice, ...], ...]:
    if hardware.device_type != "cuda":
        raise UnknownWorkspace(
            f"workspace is for GPUs, where cuDNN has several algorithms for a convolution: {hardware.name} is a "
            f"{hardware.device_type.upper()}, whose library takes what it needs. Leave workspace out, or plan for "
            "a GPU"
        )
    if trace.measured:
        raise TraceMismatch(
            "workspace is for traces without times: this one was measured, and its convolutions hold what was seen"
        )
    known: dict[tuple[object, ...], tuple[Choice, ...]] = {}  # deep networks repeat themselves
    found: list[tuple[Choice, ...]] = []
    for op in trace.ops:
        key = (op.name, op.shape, op.flops, op.moved_bytes, op.dtype)
        if key not in known:
            known[key] = choices(op, hardware)
        found.append(known[key])
    return tuple(found)


def _with_ways(trace: Trace, ways: tuple[tuple[Choice, ...], ...], *, fastest: bool) -> Trace:
    number = -1 if fastest else 0
    ops = [_run_by(op, each[number]) for op, each in zip(trace.ops, ways, strict=True)]
    return replace(trace, device="cuda", ops=tuple(ops))


def _run_by(op: Op, way: Choice) -> Op:
    return replace(op, seconds=way.seconds, workspace_bytes=way.nbytes)


def _rank(plan: Plan) -> tuple[bool, float]:
    prediction = plan.simulate()
    return (not prediction.feasible, prediction.step_seconds if prediction.feasible else prediction.peak_bytes)
