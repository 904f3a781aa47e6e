"""glibc's heap, for where there is no arena: large blocks stay on it, and free pages go back in time."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

from outgrow.runtime.tiers.resident import ResidentSet


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
    ResNet-50 at batch 16 spends 40% of a plain step on that. The resident set is kept small by `Heap` instead.

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

    def open(self) -> None:
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
    """Tensors on the heap, and pages given back before the resident set grows too large.

    Freed blocks stay on the heap and few of them fit the next block, so that the resident set drifts away from the
    live bytes. Taking a page anew costs more than the trim does: trims should be few.
    """

    # What the resident set may be over what a trim could not give back.
    _REGROWTH_BYTES = 24 << 20

    def __init__(self) -> None:
        self._blocks = LargeBlocks()
        self._busy_bytes = 0  # what a trim could not give back

    def open(self) -> None:
        """Keep large blocks on the heap; or apart, where addresses are counted."""
        self._blocks.open()

    def keep_under(self, limit_bytes: int, resident: ResidentSet, nbytes: int) -> None:
        """Give free pages back if `nbytes` more would lift the resident set over the limit."""
        if resident.nbytes + nbytes <= max(limit_bytes, self._busy_bytes + self._REGROWTH_BYTES):
            return
        give_back()
        # Pages that are truly in use cannot be given back: look again only after some growth.
        self._busy_bytes = resident.nbytes

    def make_room_beside(self, limit_bytes: int, resident: ResidentSet, nbytes: int) -> None:
        """Give free pages back if `nbytes` beside tensors would come over the limit."""
        self.keep_under(limit_bytes, resident, nbytes)

    def keep_apart(self) -> None:
        """Give all free pages back; blocks come from the system one by one from now on."""
        self._blocks.keep_apart()
        give_back()

    def close(self) -> None:
        """Give back what the heap kept, and leave it to glibc."""
        self._blocks.close()


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
