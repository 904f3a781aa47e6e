"""Planning without training: from a trace to a plan, on this machine or on another, and to a page that shows it."""

from __future__ import annotations

from pathlib import Path

from outgrow.cost.hardware import Hardware
from outgrow.cost.workspaces import find_workspace
from outgrow.errors import TraceMismatch
from outgrow.planning.plan import Plan
from outgrow.planning.policies import Policy, policy_of
from outgrow.planning.workspaces import plan_with
from outgrow.reporting.page import write_report
from outgrow.reporting.subject import Subject
from outgrow.tracing.ir import Trace
from outgrow.units import parse_bytes


def plan(
    trace: Trace,
    *,
    budget: int | str,
    policy: str | Policy = "auto",
    hardware: Hardware | None = None,
    workspace: str | None = None,
) -> Plan:
    """Make a plan for a traced step.

    Args:
        trace: a step, real or fake.
        budget: the most that live bytes may reach: bytes, or a string such as "8GiB" or "60%" (of the device).
        policy: the name of a policy, or a `Policy` of your own.
        hardware: the device to plan for; the machine at hand is measured if it is left out.
        workspace: how much memory convolutions may take for their work on a GPU: "memory" (none: the slowest
            algorithm), "speed" (what the fastest algorithm wants, and values leave for it), or "dynamic" (at each
            convolution the fastest algorithm whose workspace fits the bytes that are free). Left out, each is as fast
            as with the fastest algorithm and holds nothing.

    Raises:
        InvalidBudget: the budget cannot be read.
        UnknownPolicy: there is no such policy, or it makes no plans.
        InvalidPlan: a policy of your own made none.
        UnknownWorkspace: there are no such workspaces, or none on this device.
        TraceMismatch: the trace was measured on another kind of device, or measured at all where a kind of workspace
            is given.
    """
    maker = policy_of(policy)
    kind = find_workspace(workspace)
    if hardware is None:
        from outgrow.cost.measure import this_machine  # measuring needs torch, planning does not

        hardware = this_machine()
    if trace.measured and not trace.device.startswith(hardware.device_type):
        raise TraceMismatch(
            f"this trace was measured on {trace.device}, and {hardware.name} is {hardware.device_type}: plan for "
            "other devices from a fake trace (outgrow.trace(..., fake=True))"
        )
    budget_bytes = parse_bytes(budget, total_bytes=hardware.memory_bytes)
    return plan_with(maker, trace, hardware, budget_bytes, kind)


def report(plan: Plan, path: str | Path, *, title: str | None = None) -> None:
    """Write a plan as one HTML file, for any browser and without a network; `Session.report` for one that trains.

    It shows live bytes over the step beside the plain step's and the budget, what the device and the two copy lanes
    do and when, what holds the peak, and the decisions module by module, all as the simulator sees them.

    Args:
        plan: what to show.
        path: where the file goes; one that is there is replaced, once the new one is whole.
        title: the heading; default: the name of the policy.

    Raises:
        ReportError: the file cannot be written.
    """
    write_report(path, Subject(title or f"A plan by {plan.policy}", plan))
