"""The lanes of a plan as a Chrome trace: open it at ui.perfetto.dev or speedscope.app.

The format is the Trace Event Format: complete events ("X") with times in microseconds, counters ("C") for live bytes,
metadata ("M") for names. The planned step is one process, the plain step another. What takes no time is left out.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outgrow.planning.plan import Plan
from outgrow.planning.simulate import timeline as timeline_of
from outgrow.planning.timeline import Activity, Span
from outgrow.reporting.files import write_whole
from outgrow.reporting.modules import module_of_value, short_name
from outgrow.reporting.subject import Subject
from outgrow.tracing.liveness import plain_profile

Event = dict[str, Any]

_PLANNED, _PLAIN = 1, 2
_COMPUTE, _OUT, _BACK = 1, 2, 3


def write_perfetto(path: str | Path, subject: Subject) -> None:
    """Write the trace; compressed where the name ends in ".gz".

    Raises:
        ReportError: the file cannot be written.
    """
    content = json.dumps(perfetto_document(subject), separators=(",", ":"), allow_nan=False).encode()
    write_whole(path, gzip.compress(content, mtime=0) if str(path).endswith(".gz") else content)


def perfetto_document(subject: Subject) -> dict[str, Any]:
    """The trace as data for JSON."""
    plan = subject.plan
    return {
        "traceEvents": [*_names(plan), *_planned(plan, subject.budget), *_plain(plan)],
        "displayTimeUnit": "ms",
        "otherData": {
            "title": subject.title,
            "policy": plan.policy,
            "budget_bytes": subject.budget,
            "device": plan.problem.hardware.name,
        },
    }


def _names(plan: Plan) -> Iterator[Event]:
    yield _meta(_PLANNED, None, "process_name", name=f"planned step ({plan.policy})")
    yield _meta(_PLAIN, None, "process_name", name="plain step")
    for process in (_PLANNED, _PLAIN):
        yield _meta(process, None, "process_sort_index", sort_index=process)
        yield _meta(process, _COMPUTE, "thread_name", name="compute")
        yield _meta(process, _COMPUTE, "thread_sort_index", sort_index=_COMPUTE)
    for thread, name in ((_OUT, "copy out"), (_BACK, "copy in")):
        yield _meta(_PLANNED, thread, "thread_name", name=name)
        yield _meta(_PLANNED, thread, "thread_sort_index", sort_index=thread)


def _meta(process: int, thread: int | None, what: str, **arguments: Any) -> Event:
    event: Event = {"ph": "M", "pid": process, "name": what, "args": arguments}
    return event if thread is None else event | {"tid": thread}


def _planned(plan: Plan, budget_bytes: int) -> Iterator[Event]:
    timeline = timeline_of(plan)
    home = module_of_value(plan.problem.trace)
    for thread, lane in ((_COMPUTE, timeline.compute), (_OUT, timeline.out), (_BACK, timeline.back)):
        for span in lane:
            moment = _moment(span.start, span.end)
            if moment is not None:
                yield _span(plan, span, thread, home(span.value) if span.value >= 0 else "") | moment
    level: int | None = None
    for span in timeline.compute:
        if span.live_bytes != level:
            level = span.live_bytes
            yield _counter(_PLANNED, span.start, {"live bytes": level})
    for seconds in (0.0, timeline.end):
        yield _counter(_PLANNED, seconds, {"budget": budget_bytes}, name="budget")


def _span(plan: Plan, span: Span, thread: int, module: str) -> Event:
    trace = plan.problem.trace
    arguments: dict[str, Any] = {}
    ops = trace.ops
    if span.value >= 0:
        record = trace.values[span.value]
        arguments |= {"value": span.value, "kind": record.kind.value, "value bytes": record.nbytes, "of": module}
    if span.activity in (Activity.RUN, Activity.RECOMPUTE):
        op = ops[span.op]
        name = short_name(op)
        arguments |= {"module": op.module, "phase": op.phase.value, "workspace bytes": op.workspace_bytes}
    else:
        name = f"{span.activity.value} {module}".strip()
    if thread == _COMPUTE:
        arguments["live bytes"] = span.live_bytes
    return {
        "ph": "X",
        "pid": _PLANNED,
        "tid": thread,
        "name": name,
        "cat": span.activity.value,
        "args": arguments,
    }


def _plain(plan: Plan) -> Iterator[Event]:
    trace, times = plan.problem.trace, plan.problem.op_times
    curve = plain_profile(trace).curve
    for number, op in enumerate(trace.ops):
        moment = _moment(times[number], times[number + 1])
        if moment is None:
            continue
        yield moment | {
            "ph": "X",
            "pid": _PLAIN,
            "tid": _COMPUTE,
            "name": short_name(op),
            "cat": op.phase.value,
            "args": {"module": op.module, "live bytes": curve[number] + plan.problem.base_bytes},
        }
    for number, level in enumerate(curve):
        if number == 0 or level != curve[number - 1]:
            live = {"live bytes": level + plan.problem.base_bytes}
            yield _counter(_PLAIN, times[number], live)


def _counter(process: int, seconds: float, values: dict[str, int], name: str = "live bytes") -> Event:
    return {"ph": "C", "pid": process, "name": name, "ts": _microseconds(seconds), "args": values}


def _moment(start: float, end: float) -> Event | None:
    """When a span begins and how long it lasts; None where that is less than viewers can tell.

    Viewers add the two, and take a sum that is above the next span's begin, by rounding alone, for one span in
    another: half a nanosecond less keeps them apart.
    """
    begin = _microseconds(start)
    lasts = round(_microseconds(end) - begin, 3)
    return {"ts": begin, "dur": round(lasts - 5e-4, 4)} if lasts > 0 else None


def _microseconds(seconds: float) -> float:
    """To the nanosecond, which is as fine as viewers go."""
    return round(seconds * 1e6, 3)
