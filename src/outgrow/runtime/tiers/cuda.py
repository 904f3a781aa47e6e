"""CUDA memory as the device tier: what the caching allocator holds, and the wall that it must not pass."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from outgrow.tracing.ledger import Ledger

# This near to the budget the allocator is asked what it has really given out: blocks are rounded up, cuBLAS keeps
# workspaces, and none of that is a storage that the ledger sees.
_NEAR_SHARE = 8
# The allocator takes memory from the device in pieces of 20 MiB (2.11 to 2.13: `large_segment_size`), whose free ends
# are of no use to others. Blocks in use are kept under the budget; with those ends, under this many times as much.
_WALL_SHARE = 1.05
# So much the ends may come to, in all, when free blocks have been given back.
_ENDS_BYTES = 256 << 20
# What the ledger and the plan do not know of: each block is rounded up.
_MARGIN_SHARE = 128


class AllocatorCount:
    """The bytes that PyTorch's allocator has given out on a GPU beyond those that a ledger knows of."""

    def __init__(self, library: ctypes.CDLL, device_index: int, booked: ctypes.c_longlong) -> None:
        self._allocated: Callable[[int], int] = library.outgrow_fastpath_allocated
        self._reserved: Callable[[int], int] = library.outgrow_fastpath_reserved
        self._index = device_index
        self._booked = booked

    @property
    def nbytes(self) -> int:
        """Bytes of rounding, of libraries' workspaces, and of what was made past the mode."""
        return self._allocated(self._index) - self._booked.value

    @property
    def in_all(self) -> tuple[int, int]:
        """Bytes of all blocks in use, and of all that the allocator holds."""
        return self._allocated(self._index), self._reserved(self._index)

    def has(self, address: int) -> bool:
        """False: what the ledger sees it counts itself."""
        return False

    def close(self) -> None:
        """Nothing to do."""


class CudaMemory:
    """Keeps the caching allocator under a budget while a session is open.

    Attributes:
        is_open: the wall is out of the way in this step.

    Blocks in use stay under the budget, since room is made for each op before it runs. The allocator is forbidden to
    hold much more than that, free blocks included: it gives those back before it refuses. Where blocks of many sizes
    come and go that costs time at small budgets. With `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` there are
    next to no holes; it must be set before the first allocation, and is the user's to set.
    """

    def __init__(self, device: torch.device, budget_bytes: int, ledger: Ledger) -> None:
        self._device = device
        self._budget = budget_bytes
        self._ledger = ledger
        self._total = torch.cuda.mem_get_info(device)[1]
        self._usual_share = torch.cuda.get_per_process_memory_fraction(device)
        self._wall = int(budget_bytes * _WALL_SHARE)
        self._far_wall = max(self._wall, budget_bytes + _ENDS_BYTES)
        self._refused = self._count("num_ooms")
        self._retries = 0
        self.is_open = False
        # Free blocks of the time before would count against the wall.
        torch.cuda.empty_cache()
        self._stretched = False
        self._stand(self._wall)
        self.count(budget_bytes)

    @property
    def is_counted(self) -> bool:
        """True: the allocator rounds up, and gives memory to libraries."""
        return True

    def count(self, nbytes: int) -> None:
        """Have the ledger know what is really given out where `nbytes` more may not fit."""
        count = self._ledger.count
        if count is not None:  # it always does
            self._ledger.unseen_bytes = count.nbytes
        elif self._ledger.live_bytes + nbytes > self._budget - self._budget // _NEAR_SHARE:
            self._ledger.settle(self._now()[0])

    @property
    def margin_bytes(self) -> int:
        """What blocks may take beyond the tensors in them."""
        return self._budget // _MARGIN_SHARE

    def begin_step(self, *, again: bool) -> None:
        """Put the wall where it should be; where the last step was the same, and never came near it, out of the way.

        An allocator that is asked for the same blocks in the same order gives the same ones out.
        """
        retries = self._count("num_alloc_retries")
        met_wall, self._retries = retries != self._retries, retries
        self._stretched = False
        self.is_open = again and not met_wall and self._now()[1] <= self._wall
        self._stand(self._total if self.is_open else self._wall)

    def go_astray(self) -> None:
        """Put the wall back."""
        if self.is_open:
            self.is_open = False
            self._stand(self._wall)

    def make_room(self, nbytes: int) -> None:
        """Nothing to do: the allocator gives free blocks back to the device before it refuses memory."""

    def make_room_beside(self, nbytes: int) -> None:
        """Nothing to do: what is beside tensors lies on the host."""

    def give_back_beside(self) -> None:
        """Nothing to do."""

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Memory for a value that comes back, on the stream that is current: the computation's."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device).untyped_storage()

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Take a storage's memory away; the allocator keeps the block."""
        storage.resize_(0)

    def refill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give a storage that was emptied memory again."""
        storage.resize_(nbytes)

    @contextmanager
    def gate(self, nbytes: int) -> Iterator[None]:
        """Inside, whatever the budget has room for is found, where the wall is so near that ends may keep it out.

        cuDNN tries another algorithm where it gets no workspace for the first, tells nobody, and remembers that: the
        result would not be plain PyTorch's to the bit.
        """
        wall = self._stands_at
        if wall >= self._far_wall:
            yield
            return
        self._stand(self._far_wall)
        try:
            yield
        finally:
            self._stand(wall)

    def stretch(self, nbytes: int) -> bool:
        """Have the allocator pass the wall until the step is over, for `nbytes` that the budget has room for.

        False if it has not, or if the wall is as far out already.
        """
        allocated, reserved = self._now()
        if self._stretched or allocated + nbytes > self._budget:
            return False
        self._stretched = True
        self._stand(reserved + nbytes + _ENDS_BYTES)
        return True

    def refusals(self) -> int:
        """How often the allocator refused memory since this was asked last, to libraries that keep quiet too."""
        before, self._refused = self._refused, self._count("num_ooms")
        return self._refused - before

    def reserve(self, *, anew: bool) -> None:
        """Nothing to do: what libraries take for themselves on a GPU is refused with an error."""

    def relieve(self) -> None:
        """The allocator refused memory: give all free blocks back to the device."""
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Take the wall away."""
        torch.cuda.set_per_process_memory_fraction(self._usual_share, self._device)

    def _stand(self, wall_bytes: int) -> None:
        """Put the wall somewhere, but never where the user's own would not be."""
        self._stands_at = wall_bytes
        share = min(wall_bytes / self._total, self._usual_share)
        torch.cuda.set_per_process_memory_fraction(share, self._device)

    def _now(self) -> tuple[int, int]:
        """Bytes of blocks in use, and of all that the allocator holds."""
        if isinstance(self._ledger.count, AllocatorCount):
            return self._ledger.count.in_all
        # The nested form is the allocator's own; the flat one takes ten times as long.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(stats["allocated_bytes"]["all"]["current"]), int(stats["reserved_bytes"]["all"]["current"])

    def _count(self, what: str) -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)[what])
