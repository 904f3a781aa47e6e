"""A subject as plain data for the page: figures, the three lanes span by span, and tables.

Nothing is left out for size's sake: columns of small differences compress so well that ResNet-2504's step of 49,000
ops takes a quarter of a megabyte, and the page draws whichever part of it somebody looks at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from importlib import metadata
from itertools import pairwise
from typing import Any

from outgrow.planning.plan import Decision, Plan
from outgrow.planning.simulate import timeline as timeline_of
from outgrow.planning.timeline import Activity, Span, Timeline
from outgrow.reporting.holders import ORDER, Holding, held_in_plain_step, held_in_plan
from outgrow.reporting.modules import ModuleRow, decisions_by_module, module_of_value, short_name
from outgrow.reporting.subject import Subject
from outgrow.tracing.ir import Phase
from outgrow.tracing.liveness import plain_profile
from outgrow.units import format_bytes

# Values at a peak that are named one by one.
_NAMED_VALUES = 40


def document_of(subject: Subject) -> dict[str, Any]:
    """All that the page shows. Sizes in bytes; times in seconds, in the lanes in whole nanoseconds."""
    plan = subject.plan
    trace, prediction = plan.problem.trace, plan.simulate()
    timeline = timeline_of(plan)
    plain = plain_profile(trace)
    base = plan.problem.base_bytes
    held = held_in_plan(plan, timeline, timeline.peak)
    held_plain = held_in_plain_step(plan.problem, plain.peak_op)
    names, modules = _Table(), _Table()
    values = _Values(plan, modules)
    document: dict[str, Any] = {
        "kind": "plan",
        "title": subject.title,
        "policy": plan.policy,
        "budget_bytes": subject.budget,
        "least_budget_bytes": None if prediction.feasible else plan.least_budget_bytes,
        "prediction": {
            field.name: getattr(prediction, field.name)
            for field in fields(prediction)
            if field.name not in ("curve", "evicted", "waits")
        },
        "peak": _peak(plan, timeline),
        "plain": {
            "peak_bytes": plain.peak_bytes + base,
            "average_bytes": plain.average_bytes + base,
            "peak_op": plain.peak_op,
            "where": trace.describe_op(plain.peak_op),
        },
        "decisions": plan.decisions_summary(),
        "phases": [phase.value for phase in Phase],
        "activities": [activity.value for activity in Activity],
        "ops": {
            "name": [names.number(short_name(op)) for op in trace.ops],
            "module": [modules.number(op.module) for op in trace.ops],
            "phase": [list(Phase).index(op.phase) for op in trace.ops],
            "end": differences(nanoseconds(moment) for moment in plan.problem.op_times[1:]),
            "adds": _added_bytes(plan),
            "workspace": [op.workspace_bytes for op in trace.ops],
            "plain_live": differences(level + base for level in plain.curve),
        },
        "compute": _lane(timeline.compute, values, with_levels=True),
        "out": _lane(timeline.out, values),
        "back": _lane(timeline.back, values),
        "holders": {
            "order": list(ORDER),
            "plan": _holders(held, values),
            "plain": _holders(held_plain, values),
        },
        "modules_table": _columns(decisions_by_module(plan, timeline), modules),
        "history": {
            "first_step": subject.first_step,
            "steps": [asdict(summary) for summary in subject.history],
        },
        "settings": _settings(subject),
    }
    return document | {"values": values.columns(), "names": names.items, "modules": modules.items}


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds: integers compress better than fractions, and add up."""
    return round(seconds * 1e9)


def differences(numbers: Iterable[int]) -> list[int]:
    """Each number less the one before it; the first as it is."""
    items = list(numbers)
    return items[:1] + [after - before for before, after in pairwise(items)]


