"""The copy engine of CUDA training: one stream out to pinned host memory and one back, ordered by events alone.

The host runs far ahead of the device: what it asks for now happens later, on each stream in the order in which it was
asked for, and across streams in no order but that of events. These orders keep every byte right:

1. A copy out reads its value after the computation has written it: the out-stream waits for a mark that the compute
   stream gets when the copy is asked for.
2. A copy back writes to memory that is its own: the pool allocates on the compute stream, where the caching allocator
   may hand out what was freed a moment ago and is still being read; the back-stream waits for a mark that the compute
   stream gets after the allocation.
3. Memory is freed after the copy out of it: a copy counts as done when its mark is finished, or when the compute
   stream has been made to wait for it, since whoever gets the memory next gets it in that stream's order.
4. A value is read after its copy back: the compute stream waits for the mark of that before the value is handed out.
5. A pinned place is written after it was last read: the out-stream waits for copies back from the same place that the
   computation never waited for (a graph that was freed meanwhile).

That a copy back reads its place after the copy out has written it needs no wait of its own: the pool asks for it only
when the copy out is done, so that the mark of 2 comes after that of 3.

No stream is ever drained for a copy, the host waits for nothing but what goes by way of the disk, and no allocation
is ever told of a second stream (`record_stream`), which would put off its reuse to nobody knows when.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from outgrow.runtime.copies.copy import Copy
from outgrow.runtime.copies.cpu import Lane, LaneCopy
from outgrow.runtime.copies.streams import Event, Stream, Streams
from outgrow.runtime.tiers.disk import SpillFile
from outgrow.runtime.tiers.host import DiskPlace, HostPlace
from outgrow.runtime.tiers.place import Place

# Fewer bytes than these say nothing of a lane's speed.
_WORTH_MEASURING = 8 << 20
# So many copies are remembered until their times are read.
_MOST_TIMED = 256


class Waits:
    """What the computation has waited for copies, as marks on its stream whose times are read later."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._spans: list[tuple[Event, Event]] = []

    def wait_for(self, event: Event) -> None:
        """Have the compute stream wait for a mark."""
        before = self._streams.record(Stream.COMPUTE)
        self._streams.wait(Stream.COMPUTE, event)
        self._spans.append((before, self._streams.record(Stream.COMPUTE)))

    def take(self) -> list[tuple[Event, Event]]:
        """The pairs of marks between which the compute stream stood still since this was asked last."""
        spans, self._spans = self._spans, []
        return spans


class _Order:
    """How many copies of a lane are over, or waited for: those before one that is are too, being on one stream."""

    __slots__ = ("asked", "reached")

    def __init__(self) -> None:
        self.asked = self.reached = 0


class StreamCopy(Copy):
    """A copy between the device and pinned memory, on a stream."""

    __slots__ = ("_event", "_number", "_order", "_waits")

    def __init__(self, slot: Place, address: int, event: Event, order: _Order, waits: Waits) -> None:
        super().__init__(slot, address)
        order.asked += 1
        self._event = event
        self._number = order.asked
        self._order = order
        self._waits = waits

    @property
    def done(self) -> bool:
        """Whether it is finished, or the compute stream waits for it."""
        if self._number > self._order.reached and self._event.query():
            self._order.reached = self._number
        return self._number <= self._order.reached

    def wait(self) -> None:
        """Have the compute stream wait for it. The host goes on."""
        if not self.done:
            self._waits.wait_for(self._event)
            self._order.reached = self._number


class HopCopy(LaneCopy):
    """A copy between the device and the disk by way of a pinned buffer, which a thread carries out on a stream.

    `ready` is the compute stream's mark from which on the memory may be read or written; `event` is the one after the
    last bytes went through the buffer, which is there once the disk is done.
    """

    __slots__ = ("_is_ordered", "_waits", "event", "place", "ready", "stream")

    def __init__(self, place: DiskPlace, address: int, stream: Stream, ready: Event, waits: Waits) -> None:
        super().__init__(place, address)
        self.place = place
        self.stream = stream
        self.ready = ready
        self.event: Event | None = None
        self._waits = waits
        self._is_ordered = False

    @property
    def done(self) -> bool:
        """Whether the disk is done with it, and the device is or the compute stream waits for it."""
        return super().done and (self._is_ordered or self._is_finished())

    def wait(self) -> None:
        """Wait for the disk, and have the compute stream wait for the rest."""
        super().wait()
        if not self._is_ordered and not self._is_finished():
            assert self.event is not None
            self._waits.wait_for(self.event)
            self._is_ordered = True

    def _is_finished(self) -> bool:
        """Whether the device is done with it, as far as the host can see now."""
        return self.event is None or self.event.query()


class _Readers:
    """Copies back that may still be reading pinned memory."""

    def __init__(self) -> None:
        self._reads: list[tuple[int, int, Event]] = []  # first byte, end, mark

    def add(self, place: HostPlace, event: Event) -> None:
        self._forget_finished()
        self._reads.append((place.offset, place.offset + place.nbytes, event))

    def of(self, place: HostPlace) -> list[Event]:
        """The marks of those that read any byte of a place."""
        self._forget_finished()
        end = place.offset + place.nbytes
        return [event for first, last, event in self._reads if first < end and place.offset < last]

    def _forget_finished(self) -> None:
        # They are on one stream: what was asked for first is finished first.
        finished = 0
        for _, _, event in self._reads:
            if not event.query():
                break
            finished += 1
        del self._reads[:finished]


