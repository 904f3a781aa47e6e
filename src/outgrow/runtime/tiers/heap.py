"""glibc's heap: large blocks stay on it while a session is open, and it is given back before it grows too large."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

_HUGE_PAGE_BYTES = 2 << 20


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
    """Where glibc puts large blocks, for as long as somebody wants one of two ways.

    *Together*: on the heap, which never shrinks by itself. By default glibc gives blocks over 32 MiB, and the end
    of the heap whenever 64 MiB of it are free, back to the system at once, and takes fresh pages for the next block:
    ResNet-50 at batch 16 spends 40% of a plain step on that. The resident set is kept small by `ResidentSet` instead.

    *Apart*: each from the system on its own, and back there when it is freed. Large blocks on the heap leave holes,
    and one small block at the rim of each keeps a hole from being used again. Where addresses are counted, holes
    cost as much as memory in use: a convolutional network needed twice its live bytes.

    The choice is the process's, as the heap is: apart if anybody wants that.
    """

    _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
    _APART_MMAP_BYTES, _APART_TRIM_BYTES = 256 << 10, 128 << 10
    # What glibc's own thresholds come to in a process with large tensors; what they were cannot be asked.
    _USUAL_MMAP_BYTES, _USUAL_TRIM_BYTES, _USUAL_MMAPS = 32 << 20, 64 << 20, 65536
    _open: ClassVar[dict[int, bool]] = {}  # whether each wants large blocks apart

    def __init__(self) -> None:
        """Want large blocks together; or apart, where addresses are counted."""
        self._open[id(self)] = address_space_is_limited()
        self._choose()

    def keep_apart(self) -> None:
        """Want them apart, from now on."""
        if not self._open.get(id(self), True):
            self._open[id(self)] = True
            self._choose()

    def close(self) -> None:
        """Want nothing any more, and give back what the heap kept meanwhile."""
        if self._open.pop(id(self), None) is not None:
            self._choose()
            give_back()

    def _choose(self) -> None:
        mmap_bytes, mmaps, trim_bytes = self._USUAL_MMAP_BYTES, self._USUAL_MMAPS, self._USUAL_TRIM_BYTES
        if any(self._open.values()):
            mmap_bytes, trim_bytes = self._APART_MMAP_BYTES, self._APART_TRIM_BYTES
        elif self._open:
            mmaps, trim_bytes = 0, -1
        choose = _c_function("mallopt")
        if choose is not None:
            choose(self._M_MMAP_THRESHOLD, mmap_bytes)
            choose(self._M_MMAP_MAX, mmaps)
            choose(self._M_TRIM_THRESHOLD, trim_bytes)


class Heap:
    """glibc's heap, whose given-back pages are better taken again as huge ones: one fault for 512."""

    _HUGEPAGE_ADVICE = 14  # MADV_HUGEPAGE
    # Room that the heap grows by before anybody needs it: pages must be advised before they are first touched.
    _AHEAD_BYTES = 512 << 20

    def __init__(self) -> None:
        self._start = _heap_start()
        self._advised = 0  # the address up to which the kernel was asked

    def has_grown(self) -> bool:
        """Whether the heap is now longer than what was advised for."""
        return self._start > 0 and _heap_end() != self._advised

    def ask_for_huge_pages(self) -> None:
        """Lengthen the heap, without touching a page of it, and advise the kernel for all of it."""
        advise = _c_function("madvise", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        take, free = (
            _c_function("malloc", ctypes.c_void_p, ctypes.c_size_t),
            _c_function("free", None, ctypes.c_void_p),
        )
        if not self._start or advise is None or take is None or free is None:
            return
        if not address_space_is_limited():
            free(take(self._AHEAD_BYTES))
        self._advised = _heap_end()
        if self._advised - self._start >= _HUGE_PAGE_BYTES:
            advise(self._start, self._advised - self._start, self._HUGEPAGE_ADVICE)


def _heap_end() -> int:
    """Address at which the heap ends; 0 where the system does not tell."""
    end = _c_function("sbrk", ctypes.c_void_p, ctypes.c_ssize_t)
    return 0 if end is None else int(end(0))


def _heap_start() -> int:
    """Address at which the heap begins; 0 where the system does not tell."""
    try:
        with open("/proc/self/maps") as maps:
            line = next((line for line in maps if line.rstrip().endswith("[heap]")), "0-")
    except OSError:
        return 0
    return int(line.split("-")[0], 16)


@cache
def _c_function(name: str, result: Any = ctypes.c_int, *arguments: Any) -> Callable[..., Any] | None:
    """A function of the C library; None where it has none of this name."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):  # another C library, which gives memory back by itself
        return None
    function.restype = result
    if arguments:
        function.argtypes = arguments
    return cast("Callable[..., Any]", function)


class ResidentSet:
    """Watches the process's resident set and gives freed pages back to the system before it grows too large.

    Freed blocks stay on the heap and few of them fit the next block, so that the resident set drifts away from the
    live bytes. Taking a page anew costs more than the trim does: trims should be few.
    """

    # What the resident set may be over base and budget, and over what a trim could not give back.
    _SLACK_SHARE = 0.05
    _SLACK_BYTES = 32 << 20
    _REGROWTH_BYTES = 24 << 20

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
            if self._heap.has_grown():
                self._heap.ask_for_huge_pages()
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
