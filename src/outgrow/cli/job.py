"""From the options of a command to a model, an optimizer, a loss and batches. All commands use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import outgrow
from outgrow.cli.datasets import WHOLE, Batch, Part, Shape, default_data, open_data
from outgrow.cli.options import DeviceName, Options
from outgrow.cost.hardware import Hardware
from outgrow.cost.measure import known_gpu, this_machine
from outgrow.cost.workspaces import Workspace, find_workspace
from outgrow.errors import BudgetTooSmall, OutgrowError
from outgrow.networks import Network, find
from outgrow.planning.floor import least_budget
from outgrow.planning.plan import Plan
from outgrow.planning.policies import find as find_policy
from outgrow.planning.workspaces import costed as with_costs
from outgrow.tracing.ir import Trace
from outgrow.units import parse_bytes

DEFAULT_LEARNING_RATE = {"sgd": 1e-3, "adamw": 3e-4}
DEFAULT_MOMENTUM = 0.9


class OptionError(OutgrowError, ValueError):
    """An option whose value cannot work, with the network that was named."""


@dataclass(frozen=True)
class Job:
    """What to train and how, every option checked and every default filled in.

    `budget_bytes` is None for plain PyTorch; `learning_rate` and `momentum` are the optimizer's. `accumulation`
    batches make a step of the optimizer. `channels_last` lays out the model's weights and the images so, before any
    step: plain PyTorch and a session then see the same tensors.
    """

    network: Network
    data: str
    shape: Shape
    budget_bytes: int | None
    policy: str
    optimizer: str
    learning_rate: float
    momentum: float
    dtype: torch.dtype
    channels_last: bool
    spill_dir: Path | None
    allow_tmpfs: bool
    seed: int
    accumulation: int = 1
    workspace: Workspace | None = None
    device: DeviceName = "cpu"

    @property
    def title(self) -> str:
        """The step in a few words: "resnet-50, batch 16, size 224"."""
        name = f"{self.network.name}, batch {self.shape.batch}, size {self.shape.image_size}"
        return f"{name}, channels last" if self.channels_last else name

    def settings(self) -> dict[str, str]:
        """What a report says of the step, by name."""
        momentum = f", momentum {self.momentum:g}" if self.optimizer == "sgd" else ""
        return {
            "network": self.network.name,
            "batch": f"{self.shape.batch} of size {self.shape.image_size}",
            "optimizer": f"{self.optimizer}{momentum}",
            "dtype": str(self.dtype).removeprefix("torch."),
            "memory format": "channels last" if self.channels_last else "contiguous",
        }

    @property
    def labels(self) -> dict[str, Any]:
        """What is trained, as the JSON of the commands has it."""
        return {
            "network": self.network.name,
            "batch": self.shape.batch,
            "accumulation": self.accumulation,
            "image_size": self.shape.image_size,
        }

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model, its weights drawn from the seed, and its optimizer."""
        torch.manual_seed(self.seed)
        model = self.network.build(self.shape.image_size, self.shape.classes)
        if self.channels_last:
            _use_channels_last(model)
        if self.device != "cpu":  # a fake model cannot be moved, not even to where it is
            model = model.to(self.device)  # weights are drawn on the CPU: the same ones on every device
        return model.train(), self._optimizer(model)

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=self.momentum)

    def batches(self, part: Part = WHOLE) -> Iterator[Batch]:
        """The endless stream of batches; the data is checked at once. Several processes have a part of it each."""
        return map(self._laid_out, open_data(self.data, self.network, self.shape, self.seed, part))

    def _laid_out(self, batch: Batch) -> Batch:
        data, target = batch
        if self.channels_last:
            data = data.to(memory_format=torch.channels_last)
        return data.to(self.device), target.to(self.device)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, *batches: Batch) -> Tensor:
        """One training step; returns the loss, detached. Gradients of several batches add up to their mean."""
        losses = []
        for number, batch in enumerate(batches, 1):
            # Where processes exchange gradients, once a step is enough.
            alone = model.no_sync() if isinstance(model, DistributedDataParallel) and number < len(batches) else None
            with alone or nullcontext():
                loss = self._loss(model, batch)
                (loss if len(batches) == 1 else loss / len(batches)).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return losses[0] if len(batches) == 1 else torch.stack(losses).mean()

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        data, target = batch
        try:
            with self._autocast():
                return self.network.loss(model(data), target)
        except OutgrowError:
            raise
        except ValueError as error:  # batch norm, say, cannot take one sample of one pixel
            raise OptionError(
                f"{self.network.name} cannot train on a batch of {self.shape.batch} at size "
                f"{self.shape.image_size}: {error}"
            ) from error

    def _autocast(self) -> AbstractContextManager[object]:
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device, dtype=self.dtype)

    def make_step(self) -> outgrow.TrainingStep:
        """The step on synthetic data, everything built here: what `outgrow.trace` asks for."""
        here = replace(self, device="cpu")  # the tensors are fake, and PyTorch's CPU builds make no others
        model, optimizer = here.build()
        batches = [here._sample() for _ in range(self.accumulation)]
        return outgrow.TrainingStep(model, optimizer, lambda: here.step(model, optimizer, *batches))

    def _sample(self) -> Batch:
        return self._laid_out(self.network.sample(self.shape.batch, self.shape.image_size, self.shape.classes))

    def sized_step(self, batch: int, accumulation: int = 1) -> outgrow.TrainingStep:
        """The step with another batch, over the job's data: what `outgrow.tune` asks for."""
        job = replace(self, shape=replace(self.shape, batch=batch))
        model, optimizer = job.build()

        def batches() -> Iterator[tuple[Batch, ...]]:
            stream = job.batches()  # when the first is drawn: tensors that are made before may be fake
            while True:
                yield tuple(islice(stream, accumulation))

        return outgrow.TrainingStep(model, optimizer, lambda drawn: job.step(model, optimizer, *drawn), batches())

    def untimed_trace(self) -> Trace:
        """The trace of one step, without allocating any of its memory, and without times."""
        return outgrow.trace(self.make_step, fake=True)

    def fake_trace(self, hardware: Hardware | None = None) -> Trace:
        """The same with the times and workspaces of a device; of this machine, if it is left out."""
        return costed(self.untimed_trace(), hardware, self.workspace)

    def plan(self, trace: Trace, budget_bytes: int, hardware: Hardware | None = None) -> Plan:
        """The plan that a session with this job's policy would follow under a budget, in bytes."""
        return outgrow.plan(
            trace, budget=budget_bytes, policy=self.policy, hardware=hardware, workspace=self.workspace
        )

    def check_that_it_fits(self) -> None:
        """Fail before anything is allocated where no plan keeps the step inside the budget.

        Raises:
            BudgetTooSmall: with the least budget, and what takes it.
        """
        if self.budget_bytes is None:
            return
        hardware = gpu_here() if self.device == "cuda" else None
        # Without workspaces: what a model of them says is no reason to refuse what the session may find a way for.
        certain = replace(self, workspace=None)
        trace = certain.fake_trace(hardware)
        floor = least_budget(certain.plan(trace, self.budget_bytes, hardware).problem)
        if self.budget_bytes < floor.bytes:
            raise BudgetTooSmall(self.budget_bytes, floor.bytes, floor.holders, trace.describe_op(floor.op))


