"""`outgrow compare`: the time of a step against its peak memory, policy by policy and budget by budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import outgrow
from outgrow.cli.interleave import Setup
from outgrow.cli.job import Job, OptionError, make_job
from outgrow.cli.options import Options
from outgrow.cli.plot import Line, check_plot_path, draw
from outgrow.cli.points import Curves, Pair, Point, measure, predict, steps_to_measure
from outgrow.cost.hardware import Hardware
from outgrow.cost.measure import this_machine
from outgrow.cost.profiles import find_hardware
from outgrow.planning.policies import find as find_policy
from outgrow.progress import counting_bar
from outgrow.reporting.files import check_writable
from outgrow.reporting.points import Cell, Column, Mark, PointsPage, Series, write_points
from outgrow.runtime.tiers.disk import SpillFile
from outgrow.units import format_bytes, format_seconds

_MOST_PERCENT = 10_000.0


def compare(
    options: Options,
    budgets: str,
    policies: str | None,
    rounds: int | None,
    plot: Path | None,
    hardware: str | None,
    as_json: bool,
    report: Path | None = None,
) -> None:
    """Predict, and with `rounds` measure that many steps of each pair; print a table or one line of JSON.

    Args:
        options: what to train; its budget and policy do not count.
        budgets: percentages of the plain peak with commas between them.
        policies: names of policies with commas between them; None for all.
        rounds: measured steps of each pair; None measures nothing.
        plot: where a plot goes; None draws none.
        hardware: the name of the device to predict for; None is the machine at hand.
        as_json: print JSON rather than a table.
        report: where a page with the points goes; None writes none.
    """
    if options.workspace is not None and hardware is None:
        raise OptionError("--workspace is of a GPU: name one with --hardware, or leave it out")
    if hardware is not None and rounds is not None:
        raise OptionError("--measure trains on this machine: leave --hardware away, or --measure")
    profile = None if hardware is None else find_hardware(hardware)
    percents = parse_percents(budgets)
    names = parse_policies(policies)
    job = make_job(options)
    if plot is not None:
        check_plot_path(plot)
    if report is not None:
        check_writable(report)
    if rounds is not None:
        _check_what_workers_need(job)
    pairs = [Pair(name, percent) for name in names for percent in percents]
    device, predicted, measured = _work_out(job, options, pairs, rounds, profile)
    title = job.title
    if profile is not None:
        title += f", {device.name}"
    if plot is not None:
        draw(plot, title, _lines(names, predicted, measured))
    if report is not None:
        write_points(report, _page(title, job, device, predicted, measured))
    if as_json:
        curves = {"predicted": asdict(predicted), "measured": None if measured is None else asdict(measured)}
        print(json.dumps(_heading(job, device) | curves), flush=True)
        return
    stdout = Console()
    stdout.print(_table(f"{title}: predicted", names, predicted))
    if measured is not None:
        stdout.print(_table(f"{title}: measured", names, measured))


def parse_percents(text: str) -> tuple[float, ...]:
    """Budgets from "100,80,60": percentages of the plain peak, each once, in their order.

    Raises:
        OptionError: one of them is no number above 0.
    """
    found: list[float] = []
    for word in text.split(","):
        try:
            percent = float(word.strip().removesuffix("%"))
        except ValueError:
            percent = float("nan")
        if not 0 < percent <= _MOST_PERCENT:  # a NaN fails every comparison
            raise OptionError(
                f"--budgets: {word.strip()!r} is no percentage above 0, up to {_MOST_PERCENT:g}, of the plain peak:"
                " give numbers with commas between them, for example 100,60,40"
            )
        found.append(percent)
    return tuple(dict.fromkeys(found))


def parse_policies(text: str | None) -> tuple[str, ...]:
    """Policies from "auto,lru", each once, in their order; all of them for None.

    Raises:
        UnknownPolicy: there is none of that name.
    """
    if text is None:
        return outgrow.policies()
    return tuple(dict.fromkeys(find_policy(word.strip()).name for word in text.split(",")))


def _check_what_workers_need(job: Job) -> None:
    """What would fail in every worker is a mistake in the input, and said before any of them starts."""
    next(job.batches())
    SpillFile(job.spill_dir, allow_tmpfs=job.allow_tmpfs).close()


def _work_out(
    job: Job, options: Options, pairs: Sequence[Pair], rounds: int | None, profile: Hardware | None
) -> tuple[Hardware, Curves, Curves | None]:
    with counting_bar(refresh_per_second=4) as progress:  # drawing takes time from the steps
        planning = progress.add_task("tracing", total=len(pairs))

        def planned(pair: Pair) -> None:
            progress.update(planning, description=f"planned {pair.policy} at {pair.percent:g}%", advance=1)

        hardware = this_machine() if profile is None else profile
        trace = job.fake_trace(hardware)
        predicted = predict(trace, hardware, pairs, workspace=job.workspace, on_pair=planned)
        if rounds is None:
            return hardware, predicted, None
        # A session that does not fit takes fewer steps than this total.
        training = progress.add_task("training", total=steps_to_measure(len(pairs), rounds, predicted))

        def stepped(setup: Setup) -> None:
            progress.update(training, description=f"training {setup.name}", advance=1)

        return hardware, predicted, measure(options, pairs, rounds, on_step=stepped)


def _heading(job: Job, hardware: Hardware) -> dict[str, Any]:
    return {
        "network": job.network.name,
        "batch": job.shape.batch,
        "image_size": job.shape.image_size,
        "optimizer": job.optimizer,
        "dtype": str(job.dtype).removeprefix("torch."),
        "channels_last": job.channels_last,
        "workspace": job.workspace,
        "hardware": hardware.to_document(),
    }


def _table(title: str, names: Sequence[str], curves: Curves) -> Table:
    table = Table(title=title)
    table.add_column("policy")
    for heading in ("budget", "time / plain", "peak", "offloaded", "recomputed"):
        table.add_column(heading, justify="right")
    for name in names:
        for point in curves.points:
            if point.policy == name:
                table.add_row(name, f"{point.budget_percent:g}%", *_cells(point))
        table.add_section()
    table.caption = (
        f"A plain step peaks at {format_bytes(curves.plain_peak_bytes)} and takes "
        f"{format_seconds(curves.plain_step_seconds)}; budgets are percentages of that peak."
    )
    problems = dict.fromkeys(point.problem for point in curves.points if point.problem is not None)
    for problem in problems:
        table.caption += f"\n{problem}"
    return table


def _cells(point: Point) -> tuple[str, ...]:
    if point.time_ratio is None or point.peak_bytes is None:
        least = "" if point.least_budget_bytes is None else f"(least {format_bytes(point.least_budget_bytes)})"
        return ("failed" if point.problem else "does not fit", least, "", "")
    return (
        f"{point.time_ratio:.2f} x",
        format_bytes(point.peak_bytes),
        format_bytes(point.offloaded_bytes or 0),
        format_bytes(point.recomputed_bytes or 0),
    )


def _lines(names: Sequence[str], predicted: Curves, measured: Curves | None) -> list[Line]:
    lines: list[Line] = []
    for name in names:
        lines.append(Line(f"{name}, predicted", name, _ratios(name, predicted), measured=False))
        if measured is not None:
            lines.append(Line(f"{name}, measured", name, _ratios(name, measured), measured=True))
    return lines


def _ratios(name: str, curves: Curves) -> tuple[tuple[float, float], ...]:
    return tuple(
        (point.peak_ratio, point.time_ratio)
        for point in curves.points
        if point.policy == name and point.peak_ratio is not None and point.time_ratio is not None
    )


_COLUMNS = (
    Column("policy"),
    Column("figures"),
    Column("budget", "percent"),
    Column("budget in bytes", "bytes"),
    Column("time / plain", "factor"),
    Column("step", "seconds"),
    Column("peak", "bytes"),
    Column("offloaded", "bytes"),
    Column("recomputed", "bytes"),
    Column("waits", "seconds"),
    Column("least budget", "bytes"),
)


def _page(title: str, job: Job, hardware: Hardware, predicted: Curves, measured: Curves | None) -> PointsPage:
    """The points as a page; what was measured as full lines, what was predicted as dashed ones."""
    kinds = [("predicted", predicted)] + ([] if measured is None else [("measured", measured)])
    series: list[Series] = []
    rows: list[tuple[Cell, ...]] = []
    notes: dict[str, None] = {}
    for word, curves in kinds:
        for name in dict.fromkeys(point.policy for point in curves.points):
            points = [point for point in curves.points if point.policy == name]
            marks = tuple(mark for mark in map(_mark, points) if mark is not None)
            series.append(Series(f"{name}, {word}", name, marks, dashed=word == "predicted"))
            rows += [_row(point, word) for point in points]
        notes |= dict.fromkeys(point.problem for point in curves.points if point.problem is not None)
    facts = [("Plain step's peak", format_bytes(curves.plain_peak_bytes), word) for word, curves in kinds] + [
        ("Plain step", format_seconds(curves.plain_step_seconds), word) for word, curves in kinds
    ]
    return PointsPage(
        title=title,
        subtitle=f"Time against memory, policy by policy and budget by budget, on {hardware.name}",
        facts=tuple(facts),
        x_label="peak / plain",
        y_label="time / plain",
        series=tuple(series),
        columns=_COLUMNS,
        rows=tuple(rows),
        notes=("Budgets are percentages of the plain step's peak.", *notes),
        settings=tuple((job.settings() | {"device": hardware.name, "Outgrow": outgrow.__version__}).items()),
        x_line=1.0,
        y_line=1.0,
    )


def _mark(point: Point) -> Mark | None:
    if point.peak_ratio is None or point.time_ratio is None:
        return None
    notes = [f"budget {point.budget_percent:g}%, {format_bytes(point.budget_bytes)}"]
    if point.peak_bytes is not None and point.step_seconds is not None:
        notes.append(f"peak {format_bytes(point.peak_bytes)}, step {format_seconds(point.step_seconds)}")
    return Mark(point.peak_ratio, point.time_ratio, tuple(notes))


def _row(point: Point, word: str) -> tuple[Cell, ...]:
    if not point.fits:
        word = f"{word}: {'failed' if point.problem else 'does not fit'}"
    return (
        point.policy,
        word,
        point.budget_percent,
        point.budget_bytes,
        point.time_ratio,
        point.step_seconds,
        point.peak_bytes,
        point.offloaded_bytes,
        point.recomputed_bytes,
        point.stall_seconds,
        point.least_budget_bytes,
    )