class _Speed:
    """Times of a lane's copies, read when their marks are finished."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._pending: deque[tuple[Event, Event, int]] = deque(maxlen=_MOST_TIMED)
        self._bytes = 0
        self._seconds = 0.0

    def add(self, start: Event, end: Event, nbytes: int) -> None:
        self._pending.append((start, end, nbytes))

    def bandwidth(self) -> float | None:
        """Bytes per second over the copies that are finished; None before there were any worth measuring."""
        while self._pending and self._pending[0][1].query():
            start, end, nbytes = self._pending.popleft()
            self._seconds += self._streams.seconds_between(start, end)
            self._bytes += nbytes
        return self._bytes / self._seconds if self._bytes > _WORTH_MEASURING and self._seconds > 0 else None


class HopLane(Lane):
    """Copies of one direction that go by way of the disk, on a thread.

    The pinned buffer is this lane's alone: its last use is finished before the next one begins.
    """

    def __init__(self, name: str, streams: Streams, spill: SpillFile, bounce: int) -> None:
        super().__init__(name)
        self._streams = streams
        self._spill = spill
        self._bounce = bounce
        self._last: Event | None = None  # the mark after which the buffer is free

    def _hop(self, place: DiskPlace, address: int) -> None:
        raise NotImplementedError

    def _drain(self) -> None:
        if self._last is not None:
            self._last.synchronize()

    def _carry_out(self, copy: LaneCopy) -> None:
        assert isinstance(copy, HopCopy)
        try:
            self._streams.wait(copy.stream, copy.ready)
            self._hop(copy.place, copy.address)
            copy.event = self._last
        except Exception as caught:  # handed to whoever waits for the copy
            copy.error = caught.with_traceback(None)
            with suppress(Exception):  # of a device that is lost: whoever waits must hear of the first error
                self._drain()  # its memory may go now: nothing may read or write that any more
        copy.finish()


class OutHops(HopLane):
    """Copies from the device to the disk."""

    def _hop(self, place: DiskPlace, address: int) -> None:
        for start, part in place.parts:
            self._streams.to_host(Stream.OUT, self._bounce, address + start, part.nbytes)
            self._last = self._streams.record(Stream.OUT)
            self._drain()
            self._spill.write(part, self._bounce)


class BackHops(HopLane):
    """Copies from the disk to the device."""

    def _hop(self, place: DiskPlace, address: int) -> None:
        for start, part in place.parts:
            self._drain()
            self._spill.read(part, self._bounce)
            self._streams.to_device(Stream.BACK, address + start, self._bounce, part.nbytes)
            self._last = self._streams.record(Stream.BACK)


class StreamLane:
    """Copies of one direction, in the order in which they are asked for."""

    def __init__(self, stream: Stream, streams: Streams, hops: Lane, readers: _Readers, waits: Waits) -> None:
        self._stream = stream
        self._streams = streams
        self._hops = hops
        self._readers = readers
        self._waits = waits
        self._speed = _Speed(streams)
        self._order = _Order()

    def submit(self, slot: Place, address: int) -> Copy:
        """Ask for a copy of memory at `address`, which the compute stream has written, or allocated, by now."""
        streams, stream = self._streams, self._stream
        ready = streams.record(Stream.COMPUTE)
        if isinstance(slot, DiskPlace):
            hop = HopCopy(slot, address, stream, ready, self._waits)
            self._hops.hand_over(hop)
            return hop
        assert isinstance(slot, HostPlace)
        streams.wait(stream, ready)
        self._begin(slot)
        start = streams.record(stream)
        for first, host, nbytes in slot.pieces:
            self._move(host, address + first, nbytes)
        end = streams.record(stream)
        self._end(slot, end)
        self._speed.add(start, end, slot.nbytes)
        return StreamCopy(slot, address, end, self._order, self._waits)

    def _begin(self, place: HostPlace) -> None:
        """Wait for what else must be over before the pinned place is used."""

    def _move(self, host: int, device: int, nbytes: int) -> None:
        raise NotImplementedError

    def _end(self, place: HostPlace, event: Event) -> None:
        """Remember the mark after which the pinned place is used no more."""

    def bandwidth(self) -> float | None:
        """Bytes per second to or from pinned memory; None before there were any worth measuring."""
        return self._speed.bandwidth()

    def cost_per_byte(self) -> float | None:
        """None: copies have engines of their own."""
        return None


class OutLane(StreamLane):
    """Copies away from the device."""

    def _begin(self, place: HostPlace) -> None:
        for read in self._readers.of(place):
            self._streams.wait(Stream.OUT, read)

    def _move(self, host: int, device: int, nbytes: int) -> None:
        self._streams.to_host(Stream.OUT, host, device, nbytes)


class BackLane(StreamLane):
    """Copies back to the device."""

    def _move(self, host: int, device: int, nbytes: int) -> None:
        self._streams.to_device(Stream.BACK, device, host, nbytes)

    def _end(self, place: HostPlace, event: Event) -> None:
        self._readers.add(place, event)


class CudaCopies:
    """Copies between a CUDA device, pinned memory, and the disk for what has no room there."""

    def __init__(self, streams: Streams, spill: SpillFile, bounces: tuple[int, int]) -> None:
        """`bounces` are the addresses of the pinned buffers on the way to the disk and on the way back."""
        self.waits = Waits(streams)
        self._streams = streams
        self._hops = (
            OutHops("outgrow-hop-out", streams, spill, bounces[0]),
            BackHops("outgrow-hop-in", streams, spill, bounces[1]),
        )
        readers = _Readers()
        self.out = OutLane(Stream.OUT, streams, self._hops[0], readers, self.waits)
        self.back = BackLane(Stream.BACK, streams, self._hops[1], readers, self.waits)

    def close(self) -> None:
        """Finish all copies and end both threads. The host waits: the pinned memory may go after this."""
        for hops in self._hops:
            hops.close()
        for stream in (Stream.OUT, Stream.BACK):
            self._streams.record(stream).synchronize()
