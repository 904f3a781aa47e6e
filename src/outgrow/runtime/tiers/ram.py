"""RAM as the device tier of CPU training: aligned buffers, and keeping the resident set near the live bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch

_HUGE_PAGE_BYTES = 2 << 20


class Buffers:
    """Memory for values on their way back, used again and again.

    The system hands out fresh pages at less than two gigabytes a second, zeroed by the very cores that compute: a
    buffer whose value is done with takes the next value of about its size (Layrub's shared blocks). They lie apart
    from the heap, on huge pages where the system has them, and so leave no holes there.
    """

    _MOST_WASTE = 1.25

    def __init__(self) -> None:
        self._idle: deque[mmap.mmap] = deque()
        self._in_use: dict[weakref.ref[torch.UntypedStorage], mmap.mmap] = {}

    @property
    def idle_bytes(self) -> int:
        """Bytes of the buffers that wait for a value."""
        return sum(len(block) for block in self._idle)

    def take(self, nbytes: int, phase: int) -> torch.UntypedStorage:
        """A storage of exactly `nbytes` whose address is `phase` bytes after the start of a page.

        Direct I/O wants file offset and memory address aligned alike: a value that left from an address with a
        certain phase comes back to one with the same phase, and so needs no bounce buffer.
        """
        need = nbytes + phase
        fits = (block for block in self._idle if need <= len(block) <= need * self._MOST_WASTE)
        block = min(fits, key=len, default=None)
        if block is None:
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
            self._idle.append(block)

    def shed(self, nbytes: int) -> None:
        """Free idle buffers, those that waited longest first, until `nbytes` are free or none is left."""
        while nbytes > 0 and self._idle:
            nbytes -= len(self._idle.popleft())

    def close(self) -> None:
        """Free what is idle, and keep nothing that is still in use."""
        self._in_use.clear()
        self._idle.clear()


def _map(nbytes: int) -> mmap.mmap:
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def give_back() -> None:
    """Give all freed pages back to the system."""
    trim = _c_function("malloc_trim")
    if trim is not None:
        trim(0)


def address_space_is_limited() -> bool:
    """Whether the system counts addresses, used or not, so that an allocation can be refused."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        return True
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False


class LargeBlocks:
    """Lets glibc take each large block from the system on its own and give it back there, while anybody wants that.

    Large blocks on the heap leave holes, and one small block at the rim of each keeps a hole from being used again.
    Where addresses are counted, holes cost as much as memory in use: a convolutional network needed twice its live
    bytes. Elsewhere holes cost nothing, and fresh pages cost time.
    """

    _M_MMAP_THRESHOLD = -3
    _APART_BYTES = 256 << 10
    # By itself glibc raises its threshold with the blocks that it sees, up to this; that cannot be asked for again.
    _TOGETHER_BYTES = 32 << 20
    _wanted_by: ClassVar[set[int]] = set()

    def keep_apart(self) -> None:
        """Want it, from now on."""
        self._wanted_by.add(id(self))
        self._choose(self._APART_BYTES)

    def close(self) -> None:
        """Want it no more."""
        if id(self) in self._wanted_by:
            self._wanted_by.discard(id(self))
            if not self._wanted_by:
                self._choose(self._TOGETHER_BYTES)

    def _choose(self, threshold: int) -> None:
        choose = _c_function("mallopt")
        if choose is not None:
            choose(self._M_MMAP_THRESHOLD, threshold)


class Heap:
    """glibc's heap, whose given-back pages are better taken again as huge ones: one fault for 512."""

    _HUGEPAGE_ADVICE = 14  # MADV_HUGEPAGE

    def __init__(self) -> None:
        self._start = _heap_start()
        self._end = _c_function("sbrk")
        self._advise = _c_function("madvise")
        if self._end is not None and self._advise is not None:
            self._end.restype = ctypes.c_void_p  # type: ignore[attr-defined]
            self._advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)  # type: ignore[attr-defined]

    def ask_for_huge_pages(self) -> None:
        """Advise the kernel for all of the heap as it is now; what grows later is advised next time."""
        if self._start and self._end is not None and self._advise is not None:
            length = self._end(0) - self._start
            if length >= _HUGE_PAGE_BYTES:
                self._advise(self._start, length, self._HUGEPAGE_ADVICE)


def _heap_start() -> int:
    """Address at which the heap begins; 0 where the system does not tell."""
    try:
        with open("/proc/self/maps") as maps:
            line = next((line for line in maps if line.rstrip().endswith("[heap]")), "0-")
    except OSError:
        return 0
    return int(line.split("-")[0], 16)


@cache
def _c_function(name: str) -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):  # another C library, which gives memory back by itself
        return None
    return function


class ResidentSet:
    """Watches the process's resident set and gives freed pages back to the system before it grows too large.

    glibc keeps freed blocks below a threshold that it raises as it goes, so the resident set drifts away from
    the live bytes. Changing the threshold costs page faults on every step; `malloc_trim` only when the resident
    set nears its limit costs next to nothing (docs/architecture.md has the figures).
    """

    _REGROWTH_BYTES = 24 << 20
    # What the resident set may be over base and budget before pages go back: each time costs page faults.
    _SLACK_SHARE = 0.03
    _SLACK_BYTES = 32 << 20

    def __init__(self, base_bytes: int, budget_bytes: int) -> None:
        """`base_bytes` is what the process holds besides tensors."""
        self._heap = Heap()
        self._limit = base_bytes + int(budget_bytes * (1 + self._SLACK_SHARE)) + self._SLACK_BYTES
        self._next = self._limit
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._statm = os.open("/proc/self/statm", os.O_RDONLY) if sys.platform == "linux" else -1

    def current_bytes(self) -> int:
        """The resident set now, in bytes; 0 where the system does not tell."""
        if self._statm < 0:
            return 0
        return int(os.pread(self._statm, 80, 0).split()[1]) * self._page

    def make_room(self, nbytes: int) -> None:
        """Give freed pages back if `nbytes` more would lift the resident set over its limit."""
        if self.current_bytes() + nbytes <= self._next:
            return
        give_back()
        self._heap.ask_for_huge_pages()
        # Pages that are truly in use cannot be given back: look again only after some growth.
        self._next = max(self._limit, self.current_bytes() + self._REGROWTH_BYTES)

    def close(self) -> None:
        """Close the file that tells the resident set."""
        if self._statm >= 0:
            os.close(self._statm)
            self._statm = -1
