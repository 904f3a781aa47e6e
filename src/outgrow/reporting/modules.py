"""What a plan decides, module by module, and what that costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outgrow.planning.plan import Plan
from outgrow.planning.timeline import Activity, Timeline
from outgrow.tracing.ir import Op, Trace


@dataclass(slots=True)
class ModuleRow:
    """One module: its saved values by decision, in bytes, and the time of its ops and copies, in seconds.

    A value counts for the module that saved it first; `parked` has what the program itself holds meanwhile, saved or
    not, and `evicted` what the cache sends away beyond the plan. A wait counts for the op that has to wait.
    """

    module: str
    values: int = 0
    kept: int = 0
    offloaded: int = 0
    recomputed: int = 0
    evicted: int = 0
    parked: int = 0
    compute_seconds: float = 0.0
    recompute_seconds: float = 0.0
    copy_seconds: float = 0.0
    wait_seconds: float = 0.0


def decisions_by_module(plan: Plan, timeline: Timeline) -> list[ModuleRow]:
    """A row for each module that saves something or takes time, in the order of the step."""
    trace = plan.problem.trace
    rows: dict[str, ModuleRow] = {}
    home = module_of_value(trace)

    def row(module: str) -> ModuleRow:
        if module not in rows:
            rows[module] = ModuleRow(module)
        return rows[module]

    for op in trace.ops:
        row(op.module)
    offloaded = {item.value for item in plan.offloads}
    recomputed = {item.value for item in plan.recomputes}
    for value in dict.fromkeys(saved.value for saved in trace.saved):
        each, nbytes = row(home(value)), trace.values[value].nbytes
        each.values += 1
        if value in recomputed:
            each.recomputed += nbytes
        elif value in offloaded:
            each.offloaded += nbytes
        else:
            each.kept += nbytes
    for value in dict.fromkeys(item.value for item in plan.parks):
        row(home(value)).parked += trace.values[value].nbytes
    for span in timeline.compute:
        if span.activity is Activity.RUN:
            row(trace.ops[span.op].module).compute_seconds += span.seconds
        elif span.activity is Activity.RECOMPUTE:
            row(trace.ops[span.op].module).recompute_seconds += span.seconds
        elif span.activity is Activity.WAIT:
            row(_module_at(trace, span.op)).wait_seconds += span.seconds
    for span in (*timeline.out, *timeline.back):
        each = row(home(span.value))
        each.copy_seconds += span.seconds
        if span.activity is Activity.EVICT:
            each.evicted += trace.values[span.value].nbytes
    return list(rows.values())


def module_of_value(trace: Trace) -> Callable[[int], str]:
    """Which module a value belongs to: that which saved it first, else whose op made it, else whose op reads it."""
    found: dict[int, str] = {}
    for saved in trace.saved:
        found.setdefault(saved.value, saved.module)
    for index, value in enumerate(trace.values):
        if 0 <= value.birth < len(trace.ops):
            found.setdefault(index, trace.ops[value.birth].module)
    for op in trace.ops:
        for index in op.inputs:
            found.setdefault(index, op.module)
    return lambda value: found.get(value, "")


def short_name(op: Op) -> str:
    """What an op is called where there is little room: "convolution_backward"."""
    return op.name.removeprefix("aten.").removesuffix(".default")


def _module_at(trace: Trace, op: int) -> str:
    return trace.ops[op].module if op < len(trace.ops) else ""
