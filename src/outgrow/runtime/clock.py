"""When a device does things that the host asked for long before: marks on its stream, read after the step."""

from __future__ import annotations

from collections.abc import Sequence

from outgrow.runtime.copies.cuda import Waits
from outgrow.runtime.copies.streams import Event, Stream, Streams

Span = tuple[Event, Event]


class DeviceClock:
    """The clock of steps on a device that runs beside the host."""

    def __init__(self, streams: Streams, waits: Waits) -> None:
        """`waits` are what the engine had the computation wait for."""
        self._streams = streams
        self._waits = waits
        self._began: Event | None = None
        self._stream = 0

    def mark(self) -> Event:
        """A mark after all that the program asked the device to compute so far."""
        return self._streams.record(Stream.COMPUTE)

    def begin(self) -> None:
        """A step begins. It computes on the stream that is current now."""
        self._stream = self._streams.current()
        self._began = self.mark()

    def strays(self) -> bool:
        """Whether the program computes on another stream than the step began on.

        Copies are ordered by that one alone: what is saved meanwhile stays where it is.
        """
        return self._streams.current() != self._stream

    def end(self) -> float:
        """The step is over: wait for the device, once, and give the step's time in seconds."""
        assert self._began is not None
        last = self.mark()
        last.synchronize()
        return self._streams.seconds_between(self._began, last)

    def stall_seconds(self) -> float:
        """Time for which the computation stood still in the step that is over, in seconds."""
        return self._waits.take_seconds()

    def seconds(self, spans: Sequence[Span | None]) -> list[float]:
        """The times between pairs of marks of the step that is over; 0.0 where there is no pair."""
        return [0.0 if span is None else self._streams.seconds_between(*span) for span in spans]
