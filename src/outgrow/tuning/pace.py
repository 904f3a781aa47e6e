"""A machine's own pace: told by a fixed piece of work beside every run, and taken out of what the runs took.

A machine that is shared is faster now and slower then, by a tenth to a third for half a minute, and a batch that was
run in a slow one looks like a bad batch. What the same small work takes at the same time says how much of it was the
machine: it is a control variate (Lavenberg and Welch, Management Science 1981), and how much it explains is asked of
runs of the same batch at different times.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean, median
from typing import TypeVar

import torch
import torch.nn.functional as F

K = TypeVar("K", bound=Hashable)

_REPEATS = 3
# The work is a few million operations on each core, in caches of their own: a fixed scene of a network's training.
_SAMPLES, _CHANNELS, _SIZE = 8, 64, 32
# Where runs say nothing yet of how a step follows the machine's pace, it follows as the fixed work does: the step's
# logarithm by this much, give or take as much; and runs differ by about a twentieth for other reasons.
_TYPICAL_SLOPE = 1.0
_OTHER_REASONS = 0.05
_STEEPEST = 3.0


@dataclass(frozen=True)
class Run:
    """One run of a candidate: the median of its steps, and of what these waited for copies; in seconds.

    `fixed_seconds` is what the fixed work took meanwhile.
    """

    seconds: float
    stall_seconds: float
    fixed_seconds: float

    @property
    def busy_seconds(self) -> float:
        """Without the waiting, which is the disk's."""
        return max(self.seconds - self.stall_seconds, 0.01 * self.seconds)


class FixedWork:
    """A small piece of training that is always the same, and takes some milliseconds."""

    def __init__(self) -> None:
        # No random numbers: those are the user's. And no device or type that the user may have made the default.
        def filled(value: float, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, device="cpu", dtype=torch.float32)

        self._x = filled(0.5, _SAMPLES, _CHANNELS, _SIZE, _SIZE).requires_grad_()
        self._kernel = filled(0.01, _CHANNELS, _CHANNELS, 3, 3).requires_grad_()
        self._ones, self._zeros = filled(1.0, _CHANNELS), filled(0.0, _CHANNELS)
        self._run()  # kernels are chosen the first time

    def seconds(self, at_least: float = 0.0) -> float:
        """What it takes now: the median of some times, for `at_least` so many seconds."""
        found: list[float] = []
        began = time.perf_counter()
        while len(found) < _REPEATS or sum(found) < at_least:
            self._run()
            now = time.perf_counter()
            found.append(now - began)
            began = now
        return median(found)

    def _run(self) -> None:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            found = F.conv2d(self._x, self._kernel, padding=1)
            found = F.relu(F.batch_norm(found, None, None, self._ones, self._zeros, training=True))
            torch.autograd.grad(found.sum(), (self._x, self._kernel))


def at_usual_pace(runs: Mapping[K, Sequence[Run]]) -> dict[K, tuple[float, ...]]:
    """What each run's step takes where the machine is as fast as it was on the average of all runs; in seconds."""
    usual = fmean(log(run.fixed_seconds) for of_one in runs.values() for run in of_one)
    slope = _slope(runs.values())

    def took(run: Run) -> float:
        return run.seconds - run.busy_seconds + run.busy_seconds * exp(slope * (usual - log(run.fixed_seconds)))

    return {key: tuple(took(run) for run in of_one) for key, of_one in runs.items()}


def _slope(runs: Iterable[Sequence[Run]]) -> float:
    """By how much a step's logarithm follows the fixed work's, by runs of the same candidate: least squares."""
    weight = (_OTHER_REASONS / _TYPICAL_SLOPE) ** 2
    both, squares = weight * _TYPICAL_SLOPE, weight
    for of_one in runs:
        fixed = [log(run.fixed_seconds) for run in of_one]
        busy = [log(run.busy_seconds) for run in of_one]
        both += sum((x - fmean(fixed)) * (y - fmean(busy)) for x, y in zip(fixed, busy, strict=True))
        squares += sum((x - fmean(fixed)) ** 2 for x in fixed)
    return min(max(0.0, both / squares), _STEEPEST)
