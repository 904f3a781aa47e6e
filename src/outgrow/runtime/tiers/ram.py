"""RAM as the device tier of CPU training: aligned buffers for values on their way back."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

import torch

_HUGE_PAGE_BYTES = 2 << 20


class Buffers:
    """Memory for values on their way back, used again and again.

    The system hands out fresh pages at less than two gigabytes a second, zeroed by the very cores that compute: a
    buffer whose value is done with takes the next value of about its size (Layrub's shared blocks). They lie apart
    from the heap, on huge pages where the system has them, and so leave no holes there.
    """

    _MOST_WASTE = 1.25

    def __init__(self, before_mapping: Callable[[int], None]) -> None:
        """`before_mapping` is told how many bytes will be taken from the system."""
        self._before_mapping = before_mapping
        self._idle: deque[mmap.mmap] = deque()
        self._in_use: dict[weakref.ref[torch.UntypedStorage], mmap.mmap] = {}
        # Storages die on any thread (a collector runs anywhere): what they leave is taken in on the training's.
        self._left: SimpleQueue[mmap.mmap] = SimpleQueue()

    @property
    def idle_bytes(self) -> int:
        """Bytes of the buffers that wait for a value."""
        self._take_in()
        return sum(len(block) for block in self._idle)

    def _take_in(self) -> None:
        while not self._left.empty():
            self._idle.append(self._left.get())

    def take(self, nbytes: int, phase: int) -> torch.UntypedStorage:
        """A storage of exactly `nbytes` whose address is `phase` bytes after the start of a page.

        Direct I/O wants file offset and memory address aligned alike: a value that left from an address with a
        certain phase comes back to one with the same phase, and so needs no bounce buffer.
        """
        self._take_in()
        need = nbytes + phase
        fits = (block for block in self._idle if need <= len(block) <= need * self._MOST_WASTE)
        block = min(fits, key=len, default=None)
        if block is None:
            # Sizes change from one end of a network to the other: what waited longest is of a size gone by.
            self.shed(need)
            self._before_mapping(need)
            block = _map(need)
        else:
            self._idle = deque(other for other in self._idle if other is not block)
        # The tensor's storage is the owner that keeps `block` mapped for as long as it lives. Maps begin at a page.
        storage = torch.frombuffer(block, dtype=torch.uint8, count=nbytes, offset=phase).untyped_storage()
        self._in_use[weakref.ref(storage, self._done_with)] = block
        return storage

    def _done_with(self, storage: weakref.ref[torch.UntypedStorage]) -> None:
        block = self._in_use.pop(storage, None)
        if block is not None:
            self._left.put(block)

    def shed(self, nbytes: int) -> None:
        """Free idle buffers, those that waited longest first, until `nbytes` are free or none is left."""
        self._take_in()
        while nbytes > 0 and self._idle:
            nbytes -= len(self._idle.popleft())

    def close(self) -> None:
        """Free what is idle, and keep nothing that is still in use."""
        self._in_use.clear()
        self._take_in()
        self._idle.clear()


def _map(nbytes: int) -> mmap.mmap:
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block
