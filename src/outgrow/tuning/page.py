"""An answer of the tuner as a page: samples per second against the batch, and all candidates in a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from outgrow.reporting.points import Cell, Column, Mark, PointsPage, Series, write_points
from outgrow.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outgrow.tuning.answer import Candidate, Tuning

_COLUMNS = (
    Column("batch"),
    Column("passes"),
    Column("fits"),
    Column("peak", "bytes"),
    Column("peak, run", "bytes"),
    Column("step", "seconds"),
    Column("step, run", "seconds"),
    Column("samples/s"),
    Column("samples/s, run"),
    Column("a sample's worth", "percent"),
    Column("goodput"),
)


def write_page(answer: Tuning, path: str | Path) -> None:
    """Write the page.

    Raises:
        ReportError: the file cannot be written.
    """
    feasible = [item for item in answer.candidates if item.feasible]
    series = [
        _series("predicted", feasible, lambda item: item.predicted_samples_per_second, dashed=True),
        _series("run", feasible, lambda item: item.measured_samples_per_second, joined=False),
        _series("goodput", feasible, lambda item: item.goodput if answer.objective == "goodput" else None),
        _series("chosen", [answer.chosen], lambda item: item.samples_per_second, starred=True),
    ]
    write_points(
        path,
        PointsPage(
            title=f"The batch that is worth it: {answer.batch_size}",
            subtitle=f"Samples per second against the batch, within {format_bytes(answer.budget_bytes)}",
            facts=tuple((name, text, "") for name, text in answer.in_words().items()),
            x_label="samples in a step",
            y_label="samples per second",
            series=tuple(item for item in series if item.marks),
            columns=_COLUMNS,
            rows=tuple(map(_row, answer.candidates)),
            notes=(
                f"The learning rate follows the {answer.rule} rule: {answer.rule.source}.",
                "Predicted: before a batch was run. Goodput: samples per second, times what a sample is worth "
                "(Pollux, OSDI 2021).",
            ),
        ),
    )


def _series(
    label: str,
    candidates: list[Candidate],
    speed: Callable[[Candidate], float | None],
    *,
    dashed: bool = False,
    joined: bool = True,
    starred: bool = False,
) -> Series:
    marks = [(item, speed(item)) for item in candidates]
    return Series(
        label,
        label,
        tuple(Mark(item.batch_size, value, _notes(item)) for item, value in marks if value is not None),
        dashed=dashed,
        joined=joined,
        starred=starred,
    )


def _notes(item: Candidate) -> tuple[str, ...]:
    passes = f", {item.accumulation} passes of {item.micro_batch}" if item.accumulation > 1 else ""
    peak, step = format_bytes(item.predicted_peak_bytes), format_seconds(item.predicted_step_seconds)
    return f"batch {item.batch_size}{passes}", f"predicted: peak {peak}, step {step}"


def _row(item: Candidate) -> tuple[Cell, ...]:
    return (
        item.batch_size,
        item.accumulation,
        "yes" if item.feasible else "no",
        item.predicted_peak_bytes,
        item.measured_peak_bytes,
        item.predicted_step_seconds,
        item.measured_step_seconds,
        round(item.predicted_samples_per_second, 1),
        None if item.measured_samples_per_second is None else round(item.measured_samples_per_second, 1),
        100 * item.efficiency,
        round(item.goodput, 1),
    )
