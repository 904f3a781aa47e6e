"""The spill file gives back the bytes that were put into it, whatever their sizes, addresses and order."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from conftest import open_files_in
from outgrow.errors import SpillError
from outgrow.planning.plan import slot_bytes
from outgrow.runtime.tiers.disk import Run, Slot, SpillFile

LARGEST = 300 << 10
PLANNED_SIZES = (70_001, 4096, 1, 300_000)
sizes = st.one_of(st.integers(1, LARGEST), st.sampled_from([1, 511, 512, 513, 4095, 4096, 4097, LARGEST]))
phases = st.one_of(st.integers(0, 4095), st.sampled_from([0, 1, 64, 511, 512, 576, 4032]))


class Memory:
    """Memory at an address with a given phase, in the middle of bytes that nobody may touch."""

    GUARD = 8192

    def __init__(self, nbytes: int, phase: int, fill: int) -> None:
        self.room = mmap.mmap(-1, nbytes + 3 * self.GUARD)
        self.room[:] = bytes([fill]) * len(self.room)
        self.nbytes = nbytes
        self.start = self.GUARD + phase
        self.fill = fill
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.room)) + self.start

    @property
    def contents(self) -> bytes:
        return self.room[self.start : self.start + self.nbytes]

    @contents.setter
    def contents(self, data: bytes) -> None:
        self.room[self.start : self.start + self.nbytes] = data

    @property
    def surroundings_are_untouched(self) -> bool:
        around = self.room[: self.start] + self.room[self.start + self.nbytes :]
        return around == bytes([self.fill]) * len(around)


@dataclass(eq=False)
class Value:
    """A value that was sent to the file, and the bytes that it had."""

    slot: Slot
    phase: int
    data: bytes

    @property
    def span(self) -> range:
        return range(self.slot.offset, self.slot.offset + slot_bytes(self.slot.nbytes))


def pattern(nbytes: int, seed: int) -> bytes:
    """Bytes that differ from block to block and from value to value."""
    return b"".join((seed * 1_000_003 + block).to_bytes(8, "little") for block in range(-(-nbytes // 8)))[:nbytes]


class SpillMachine(RuleBasedStateMachine):
    """Values come and go in any order, in reserved places and in places that a plan fixed."""

    values = Bundle("values")

    @initialize(planned=st.booleans())
    def open(self, planned: bool) -> None:
        self.folder = Path(mkdtemp(prefix="test-spill-"))
        self.spill = SpillFile(self.folder, allow_tmpfs=True)
        self.planned_bytes = 0
        self.live: list[Value] = []
        self.count = 0
        self.free_places: list[tuple[int, int]] = []
        if planned:
            for nbytes in PLANNED_SIZES:
                self.free_places.append((self.planned_bytes, nbytes))
                self.planned_bytes += slot_bytes(nbytes)
            assert self.spill.plan_area(self.planned_bytes) == self.planned_bytes

    def _filled(self, slot: Slot, phase: int) -> Memory:
        self.count += 1
        memory = Memory(slot.nbytes, phase, fill=0xA5)
        memory.contents = pattern(slot.nbytes, self.count)
        return memory

    def _write(self, slot: Slot, phase: int) -> Value:
        memory = self._filled(slot, phase)
        data = memory.contents
        self.spill.write(slot, memory.address)
        assert memory.contents == data
        assert memory.surroundings_are_untouched
        value = Value(slot, phase, data)
        self.live.append(value)
        return value

    @rule(target=values, nbytes=sizes, phase=phases)
    def write(self, nbytes: int, phase: int) -> Value:
        return self._write(self.spill.reserve(nbytes), phase)

    @rule(target=values, phase=phases, which=st.integers(0, len(PLANNED_SIZES) - 1))
    def write_where_the_plan_says(self, phase: int, which: int) -> object:
        if not self.free_places:
            return multiple()
        offset, nbytes = self.free_places.pop(which % len(self.free_places))
        return self._write(self.spill.planned_slot(offset, nbytes), phase)

    @rule(value=values)
    def read(self, value: Value) -> None:
        memory = Memory(value.slot.nbytes, value.phase, fill=0x5A)
        self.spill.read(value.slot, memory.address)
        assert memory.contents == value.data
        assert memory.surroundings_are_untouched

    @rule(value=values, phase=phases)
    def read_to_another_phase(self, value: Value, phase: int) -> None:
        memory = Memory(value.slot.nbytes, phase, fill=0x5A)
        self.spill.read(value.slot, memory.address)
        assert memory.contents == value.data
        assert memory.surroundings_are_untouched

    @rule(target=values, nbytes=st.lists(st.integers(1, 20_000), min_size=2, max_size=6), phase=phases)
    def write_at_once(self, nbytes: list[int], phase: int) -> object:
        slots = [self.spill.reserve(size) for size in nbytes]
        run = Run(slots[0])
        beside = [slots[0], *(slot for slot in slots[1:] if run.takes(slot))]
        memory = [self._filled(slot, phase) for slot in beside]
        self.spill.write_run([(slot, part.address) for slot, part in zip(beside, memory, strict=True)])
        others = [self._write(slot, phase) for slot in slots if slot not in beside]
        found = [Value(slot, phase, part.contents) for slot, part in zip(beside, memory, strict=True)]
        self.live += found
        return multiple(*found, *others)

    @rule(value=values, phase=phases)
    def read_at_once_with_what_lies_beside(self, value: Value, phase: int) -> None:
        if not value.slot.is_small:
            return
        run = Run(value.slot)
        beside = [value, *(other for other in self.live if other is not value and run.takes(other.slot))]
        memory = [Memory(other.slot.nbytes, phase, fill=0x5A) for other in beside]
        self.spill.read_run([(other.slot, part.address) for other, part in zip(beside, memory, strict=True)])
        assert [part.contents for part in memory] == [other.data for other in beside]
        assert all(part.surroundings_are_untouched for part in memory)

    @rule(value=consumes(values))
    def release(self, value: Value) -> None:
        self._release(value)

    def _release(self, value: Value) -> None:
        self.spill.release(value.slot)
        self.live.remove(value)
        if value.slot.planned:
            self.free_places.append((value.slot.offset, value.slot.nbytes))

    @invariant()
    def no_two_values_overlap(self) -> None:
        spans = sorted((value.span for value in self.live), key=lambda span: span.start)
        assert all(a.stop <= b.start for a, b in pairwise(spans))

    def teardown(self) -> None:
        for value in list(self.live):
            self.read(value)
            self._release(value)
        # Nothing is left: the next value begins where the plan's room ends.
        assert self.spill.reserve(1).offset == self.planned_bytes
        self.spill.close()
        assert os.listdir(self.folder) == []
        self.folder.rmdir()


TestSpillFile = SpillMachine.TestCase
TestSpillFile.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture
def spill(tmp_path: Path) -> SpillFile:
    return SpillFile(tmp_path, allow_tmpfs=True)


def test_the_file_has_no_name_and_is_private(spill: SpillFile, tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []
    [descriptor] = open_files_in(tmp_path)
    assert os.fstat(descriptor).st_nlink == 0
    assert os.fstat(descriptor).st_mode & 0o077 == 0
    spill.close()
    assert open_files_in(tmp_path) == []


def test_closing_twice_is_harmless(spill: SpillFile, tmp_path: Path) -> None:
    spill.close()
    other = os.open(tmp_path, os.O_RDONLY)  # takes the number of the closed descriptor
    spill.close()
    os.fstat(other)
    os.close(other)


def test_a_new_file_takes_no_room(spill: SpillFile, tmp_path: Path) -> None:
    [descriptor] = open_files_in(tmp_path)
    assert os.fstat(descriptor).st_size == 0
    assert os.fstat(descriptor).st_blocks == 0


def test_a_plan_sets_its_room_aside_at_once(spill: SpillFile, tmp_path: Path) -> None:
    assert spill.plan_area(1 << 20) == 1 << 20
    [descriptor] = open_files_in(tmp_path)
    assert os.fstat(descriptor).st_blocks * 512 >= 1 << 20


def test_a_plans_room_grows_only_while_nothing_lies_behind_it(spill: SpillFile) -> None:
    assert spill.plan_area(8192) == 8192
    slot = spill.reserve(100)
    assert slot.offset == 8192
    assert spill.plan_area(4096) == 8192
    assert spill.plan_area(16384) == 8192
    spill.release(slot)
    assert spill.plan_area(16384) == 16384
    assert spill.reserve(100).offset == 16384


def test_reserved_places_are_used_again(spill: SpillFile) -> None:
    first, second, third = (spill.reserve(10_000) for _ in range(3))
    spill.release(second)
    again = spill.reserve(9_000)
    assert again.offset == second.offset
    assert {first.offset, again.offset, third.offset} == {0, 12288, 24576}


@pytest.mark.parametrize("missing", ["O_DIRECT", "O_TMPFILE"])
def test_where_the_system_lacks_a_feature_the_bytes_come_back_all_the_same(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, missing, 0)
    spill = SpillFile(tmp_path, allow_tmpfs=True)
    assert list(tmp_path.iterdir()) == []
    written = []
    for seed, (nbytes, phase) in enumerate([(1, 0), (10_000, 64), (4096, 0), (300_000, 17)]):
        memory, slot = Memory(nbytes, phase, fill=0), spill.reserve(nbytes)
        memory.contents = pattern(nbytes, seed)
        spill.write(slot, memory.address)
        written.append((slot, phase, memory.contents))
    for slot, phase, data in reversed(written):
        target = Memory(slot.nbytes, phase, fill=0x5A)
        spill.read(slot, target.address)
        assert target.contents == data
        assert target.surroundings_are_untouched
    spill.close()


def test_a_file_that_lost_its_end_is_an_error_and_not_zeros(spill: SpillFile, tmp_path: Path) -> None:
    memory = Memory(10_000, 0, fill=0)
    memory.contents = pattern(10_000, 1)
    slot = spill.reserve(10_000)
    spill.write(slot, memory.address)
    [descriptor] = open_files_in(tmp_path)
    os.ftruncate(descriptor, 4096)
    target = Memory(10_000, 0, fill=0)
    with pytest.raises(SpillError, match="shorter than what was written"):
        spill.read(slot, target.address)