def _use_channels_last(model: nn.Module) -> None:
    """What `model.to(memory_format=...)` does; on fake tensors, whose parameters it cannot swap, too."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)


def costed(trace: Trace, hardware: Hardware | None = None, workspace: Workspace | None = None) -> Trace:
    """A fake trace with the times and workspaces that plans reckon with on a device; on this machine by default."""
    return with_costs(trace, this_machine() if hardware is None else hardware, workspace)


def is_own(network: str) -> bool:
    """Whether NETWORK is a function in a file and not the name of a network."""
    return network.endswith(".py") or ".py:" in network


def find_listed(name: str) -> Network:
    """The network of a name, for commands that take no function in a file.

    Raises:
        UnknownNetwork, OptionError: see their messages.
    """
    if is_own(name):
        raise OptionError(f"{name}: a step of your own goes with train, plan (and its --report) and tune")
    return find(name)


def make_job(options: Options, memory_bytes: int | None = None) -> Job:
    """Check what a command was given, and fill in what it was not.

    Args:
        options: what was given.
        memory_bytes: what a budget in percent is a share of, in bytes; this machine's memory, if it is left out.

    Raises:
        UnknownNetwork, UnknownPolicy, InvalidBudget, DataError, OptionError: see their messages.
    """
    network = find_listed(options.network)
    image_size = network.image_size if options.image_size is None else options.image_size
    if image_size != network.image_size:
        _check_that_it_builds(network, image_size)
    if options.policy is not None:
        find_policy(options.policy)
    if options.momentum is not None and options.optimizer != "sgd":
        raise OptionError(f"--momentum is sgd's: {options.optimizer} has none to set")
    if options.channels_last and network.kind == "text":
        raise OptionError(
            f"--channels-last is an order of the pixels of images: {network.name} takes text, which has none"
        )
    return Job(
        network=network,
        data=default_data(network) if options.data is None else options.data,
        shape=Shape(options.batch, image_size, network.classes),
        budget_bytes=budget_in_bytes(options.budget, memory_bytes),
        policy="auto" if options.policy is None else options.policy,
        optimizer=options.optimizer,
        learning_rate=options.learning_rate or DEFAULT_LEARNING_RATE[options.optimizer],
        momentum=DEFAULT_MOMENTUM if options.momentum is None else options.momentum,
        dtype=torch.bfloat16 if options.dtype == "bfloat16" else torch.float32,
        channels_last=options.channels_last,
        spill_dir=options.spill_dir,
        allow_tmpfs=options.allow_tmpfs,
        seed=options.seed,
        accumulation=options.accumulate,
        workspace=find_workspace(options.workspace),
        device=options.device,
    )


def gpu_here() -> Hardware:
    """The GPU of this machine, as `outgrow doctor` measured it, or measured now.

    Raises:
        OptionError: there is none.
    """
    check_device("cuda")
    return known_gpu(torch.device("cuda"))


def check_device(device: DeviceName) -> None:
    """Refuse a device that is not here.

    Raises:
        OptionError: PyTorch sees no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        why = "it was built without CUDA" if torch.version.cuda is None else "the driver or the device is missing"
        raise OptionError(
            f"--device cuda: PyTorch {torch.__version__} sees no CUDA device here ({why}). Train with --device cpu, "
            "or plan for a GPU that is not here with 'outgrow plan --hardware'"
        )


def budget_in_bytes(budget: str | None, memory_bytes: int | None) -> int | None:
    """What --budget says, in bytes; None if it was not given. A share is one of `memory_bytes`, or of the machine."""
    if budget is None:
        return None
    return parse_bytes(budget, psutil.virtual_memory().total if memory_bytes is None else memory_bytes)


def _check_that_it_builds(network: Network, image_size: int) -> None:
    """Ask the network itself, on the meta device, where tensors have shapes only."""
    try:
        with torch.device("meta"):
            network.build(image_size, network.classes)
    except ValueError as error:
        raise OptionError(f"--image-size {image_size} does not do for {network.name}: {error}") from error
