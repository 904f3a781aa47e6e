"""A user's own training step, `FILE.py:FUNCTION` in place of a network's name, for `outgrow train` and `plan`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import outgrow
from outgrow.cli.job import OptionError, budget_in_bytes, costed
from outgrow.cli.memory import PeakMeter, resident_bytes, settle
from outgrow.cli.options import Options
from outgrow.cli.train import fingerprint, make_progress, open_session, result_of, show_step
from outgrow.cost.hardware import Hardware
from outgrow.cost.workspaces import Workspace, find_workspace
from outgrow.errors import OutgrowError
from outgrow.planning.plan import Plan
from outgrow.planning.policies import find as find_policy
from outgrow.session.opening import refuse_what_is_neither
from outgrow.tracing.capture import as_sequence
from outgrow.tracing.ir import Trace

# Options that say what the file says itself.
_SAID_BY_THE_FILE = {
    "accumulate": "--accumulate",
    "data": "--data",
    "image_size": "--image-size",
    "optimizer": "--optimizer",
    "momentum": "--momentum",
    "lr": "--lr",
    "dtype": "--dtype",
    "channels_last": "--channels-last",
    "device": "--device",
}


class OwnFileError(OutgrowError, ValueError):
    """A file with a training step that cannot be used: missing, without the function, or with an error in it."""


@dataclass(frozen=True)
class OwnJob:
    """What to train, from a file, and how; every option checked.

    `batch` is None where the function takes none. `budget_bytes` is None for plain PyTorch.
    """

    path: Path
    function: str
    make: Callable[..., object]
    batch: int | None
    budget_bytes: int | None
    policy: str
    spill_dir: Path | None
    allow_tmpfs: bool
    seed: int
    workspace: Workspace | None = None

    @property
    def labels(self) -> dict[str, Any]:
        """What is trained, as the JSON of the commands has it."""
        return {"network": f"{self.path}:{self.function}", "batch": self.batch, "image_size": None}

    @property
    def title(self) -> str:
        """The step in a few words: "my_model.py:make_step, batch 16"."""
        name = f"{self.path}:{self.function}"
        return name if self.batch is None else f"{name}, batch {self.batch}"

    def settings(self) -> dict[str, str]:
        """What a report says of the step, by name."""
        return {"step": f"{self.path}:{self.function}", "batch": "" if self.batch is None else str(self.batch)}

    def make_step(self) -> outgrow.TrainingStep:
        """Call the function, with the random numbers of the seed.

        Raises:
            OwnFileError: it failed, or returned something else than a `TrainingStep`.
        """
        return self._made() if self.batch is None else self._made(self.batch)

    def sized_step(self, batch: int, accumulation: int = 1) -> outgrow.TrainingStep:
        """The step with another batch: what `outgrow.tune` asks for.

        Raises:
            OwnFileError: as `make_step`.
        """
        return self._made(batch) if accumulation == 1 else self._made(batch, accumulation=accumulation)

    def _made(self, *sizes: int, **more: int) -> outgrow.TrainingStep:
        torch.manual_seed(self.seed)
        with self.blame(f"{self.function} failed"):
            made = self.make(*sizes, **more)
        if not isinstance(made, outgrow.TrainingStep):
            raise OwnFileError(
                f"{self.path}: {self.function} returned {type(made).__name__}: it has to return "
                "outgrow.TrainingStep(model, optimizer, step)"
            )
        refuse_what_is_neither(as_sequence(made.model), as_sequence(made.optimizer))
        if not callable(made.step):
            raise OwnFileError(f"{self.path}: the step of {self.function} is no function")
        if not (made.batches is None or hasattr(made.batches, "__next__")):
            raise OwnFileError(f"{self.path}: the batches of {self.function} are no iterator: give iter(batches)")
        return made

    def fake_trace(self, hardware: Hardware | None = None) -> Trace:
        """The trace of one step, without its memory, with the times of a device; of this machine by default."""
        with self.blame("the step failed while it was traced, on fake tensors (they have no numbers to look at)"):
            return costed(outgrow.trace(self.make_step, fake=True), hardware, self.workspace)

    def plan(self, trace: Trace, budget_bytes: int, hardware: Hardware | None = None) -> Plan:
        """The plan that a session with this job's policy would follow under a budget, in bytes."""
        return outgrow.plan(
            trace, budget=budget_bytes, policy=self.policy, hardware=hardware, workspace=self.workspace
        )

    @contextmanager
    def blame(self, what: str) -> Iterator[None]:
        """Inside, an error that is not Outgrow's own is the file's: it is raised again with the file's own line."""
        try:
            yield
        except OutgrowError:
            raise
        except Exception as error:
            raise OwnFileError(f"{_place(self.path, error)}: {what}: {_said(error)}") from error


