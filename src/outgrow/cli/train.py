"""`outgrow train`: trains a network under a budget, or plainly without one, and says what it took."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

import outgrow
from outgrow.cli.datasets import WHOLE, Batch, Part
from outgrow.cli.job import Job, OptionError, check_device, is_own, make_job
from outgrow.cli.memory import PeakMeter, resident_bytes, settle
from outgrow.cli.options import DeviceName, Options
from outgrow.cli.outputs import NO_OUTPUTS, Outputs
from outgrow.cost.workspaces import Workspace
from outgrow.errors import OutgrowError
from outgrow.planning.plan import Plan
from outgrow.progress import log_to
from outgrow.reporting.subject import Subject
from outgrow.units import format_bytes, format_seconds

PLAIN = "plain"
_GAUGE_CELLS = 12


class Budgeted(Protocol):
    """What a session is opened with: a `Job`, or a job of a user's own file."""

    @property
    def budget_bytes(self) -> int | None: ...
    @property
    def policy(self) -> str: ...
    @property
    def spill_dir(self) -> Path | None: ...
    @property
    def allow_tmpfs(self) -> bool: ...
    @property
    def workspace(self) -> Workspace | None: ...


class Reported(Budgeted, Protocol):
    """What a report is made of when it was trained."""

    @property
    def title(self) -> str: ...
    def settings(self) -> dict[str, str]: ...


def train(
    options: Options,
    steps: int,
    as_json: bool,
    outputs: Outputs = NO_OUTPUTS,
    verbose: bool = False,
    nproc: int = 1,
    given: Collection[str] = (),
    followed: Path | None = None,
) -> None:
    """Train and print the result: a table, or with `as_json` one line of JSON with the table on stderr.

    `outputs` are written when the training is over, also when Ctrl-C or an error ended it: of the steps until then.
    With `verbose` the session's log goes to standard error. With `nproc` above 1 so many processes train together.
    `given` has the names of the options that were typed: some mean nothing for a user's own file. `followed` is the
    file of a plan that is followed from the first step.
    """
    from outgrow.cli import own  # it trains with what is here

    has_own_step = is_own(options.network)
    check_device(options.device)
    memory = torch.cuda.mem_get_info()[1] if options.device == "cuda" else None
    job: Reported = own.make_own_job(options, given) if has_own_step else make_job(options, memory)
    _refuse_idle_options(options, outputs, followed)
    _refuse_workspace_on_cpu(options, has_own_step)
    _refuse_what_processes_cannot(nproc, outputs, followed, has_own_step, options.device)
    plan = None if followed is None else _load_plan(followed)
    outputs.check()
    stderr = Console(stderr=True)
    trained = _Trained()
    try:
        with log_to(stderr) if verbose else nullcontext():
            if isinstance(job, own.OwnJob):
                result = own.run(job, steps, stderr, plan=plan, after_step=trained.count)
            elif nproc > 1:
                from outgrow.cli.ranks import run_ranks

                assert isinstance(job, Job)
                result = run_ranks(options, job, nproc, steps, stderr)
            else:
                assert isinstance(job, Job)
                result = run(job, steps, stderr, plan=plan, after_step=trained.count)
    except BaseException:  # Ctrl-C, too
        if outputs.names:
            _write_what_there_is(outputs, trained, job, steps, stderr)
        raise
    (stderr if as_json else Console()).print(_table(result))
    if as_json:
        print(json.dumps(result), flush=True)
    if trained.session is not None:
        outputs.write(trained.subject(job), stderr)


@dataclass
class _Trained:
    """The session of a training, and how many of its steps have ended; None in a plain run, and before the first."""

    session: outgrow.Session | None = None
    steps: int = 0

    def count(self, session: outgrow.Session | None) -> None:
        self.session = session
        self.steps += 1

    def subject(self, job: Reported) -> Subject:
        """What a report of it is about; there has to be a session."""
        assert self.session is not None
        assert self.session.plan is not None, "every step that ends leaves a plan"
        history = self.session.history
        first = self.steps - len(history) + 1
        return Subject(job.title, self.session.plan, history, first, job.settings(), self.session.budget_bytes)


