"""What a recorded step notes of each op beside the values: its own time, and what was allocated beside tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from outgrow.runtime.clock import DeviceClock, Span
from outgrow.runtime.copies.streams import Event as Mark
from outgrow.tracing.ledger import Ledger
from outgrow.tracing.ops import OpFacts
from outgrow.tracing.recorder import Recorder


class Recording:
    """The ops of one step, each reached, begun, ended and told of in turn."""

    def __init__(
        self, recorder: Recorder, ledger: Ledger, clock: DeviceClock | None, lost_seconds: Callable[[], float]
    ) -> None:
        """`clock` is the device's, where that runs beside the host.

        `lost_seconds` is time that the step took so far and would not have taken in plain PyTorch.
        """
        self.recorder = recorder
        self._ledger = ledger
        self._clock = clock
        self._lost = lost_seconds
        self._spans: list[Span | None] = []
        self._unseen: list[int] = []  # bytes beside tensors as each op began
        self._own_seconds = self._op_seconds = 0.0
        self._unseen_before = 0
        self._began: Mark | None = None
        self._started = self._left_at = time.perf_counter()
        self._left_lost = 0.0

    def reach(self) -> None:
        """The step comes to an op. What went by since the last one is this one's, but for our copies and recipes."""
        since = time.perf_counter() - self._left_at
        self._own_seconds = max(0.0, since - (self._lost() - self._left_lost))

    def begin(self, *, is_timed: bool = True) -> None:
        """It begins, now that it has its room."""
        self._unseen_before = self._ledger.unseen_bytes
        self._began = self._clock.mark_alone() if self._clock is not None and is_timed else None
        self._started = time.perf_counter()

    def begin_late(self) -> None:
        """It begins only now: what it did so far was to wait."""
        if self._began is not None and self._clock is not None:
            self._began = self._clock.mark_alone()
        self._started = time.perf_counter()

    def begin_anew(self, mark: Mark | None) -> None:
        """What it did before `mark` it will not do again: it tried ways out. None: it did not."""
        if self._began is not None and mark is not None:
            self._began = mark

    def end(self) -> float:
        """It is over (on a device that runs beside the host it was asked for), after so many seconds."""
        self._op_seconds = time.perf_counter() - self._started
        if self._clock is not None:
            self._spans.append(None if self._began is None else (self._began, self._clock.mark()))
        self._unseen.append(self._unseen_before)
        return self._op_seconds

    def tell(
        self,
        func: Any,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        result: Any,
        *,
        rise_bytes: int,
    ) -> None:
        """The recorder is told of it."""
        seconds = self._op_seconds + self._own_seconds
        self.recorder.op(func, facts, args, kwargs, inputs, outputs, result, rise_bytes=rise_bytes, seconds=seconds)
        self.leave()

    def leave(self) -> None:
        """It is done with, and the program goes on."""
        self._left_at, self._left_lost = time.perf_counter(), self._lost()

    def set_times(self) -> None:
        """The step is over, on the device too: its ops get the times that the device took for them."""
        if self._clock is not None:
            self.recorder.set_times(self._clock.seconds(self._spans))

    def add_beside(self) -> None:
        """What was allocated beside tensors counts for the ops that began with it; not what lasts after the step."""
        lasting = self._ledger.unseen_bytes
        self.recorder.add_beside([max(0, unseen - lasting) for unseen in self._unseen])
