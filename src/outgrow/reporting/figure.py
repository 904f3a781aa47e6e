"""A picture of a plan: live bytes over the step, and the three lanes below. matplotlib is optional."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outgrow.planning.simulate import timeline as timeline_of
from outgrow.planning.timeline import Activity, Span
from outgrow.reporting.files import write_whole
from outgrow.reporting.subject import Subject
from outgrow.tracing.ir import Phase, Trace
from outgrow.tracing.liveness import plain_profile
from outgrow.units import format_bytes, format_seconds

_INCHES = (11.0, 6.2)
_DOTS_PER_INCH = 150
_LARGE = 4 << 30  # from here on sizes are in GiB
_COLUMNS = 1600  # a step of 100,000 ops is drawn as so many slices of time
_COLORS: dict[str, str] = {
    Phase.FORWARD: "#4f8fd6",
    Phase.BACKWARD: "#1f9d94",
    Phase.UPDATE: "#8d99ab",
    Activity.RECOMPUTE: "#eba31c",
    Activity.WAIT: "#d7263d",
    Activity.COPYING: "#b59ad6",
    Activity.OFFLOAD: "#7c5bd0",
    Activity.EVICT: "#c2459b",
    Activity.PARK: "#4a3fa3",
    Activity.FETCH: "#2f9e5b",
}


def draw_plan(path: str | Path, subject: Subject) -> None:
    """Write the picture; the suffix of `path` says in which format (png, svg, pdf).

    Raises:
        ReportError: the file cannot be written.
        ImportError: matplotlib is not there.
        ValueError: it does not know the suffix.
    """
    # The object interface: pyplot would choose a backend, and might want a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    plan = subject.plan
    trace, base = plan.problem.trace, plan.problem.base_bytes
    timeline = timeline_of(plan)
    end = max(timeline.end, plan.problem.op_times[-1]) or 1.0
    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
    plain = plain_profile(trace)
    budget = subject.budget
    unit, unit_name = (2**30, "GiB") if max(plain.peak_bytes, budget) >= _LARGE else (2**20, "MiB")
    moments = np.arange(_COLUMNS) * (end / _COLUMNS)
    plain_spans = list(zip(plan.problem.op_times, plan.problem.op_times[1:], plain.curve, strict=False))
    planned_spans = [(span.start, span.end, span.live_bytes) for span in timeline.compute]
    for name, spans, extra, color in (
        ("plain", plain_spans, base, "#8a94a3"),
        ("planned", planned_spans, 0, "#2563eb"),
    ):
        levels = (most_by_slice(spans, end, _COLUMNS) + extra) / unit
        memory.fill_between(moments, 0, levels, step="post", alpha=0.18, color=color, linewidth=0)
        memory.step(moments, levels, where="post", color=color, linewidth=1.2, label=_peak_label(name, subject))
    memory.axhline(
        budget / unit, color="#d02438", linestyle="--", linewidth=1.2, label=f"budget {format_bytes(budget)}"
    )
    memory.set_ylim(bottom=0)
    memory.set_ylabel(f"live bytes ({unit_name})")
    memory.legend(fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.02), frameon=False, ncols=1)
    memory.set_title(f"{subject.title}: {plan.policy} within {format_bytes(budget)}")
    memory.grid(alpha=0.25)
    _draw_lanes(lanes, trace, (timeline.compute, timeline.out, timeline.back), end)
    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix[1:].lower(), dpi=_DOTS_PER_INCH)
    write_whole(path, content.getvalue())


def most_by_slice(spans: Sequence[tuple[float, float, int]], end: float, slices: int) -> np.ndarray[Any, Any]:
    """The highest level in each of so many equal slices of [0, end]; NaN where there is no span.

    `spans` are (start, end, level), in order and in seconds.
    """
    most = np.full(slices, np.nan)
    scale = slices / end
    for start, stop, level in spans:
        first = min(slices - 1, int(start * scale))
        last = max(first + 1, min(slices, int(np.ceil(stop * scale))))
        part = most[first:last]
        np.fmax(part, level, out=part)
    return most


def shares_by_slice(spans: Sequence[tuple[float, float]], end: float, slices: int) -> np.ndarray[Any, Any]:
    """Which share of each slice of [0, end] spans take that do not overlap, from 0 to 1."""
    # How much of the spans lies before each border between slices.
    if not spans:
        return np.zeros(slices)
    starts, ends = (np.array(column) for column in zip(*spans, strict=True))
    filled = np.concatenate(([0.0], np.cumsum(ends - starts)))
    borders = np.linspace(0, end, slices + 1)
    place = np.searchsorted(starts, borders, side="right")
    before = filled[place]
    open_one = np.maximum(place - 1, 0)
    before -= np.where(place > 0, np.maximum(0.0, ends[open_one] - borders), 0.0)
    return np.diff(before) / (end / slices)


def _draw_lanes(axes: Any, trace: Trace, lanes: Sequence[Sequence[Span]], end: float) -> None:
    edges = np.linspace(0, end, _COLUMNS + 1)
    for number, lane in enumerate(lanes):
        groups: dict[str, list[tuple[float, float]]] = {}
        for span in lane:
            name: str = trace.ops[span.op].phase if span.activity is Activity.RUN else span.activity
            groups.setdefault(name, []).append((span.start, span.end))
        floor = np.full(_COLUMNS, -float(number))
        for kind in reversed([kind for kind in _COLORS if kind in groups]):
            shares = shares_by_slice(groups[kind], end, _COLUMNS) * 0.82
            axes.stairs(floor + shares, edges, baseline=floor, fill=True, color=_COLORS[kind], label=kind)
            floor = floor + shares
    axes.set_yticks([0.41, -0.59, -1.59], ["compute", "copy out", "copy in"])
    axes.set_xlabel("seconds since the step began")
    axes.set_xlim(0, end)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=8, frameon=False)


def _peak_label(name: str, subject: Subject) -> str:
    plan = subject.plan
    trace, prediction = plan.problem.trace, plan.simulate()
    if name == "planned":
        peak, op, seconds = prediction.peak_bytes, prediction.peak_op, prediction.step_seconds
    else:
        profile = plain_profile(trace)
        peak, op, seconds = (
            profile.peak_bytes + plan.problem.base_bytes,
            profile.peak_op,
            prediction.plain_step_seconds,
        )
    return f"{name}: {format_seconds(seconds)}, peak {format_bytes(peak)} at {trace.describe_op(op)}"
