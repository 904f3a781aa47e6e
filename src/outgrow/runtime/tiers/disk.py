"""The disk tier: one unnamed file, direct I/O, places fixed by the plan and a free list for the rest.

The file never has a name (`O_TMPFILE`), so that a killed process leaves nothing behind, and bypasses the page
cache (`O_DIRECT`), since bytes in the page cache would still be in RAM.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from outgrow.errors import SpillError
from outgrow.planning.plan import SLOT_ALIGNMENT, slot_bytes
from outgrow.runtime.tiers.place import Place
from outgrow.units import format_bytes

_Transfer = Callable[[int, "ctypes.Array[ctypes.c_char]", int], int]
_ASIDE_BYTES = 1 << 20
# An operation on a disk takes some 80 microseconds, whether it moves 32 KiB or 128: what is smaller than this goes by
# way of a buffer, along with what lies beside it, until so many bytes are together. (More would be hardly faster, and
# whoever waits for the first value waits for all.)
_SMALL_BYTES = 128 << 10
_RUN_BYTES = 512 << 10
_RAM_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


class Slot(Place):
    """A value's place on the disk.

    Direct I/O moves whole aligned blocks. Small values go by way of a buffer, and lie in the file from the slot's
    beginning. Of large ones `head` and `tail` are the bytes before the first and after the last aligned address, less
    than two blocks in all, and stay in RAM.
    """

    __slots__ = ("head", "phase", "tail")

    def __init__(self, offset: int, nbytes: int, *, planned: bool) -> None:
        super().__init__(offset, nbytes, planned=planned)
        self.phase = 0
        self.head = b""
        self.tail = b""

    @property
    def is_small(self) -> bool:
        """Whether it goes by way of a buffer."""
        return self.nbytes < _SMALL_BYTES

    @property
    def end(self) -> int:
        """Where the next slot may begin."""
        return self.offset + slot_bytes(self.nbytes)


class Run:
    """Slots that adjoin each other: one operation on the disk moves all of them."""

    __slots__ = ("begin", "end")

    def __init__(self, slot: Slot) -> None:
        self.begin = slot.offset
        self.end = slot.end

    def takes(self, slot: Slot) -> bool:
        """Take one more in, if it adjoins them and is small, as they are."""
        begin, end = min(self.begin, slot.offset), max(self.end, slot.end)
        adjoins = slot.end == self.begin or slot.offset == self.end
        if not (adjoins and slot.is_small and end - begin <= _RUN_BYTES):
            return False
        self.begin, self.end = begin, end
        return True


class _Aside:
    """A buffer that is aligned as direct I/O wants it, for one thread at a time.

    It is there from the start: where values have to leave there may be no memory for one.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _ASIDE_BYTES)
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[tuple[memoryview, int]]:
        """The buffer, and its address."""
        with self._lock, memoryview(self._memory) as view:
            yield view, ctypes.addressof(ctypes.c_char.from_buffer(view))


