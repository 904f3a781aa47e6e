"""Streams and events that record who touches which memory when, and do their copies as late as they may.

Every stream has a vector clock. An access is a race if one before it to the same bytes, one of the two a write, is
not known to be over by then: through the order of a stream, an event that was waited for, or the host having seen
an event finished. The computation does its part at once; copies are made when somebody is made to wait for them (or a
query says that they are finished), so that a wait that is missing also gives wrong bytes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from outgrow.runtime.copies.streams import Stream
from outgrow.runtime.tiers.disk import Slot, SpillFile
from outgrow.runtime.tiers.holes import Holes

HOST = "host"
# These do all that they are asked for at once: here and now.
COMPUTING = (Stream.COMPUTE, Stream.ELSEWHERE)
Who = Stream | str
Clock = dict[Who, int]


def merge(clock: Clock, other: Clock) -> None:
    """What `other` knows to be over is known to `clock` too."""
    for who, count in other.items():
        clock[who] = max(clock.get(who, 0), count)


@dataclass(frozen=True)
class Access:
    """One access to bytes [first, end), the `count`-th act of `who`."""

    first: int
    end: int
    writes: bool
    who: Who
    count: int
    what: str


@dataclass
class Work:
    """What a stream was asked for and has not done yet; `after` are events that it waits for first."""

    count: int
    act: Callable[[], None] | None
    after: FakeEvent | None = None


@dataclass
class FakeEvent:
    """A mark in a stream."""

    streams: FakeStreams
    stream: Stream
    count: int
    clock: Clock

    def query(self) -> bool:
        streams = self.streams
        with streams.lock:
            if streams.is_performed(self.stream, self.count) or streams.coins.random() < streams.luck:
                self._finish()
                return True
            return False

    def synchronize(self) -> None:
        with self.streams.lock:
            if (HOST, self.stream) not in self.streams.skipped:
                self._finish()

    def _finish(self) -> None:
        self.streams.perform(self.stream, self.count)
        merge(self.streams.clocks[HOST], self.clock)


@dataclass
class FakeStreams:
    """A fake of `Streams`. What is `skipped`, as (who waits, for whom), is not waited for.

    The program is on the stream of the step, or on `elsewhere`.
    """

    coins: Random
    luck: float = 0.2
    skipped: Collection[tuple[Who, Who]] = ()
    races: list[str] = field(default_factory=list)
    waits: set[tuple[Who, Who]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.clocks: dict[Who, Clock] = {who: {} for who in (*Stream, HOST)}
        self._queues: dict[Stream, list[Work]] = {stream: [] for stream in Stream}
        self._done: dict[Stream, int] = dict.fromkeys(Stream, 0)
        self._accesses: list[Access] = []
        self._is_elsewhere = False

    # --- what the engine asks for ---

    home = 0
    has_strayed = is_capturing = False

    def begin(self) -> None:
        assert self.current() == self.home

    def current(self) -> int:
        return int(self._is_elsewhere)

    def record_elsewhere(self) -> FakeEvent:
        assert self._is_elsewhere
        self.has_strayed = True
        return self.record(Stream.ELSEWHERE)

    def at_home(self) -> AbstractContextManager[None]:
        return self._on(elsewhere=False)

    def elsewhere(self) -> AbstractContextManager[None]:
        """Inside, the program is on a stream of its own."""
        return self._on(elsewhere=True)

    @contextmanager
    def _on(self, *, elsewhere: bool) -> Iterator[None]:
        before, self._is_elsewhere = self._is_elsewhere, elsewhere
        try:
            yield
        finally:
            self._is_elsewhere = before

    def is_known_to(self, who: Who, others: Who) -> None:
        """The program has one of its streams wait for the other."""
        with self.lock:
            merge(self.clocks[who], self.clocks[others])

    def record(self, stream: Stream) -> FakeEvent:
        with self.lock:
            count = self._act(stream)
            return FakeEvent(self, stream, count, dict(self.clocks[stream]))

    def wait(self, stream: Stream, event: Any) -> None:
        with self.lock:
            assert isinstance(event, FakeEvent)
            self.waits.add((stream, event.stream))
            if (stream, event.stream) in self.skipped:
                return
            merge(self.clocks[stream], event.clock)
            if stream in COMPUTING:
                self.perform(event.stream, event.count)
            else:
                self._queues[stream].append(Work(self._act(stream), None, event))

    def linger(self) -> None:
        self._act(Stream.COMPUTE)

    def to_host(self, stream: Stream, host: int, device: int, nbytes: int) -> None:
        self._copy(stream, host, device, nbytes, "a copy out")

    def to_device(self, stream: Stream, device: int, host: int, nbytes: int) -> None:
        self._copy(stream, device, host, nbytes, "a copy back")

    def seconds_between(self, start: Any, end: Any) -> float:
        assert start.count < end.count
        return 1e-3

    # --- what the tests show ---

    def touch(self, who: Who, address: int, nbytes: int, what: str, *, writes: bool) -> None:
        """`who` reads or writes bytes."""
        with self.lock:
            count = self._act(who)
            new = Access(address, address + nbytes, writes, who, count, what)
            known = self.clocks[who]
            kept: list[Access] = []
            for old in self._accesses:
                overlaps = old.first < new.end and new.first < old.end
                if overlaps and (old.writes or writes) and old.count > known.get(old.who, 0):
                    self.races.append(f"{what} on {who} races with {old.what} on {old.who}")
                # What a write covers and is known to be over no later access can race with, if it comes after this.
                if not (writes and new.first <= old.first and old.end <= new.end):
                    kept.append(old)
            self._accesses = [*kept, new]

    # --- inside ---

    def is_performed(self, stream: Stream, count: int) -> bool:
        return stream in COMPUTING or self._done[stream] >= count

    def perform(self, stream: Stream, count: int) -> None:
        """Do what a stream was asked for up to its `count`-th act."""
        queue = self._queues[stream]
        while queue and queue[0].count <= count:
            work = queue.pop(0)
            if work.after is not None:
                self.perform(work.after.stream, work.after.count)
            if work.act is not None:
                work.act()
        self._done[stream] = max(self._done[stream], count)

    def _copy(self, stream: Stream, target: int, source: int, nbytes: int, what: str) -> None:
        with self.lock:
            self.touch(stream, source, nbytes, what, writes=False)
            self.touch(stream, target, nbytes, what, writes=True)
            count = self.clocks[stream][stream]
            self._queues[stream].append(Work(count, lambda: void(ctypes.memmove(target, source, nbytes))))

    def _act(self, who: Who) -> int:
        """Whoever acts does so after all that the host knows to be over, and after its own acts."""
        clock = self.clocks[who]
        merge(clock, self.clocks[HOST])
        clock[who] = clock.get(who, 0) + 1
        return clock[who]


def void(_: object) -> None:
    return None


class WatchedSpill(SpillFile):
    """A spill file whose reads and writes of pinned memory are the host's accesses."""

    streams: FakeStreams

    def write(self, slot: Slot, address: int) -> None:
        self.streams.touch(HOST, address, slot.nbytes, "a write to the disk", writes=False)
        super().write(slot, address)

    def read(self, slot: Slot, address: int) -> None:
        self.streams.touch(HOST, address, slot.nbytes, "a read from the disk", writes=True)
        super().read(slot, address)