def _write_what_there_is(outputs: Outputs, trained: _Trained, job: Reported, steps: int, stderr: Console) -> None:
    """What a training that ended early has to show, and a line on it; what ended it is the error that is raised."""
    if trained.session is None:
        said = f"no step was finished: nothing is written for {', '.join(outputs.names)}"
    else:
        try:
            outputs.write(trained.subject(job), stderr)
            written = ", ".join(str(path) for path in outputs.paths)
            said = f"stopped after {trained.steps} of {steps} steps: {written} shows these"
        except OutgrowError as error:
            said = str(error)
    stderr.print(f"outgrow: {said}", markup=False, highlight=False, soft_wrap=True)


def run(
    job: Job,
    steps: int,
    stderr: Console,
    *,
    part: Part = WHOLE,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    plan: Plan | None = None,
    after_step: Callable[[outgrow.Session | None], None] = lambda session: None,
) -> dict[str, Any]:
    """Train for some steps; the figures under the keys that `outgrow train --json` prints.

    A process that trains together with others has a `part` of the samples, and its model is what `wrap` makes of it.
    A session follows `plan` from its first step, if there is one. `after_step` is called after each step, with the
    session if there is one.
    """
    batches = job.batches(part)
    if part is WHOLE:  # else it was seen to before any of the processes was started
        check_that_it_fits(job, stderr)
    losses: list[float] = []
    step_seconds: list[float] = []
    import_module("torch._dynamo")  # the first optimizer loads it: that is no memory of the training's
    settle()
    baseline = resident_bytes()
    meter = PeakMeter()
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with ExitStack() as stack:
        model, optimizer = job.build()
        if wrap is not None:
            model = wrap(model)
        session = stack.enter_context(open_session(job, model, optimizer, plan)) if job.budget_bytes else None
        progress = stack.enter_context(make_progress(stderr))
        task = progress.add_task("", total=steps, loss="", speed="", memory="")
        for index in range(steps):
            drawn = tuple(islice(batches, job.accumulation))
            loss, seconds = timed_step(job, model, optimizer, drawn, session)
            losses.append(loss)
            step_seconds.append(seconds)
            if index == 0:
                # The first step records, and in plain PyTorch it warms up: it is left out.
                meter.start()
            else:
                meter.sample()
            after_step(session)
            show_step(progress, task, job.shape.batch * job.accumulation, loss, seconds, session)
        # With one step there is none but the first.
        peak = meter.peak_bytes if steps > 1 else None
        on_device = torch.cuda.max_memory_allocated() if job.device == "cuda" else None
        labels = job.labels | {"device_peak_bytes": on_device}
        return result_of(labels, session, peak, baseline, step_seconds, losses, fingerprint(model))


def result_of(
    labels: dict[str, Any],
    session: outgrow.Session | None,
    rss_peak: int | None,
    baseline: int,
    step_seconds: list[float],
    losses: Sequence[float | None],
    parameters: str,
) -> dict[str, Any]:
    """The object that `outgrow train --json` prints. Sizes in bytes; a loss is None where the step returned none."""
    return {
        "network": labels["network"],
        "batch": labels["batch"],
        "accumulation": labels.get("accumulation", 1),
        **_session_figures(session),
        "rss_peak_bytes": None if rss_peak is None else rss_peak - baseline,
        "baseline_rss_bytes": baseline,
        # PyTorch's own statistic, of a GPU alone: all steps, the first one too, with or without a session.
        "device_peak_bytes": labels.get("device_peak_bytes"),
        "step_seconds": step_seconds,
        # JSON has no word for infinite or undefined: a loss that diverged is null.
        "losses": [loss if loss is not None and math.isfinite(loss) else None for loss in losses],
        "parameters_sha256": parameters,
    }