def make_own_job(options: Options, given: Collection[str], memory_bytes: int | None = None) -> OwnJob:
    """Run the file and check what the command was given with it.

    Args:
        options: what was given, and defaults.
        given: the names of the options that were given.
        memory_bytes: what a budget in percent is a share of, in bytes; this machine's memory, if it is left out.

    Raises:
        OwnFileError, OptionError, UnknownPolicy, InvalidBudget: see their messages.
    """
    for name, option in _SAID_BY_THE_FILE.items():
        if name in given:
            raise OptionError(f"{option} is for the networks that have a name: {options.network} says that itself")
    if options.policy is not None:
        find_policy(options.policy)
    budget_bytes = budget_in_bytes(options.budget, memory_bytes)
    path, function = _parted(options.network)
    make = _load(path, function)
    takes_batch = _takes_batch(make, path, function)
    if "batch" in given and not takes_batch:
        raise OptionError(f"--batch: {function} in {path} takes no batch size")
    return OwnJob(
        path=path,
        function=function,
        make=make,
        batch=options.batch if takes_batch else None,
        budget_bytes=budget_bytes,
        policy="auto" if options.policy is None else options.policy,
        spill_dir=options.spill_dir,
        allow_tmpfs=options.allow_tmpfs,
        seed=options.seed,
        workspace=find_workspace(options.workspace),
    )


def run(
    job: OwnJob,
    steps: int,
    stderr: Console,
    *,
    plan: Plan | None = None,
    after_step: Callable[[outgrow.Session | None], None] = lambda session: None,
) -> dict[str, Any]:
    """Train for some steps; the figures under the keys that `outgrow train --json` prints.

    A session follows `plan` from its first step, if there is one. `after_step` is called after each step, with the
    session if there is one.
    """
    losses: list[float | None] = []
    step_seconds: list[float] = []
    import_module("torch._dynamo")  # as for networks that have a name
    settle()
    baseline = resident_bytes()
    meter = PeakMeter()
    with ExitStack() as stack:
        made = job.make_step()
        models = as_sequence(made.model)
        session = None
        if job.budget_bytes is not None:
            session = stack.enter_context(open_session(job, made.model, made.optimizer, plan))
        progress = stack.enter_context(make_progress(stderr))
        task = progress.add_task("", total=steps, loss="", speed="", memory="")
        for index in range(steps):
            with job.blame("a batch failed"):
                step = made.drawn()
            began = time.perf_counter()
            with job.blame("the step failed"), nullcontext() if session is None else session.step():
                loss = _loss(step())
            seconds = time.perf_counter() - began
            losses.append(loss)
            step_seconds.append(seconds)
            if index == 0:
                meter.start()
            else:
                meter.sample()
            after_step(session)
            show_step(progress, task, job.batch, loss, seconds, session)
        peak = meter.peak_bytes if steps > 1 else None
        return result_of(job.labels, session, peak, baseline, step_seconds, losses, fingerprint(*models))


def _parted(network: str) -> tuple[Path, str]:
    file, _, function = network.rpartition(":") if ".py:" in network else (network, "", "")
    if not function:
        raise OwnFileError(f"{network}: which function of it? Write {file}:make_step, for example")
    path = Path(file)
    if not path.is_file():
        raise OwnFileError(f"{path}: there is no such file")
    return path, function


def _load(path: Path, function: str) -> Callable[..., object]:
    """Run the file as a module, and find the function in it."""
    # A process that loads the model's classes by name, a worker of a DataLoader say, has to find the same module.
    name = path.stem if path.stem not in sys.modules else f"outgrow_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise OwnFileError(f"{path}: Python cannot import it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE.py` does, for what lies beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise OwnFileError(f"{_place(path, error)}: the file cannot be imported: {_said(error)}") from error
    found: object = getattr(module, function, None)
    if found is None:
        own = ", ".join(
            key
            for key, item in vars(module).items()
            if inspect.isfunction(item) and item.__module__ == name and not key.startswith("_")
        )
        raise OwnFileError(f"{path} has no function {function!r}; it has {own or 'none at all'}")
    if not callable(found):
        raise OwnFileError(f"{path}: {function} is {type(found).__name__} and no function")
    return found


def _takes_batch(make: Callable[..., object], path: Path, function: str) -> bool:
    signature = inspect.signature(make)
    for arguments in ((1,), ()):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return bool(arguments)
    raise OwnFileError(f"{path}: {function}{signature} has to take the batch size alone, or nothing")


def _loss(outcome: object) -> float | None:
    """The loss if the step returned one."""
    if isinstance(outcome, torch.Tensor) and outcome.numel() == 1:
        return float(outcome.detach())
    return float(outcome) if isinstance(outcome, float | int) else None


def _place(path: Path, error: Exception) -> str:
    """The file, with the line in it that was running when the error came."""
    own = str(path.absolute())  # as Python names the file of a module
    if isinstance(error, SyntaxError) and error.filename == own:
        return f"{path}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    if not frames:
        return str(path)
    return f"{path}, line {frames[-1].lineno} ({frames[-1].line})"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
