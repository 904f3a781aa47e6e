"""When a device does things that the host asked for long before: marks on its stream, read after the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        self._lingers: list[Span] = []

    def mark(self) -> Event:
        """A mark after all that the program asked the device to compute so far."""
        return self._streams.record(Stream.COMPUTE)

    def mark_alone(self) -> Event:
        """A mark before an op that is to be timed: what comes between this and the next takes its own time alone.

        A device that waits for the host would be timed at waiting. So it lingers before the mark, and finds the op
        there when it gets on.
        """
        before = self.mark()
        self._streams.linger()
        mark = self.mark()
        self._lingers.append((before, mark))
        return mark

    def begin(self) -> None:
        """A step begins, on the stream that the program is on now."""
        self._streams.begin()
        self._lingers = []
        self._began = self.mark()

    def end(self, recomputes: Sequence[Span]) -> StepTimes:
        """The step is over as far as the host goes; `recomputes` are the spans in which values were made anew."""
        assert self._began is not None
        return StepTimes(self._streams, (self._began, self.mark()), self._lingers, self._waits.take(), recomputes)

    def seconds(self, spans: Sequence[Span | None]) -> list[float]:
        """The times between pairs of marks of a step that is over; 0.0 where there is no pair."""
        return [0.0 if span is None else self._streams.seconds_between(*span) for span in spans]


@dataclass(frozen=True)
class StepTimes:
    """The marks of a step that the device may still be at."""

    _streams: Streams
    _whole: Span
    _lingers: Sequence[Span]
    _waits: Sequence[Span]
    _recomputes: Sequence[Span]

    def read(self) -> tuple[float, float, float]:
        """The step's time without lingering, what it stood still, and what it made values anew for, in seconds.

        Waits for the device.
        """
        self._whole[1].synchronize()
        whole, lingered = self._streams.seconds_between(*self._whole), self._sum(self._lingers)
        return whole - lingered, self._sum(self._waits), self._sum(self._recomputes)

    def _sum(self, spans: Sequence[Span]) -> float:
        return sum(self._streams.seconds_between(*span) for span in spans)
