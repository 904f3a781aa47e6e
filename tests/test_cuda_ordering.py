"""The CUDA copy engine under the real pool: every access to device and pinned memory is ordered, and bytes are right.

There is no GPU here. The streams are fakes that know what happens before what (`fake_streams.py`); pool, engine, host
tier and spill file are the real ones.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_streams import HOST, FakeDevice, FakeStreams, WatchedSpill, Who
from outgrow.errors import SpillError
from outgrow.planning.plan import slot_bytes
from outgrow.runtime.copies import cuda
from outgrow.runtime.copies.cuda import CudaCopies, StreamCopy
from outgrow.runtime.copies.strays import StreamStrays
from outgrow.runtime.copies.streams import Stream
from outgrow.runtime.entry import Entry
from outgrow.runtime.pool import Pool
from outgrow.runtime.tiers import host
from outgrow.runtime.tiers.disk import Slot
from outgrow.runtime.tiers.host import DiskPlace, HostPlace, HostTier
from outgrow.tracing.ledger import Ledger

BUDGET = 96 << 10
LARGEST = 24 << 10
PART = 4 << 10  # what passes to the disk at a time


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of a few KiB go to the disk in several parts."""
    shrink(monkeypatch)


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_LEAST_BOUNCE_BYTES", PART)
    monkeypatch.setattr(host, "LEAST_HOST_BYTES", 2 * PART)
    monkeypatch.setattr(host, "_MOST_BLOCK_BYTES", 16 << 10)


@dataclass(eq=False)
class Value:
    """A saved value, and the bytes that it was packed with; `planned` is its place in the plan, if it has one."""

    entry: Entry
    data: bytes
    planned: int | None


