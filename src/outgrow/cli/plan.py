"""`outgrow plan`: what a step would take under a budget, without allocating any of its memory."""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from outgrow.cli.job import OptionError, gpu_here, is_own, make_job
from outgrow.cli.options import Options
from outgrow.cli.outputs import NO_OUTPUTS, Outputs
from outgrow.cli.own import make_own_job
from outgrow.cost.hardware import Hardware
from outgrow.cost.measure import this_machine
from outgrow.cost.profiles import find_hardware
from outgrow.cost.workspaces import Workspace
from outgrow.planning.floor import least_budget
from outgrow.planning.plan import Plan
from outgrow.reporting.subject import Subject
from outgrow.tracing.ir import Trace
from outgrow.tracing.liveness import plain_profile
from outgrow.units import format_bytes, format_seconds


class Planned(Protocol):
    """What is planned: a `Job`, or a job of a user's own file."""

    @property
    def labels(self) -> dict[str, Any]: ...
    @property
    def title(self) -> str: ...
    @property
    def budget_bytes(self) -> int | None: ...
    @property
    def workspace(self) -> Workspace | None: ...
    def settings(self) -> dict[str, str]: ...
    def fake_trace(self, hardware: Hardware | None = None) -> Trace: ...
    def plan(self, trace: Trace, budget_bytes: int, hardware: Hardware | None = None) -> Plan: ...


def plan(
    options: Options,
    hardware: str | None,
    as_json: bool,
    outputs: Outputs = NO_OUTPUTS,
    given: Collection[str] = (),
) -> None:
    """Trace, plan, and print what came out: a table, or with `as_json` one line of JSON.

    `hardware` names the device to plan for; None is the machine at hand. `given` has the names of the options that
    were typed: some mean nothing for a user's own file.
    """
    outputs.check()
    device = None if hardware is None else find_hardware(hardware)
    if options.device == "cuda":
        if device is not None:
            raise OptionError("--device cuda plans for the GPU that is here: leave --hardware away, or --device")
        device = gpu_here()
    memory = None if device is None else device.memory_bytes
    job: Planned = make_own_job(options, given, memory) if is_own(options.network) else make_job(options, memory)
    stderr = Console(stderr=True)
    with stderr.status("Tracing and planning") if stderr.is_terminal else nullcontext():
        device = this_machine() if device is None else device
        trace = job.fake_trace(device)
        made = make_plan(job, trace, device)
        result = figures(job, trace, made)
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        Console().print(result_table(result))
    outputs.write(Subject(job.title, made, settings=job.settings()), stderr)


def make_plan(job: Planned, trace: Trace, hardware: Hardware | None = None) -> Plan:
    """The job's plan; without a budget, for the plain step's peak."""
    budget = job.budget_bytes
    return job.plan(trace, plain_profile(trace).peak_bytes if budget is None else budget, hardware)


def figures(job: Planned, trace: Trace, made: Plan) -> dict[str, Any]:
    """What `outgrow plan --json` prints, by key."""
    profile = plain_profile(trace)
    prediction = made.simulate()
    return {
        **job.labels,
        "hardware": made.problem.hardware.name,
        "workspace": job.workspace,
        "policy": made.policy,
        "budget_bytes": made.budget_bytes,
        "plain_peak_bytes": profile.peak_bytes,
        "peak_op": trace.describe_op(profile.peak_op),
        "predicted_peak_bytes": prediction.peak_bytes,
        "predicted_peak_op": trace.describe_op(prediction.peak_op),
        "predicted_step_seconds": prediction.step_seconds,
        "plain_step_seconds": prediction.plain_step_seconds,
        "average_bytes": prediction.average_bytes,
        "plain_average_bytes": profile.average_bytes,
        "feasible": prediction.feasible,
        # Of what is certain: workspaces that a plan takes where bytes are free are none that it needs.
        "least_budget_bytes": least_budget(replace(made.problem, trace=trace)).bytes,
        "decisions": made.decisions_summary(),
    }


def result_table(result: dict[str, Any]) -> Table:
    """The figures for people."""
    sizes = {"batch": result["batch"], "size": result["image_size"]}
    known = [f"{name} {size}" for name, size in sizes.items() if size is not None]
    if result["workspace"] is not None:
        known.append(f"workspace {result['workspace']}")
    title = ", ".join((result["network"], *known, result["hardware"]))
    table = Table(title=title)
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column(result["policy"], justify="right")
    table.add_row("budget", "", format_bytes(result["budget_bytes"]))
    table.add_row("peak", format_bytes(result["plain_peak_bytes"]), format_bytes(result["predicted_peak_bytes"]))
    table.add_row(
        "average over the step",
        format_bytes(result["plain_average_bytes"]),
        format_bytes(result["average_bytes"]),
    )
    table.add_row(
        "time of a step (estimate)",
        format_seconds(result["plain_step_seconds"]),
        format_seconds(result["predicted_step_seconds"]),
    )
    for name, decision in result["decisions"].items():
        amount = f"{decision['count']} values, {format_bytes(decision['bytes'])}"
        table.add_row(name, "", amount)
    table.add_row("fits the budget", "", "yes" if result["feasible"] else "no")
    table.add_row("least budget", "", format_bytes(result["least_budget_bytes"]))
    table.caption = f"The plain step peaks at {result['peak_op']}, the planned one at {result['predicted_peak_op']}."
    return table