def check_that_it_fits(job: Job, stderr: Console) -> None:
    """As the job's own, with a word on standard error meanwhile."""
    if job.budget_bytes is not None:
        with stderr.status("Tracing and planning") if stderr.is_terminal else nullcontext():
            job.check_that_it_fits()


def open_session(
    job: Budgeted,
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    plan: Plan | None = None,
) -> outgrow.Session:
    """The session of a job that has a budget."""
    assert job.budget_bytes is not None
    return outgrow.Session(
        model,
        optimizer,
        budget=job.budget_bytes,
        policy=job.policy,
        plan=plan,
        spill_dir=job.spill_dir,
        allow_tmpfs=job.allow_tmpfs,
        workspace=job.workspace,
    )


def timed_step(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    session: outgrow.Session | None,
) -> tuple[float, float]:
    """One step, in the session's care if there is one: its loss and its time in seconds."""
    began = time.perf_counter()
    with nullcontext() if session is None else session.step():
        loss = job.step(model, optimizer, *batches)
    if loss.is_cuda:  # the step was asked for, and is under way
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return loss.item(), seconds


def make_progress(stderr: Console) -> Progress:
    """A progress bar, with the highest live bytes so far against the budget; silent where there is no terminal."""
    return Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TextColumn("{task.fields[memory]}", markup=False),
        TimeRemainingColumn(),
        console=stderr,
        disable=not stderr.is_terminal,
        refresh_per_second=4,  # drawing takes time from the step
    )


def show_step(
    progress: Progress,
    task: TaskID,
    batch: int | None,
    loss: float | None,
    seconds: float,
    session: outgrow.Session | None,
) -> None:
    """Move the bar on by one step; what nobody knows is left out."""
    memory = ""
    if session is not None and session.history:
        memory = memory_gauge(session.history[-1].measured_peak_bytes, session.budget_bytes)
    speed = f"{seconds:.2f} s/step" if batch is None else f"{batch / seconds:.1f} samples/s"
    said = "" if loss is None else f"loss {loss:.4f}"
    progress.update(task, advance=1, loss=said, speed=speed, memory=memory)


def memory_gauge(peak_bytes: int, budget_bytes: int) -> str:
    """A peak against its budget, as a bar and in words: "peak [######--] 612.0 MiB of 700.0 MiB"."""
    filled = min(_GAUGE_CELLS, round(peak_bytes / budget_bytes * _GAUGE_CELLS))
    bar = "#" * filled + "-" * (_GAUGE_CELLS - filled)
    return f"peak [{bar}] {format_bytes(peak_bytes)} of {format_bytes(budget_bytes)}"


def fingerprint(*models: nn.Module) -> str:
    """SHA-256, in hexadecimal, over the bytes of all parameters and buffers, of each model in order of name."""
    digest = hashlib.sha256()
    for model in models:
        for _, tensor in sorted(model.state_dict().items()):
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def _refuse_idle_options(options: Options, outputs: Outputs, followed: Path | None = None) -> None:
    """Refuse what would do nothing in a plain run, rather than let somebody believe in it."""
    if options.budget is not None:
        return
    given = {
        "--plan": followed is not None,
        "--policy": options.policy is not None,
        "--spill-dir": options.spill_dir is not None,
        "--allow-tmpfs": options.allow_tmpfs,
        "--workspace": options.workspace is not None,
    }
    for name, is_given in (given | dict.fromkeys(outputs.names, True)).items():
        if is_given:
            raise OptionError(f"{name} needs a --budget: without one, plain PyTorch trains")


def _refuse_workspace_on_cpu(options: Options, has_own_step: bool) -> None:
    if options.workspace is not None and options.device == "cpu" and not has_own_step:
        raise OptionError(
            "--workspace is for --device cuda: on a CPU, convolutions take what oneDNN needs, and the session sees "
            "to it"
        )