class Program:
    """A program that saves values and wants them back, and at random what a plan or the cache might do."""

    def __init__(
        self, folder: Path, seed: int, *, skipped: Collection[tuple[Who, Who]] = (), threads: bool = False
    ) -> None:
        self.coins = coins = Random(seed)
        self.streams = FakeStreams(Random(seed + 1), coins.choice((0.0, 0.1, 0.5, 1.0)), skipped)
        self.device = FakeDevice(self.streams, int(BUDGET * coins.choice((1.0, 1.3, 2.0))))
        self.host_budget = 2 * PART + coins.choice((0, 20 << 10, 60 << 10, 400 << 10))
        self.spill = WatchedSpill(folder, allow_tmpfs=True)
        self.spill.streams = self.streams
        self.pinned_bytes = 0
        self.tier = HostTier(self.host_budget, self.spill, self._pin)
        self.copies = CudaCopies(self.streams, self.spill, self.tier.bounces)
        if not threads:  # copies by way of the disk are made on the spot, so that an example is always the same
            for hops in self.copies._hops:
                hops.close()
        self.ledger = Ledger("cpu")
        self.strays = StreamStrays(self.streams)
        self.pool = Pool(self.ledger, BUDGET, self.tier, self.copies, self.device, 1, strays=self.strays)
        self.allocate, self.device.allocate = self.device.allocate, self._allocate  # type: ignore[method-assign]
        self.saved: list[Value] = []
        self.sizes: list[int] = []
        self.count = 0

    def _pin(self, nbytes: int) -> torch.Tensor:
        self.pinned_bytes += nbytes
        assert self.pinned_bytes <= self.host_budget
        return torch.zeros(nbytes, dtype=torch.uint8)

    def _allocate(self, nbytes: int) -> torch.UntypedStorage:
        storage = self.allocate(nbytes)
        weakref.finalize(storage, self.device.freed, storage.data_ptr()).atexit = False
        return storage

    # --- what the program does ---

    def compute(self, nbytes: int) -> torch.UntypedStorage | None:
        """An op that makes something of `nbytes`; None if it does not fit."""
        is_elsewhere = self.coins.random() < 0.2
        with self.streams.elsewhere() if is_elsewhere else nullcontext():
            if not self.pool.cache.make_room(nbytes):
                return None
            # The program allocates where it is, we do not.
            storage = self._allocate(nbytes) if is_elsewhere else self.pool._allocate(nbytes, may_evict=True)
            self.ledger.see_storage(storage)
            self.count += 1
            data = self.coins.randbytes(nbytes)
            stream = Stream.ELSEWHERE if is_elsewhere else Stream.COMPUTE
            self.streams.touch(stream, storage.data_ptr(), nbytes, "an op that writes", writes=True)
            ctypes.memmove(storage.data_ptr(), data, nbytes)
            self.strays.ran([])
        self.streams.is_known_to(Stream.COMPUTE, stream)
        return storage

    def save(self, planned: int | None, nbytes: int) -> None:
        """Autograd saves what an op made."""
        storage = self.compute(nbytes)
        if storage is None:
            return
        data = ctypes.string_at(storage.data_ptr(), nbytes)
        tensor = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
        self.saved.append(Value(self.pool.adopt(tensor, self.ledger.see_storage(storage)), data, planned))

    def read(self, value: Value) -> None:
        """Autograd wants a value back, and an op reads it, now and then on a stream of the program's own."""
        is_elsewhere = self.coins.random() < 0.2
        with self.streams.elsewhere() if is_elsewhere else nullcontext():
            self._read(value, Stream.ELSEWHERE if is_elsewhere else Stream.COMPUTE)

    def _read(self, value: Value, reader: Stream) -> None:
        storage = self.pool.request(value.entry, lambda nbytes: void(self.pool.cache.make_room(nbytes)))
        if self.coins.random() < 0.3:
            self.act()  # plan actions come between
        self.pool.wait_in(value.entry)
        self.strays.follow()
        nbytes = len(value.data)
        self.streams.touch(reader, storage.data_ptr(), nbytes, "an op that reads", writes=False)
        is_right = ctypes.string_at(storage.data_ptr(), nbytes) == value.data
        assert is_right, "wrong bytes came back"  # to show the difference takes pytest long
        self._meet()  # the memory may go with what reads it

    def _meet(self) -> None:
        """The program has its streams wait for each other: without us, memory would go about now."""
        self.streams.is_known_to(Stream.COMPUTE, Stream.ELSEWHERE)
        self.streams.is_known_to(Stream.ELSEWHERE, Stream.COMPUTE)

    def act(self) -> None:
        """Something that a plan or the cache does to some value."""
        if not self.saved:
            return
        value = self.coins.choice(self.saved)
        entry, pool = value.entry, self.pool
        what = self.coins.randrange(11)
        if what <= 2:
            pool.start_out(entry, value.planned)
        elif what <= 4:
            pool.start_in(entry, self.coins.choice((0, 4096)))
        elif what == 5:
            pool.wait_out(entry)
        elif what == 6:
            pool.land()
        elif what == 7:
            pool.cache.evict(self.coins.randrange(1, LARGEST))
        elif what == 8:
            self.write(value)
        elif what == 9:
            self.look(value)
        else:
            pool.cache.make_room(self.coins.randrange(1, LARGEST))

    def look(self, value: Value) -> None:
        """Somebody who holds a value reads it on a stream of the program's own: the graph is to outlive that."""
        storage = value.entry.record.storage()
        if storage is None or value.entry.reading is not None:
            return
        self.streams.is_known_to(Stream.ELSEWHERE, Stream.COMPUTE)
        with self.streams.elsewhere():
            nbytes = len(value.data)
            self.streams.touch(Stream.ELSEWHERE, storage.data_ptr(), nbytes, "an op elsewhere", writes=False)
            self.strays.ran([torch.empty(0, device="meta")])

    def write(self, value: Value) -> None:
        """Somebody who holds a value writes to it past autograd: what was copied of it is stale."""
        storage = value.entry.record.storage()
        if storage is None or value.entry.reading is not None:
            return
        self.streams.is_known_to(Stream.COMPUTE, Stream.ELSEWHERE)
        self.pool.written(value.entry.record)
        nbytes, value.data = len(value.data), self.coins.randbytes(len(value.data))
        self.streams.touch(Stream.COMPUTE, storage.data_ptr(), nbytes, "an op that writes", writes=True)
        ctypes.memmove(storage.data_ptr(), value.data, nbytes)

    def drop(self, value: Value) -> None:
        """A graph is freed, with copies of it wherever they are."""
        self.saved.remove(value)
        self._meet()
        self.pool.drop(value.entry)

    def step(self) -> None:
        """One step: values are saved, moved and read; some live on."""
        coins = self.coins
        for value in self.saved:  # plans of later steps do not know of them
            value.planned = None
        if not self.sizes or coins.random() < 0.3:  # another kind of step
            self.sizes = [coins.randrange(1, LARGEST) for _ in range(coins.randrange(2, 9))]
        sizes = self.sizes
        area = sum(slot_bytes(size) for size in sizes)
        self.pool.make_way(area)
        offset = 0
        for nbytes in sizes:
            self.save(offset if coins.random() < 0.7 else None, nbytes)
            offset += slot_bytes(nbytes)
            if self.saved and coins.random() < 0.5:
                self.pool.start_out(self.saved[-1].entry, self.saved[-1].planned)
            for _ in range(coins.randrange(4)):
                self.act()
            if coins.random() < 0.5:
                self.compute(coins.randrange(1, LARGEST))  # and frees it at once
        while self.saved and coins.random() < 0.93:
            value = self.saved[-1] if coins.random() < 0.7 else coins.choice(self.saved)
            if coins.random() < 0.8:
                self.read(value)
            if coins.random() < 0.7:
                self.drop(value)
            self.act()
            if coins.random() < 0.5:
                self.compute(coins.randrange(1, LARGEST))
        if coins.random() < 0.4:  # an error: the graph is freed with copies back under way
            for value in list(self.saved):
                self.pool.wait_out(value.entry)
                self.pool.start_in(value.entry, 0)
                self.drop(value)
                if value.planned is not None:  # and the next step's value leaves for the same place
                    self.save(value.planned, len(value.data))
                    self.pool.start_out(self.saved[-1].entry, value.planned)

    def run(self) -> None:
        """Some steps, and the end, which brings back what is still wanted."""
        for _ in range(self.coins.randrange(1, 5)):
            self.step()
        self.pool._budget = 1 << 40  # what is closed asks for no budget
        self.device.allocate = lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()  # type: ignore[method-assign]
        self.pool.close()
        for value in self.saved:
            storage = value.entry.storage
            assert storage is not None
            assert ctypes.string_at(storage.data_ptr(), len(value.data)) == value.data
        self.saved.clear()