class SpillFile:
    """Room on a disk for values that left RAM. `write` and `read` may be called from worker threads."""

    def __init__(self, directory: str | Path | None, *, allow_tmpfs: bool = False) -> None:
        """Open the file in `directory` (default: the system's folder for temporary files that is on a disk).

        Raises:
            SpillError: the folder is missing, read-only, or in RAM and not `allow_tmpfs`.
        """
        self.directory = _choose_directory(directory, allow_tmpfs=allow_tmpfs)
        self._descriptor, self._direct = _open_unnamed(self.directory)
        self.alignment = self._find_alignment()
        self._planned_end = 0
        self._end = 0
        self._free: list[tuple[int, int]] = []  # (room, offset), smallest room first
        self._free_bytes = 0
        self._out, self._back = _Aside(), _Aside()

    def plan_area(self, nbytes: int, used_bytes: int | None = None) -> int:
        """Set the first `nbytes` of the file aside for places that plans fix; asks the disk for them now.

        Where less of it will be written, the disk is asked for the first `used_bytes` alone. Returned is how many are
        set aside now: less than that where unplanned values lie behind them.

        Raises:
            SpillError: the file system has not that much room.
        """
        if nbytes <= self._planned_end or self._end > self._planned_end:
            return self._planned_end
        aside = nbytes if used_bytes is None else used_bytes
        try:
            os.posix_fallocate(self._descriptor, 0, aside)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise self._failure(f"setting {format_bytes(aside)} aside", error) from error
        self._planned_end = self._end = nbytes
        self._free.clear()
        self._free_bytes = 0
        return nbytes

    def planned_slot(self, offset: int, nbytes: int) -> Slot:
        """The place that the plan gave a value."""
        return Slot(offset, nbytes, planned=True)

    def reserve(self, nbytes: int) -> Slot:
        """A place for a value that no plan foresaw: the smallest free one, else at the end of the file."""
        room = slot_bytes(nbytes)
        for index, (size, offset) in enumerate(self._free):
            if size >= room:
                del self._free[index]
                self._free_bytes -= room
                if size > room:
                    insort(self._free, (size - room, offset + room))
                return Slot(offset, nbytes, planned=False)
        offset, self._end = self._end, self._end + room
        return Slot(offset, nbytes, planned=False)

    def release(self, slot: Place) -> None:
        """Give a place back."""
        if slot.planned:
            return
        room = slot_bytes(slot.nbytes)
        insort(self._free, (room, slot.offset))
        self._free_bytes += room
        if self._free_bytes == self._end - self._planned_end:
            self._free.clear()  # nothing is in use: start anew, without splinters
            self._free_bytes = 0
            self._end = self._planned_end

    def write(self, slot: Slot, address: int) -> None:
        """Copy `slot.nbytes` from memory at `address` to the slot."""
        if slot.is_small:
            self.write_run([(slot, address)])
            return
        first, last = self._aligned(address, slot.nbytes)
        slot.phase = address % self.alignment
        slot.head = ctypes.string_at(address, first - address)
        slot.tail = ctypes.string_at(last, address + slot.nbytes - last)
        try:
            self._transfer(os.pwrite, first, last, slot.offset)
        except OSError as error:
            raise self._failure(f"writing {format_bytes(slot.nbytes)}", error) from error

    def read(self, slot: Slot, address: int) -> None:
        """Copy the slot's bytes to memory at `address`; fastest where it has the phase that they left with."""
        if slot.is_small:
            self.read_run([(slot, address)])
            return
        first, last = address + len(slot.head), address + slot.nbytes - len(slot.tail)
        try:
            if address % self.alignment == slot.phase:
                self._transfer(_pread_into, first, last, slot.offset)
            else:
                self._read_aside(first, last, slot.offset)
        except OSError as error:
            raise self._failure(f"reading {format_bytes(slot.nbytes)}", error) from error
        ctypes.memmove(address, slot.head, len(slot.head))
        ctypes.memmove(last, slot.tail, len(slot.tail))

    def write_run(self, values: Sequence[tuple[Slot, int]]) -> None:
        """Copy small values from memory at their addresses to their slots, which are a `Run`."""
        begin, end = _span(values)
        with self._out.taken() as (view, start):
            for slot, address in values:
                place = slot.offset - begin
                view[place : place + slot.nbytes] = _memory(address, slot.nbytes)
            try:
                self._transfer(os.pwrite, start, start + end - begin, begin)
            except OSError as error:
                raise self._failure(f"writing {format_bytes(end - begin)}", error) from error

    def read_run(self, values: Sequence[tuple[Slot, int]]) -> None:
        """Copy the bytes of slots, which are a `Run`, to memory at their addresses."""
        begin, end = _span(values)
        with self._back.taken() as (view, start):
            try:
                self._transfer(_pread_into, start, start + end - begin, begin)
            except OSError as error:
                raise self._failure(f"reading {format_bytes(end - begin)}", error) from error
            for slot, address in values:
                place = slot.offset - begin
                _memory(address, slot.nbytes)[:] = view[place : place + slot.nbytes]

    def close(self) -> None:
        """Close the file, which frees its room on the disk."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read_aside(self, first: int, last: int, offset: int) -> None:
        """Read what lies in whole blocks in the file to memory that is aligned otherwise, by way of a buffer."""
        with self._back.taken() as (_, start):
            while first < last:
                part = min(last - first, _ASIDE_BYTES)
                self._transfer(_pread_into, start, start + part, offset)
                ctypes.memmove(first, start, part)
                first, offset = first + part, offset + part

    def _aligned(self, address: int, nbytes: int) -> tuple[int, int]:
        first = -(-address // self.alignment) * self.alignment
        last = (address + nbytes) // self.alignment * self.alignment
        if last < first:  # smaller than one block: all of it is head
            return address + nbytes, address + nbytes
        return first, last

    def _transfer(self, call: _Transfer, first: int, last: int, offset: int) -> None:
        start = first
        while start < last:
            window = (ctypes.c_char * (last - start)).from_address(start)
            moved = call(self._descriptor, window, offset + start - first)
            if moved <= 0:
                raise OSError(errno.EIO, "the spill file is shorter than what was written to it")
            start += moved
        if not self._direct and call is os.pwrite and last > first:
            os.fdatasync(self._descriptor)
            os.posix_fadvise(self._descriptor, offset, last - first, os.POSIX_FADV_DONTNEED)

    def _find_alignment(self) -> int:
        """The least alignment that the file system takes for direct I/O."""
        if not self._direct:
            return 1
        with mmap.mmap(-1, 2 * SLOT_ALIGNMENT) as page:
            view = memoryview(page)
            try:
                os.pwrite(self._descriptor, view[512:1024], 512)
                found = 512
            except OSError:
                found = SLOT_ALIGNMENT
            finally:
                view.release()
        try:
            os.ftruncate(self._descriptor, 0)
        except OSError as error:
            raise self._failure("preparing the file", error) from error
        return found

    def _failure(self, doing: str, error: OSError) -> SpillError:
        reason = error.strerror or str(error)
        advice = "Free some room there or give another spill_dir."
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            advice = "Give a spill_dir on another disk."
        place = _file_system_of(self.directory)
        return SpillError(
            error.errno or errno.EIO,
            f"{doing} failed on the spill file in {self.directory} ({place}): {reason}. {advice}",
        )


def _span(values: Sequence[tuple[Slot, int]]) -> tuple[int, int]:
    """Where slots that adjoin each other begin and end."""
    return min(slot.offset for slot, _ in values), max(slot.end for slot, _ in values)


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _pread_into(descriptor: int, window: ctypes.Array[ctypes.c_char], offset: int) -> int:
    return os.preadv(descriptor, [window], offset)


def _choose_directory(wanted: str | Path | None, *, allow_tmpfs: bool) -> Path:
    if wanted is None:
        for folder in (tempfile.gettempdir(), "/var/tmp", os.getcwd()):
            if os.access(folder, os.W_OK) and _file_system_type(Path(folder)) not in _RAM_FILE_SYSTEMS:
                return Path(folder)
        raise SpillError(errno.ENOENT, "no folder for temporary files lies on a disk: give spill_dir")
    if not isinstance(wanted, str | os.PathLike):
        raise SpillError(errno.EINVAL, f"spill_dir is {wanted!r}: give the name of a folder")
    place = Path(wanted)
    if not place.is_dir():
        raise SpillError(errno.ENOENT, f"the spill folder {place} does not exist or is no folder")
    kind = _file_system_type(place)
    if kind in _RAM_FILE_SYSTEMS and not allow_tmpfs:
        raise SpillError(
            errno.EINVAL,
            f"the spill folder {place} is on {kind}, which is RAM: what is offloaded there saves nothing."
            " Give a folder on a disk (or pass allow_tmpfs=True, --allow-tmpfs, to force it)",
        )
    return place


def _open_unnamed(directory: Path) -> tuple[int, bool]:
    """A file without a name, and whether it bypasses the page cache."""
    direct = getattr(os, "O_DIRECT", 0)
    unnamed = getattr(os, "O_TMPFILE", 0)
    attempts = [(unnamed | direct, bool(direct)), (unnamed, False)] if unnamed else []
    for flags, is_direct in attempts:
        try:
            return os.open(directory, flags | os.O_RDWR | os.O_CLOEXEC, 0o600), is_direct
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise SpillError(
                    error.errno,
                    f"cannot make a spill file in {directory}: {error.strerror}. Give another spill_dir",
                ) from error
    try:  # a file system without unnamed files: the name is gone before a byte is written
        descriptor, path = tempfile.mkstemp(prefix="outgrow-", dir=directory)
    except OSError as error:
        raise SpillError(
            error.errno or errno.EIO,
            f"cannot make a spill file in {directory}: {error.strerror}. Give another spill_dir",
        ) from error
    os.unlink(path)
    return descriptor, False


def _file_system_type(path: Path) -> str:
    mount = _mount_of(path)
    return mount.fstype if mount else ""


def _file_system_of(path: Path) -> str:
    """The file system for people: "ext4 on /dev/vda mounted at /"."""
    mount = _mount_of(path)
    return f"{mount.fstype} on {mount.device} mounted at {mount.mountpoint}" if mount else "unknown file system"


def _mount_of(path: Path) -> psutil._ntuples.sdiskpart | None:
    real = path.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    # Of two mounts at one place the later one is what is seen.
    return max(enumerate(mounts), key=lambda item: (len(item[1].mountpoint), item[0]))[1] if mounts else None
