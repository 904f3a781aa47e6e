"""Programs that compute on a stream of their own inside a step, beside the one that the step began on.

Copies, and the memory of what comes back, are ordered by the step's own stream, wherever the program is when they are
asked for (`streams.py`). What remains: what other streams read of ours must be there, and stay until they have.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from outgrow.runtime.copies.streams import Event, Stream, Streams


class Strays:
    """For a device without streams: nobody strays."""

    def now(self) -> bool:
        """Whether the program is on another stream than the step began on."""
        return False

    def at_home(self) -> AbstractContextManager[None]:
        """Inside, it is on that: what is computed for the step, or allocated, is so in the order of the step."""
        return nullcontext()

    def ran(self, tensors: Iterable[torch.Tensor]) -> None:
        """The program has run something on these tensors, wherever it is."""

    def join(self) -> None:
        """Memory is about to be free: whoever gets it next does so after all that has run, wherever that was."""

    def follow(self) -> None:
        """Something of the step's is handed out: who reads it elsewhere waits for what the step does until here."""


class StreamStrays(Strays):
    """For a device with streams."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._marks: dict[int, Event] = {}  # by stream, after the last op that ran there

    def now(self) -> bool:
        """See `Strays`."""
        return self._streams.current() != self._streams.home

    def at_home(self) -> AbstractContextManager[None]:
        """See `Strays`."""
        return self._streams.at_home() if self.now() else nullcontext()

    def ran(self, tensors: Iterable[torch.Tensor]) -> None:
        """See `Strays`. What is given no tensor on the device, a batch on its way there, reads nothing of ours."""
        if self._can_mark():
            mark = self._streams.record_elsewhere()
            if any(tensor.device.type != "cpu" for tensor in tensors):
                self._marks[self._streams.current()] = mark

    def join(self) -> None:
        """See `Strays`. What was allocated elsewhere is given out there again."""
        if self._can_mark():  # room is made here for an op that has not run yet
            self._streams.record_elsewhere()
        while self._marks:
            self._streams.wait(Stream.COMPUTE, self._marks.popitem()[1])
        if self._streams.has_strayed:
            self._streams.wait(Stream.ELSEWHERE, self._streams.record(Stream.COMPUTE))

    def follow(self) -> None:
        """See `Strays`."""
        if self._can_mark():
            self._streams.record_elsewhere()
            self._streams.wait(Stream.ELSEWHERE, self._streams.record(Stream.COMPUTE))

    def _can_mark(self) -> bool:
        """Whether the program is elsewhere, and not only takes down there what it will do one day."""
        return self.now() and not self._streams.is_capturing
