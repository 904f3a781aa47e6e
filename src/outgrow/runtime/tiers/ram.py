"""RAM as the device tier of CPU training: one region of memory for values on their way back."""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue

import torch

from outgrow.runtime.tiers.heap import address_space_is_limited

_Range = tuple[int, int]  # first byte, and the one after the last


class Buffers:
    """Memory for values on their way back, used again and again.

    The system hands out fresh pages at less than two gigabytes a second, zeroed by the very cores that compute: a
    value takes the place of others that are done with (Layrub's shared blocks). All of them lie in one region of
    addresses, on huge pages where the system has them, apart from the heap, where they would leave holes. Each gets
    the smallest gap that it fits; pages stay until they are shed. Where addresses are counted, or the region is full,
    a value gets a map of its own, which goes with it.
    """

    # Addresses cost nothing; what a region of just the budget might not fit is between the values.
    _REGION_BUDGETS = 2

    def __init__(self, budget_bytes: int, before_touching: Callable[[int], None]) -> None:
        """`before_touching` is told how many bytes will be taken from the system."""
        self._before_touching = before_touching
        memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE  # the system refuses a region that is larger
        size = _whole_pages(min(self._REGION_BUDGETS * budget_bytes, memory))
        self._region = None if address_space_is_limited() else _reserve(size)
        self._size = 0 if self._region is None else size
        self._used: list[_Range] = []  # by address, as are all lists of ranges here
        self._touched: list[_Range] = []  # whose pages are there; no two of them meet
        self._idle = 0
        self._in_use: dict[weakref.ref[torch.UntypedStorage], _Range] = {}
        # Storages die on any thread (a collector runs anywhere): what they leave is taken in on the training's.
        self._left: SimpleQueue[_Range] = SimpleQueue()

    @property
    def idle_bytes(self) -> int:
        """Bytes whose pages are there and that no value uses."""
        self._take_in()
        return self._idle

    def take(self, nbytes: int, phase: int) -> torch.UntypedStorage:
        """A storage of exactly `nbytes` whose address is `phase` bytes after the start of a page.

        Direct I/O wants file offset and memory address aligned alike: a value that left from an address with a
        certain phase comes back to one with the same phase, and so needs no bounce buffer.
        """
        self._take_in()
        need = _whole_pages(nbytes + phase)
        fits = (gap for gap in self._gaps() if gap[1] - gap[0] >= need)
        gap = min(fits, key=lambda gap: gap[1] - gap[0], default=None)
        if self._region is None or gap is None:
            self._before_touching(need)
            return _window(_map(need), nbytes, phase)
        place = (gap[0], gap[0] + need)
        fresh = need - _length(_overlap(self._touched, place))
        if fresh:
            self._before_touching(fresh)
        # The tensor's storage is the owner that keeps the region mapped for as long as it lives.
        storage = _window(self._region, nbytes, place[0] + phase)
        insort(self._used, place)
        self._touched = _with(self._touched, place)
        self._idle -= need - fresh
        self._in_use[weakref.ref(storage, self._done_with)] = place
        return storage

    def shed(self, nbytes: int) -> None:
        """Give idle pages back to the system, those at high addresses first, until `nbytes` are or none is left."""
        self._take_in()
        if nbytes <= 0 or self._region is None:
            return
        for gap in reversed(list(self._gaps())):
            for start, stop in reversed(_overlap(self._touched, gap)):
                if nbytes <= 0:
                    return
                start = max(start, stop - _whole_pages(nbytes))
                self._region.madvise(mmap.MADV_DONTNEED, start, stop - start)
                self._touched = _without(self._touched, (start, stop))
                self._idle -= stop - start
                nbytes -= stop - start

    def close(self) -> None:
        """Free what is idle; what is still in use lives on with its storages."""
        self.shed(self.idle_bytes)
        self._region, self._size = None, 0
        self._in_use.clear()
        self._used, self._touched, self._idle = [], [], 0

    def _gaps(self) -> Iterator[_Range]:
        end = 0
        for start, stop in self._used:
            if end < start:
                yield end, start
            end = stop
        if end < self._size:
            yield end, self._size

    def _done_with(self, storage: weakref.ref[torch.UntypedStorage]) -> None:
        place = self._in_use.pop(storage, None)
        if place is not None:
            self._left.put(place)

    def _take_in(self) -> None:
        while not self._left.empty():
            place = self._left.get()
            if place in self._used:  # else the region was closed meanwhile
                self._used.remove(place)
                self._idle += place[1] - place[0]


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _length(ranges: Iterable[_Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _overlap(ranges: Iterable[_Range], place: _Range) -> list[_Range]:
    """What of the ranges lies in `place`."""
    clipped = ((max(start, place[0]), min(stop, place[1])) for start, stop in ranges)
    return [(start, stop) for start, stop in clipped if start < stop]


def _with(ranges: Iterable[_Range], place: _Range) -> list[_Range]:
    """The ranges and `place`, with those that meet made one."""
    apart: list[_Range] = []
    first, last = place
    for start, stop in ranges:
        if stop < place[0] or start > place[1]:
            apart.append((start, stop))
        else:
            first, last = min(first, start), max(last, stop)
    insort(apart, (first, last))
    return apart


def _without(ranges: Iterable[_Range], place: _Range) -> list[_Range]:
    """The ranges less what of them lies in `place`."""
    parts = (part for start, stop in ranges for part in ((start, min(stop, place[0])), (max(start, place[1]), stop)))
    return [(start, stop) for start, stop in parts if start < stop]


def _reserve(nbytes: int) -> mmap.mmap | None:
    """Addresses whose pages come when they are touched; None where the system does not hand out that many."""
    with suppress(OSError, ValueError, OverflowError):
        return _map(nbytes)
    return None


def _map(nbytes: int) -> mmap.mmap:
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _window(block: mmap.mmap, nbytes: int, offset: int) -> torch.UntypedStorage:
    return torch.frombuffer(block, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()
