"""RAM as the device tier of CPU training: aligned buffers, and keeping the resident set near the live bytes."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch


def allocate(nbytes: int, alignment: int, phase: int) -> torch.UntypedStorage:
    """A new storage of exactly `nbytes` whose address is `phase` modulo `alignment`, from torch's allocator.

    Direct I/O wants file offset and memory address aligned alike: a value that left from an address with a
    certain phase comes back to one with the same phase, and so needs no bounce buffer.
    """
    block = torch.empty(nbytes + alignment, dtype=torch.uint8)
    start = (phase - block.data_ptr()) % alignment
    # NumPy's view is the owner that keeps `block` alive for as long as the storage lives.
    return torch.from_numpy(block.numpy()[start : start + nbytes]).untyped_storage()


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

    def __init__(self, base_bytes: int, budget_bytes: int) -> None:
        """`base_bytes` is what the process holds besides tensors."""
        self._limit = base_bytes + budget_bytes + budget_bytes // 50 + (8 << 20)
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
        # Pages that are truly in use cannot be given back: look again only after some growth.
        self._next = max(self._limit, self.current_bytes() + self._REGROWTH_BYTES)

    def close(self) -> None:
        """Close the file that tells the resident set."""
        if self._statm >= 0:
            os.close(self._statm)
            self._statm = -1
