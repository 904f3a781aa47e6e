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
    fitting = [item for item in answer.candidates if item.feasible]
    was_run = [item for item in fitting if item.measured_step_seconds is not None]
    series = [  # the first is drawn on top
        _series("chosen", [answer.chosen], lambda item: item.samples_per_second, starred=True),
        *_predicted("predicted", fitting, lambda item: item.predicted_samples_per_second),
        _series("run", was_run, lambda item: item.samples_per_second),
    ]
    if answer.objective == "goodput":
        series += [
            *_predicted("goodput", fitting, lambda item: item.predicted_samples_per_second * item.efficiency),
            _series("goodput, run", was_run, lambda item: item.goodput, group="goodput"),
        ]
    write_points(
        path,
        PointsPage(
            title=f"The batch that is worth it: {answer.batch_size}",
            subtitle=f"Samples per second against the batch, within {format_bytes(answer.budget_bytes)}",
            facts=tuple(_fact(name, text) for name, text in answer.in_words().items()),
            x_label="samples in a step",
            y_label="samples per second",
            series=tuple(item for item in series if item.marks),
            columns=_COLUMNS,
            rows=tuple(map(_row, answer.candidates)),
            notes=(
                f"The learning rate follows the {answer.rule} rule: {answer.rule.source}.",
                "Predicted: from steps that were run. The base batch and the ends of the curve are run first, to set "
                "estimates right, and are predicted from themselves as well; all others before they are run.",
                "Goodput: samples per second, times what a sample is worth (Pollux, OSDI 2021).",
            ),
        ),
    )


def _fact(name: str, text: str) -> tuple[str, str, str]:
    """A card: what stands in brackets, or what a size is a part of, is its small print."""
    value, bracket, remark = text.partition(" (")
    if bracket:
        return name, value, remark.removesuffix(")")
    value, of, whole = text.partition(" of ")
    return name, value, f"of {whole}" if of else ""


def _predicted(label: str, candidates: list[Candidate], speed: Callable[[Candidate], float]) -> list[Series]:
    """A curve over the batches of one pass; those of several passes lie beside it."""
    one = [item for item in candidates if item.accumulation == 1]
    several = [item for item in candidates if item.accumulation > 1]
    of_one = label if label == "predicted" else f"{label}, predicted"
    return [
        _series(of_one, one, speed, group=label, dashed=True, joined=True),
        _series(f"{of_one}, several passes", several, speed, group=label, dashed=True),
    ]


def _series(
    label: str,
    candidates: list[Candidate],
    speed: Callable[[Candidate], float],
    *,
    group: str = "",
    dashed: bool = False,
    joined: bool = False,
    starred: bool = False,
) -> Series:
    marks = tuple(Mark(item.batch_size, float(f"{speed(item):.4g}"), _notes(item)) for item in candidates)
    return Series(label, group or label, marks, dashed=dashed, joined=joined, starred=starred)


def _notes(item: Candidate) -> tuple[str, ...]:
    passes = f", {item.accumulation} passes of {item.micro_batch}" if item.accumulation > 1 else ""
    peak, step = format_bytes(item.predicted_peak_bytes), format_seconds(item.predicted_step_seconds)
    notes = (f"batch {item.batch_size}{passes}", f"predicted: peak {peak}, step {step}")
    if item.measured_peak_bytes is None or item.measured_step_seconds is None:
        return notes
    peak, step = format_bytes(item.measured_peak_bytes), format_seconds(item.measured_step_seconds)
    return *notes, f"run: peak {peak}, step {step}"


def _row(item: Candidate) -> tuple[Cell, ...]:
    run = item.measured_samples_per_second
    size = (item.batch_size, item.accumulation, "yes" if item.feasible else "no", item.predicted_peak_bytes)
    if not item.feasible:  # a step that does not fit takes no time
        return *size, item.measured_peak_bytes, None, None, None, None, None, None
    return (
        *size,
        item.measured_peak_bytes,
        item.predicted_step_seconds,
        item.measured_step_seconds,
        round(item.predicted_samples_per_second, 1),
        None if run is None else round(run, 1),
        100 * item.efficiency,
        round(item.goodput, 1),
    )
