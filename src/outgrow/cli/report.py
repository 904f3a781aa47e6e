"""`outgrow report`: a plan as a page to look at, without training anything."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from outgrow.cli.job import OptionError, make_job
from outgrow.cli.options import Options
from outgrow.cli.outputs import Outputs
from outgrow.cli.plan import make_plan
from outgrow.cost.measure import this_machine
from outgrow.cost.profiles import find_hardware
from outgrow.planning.plan import Plan
from outgrow.reporting.subject import Subject


def report(options: Options, hardware: str | None, output: Path) -> None:
    """Plan, or read a plan from the file that `options.network` names, and write its page.

    `hardware` names the device to plan for; None is the machine at hand.
    """
    outputs = Outputs(report=output)
    outputs.check()
    stderr = Console(stderr=True)
    with stderr.status("Tracing and planning") if stderr.is_terminal else nullcontext():
        if options.network.endswith(".json"):
            _refuse_idle_options(options, hardware)
            subject = _saved(Path(options.network))
        else:
            subject = _planned(options, hardware)
    outputs.write(subject, stderr)


def _refuse_idle_options(options: Options, hardware: str | None) -> None:
    given = {"--budget": options.budget, "--policy": options.policy, "--hardware": hardware}
    for name, value in given.items():
        if value is not None:
            raise OptionError(f"{name} has no effect on {options.network}: a saved plan is shown as it is")


def _saved(path: Path) -> Subject:
    try:
        return Subject(path.stem, Plan.load(path))
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}") from error


def _planned(options: Options, hardware: str | None) -> Subject:
    device = None if hardware is None else find_hardware(hardware)
    job = make_job(options, None if device is None else device.memory_bytes)
    device = this_machine() if device is None else device
    return Subject(job.title, make_plan(job, job.fake_trace(device), device), settings=job.settings())
