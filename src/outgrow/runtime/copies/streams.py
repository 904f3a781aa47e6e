"""What the CUDA copy engine needs of CUDA: three streams, events between them, and copies between addresses.

A protocol, so that the engine's order of things can be tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Protocol

import torch

# Some 300 microseconds: longer than an op that is recorded keeps the host.
_LINGER_CYCLES = 1 << 19


class Stream(Enum):
    """Whom work is asked of. Each does what it was asked for in order; across streams only events order anything.

    `COMPUTE` is the stream that a step began on. `ELSEWHERE` are all others that the program was on in a step.
    """

    COMPUTE = "compute"
    ELSEWHERE = "elsewhere"
    OUT = "out"
    BACK = "back"


class Event(Protocol):
    """A mark in a stream."""

    def query(self) -> bool:
        """Whether all that the stream was asked for before the mark is finished."""

    def synchronize(self) -> None:
        """Have the host wait until it is."""


class Streams(Protocol):
    """The streams of one device. No call waits for the device."""

    def begin(self) -> None:
        """A step begins, on the stream that the program is on now."""

    @property
    def home(self) -> int:
        """The stream that the step began on."""

    def current(self) -> int:
        """The one that the program is on now."""

    @property
    def has_strayed(self) -> bool:
        """Whether the program was ever seen on another one: what it made there may be let go of much later."""

    @property
    def is_capturing(self) -> bool:
        """Whether what is asked for where the program is now goes into a graph instead of being done."""

    def record_elsewhere(self) -> Event:
        """A mark on the stream that the program is on now, which is not the step's."""

    def at_home(self) -> AbstractContextManager[None]:
        """Inside, the program is on the step's stream, and allocates there."""

    def record(self, stream: Stream) -> Event:
        """A mark after all that `stream` was asked for so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What `stream` is asked for from now on begins after the mark."""

    def linger(self) -> None:
        """Have the compute stream do nothing for a moment, while the host goes on."""

    def to_host(self, stream: Stream, host: int, device: int, nbytes: int) -> None:
        """Copy `nbytes` from an address on the device to one in pinned memory."""

    def to_device(self, stream: Stream, device: int, host: int, nbytes: int) -> None:
        """Copy `nbytes` from an address in pinned memory to one on the device."""

    def seconds_between(self, start: Event, end: Event) -> float:
        """Time from one mark to another, in seconds; both must be finished."""


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index or 0
        self._lanes = {
            Stream.OUT: torch.cuda.Stream(device),
            Stream.BACK: torch.cuda.Stream(device),
        }
        self._elsewhere: dict[int, torch.cuda.Stream] = {}
        self.begin()

    def begin(self) -> None:
        """See `Streams`."""
        self.home = self.current()
        self._elsewhere.pop(self.home, None)
        self._lanes[Stream.COMPUTE] = torch.cuda.current_stream(self._device)

    @property
    def has_strayed(self) -> bool:
        """See `Streams`."""
        return bool(self._elsewhere)

    @property
    def is_capturing(self) -> bool:
        """See `Streams`."""
        return torch.cuda.is_current_stream_capturing()

    def record_elsewhere(self) -> torch.cuda.Event:
        """See `Streams`."""
        here = self._elsewhere[self.current()] = torch.cuda.current_stream(self._device)
        return self._recorded(here)

    def at_home(self) -> AbstractContextManager[None]:
        """See `Streams`."""
        return self._on(Stream.COMPUTE)

    def current(self) -> int:
        """See `Streams`."""
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    def record(self, stream: Stream) -> torch.cuda.Event:
        """See `Streams`."""
        return self._recorded(self._lanes[stream])

    def _recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # it tells times
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """See `Streams`."""
        assert isinstance(event, torch.cuda.Event)
        streams = list(self._elsewhere.values()) if stream is Stream.ELSEWHERE else [self._lanes[stream]]
        for each in streams:
            each.wait_event(event)

    def linger(self) -> None:
        """See `Streams`."""
        with self._on(Stream.COMPUTE):
            torch.cuda._sleep(_LINGER_CYCLES)

    def to_host(self, stream: Stream, host: int, device: int, nbytes: int) -> None:
        """See `Streams`."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), self._on(stream):
            _bytes_at(host, _HOST, nbytes).copy_(_bytes_at(device, self._device, nbytes), non_blocking=True)

    def to_device(self, stream: Stream, device: int, host: int, nbytes: int) -> None:
        """See `Streams`."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), self._on(stream):
            _bytes_at(device, self._device, nbytes).copy_(_bytes_at(host, _HOST, nbytes), non_blocking=True)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        # Left alone, the stream's own context has a look at the device that is current, which need not be ours.
        with torch.cuda.device(self._device), torch.cuda.stream(self._lanes[stream]):
            yield

    def seconds_between(self, start: Event, end: Event) -> float:
        """See `Streams`."""
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()  # it is finished, unless the program computed on a stream of its own
        return float(start.elapsed_time(end)) / 1e3


_HOST = torch.device("cpu")


def _bytes_at(address: int, device: torch.device, nbytes: int) -> torch.Tensor:
    """Memory at an address as a tensor that does not own it.

    A tensor on the value's own storage would count as one of its holders, for as long as it lives, and that number
    decides what may leave; and what a worker thread drops last is freed there.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))
