"""One region of memory for CPU tensors, whose pages stay: built from `arena.cpp` when it is first wanted."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outgrow.runtime.native import Code, built, once
from outgrow.runtime.tiers.heap import address_space_is_limited
from outgrow.runtime.tiers.resident import ResidentSet

_LOG = logging.getLogger(__name__)

CODE = Code(Path(__file__).with_name("arena.cpp"), ("c10",))
# Addresses for each byte of the machine's memory: between blocks there are holes, and addresses cost nothing.
_ADDRESSES_PER_BYTE = 2


class ArenaCount:
    """The bytes of those blocks that native code made while it counted here; `address` is what it counts in."""

    def __init__(
        self,
        address: int,
        count_in: Callable[[int | None], None],
        counts: Any,
        end: Callable[[int], None],
    ) -> None:
        self.address = address
        self._count_in = count_in
        self._nbytes = ctypes.c_longlong.from_address(address)
        self._most = ctypes.c_longlong.from_address(address + ctypes.sizeof(ctypes.c_longlong))
        self._counts = counts
        self._end = end

    @property
    def nbytes(self) -> int:
        """Bytes of those that are alive."""
        return self._nbytes.value

    def count_in(self, live_bytes: int) -> None:
        """From here on the blocks that this thread makes are counted; `live_bytes` are those that are there now."""
        self._most.value = live_bytes
        self._count_in(self.address)

    @property
    def most_bytes(self) -> int:
        """The most that live bytes came to at any block since `count_in`."""
        return self._most.value

    def count_out(self) -> None:
        """From here on they are not."""
        self._count_in(None)

    def has(self, address: int) -> bool:
        """Whether the memory at `address` is one of them."""
        return bool(self._counts(self.address, address))

    @property
    def asks(self) -> int:
        """The address of a function that says the same: `int (*)(address of the count, address of the memory)`."""
        return ctypes.cast(self._counts, ctypes.c_void_p).value or 0

    def close(self) -> None:
        """Count no more; the blocks stay."""
        self._end(self.address)


class Arena:
    """PyTorch's CPU allocator while a session is open, for blocks from 64 KiB up."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._open = library.outgrow_arena_open
        self.begin_step: Callable[[], object] = library.outgrow_arena_begin_step
        self.give_back: Callable[[], object] = library.outgrow_arena_give_back
        self._keep_under = library.outgrow_arena_keep_under
        self._present = library.outgrow_arena_present_bytes
        self._used = library.outgrow_arena_used_bytes
        self._keep_under.argtypes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t, ctypes.c_int)
        self._keep_under.restype = None
        for function in (self._present, self._used):
            function.restype = ctypes.c_size_t
        self._adopt = library.outgrow_arena_adopt
        self._adopt.argtypes = (ctypes.c_void_p,)
        self._new_count = library.outgrow_arena_new_count
        self._new_count.argtypes = (ctypes.c_void_p,)
        self._new_count.restype = ctypes.c_void_p
        self._count_in = library.outgrow_arena_count_in
        self._count_in.argtypes = (ctypes.c_void_p,)
        self._count_in.restype = None
        self._counts = library.outgrow_arena_counts
        self._counts.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._end_count = library.outgrow_arena_end_count
        self._end_count.argtypes = (ctypes.c_void_p,)
        self._end_count.restype = None
        # For native code: how a thread counts, and how it makes room.
        self.count_in_address = ctypes.cast(library.outgrow_arena_count_in, ctypes.c_void_p).value
        self.keep_under_address = ctypes.cast(library.outgrow_arena_keep_under, ctypes.c_void_p).value
        self._users = 0

    @property
    def present_bytes(self) -> int:
        """Bytes whose pages are there, in use or not."""
        return int(self._present())

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks in use, in whole pages."""
        return int(self._used())

    def keep_under(self, limit_bytes: int, resident: ResidentSet, nbytes: int) -> None:
        """Tell the arena how many pages it may have; it keeps to that by itself when it hands out a block.

        As many as blocks lie in at their most in each step it keeps all the same.
        """
        self._keep_under(max(0, limit_bytes), resident.descriptor, resident.page_bytes, 0)

    def make_room_beside(self, limit_bytes: int, resident: ResidentSet, nbytes: int) -> None:
        """Give free pages back, those of the next steps too, if `nbytes` beside tensors would come over the limit."""
        self._keep_under(max(0, limit_bytes - nbytes), resident.descriptor, resident.page_bytes, 1)

    def adopt(self, storage: torch.UntypedStorage) -> bool:
        """Have a storage get its memory here when it is resized; True if that lies elsewhere, for the last time."""
        return bool(self._adopt(storage._cdata))

    def new_count(self, others_address: int) -> ArenaCount:
        """A count that blocks can be made in; its most is that of both it and the number of bytes at an address."""
        return ArenaCount(self._new_count(others_address), self._count_in, self._counts, self._end_count)

    def open(self) -> None:
        """Hand out memory. Each call has its `close`."""
        self._users += 1
        self._open(1)

    def close(self) -> None:
        """With the last, hand out no more, and give free pages back; blocks in use stay good."""
        self._users -= 1
        if not self._users:
            self._open(0)


def is_wanted() -> bool:
    """Whether there is to be an arena at all: nobody said otherwise, and addresses are not limited."""
    return os.environ.get("OUTGROW_ARENA") != "0" and not address_space_is_limited()


@once
def find_arena() -> Arena | None:
    """The process's arena; None where there can be none, and the log says why."""
    if os.environ.get("OUTGROW_ARENA") == "0":
        return None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        library = ctypes.CDLL(str(built(CODE)))
    except (OSError, subprocess.SubprocessError) as error:
        _LOG.info("no arena, tensors stay on the heap: %s", error)
        return None
    library.outgrow_arena_install.argtypes = (ctypes.c_size_t,)
    if library.outgrow_arena_install(_ADDRESSES_PER_BYTE * memory):
        _LOG.info("no arena, tensors stay on the heap: no addresses for it, or another allocator comes first")
        return None
    return Arena(library)