class FakeDevice:
    """Device memory with a caching allocator: what is freed is given out again at once, on the stream that had it."""

    def __init__(self, streams: FakeStreams, nbytes: int) -> None:
        self._streams = streams
        self._region = torch.zeros(2 * nbytes + 512, dtype=torch.uint8)
        self._base = -(-self._region.data_ptr() // 512) * 512
        self._holes = {Stream.COMPUTE: Holes(0, nbytes, 512), Stream.ELSEWHERE: Holes(nbytes, 2 * nbytes, 512)}
        self._blocks: dict[int, tuple[int, int, Stream]] = {}

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        stream = Stream.ELSEWHERE if self._streams.current() else Stream.COMPUTE
        offset = self._holes[stream].take(nbytes)
        if offset is None:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes")
        address = self._base + offset
        self._streams.touch(stream, address, nbytes, "an allocation", writes=True)
        storage = torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), nbytes)
        self._blocks[address] = (offset, nbytes, stream)
        return storage

    def freed(self, address: int) -> None:
        """The block at an address is free; to be called when its storage dies."""
        offset, nbytes, stream = self._blocks.pop(address)
        self._streams.touch(stream, address, nbytes, "a free", writes=True)
        self._holes[stream].give(offset, nbytes)

    def empty(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(0)

    def refill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        storage.resize_(nbytes)

    is_counted = False

    @property
    def margin_bytes(self) -> int:
        return 0

    def give_back_beside(self) -> None:
        pass

    def make_room(self, nbytes: int) -> None:
        pass

    def make_room_beside(self, nbytes: int) -> None:
        pass

    def reserve(self, *, anew: bool) -> None:
        pass

    def relieve(self) -> None:
        pass

    def keeps_bounds(self) -> bool:
        return True

    def go_astray(self) -> None:
        pass

    def stretch(self, nbytes: int) -> bool:
        return False

    def close(self) -> None:
        assert not self._blocks, "some device memory was never freed"