def _refuse_what_processes_cannot(
    nproc: int, outputs: Outputs, followed: Path | None, has_own_step: bool, device: DeviceName
) -> None:
    if nproc == 1:
        return
    if device != "cpu":
        raise OptionError("--nproc trains on the CPU: leave it out, or --device")
    if has_own_step:
        raise OptionError("--nproc is for the networks that have a name: start a step of your own with torchrun")
    if followed is not None:
        raise OptionError("--plan is of a step in one process: leave it out, or --nproc")
    if outputs.names:
        raise OptionError(f"{outputs.names[0]} shows the session of one process: leave it out, or --nproc")


def _load_plan(path: Path) -> Plan:
    try:
        return Plan.load(path)
    except OSError as error:
        raise OptionError(f"--plan {path} cannot be read: {error.strerror}") from error


# What `outgrow train --json` has straight from a session's `Summary`.
FROM_SUMMARY = (
    "predicted_peak_bytes",
    "kept_bytes",
    "offloaded_bytes",
    "recomputed_bytes",
    "stall_seconds",
    "recompute_seconds",
    "plan_seconds",
    "oom_retries",
    "replans",
)


def _session_figures(session: outgrow.Session | None) -> dict[str, Any]:
    if session is None:
        figures = dict.fromkeys(("budget_bytes", "measured_peak_bytes", "highest_peak_bytes", *FROM_SUMMARY))
        return {"policy": PLAIN, **figures}
    summary = session.summary()
    return {
        "policy": summary.policy,
        "budget_bytes": summary.budget_bytes,
        # Of the last step, as the prediction is; and of all steps, the first one too, which has no plan yet.
        "measured_peak_bytes": summary.measured_peak_bytes,
        "highest_peak_bytes": session.peak_bytes,
        **{name: getattr(summary, name) for name in FROM_SUMMARY},
    }


def _table(result: dict[str, Any]) -> Table:
    batch = result["batch"]
    title = ", ".join((result["network"], *([] if batch is None else [f"batch {batch}"]), result["policy"]))
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")

    def row(label: str, key: str, form: Any) -> None:
        if result[key] is not None:
            table.add_row(label, form(result[key]))

    nproc = result.get("nproc", 1)
    seconds = statistics.median(result["step_seconds"])
    loss = result["losses"][-1]
    table.add_row("steps", str(len(result["losses"])))
    table.add_row("last loss", "none, or diverged" if loss is None else f"{loss:.4f}")
    table.add_row("time of a step (median)", format_seconds(seconds))
    if nproc > 1:
        table.add_row("processes", str(nproc))
        table.add_row("synchronizations", f"{result['synchronizations']} for {result['samples']} samples")
    if batch is not None:
        table.add_row("samples per second", f"{nproc * batch * result['accumulation'] / seconds:.1f}")
    row("budget", "budget_bytes", format_bytes)
    row("peak, predicted", "predicted_peak_bytes", format_bytes)
    row("peak, measured", "measured_peak_bytes", format_bytes)
    row("peak of all steps", "highest_peak_bytes", format_bytes)
    row("peak of the GPU's allocator", "device_peak_bytes", format_bytes)
    row("growth of the resident set", "rss_peak_bytes", format_bytes)
    row("kept", "kept_bytes", format_bytes)
    row("offloaded", "offloaded_bytes", format_bytes)
    row("recomputed", "recomputed_bytes", format_bytes)
    row("waited for copies, last step", "stall_seconds", format_seconds)
    row("recomputing, last step", "recompute_seconds", format_seconds)
    row("planning", "plan_seconds", format_seconds)
    row("out-of-memory retries", "oom_retries", str)
    row("plans made anew", "replans", str)
    for rank in result.get("ranks", ()):
        peak = rank["highest_peak_bytes"] or rank["rss_peak_bytes"]
        if peak is not None:
            table.add_row(f"peak of rank {rank['rank']}", format_bytes(peak))
    return table