def void(_: object) -> None:
    return None


def run_program(seed: int, *, skipped: Collection[tuple[Who, Who]] = (), threads: bool = False) -> Program:
    with TemporaryDirectory() as folder:
        program = Program(Path(folder), seed, skipped=skipped, threads=threads)
        program.run()
        return program


@settings(max_examples=300, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_every_access_is_ordered_and_every_byte_is_right(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        assert run_program(seed).streams.races == []


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_it_is_the_same_where_threads_copy_to_the_disk(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        assert run_program(seed, threads=True).streams.races == []


def is_caught(skipped: Collection[tuple[Who, Who]] = ()) -> bool:
    """Whether some of a few programs shows that something is missing."""
    for seed in range(100):
        try:
            if run_program(seed, skipped=skipped).streams.races:
                return True
        except AssertionError as error:
            return "wrong bytes" in str(error)
    return False


WAITS: dict[str, tuple[Who, Who]] = {
    "a copy out begins when the value is written": (Stream.OUT, Stream.COMPUTE),
    "a copy back begins when the memory is its own": (Stream.BACK, Stream.COMPUTE),
    "memory is freed after the copy out": (Stream.COMPUTE, Stream.OUT),
    "a value is read after the copy back": (Stream.COMPUTE, Stream.BACK),
    "a pinned place is written after the copy back": (Stream.OUT, Stream.BACK),
    "who reads a value elsewhere waits for the copy back": (Stream.ELSEWHERE, Stream.COMPUTE),
    "memory is freed after what was read of it elsewhere": (Stream.COMPUTE, Stream.ELSEWHERE),
    "the disk is written after the copy out": (HOST, Stream.OUT),
    "the buffer is filled after the copy back": (HOST, Stream.BACK),
}


@pytest.mark.parametrize("skipped", WAITS.values(), ids=WAITS.keys())
def test_an_engine_that_skips_a_wait_is_caught(skipped: tuple[Who, Who]) -> None:
    assert is_caught([skipped])


def test_programs_that_skip_nothing_are_not_caught() -> None:
    assert not is_caught()


def test_an_engine_that_takes_copies_for_done_at_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamCopy, "done", property(lambda self: True))
    assert is_caught()


def test_an_engine_that_forgets_who_reads_a_pinned_place_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda._Readers, "of", lambda self, place: [])
    assert is_caught()


def test_a_pool_that_frees_what_a_copy_still_fills_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies back whose value nobody wants any more hold their memory until they are done."""

    def land(pool: Pool) -> None:
        pool._abandoned.clear()
        usual(pool)

    usual = Pool.land
    monkeypatch.setattr(Pool, "land", land)
    assert is_caught()


def test_the_programs_wait_in_every_way_that_there_is() -> None:
    seen = set().union(*(run_program(seed).streams.waits for seed in range(60)))
    assert seen == {pair for pair in WAITS.values() if pair[0] is not HOST}


@pytest.mark.parametrize("what", ["is written to", "is waited for", "is over"])
def test_a_copy_that_is_over_lands_though_one_to_the_disk_that_began_before_is_not(what: str, tmp_path: Path) -> None:
    """Copies to pinned memory are on a stream, those to the disk on a thread: they end in no order."""
    program = Program(tmp_path, 10, threads=True)  # whose host budget has room
    pool, disk_goes_on, usual = program.pool, threading.Event(), program.spill.write

    def write(slot: Slot, address: int) -> None:
        assert disk_goes_on.wait(10)
        usual(slot, address)

    program.spill.write = write  # type: ignore[method-assign]
    for _ in range(2):
        program.save(None, PART)
    slow, quick = program.saved
    pinned = program.tier.reserve(PART)
    assert isinstance(pinned, HostPlace)
    places = iter([DiskPlace(program.spill.reserve(PART), PART), pinned])
    pool.reserve = lambda nbytes: next(places)  # type: ignore[method-assign]
    pool.start_out(slow.entry)
    pool.start_out(quick.entry)
    if what == "is written to":
        program.write(quick)
    elif what == "is waited for":
        pool.wait_out(quick.entry)
    else:
        assert quick.entry.writing is not None
        quick.entry.writing.wait()
        pool.land()
    assert quick.entry.writing is None
    assert slow.entry.writing is not None
    disk_goes_on.set()
    pool.wait_out(slow.entry)
    for value in (slow, quick):
        program.read(value)
    assert program.streams.races == []
    for value in (slow, quick):
        program.drop(value)
    pool.close()


def test_what_a_loader_made_between_steps_is_its_own_again_only_after_our_copy(tmp_path: Path) -> None:
    """Its stream is seen for the first time when it asks for room inside a step."""
    program = Program(tmp_path, 10)
    program.streams.luck = 0.0
    with program.streams.elsewhere():
        batch = program._allocate(PART)
        program.streams.touch(Stream.ELSEWHERE, batch.data_ptr(), PART, "a batch that is loaded", writes=True)
    program._meet()
    tensor = torch.empty(0, dtype=torch.uint8).set_(batch, 0, (PART,), (1,))
    entry = program.pool.adopt(tensor, program.ledger.see_storage(batch))
    address = batch.data_ptr()
    del batch, tensor
    with program.streams.elsewhere():
        program.pool.cache.evict(PART)
        again = program._allocate(PART)
    assert again.data_ptr() == address
    assert program.streams.races == []
    del again
    program.pool.drop(entry)
    program.pool.close()


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("what", ["write", "read"])
def test_a_disk_that_fails_is_an_error_for_whoever_waits_and_frees_no_memory_in_use(
    what: str, threads: bool, tmp_path: Path
) -> None:
    program = Program(tmp_path, 1, threads=threads)
    program.streams.luck = 0.0
    value = b"".join(k.to_bytes(2, "little") for k in range(PART))  # two parts
    storage = program.device.allocate(len(value))
    ctypes.memmove(storage.data_ptr(), value, len(value))
    place = DiskPlace(program.spill.reserve(len(value)), PART)

    def fail(slot: Slot, address: int) -> None:
        if slot.offset > place.offset:  # in the second part
            raise SpillError(5, "the disk is gone")
        usual(slot, address)

    if what == "read":
        out = program.copies.out.submit(place, storage.data_ptr())
        out.wait()
        out.check()
    usual = getattr(program.spill, what)
    setattr(program.spill, what, fail)
    lane = program.copies.out if what == "write" else program.copies.back
    copy = lane.submit(place, storage.data_ptr())
    copy.wait()
    assert copy.done
    with pytest.raises(SpillError, match="the disk is gone"):
        copy.check()
    del storage  # nothing reads or writes it any more
    setattr(program.spill, what, usual)
    again = program.device.allocate(len(value))
    assert program.streams.races == []
    lane.submit(place, again.data_ptr()).wait()
    del again
    program.copies.close()
    assert program.streams.races == []


def test_who_waits_for_a_copy_waits_for_those_before_it(tmp_path: Path) -> None:
    """They are on one stream: memory of all of them may go, although nobody asked for each."""
    program = Program(tmp_path, 3)
    program.streams.luck = 0.0
    program.pool._budget = 1 << 30
    for _ in range(3):
        program.save(None, 1000)
        program.pool.start_out(program.saved[-1].entry)
    places = [value.entry.writing.slot for value in program.saved if value.entry.writing is not None]
    assert all(isinstance(place, HostPlace) for place in places)
    assert program.ledger.live_bytes == 3000
    program.pool.wait_out(program.saved[1].entry)
    assert program.ledger.live_bytes == 1000
    assert [value.entry.storage is None for value in program.saved] == [True, True, False]
    assert program.streams.races == []
    program.pool.close()
