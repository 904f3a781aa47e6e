"""A figure's setting, trained for real for a few steps: the column "measured" of the papers' tables.

It needs a CUDA device; on a machine without one there is no column. The device is the one that is here, not the
paper's, and the paper's budget is the wall.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

import torch

import outgrow
from outgrow.errors import BudgetTooSmall, DeviceOutOfMemory
from outgrow.networks import find
from outgrow.tuning.steps import synthetic_step

_WARMUP = 5  # a session records two steps, tries its recipes, and settles
_STEPS = 5


@dataclass(frozen=True)
class Trial:
    """What is trained: a network of the catalogue at its own image size, with SGD, under a budget in bytes.

    `against_plain` asks for plain steps without a budget as well, if the device holds them.
    """

    network: str
    batch: int
    budget_bytes: int
    momentum: float = 0.0
    against_plain: bool = False


@dataclass(frozen=True)
class Measured:
    """What came of it: the highest peak of live bytes of any step, and medians of step times in seconds."""

    peak_bytes: int
    step_seconds: float
    plain_step_seconds: float | None = None

    @property
    def slower(self) -> float | None:
        """By what share a step is slower than plain PyTorch's; None where that was not run."""
        return None if self.plain_step_seconds is None else self.step_seconds / self.plain_step_seconds - 1


# Trains, or gives None where the network does not train within the budget.
Measurer = Callable[[Trial], Measured | None]


def measurer_here() -> Measurer | None:
    """What trains on this machine's CUDA device; None where there is none."""
    if not torch.cuda.is_available():
        return None
    return lambda trial: train(trial, torch.device("cuda", torch.cuda.current_device()))


def train(trial: Trial, device: torch.device, *, image_size: int | None = None) -> Measured | None:
    """Train under `auto` with the budget as the wall; None where no plan keeps it inside."""
    plain = _plain_seconds(trial, device, image_size) if trial.against_plain else None
    _fresh(device)
    step = _Step(trial, device, image_size)
    try:
        # Machines with GPUs often have no disk but RAM; what leaves goes to pinned memory first.
        with outgrow.Session(
            step.model,
            step.optimizer,
            budget=trial.budget_bytes,
            spill_dir=tempfile.gettempdir(),
            allow_tmpfs=True,
        ) as session:
            seconds = step.seconds_within(session.step)
            return Measured(session.peak_bytes, seconds, plain)
    except (BudgetTooSmall, DeviceOutOfMemory):
        return None


def _plain_seconds(trial: Trial, device: torch.device, image_size: int | None) -> float | None:
    """The time of a plain step, where the device is large enough for one."""
    _fresh(device)
    try:
        return _Step(trial, device, image_size).seconds_within(nullcontext)
    except torch.OutOfMemoryError:
        return None


class _Step:
    """A network on the device, with data that stays the same."""

    def __init__(self, trial: Trial, device: torch.device, image_size: int | None) -> None:
        self._device = device
        with torch.random.fork_rng(devices=()), torch.device(device):
            made = synthetic_step(find(trial.network), trial.batch, image_size, momentum=trial.momentum)
        self.model, self.optimizer, self._run = made.model, made.optimizer, made.step

    def seconds_within(self, around: Callable[[], AbstractContextManager[object]]) -> float:
        """The median time of a step, after some to warm up."""
        seconds: list[float] = []
        for _ in range(_WARMUP + _STEPS):
            began = time.perf_counter()
            with around():
                self._run()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - began)
        return median(seconds[_WARMUP:])


def _fresh(device: torch.device) -> None:
    """Give back what was trained before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
