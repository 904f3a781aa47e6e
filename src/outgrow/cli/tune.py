"""`outgrow tune`: the batch that is worth it under a budget, and the learning rate that goes with it."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outgrow.cli.datasets import epoch_samples
from outgrow.cli.job import Job, make_job
from outgrow.cli.options import Options
from outgrow.cli.plot import check_plot_path
from outgrow.tuning.answer import Candidate, Tuning
from outgrow.tuning.tuner import Objective
from outgrow.tuning.tuner import tune as find_batch
from outgrow.units import format_bytes, format_seconds


def tune(
    options: Options,
    objective: Objective,
    noise_scale: float | None,
    max_batch: int | None,
    trials: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Tune, and print the answer: tables, or with `as_json` one line of JSON with the tables on stderr."""
    job = make_job(options)
    assert job.budget_bytes is not None, "the option is required"
    if plot is not None:
        check_plot_path(plot)
    job.batches()  # a data set that is not there is said now, not after a minute of planning
    answer = find_batch(
        job.sized_step,
        budget=job.budget_bytes,
        objective=objective,
        base_batch=job.shape.batch,
        max_batch=max_batch,
        epoch_samples=epoch_samples(job.data, job.network, job.shape.image_size),
        noise_scale=noise_scale,
        policy=job.policy,
        trials=trials,
        spill_dir=job.spill_dir,
        allow_tmpfs=job.allow_tmpfs,
    )
    if plot is not None:
        answer.plot(plot)
    console = Console(stderr=as_json)
    console.print(_table(job, answer))
    console.print(str(answer), highlight=False)
    if as_json:
        print(json.dumps({"network": job.network.name, **answer.to_document()}), flush=True)


def _table(job: Job, answer: Tuning) -> Table:
    table = Table(title=f"{job.network.name}, budget {format_bytes(answer.budget_bytes)}")
    for name in ("batch", "peak", "step", "samples/s", "run", "worth", "goodput"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in answer.candidates:
        is_chosen = (item.micro_batch, item.accumulation) == (answer.micro_batch, answer.accumulation)
        table.add_row(*_row(item), style="bold green" if is_chosen else "" if item.feasible else "dim")
    table.caption = "peak, step, samples/s: as predicted; run: samples/s as measured; worth: that of one sample"
    return table


def _row(item: Candidate) -> tuple[str, ...]:
    batch = str(item.batch_size)
    if item.accumulation > 1:
        batch += f" = {item.accumulation} x {item.micro_batch}"
    if not item.feasible:
        return batch, format_bytes(item.predicted_peak_bytes), "does not fit", "", "", "", ""
    run = item.measured_samples_per_second
    return (
        batch,
        format_bytes(item.predicted_peak_bytes),
        format_seconds(item.predicted_step_seconds),
        f"{item.predicted_samples_per_second:.1f}",
        "" if run is None else f"{run:.1f}",
        f"{item.efficiency:.2f}",
        f"{item.goodput:.1f}",
    )
