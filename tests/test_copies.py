"""The lanes of the CPU's copy engine: small values that wait, and lie beside each other, are moved at once."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from outgrow.errors import SpillError
from outgrow.runtime.copies.copy import Copy
from outgrow.runtime.copies.cpu import CpuCopies, DiskLane
from outgrow.runtime.tiers.disk import Slot, SpillFile

SMALL, LARGE = 20_000, 300_000


class Disk:
    """A spill file whose operations wait at first, and are counted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = SpillFile(folder, allow_tmpfs=True)
        self.may_go_on = threading.Event()
        self.begun = threading.Event()
        self.moved: list[list[int]] = []  # by operation, where what it moved lies
        for name in ("write", "read"):
            self._count(name, monkeypatch, lambda slot, address: [slot.offset])
            self._count(f"{name}_run", monkeypatch, lambda values: [slot.offset for slot, _ in values])
        self.copies = CpuCopies(self.file)

    def _count(self, name: str, monkeypatch: pytest.MonkeyPatch, offsets: Callable[..., list[int]]) -> None:
        move = getattr(self.file, name)

        def moving(*given: Any) -> None:
            if not (name.endswith("_run") and len(given[0]) == 1):  # else it was counted on its way here
                self.moved.append(offsets(*given))
            self.begun.set()
            self.may_go_on.wait(60)
            move(*given)

        monkeypatch.setattr(self.file, name, moving)

    def submit(self, lane: DiskLane, memory: Sequence[tuple[Slot, ctypes.Array[ctypes.c_char]]]) -> list[Copy]:
        """Ask for copies, of which the first is under way before the others wait."""
        self.begun.clear()
        self.may_go_on.clear()
        copies = []
        for slot, array in memory:
            copies.append(lane.submit(slot, ctypes.addressof(array)))
            self.begun.wait(60)
        self.may_go_on.set()
        for copy in copies:
            copy.wait()
        return copies


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(tmp_path, monkeypatch)
    yield made
    made.copies.close()
    made.file.close()


def filled(nbytes: int, seed: int) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(bytes((seed + k) % 251 for k in range(nbytes)), nbytes)


def test_small_values_that_wait_beside_each_other_are_moved_at_once_in_any_order(disk: Disk) -> None:
    memory = [(disk.file.reserve(SMALL), filled(SMALL, k)) for k in range(8)]
    copies = disk.submit(disk.copies.out, memory)
    assert [copy.error for copy in copies] == [None] * 8
    assert disk.moved == [[0], [slot.offset for slot, _ in memory[1:]]]
    assert disk.copies.out.moved_bytes == 8 * SMALL
    disk.moved.clear()
    order = [memory[k] for k in (0, 4, 3, 5, 2, 6, 7, 1)]
    back = [(slot, ctypes.create_string_buffer(SMALL)) for slot, _ in order]
    disk.submit(disk.copies.back, back)
    assert disk.moved == [[0], [slot.offset for slot, _ in order[1:]]]
    assert [array.raw for _, array in back] == [array.raw for _, array in order]


def test_what_is_large_or_lies_elsewhere_is_moved_by_itself_and_in_its_turn(disk: Disk) -> None:
    slots = [disk.file.reserve(nbytes) for nbytes in (SMALL, SMALL, LARGE, SMALL, SMALL, SMALL)]
    first, second, large, third, gap, last = slots
    order = [first, second, large, third, last]
    disk.submit(disk.copies.out, [(slot, filled(slot.nbytes, 1)) for slot in order])
    assert disk.moved == [[slot.offset] for slot in order]
    disk.moved.clear()
    disk.submit(disk.copies.out, [(slot, filled(slot.nbytes, 1)) for slot in (large, gap, last, third)])
    assert disk.moved == [[large.offset], [gap.offset, last.offset, third.offset]]


def test_one_operation_moves_half_a_mebibyte_at_most(disk: Disk) -> None:
    memory = [(disk.file.reserve(1 << 16), filled(1 << 16, k)) for k in range(18)]
    disk.submit(disk.copies.out, memory)
    assert [len(moved) for moved in disk.moved] == [1, 8, 8, 1]


def test_of_those_that_were_moved_at_once_each_has_an_error_of_its_own(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = [(disk.file.reserve(SMALL), filled(SMALL, k)) for k in range(4)]
    write_run = disk.file.write_run

    def broken(values: Sequence[tuple[Slot, int]]) -> None:
        if any(slot is memory[2][0] for slot, _ in values):
            raise SpillError(5, "a bad block")
        write_run(values)

    monkeypatch.setattr(disk.file, "write_run", broken)
    monkeypatch.setattr(disk.copies.out, "_move_run", broken)
    copies = disk.submit(disk.copies.out, memory)
    assert [copy.error is None for copy in copies] == [True, True, False, True]
    with pytest.raises(SpillError, match="a bad block"):
        copies[2].check()
    back = [(slot, ctypes.create_string_buffer(SMALL)) for slot, _ in memory]
    disk.submit(disk.copies.back, [back[0], back[1], back[3]])
    assert [back[k][1].raw for k in (0, 1, 3)] == [memory[k][1].raw for k in (0, 1, 3)]