class _Table:
    """Words by number, each once."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, word: str) -> int:
        if word not in self._numbers:
            self._numbers[word] = len(self.items)
            self.items.append(word)
        return self._numbers[word]


class _Values:
    """The values that the page names, numbered anew."""

    def __init__(self, plan: Plan, modules: _Table) -> None:
        self._plan = plan
        self._modules = modules
        self._home = module_of_value(plan.problem.trace)
        self._numbers: dict[int, int] = {}

    def number(self, value: int) -> int:
        return -1 if value < 0 else self._numbers.setdefault(value, len(self._numbers))

    def columns(self) -> dict[str, list[Any]]:
        plan = self._plan
        trace = plan.problem.trace
        fates = dict.fromkeys((saved.value for saved in trace.saved), Decision.KEEP.value)
        fates |= dict.fromkeys((item.value for item in plan.offloads), Decision.OFFLOAD.value)
        fates |= dict.fromkeys((item.value for item in plan.recomputes), Decision.RECOMPUTE.value)
        fates |= {item.value: fates[item.value] + ", park" if item.value in fates else "park" for item in plan.parks}
        records = [trace.values[index] for index in self._numbers]
        return {
            "bytes": [record.nbytes for record in records],
            "kind": [record.kind.value for record in records],
            "module": [self._modules.number(self._home(index)) for index in self._numbers],
            "op": [record.birth for record in records],
            "fate": [fates.get(index, "") for index in self._numbers],
        }


def _lane(spans: Sequence[Span], values: _Values, *, with_levels: bool = False) -> dict[str, list[int]]:
    activities = {activity: number for number, activity in enumerate(Activity)}
    lane = {
        "activity": [activities[span.activity] for span in spans],
        "start": differences(nanoseconds(span.start) for span in spans),
        "end": differences(nanoseconds(span.end) for span in spans),
        "op": differences(span.op for span in spans),
        "value": [values.number(span.value) for span in spans],
    }
    return lane | {"live": differences(span.live_bytes for span in spans)} if with_levels else lane


def _peak(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """The moment with the most live bytes, which may be inside a burst of recompute."""
    if not timeline.compute:
        return {"bytes": plan.problem.base_bytes, "seconds": 0.0, "where": "", "span": -1}
    span = timeline.compute[timeline.peak]
    where = (
        plan.problem.trace.describe_op(span.op) if span.op < len(plan.problem.trace.ops) else "the end of the step"
    )
    if span.activity is Activity.RECOMPUTE:
        where = f"{where}, run again"
    return {"bytes": span.live_bytes, "seconds": span.start, "where": where, "span": timeline.peak}


def _added_bytes(plan: Plan) -> list[int]:
    """Bytes of the values that each op makes."""
    added = [0] * len(plan.problem.trace.ops)
    for value in plan.problem.trace.values:
        if 0 <= value.birth < len(added):
            added[value.birth] += value.nbytes
    return added


def _holders(holding: Holding, values: _Values) -> dict[str, Any]:
    return {
        "kinds": holding.kinds,
        "values": [values.number(value) for value in holding.values[:_NAMED_VALUES]],
        "count": len(holding.values),
    }


def _columns(rows: Sequence[ModuleRow], modules: _Table) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for field in fields(ModuleRow):
        column = [getattr(row, field.name) for row in rows]
        columns[field.name] = [modules.number(name) for name in column] if field.name == "module" else column
    return columns


def _settings(subject: Subject) -> list[tuple[str, str]]:
    plan = subject.plan
    problem, trace, hardware = plan.problem, plan.problem.trace, plan.problem.hardware
    source = "measured" if trace.measured else "estimated"
    return [
        *subject.settings.items(),
        ("policy", plan.policy),
        ("budget of the plan", f"{format_bytes(plan.budget_bytes)} ({plan.budget_bytes} bytes)"),
        ("smallest value that moves", format_bytes(problem.least_moved_bytes)),
        ("trace", f"{len(trace.ops)} ops, {len(trace.values)} values, {len(trace.saved)} saved tensors; {source}"),
        ("device", hardware.name),
        ("memory of the device", format_bytes(hardware.memory_bytes)),
        ("arithmetic", f"{hardware.flops_per_second / 1e9:.0f} GFLOP/s"),
        ("memory bandwidth", f"{hardware.memory_bandwidth / 1e9:.1f} GB/s"),
        ("copies out", f"{hardware.copy_out_bandwidth / 1e9:.2f} GB/s"),
        ("copies in", f"{hardware.copy_in_bandwidth / 1e9:.2f} GB/s"),
        ("torch", trace.torch_version),
        ("Outgrow", _version()),
    ]


def _version() -> str:
    try:
        return metadata.version("outgrow")
    except metadata.PackageNotFoundError:
        return "from a source tree that is not installed"
