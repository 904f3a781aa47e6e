"""`outgrow tune`: the batch that is worth it under a budget, and the learning rate that goes with it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outgrow.cli.datasets import epoch_samples
from outgrow.cli.job import OptionError, is_own, make_job
from outgrow.cli.options import Options
from outgrow.cli.own import make_own_job
from outgrow.cli.plot import check_plot_path
from outgrow.reporting.files import check_writable
from outgrow.tracing.capture import TrainingStep
from outgrow.tuning.answer import Candidate, Tuning
from outgrow.tuning.race import Objective
from outgrow.tuning.tuner import tune as find_batch
from outgrow.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Search:
    """How to search: see `outgrow.tune`."""

    objective: Objective
    noise_scale: float | None
    max_batch: int | None
    trials: int


@dataclass(frozen=True)
class Results:
    """Where a picture, a page and the plan of the answer go; None where none was asked for."""

    plot: Path | None = None
    report: Path | None = None
    plan: Path | None = None

    def check(self) -> None:
        """Fail before any work is done for a file that could not be written in the end."""
        if self.plot is not None:
            check_plot_path(self.plot)
        for path in (self.report, self.plan):
            if path is not None:
                check_writable(path)

    def write(self, answer: Tuning) -> None:
        """Write what was asked for."""
        if self.plot is not None:
            answer.plot(self.plot)
        if self.report is not None:
            answer.report(self.report)
        if self.plan is not None:
            answer.plan.save(self.plan)


def tune(options: Options, search: Search, results: Results, as_json: bool, given: Collection[str] = ()) -> None:
    """Tune, and print the answer: tables, or with `as_json` one line of JSON with the tables on stderr.

    `given` has the names of the options that were typed: some mean nothing for a user's own file.
    """
    results.check()
    name, make_step, epoch = _subject(options, given)
    answer = find_batch(
        make_step,
        budget=options.budget or "100%",
        objective=search.objective,
        base_batch=options.batch,
        max_batch=search.max_batch,
        epoch_samples=epoch,
        noise_scale=search.noise_scale,
        policy=options.policy or "auto",
        trials=search.trials,
        spill_dir=options.spill_dir,
        allow_tmpfs=options.allow_tmpfs,
    )
    results.write(answer)
    console = Console(stderr=as_json)
    console.print(_table(name, answer))
    console.print(str(answer), highlight=False)
    if as_json:
        print(json.dumps({"network": name, **answer.to_document()}), flush=True)


def _subject(options: Options, given: Collection[str]) -> tuple[str, Callable[..., TrainingStep], int | None]:
    """What is tuned: its name, the function that makes its steps, and the samples of an epoch if they are known."""
    if is_own(options.network):
        own = make_own_job(options, given)
        if own.batch is None:
            raise OptionError(f"{own.function} in {own.path} takes no batch size: there is none to tune")
        # The tuner reads off the function whether it knows of several passes: the file's says it, not the job's.
        knows_passes = "accumulation" in inspect.signature(own.make).parameters
        return options.network, own.sized_step if knows_passes else lambda batch: own.sized_step(batch), None
    job = make_job(options)
    job.batches()  # a data set that is not there is said now, not after a minute of planning
    return job.network.name, job.sized_step, epoch_samples(job.data, job.network, job.shape.image_size)


def _table(name: str, answer: Tuning) -> Table:
    table = Table(title=f"{name}, budget {format_bytes(answer.budget_bytes)}")
    for heading in ("batch", "peak", "step", "samples/s", "run", "worth", "goodput"):
        table.add_column(heading, justify="right", no_wrap=True)
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
