"""The host tier of CUDA training: pinned memory within a budget of its own, and the disk for what has no room there.

Pinned memory is what a copy engine can reach while the device computes. It is taken from the system once, as it is
first wanted, in blocks of powers of two: PyTorch's pinned allocator rounds all else up to one, and to pin takes a
tenth of a second or more a GiB, which a session that needs little should not pay for all that it may have.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable

import torch

from outgrow.errors import HostBudgetTooSmall
from outgrow.planning.plan import SLOT_ALIGNMENT, slot_bytes
from outgrow.runtime.tiers.disk import Slot, SpillFile
from outgrow.runtime.tiers.holes import Holes
from outgrow.runtime.tiers.place import Place

_log = logging.getLogger(__name__)

# What goes by way of the disk passes through a pinned buffer, one for each direction: of this share of the budget.
_BOUNCE_SHARE = 32
_LEAST_BOUNCE_BYTES = 1 << 20
_MOST_BOUNCE_BYTES = 32 << 20
_MOST_BLOCK_BYTES = 256 << 20
_LEAST_BLOCK_BYTES = SLOT_ALIGNMENT
LEAST_HOST_BYTES = 2 * _LEAST_BOUNCE_BYTES


class HostPlace(Place):
    """A value's place in pinned memory.

    `pieces` are (first byte of the value, address, bytes): more than one where it spans blocks.
    """

    __slots__ = ("pieces",)

    def __init__(self, offset: int, nbytes: int, pieces: tuple[tuple[int, int, int], ...], *, planned: bool) -> None:
        super().__init__(offset, nbytes, planned=planned)
        self.pieces = pieces


class DiskPlace(Place):
    """A value's place on the disk, cut into parts that pass through a pinned buffer.

    `parts` are (first byte of the value, slot of the part); `whole` is what the spill file gave.
    """

    __slots__ = ("parts", "whole")

    def __init__(self, whole: Slot, part_bytes: int) -> None:
        super().__init__(whole.offset, whole.nbytes, planned=whole.planned)
        self.whole = whole
        self.parts = tuple(
            (start, Slot(whole.offset + start, min(part_bytes, whole.nbytes - start), planned=whole.planned))
            for start in range(0, whole.nbytes, part_bytes)
        )


class HostTier:
    """Places for what leaves a CUDA device, in pinned memory while there is room, else on the disk.

    Attributes:
        budget_bytes: the most pinned memory that this tier may take, buffers on the way to the disk included.
        bounces: the addresses of those buffers, one on the way out and one on the way back.
    """

    def __init__(self, budget_bytes: int, spill: SpillFile, pin: Callable[[int], torch.Tensor]) -> None:
        """`pin` gives that many bytes of pinned memory.

        Raises:
            HostBudgetTooSmall: the budget does not even hold the buffers.
        """
        if budget_bytes < LEAST_HOST_BYTES:
            raise HostBudgetTooSmall(budget_bytes, LEAST_HOST_BYTES)
        self.budget_bytes = budget_bytes
        self._spill = spill
        self._pin = pin
        share = 1 << (budget_bytes // _BOUNCE_SHARE).bit_length() - 1
        self._part_bytes = min(max(share, _LEAST_BOUNCE_BYTES), _MOST_BOUNCE_BYTES)
        try:
            self._buffers = [pin(self._part_bytes) for _ in range(2)]
        except RuntimeError as error:
            raise HostBudgetTooSmall(budget_bytes, LEAST_HOST_BYTES, str(error)) from error
        self.bounces = (self._buffers[0].data_ptr(), self._buffers[1].data_ptr())
        self._capacity = (budget_bytes - 2 * self._part_bytes) // SLOT_ALIGNMENT * SLOT_ALIGNMENT
        self._blocks: list[torch.Tensor] = []
        self._starts: list[int] = []  # where each block begins in the tier
        self._pinned = 0
        self._planned = 0  # bytes of the plan's area, on the disk and here
        self._on_disk = 0  # of these the first are on the disk
        self._planned_end = 0
        self._holes = Holes(0, self._capacity, SLOT_ALIGNMENT)

    @property
    def pinned_bytes(self) -> int:
        """Pinned memory that the tier has taken from the system, in bytes."""
        return self._pinned + sum(buffer.nbytes for buffer in self._buffers)

    def plan_area(self, nbytes: int) -> int:
        """Set room aside for the places that a plan fixes, of which none may be in use; how much there is now.

        That is what it was before where unplanned values lie there. What the plan sends away first is wanted back
        last: where not all of it fits, that part goes to the disk.
        """
        if nbytes == self._planned:
            return nbytes
        here = min(nbytes, self._capacity)
        if here > self._planned_end and not self._holes.is_untouched:
            return self._planned
        here = min(here, self._grow(here))
        on_disk = nbytes - here
        # The value that begins before that and ends behind it is on the disk whole.
        if on_disk and self._spill.plan_area(nbytes, on_disk) < nbytes:
            return self._planned
        if self._holes.is_untouched:
            self._planned_end = here
            self._holes = Holes(here, self._capacity, SLOT_ALIGNMENT)
        self._planned, self._on_disk = nbytes, on_disk
        return nbytes

    def planned_slot(self, offset: int, nbytes: int) -> Place:
        """The place that the plan gave a value."""
        start = offset - self._on_disk
        if start < 0:
            return DiskPlace(self._spill.planned_slot(offset, nbytes), self._part_bytes)
        return HostPlace(start, nbytes, self._pieces(start, nbytes), planned=True)

    def reserve(self, nbytes: int) -> Place:
        """A place for a value that no plan foresaw: in pinned memory if there is room, else on the disk."""
        start = self._holes.take(nbytes)
        if start is not None and self._grow(start + slot_bytes(nbytes)) < start + slot_bytes(nbytes):
            self._holes.give(start, nbytes)
            start = None
        if start is None:
            return DiskPlace(self._spill.reserve(nbytes), self._part_bytes)
        return HostPlace(start, nbytes, self._pieces(start, nbytes), planned=False)

    def release(self, slot: Place) -> None:
        """Give a place back; what a plan fixed stays the plan's."""
        if slot.planned:
            return
        if isinstance(slot, DiskPlace):
            self._spill.release(slot.whole)
        else:
            self._holes.give(slot.offset, slot.nbytes)

    def close(self) -> None:
        """Give all memory back and close the file. All copies must be finished."""
        self._blocks.clear()
        self._starts.clear()
        self._buffers.clear()
        self._pinned = 0
        unpin()
        self._spill.close()

    def _grow(self, end: int) -> int:
        """Pin memory up to `end`; how far there is some now.

        Where the system gives no more, the tier stays as large as it is, and the rest goes to the disk.
        """
        while self._pinned < min(end, self._capacity):
            left = self._capacity - self._pinned
            size = min(_MOST_BLOCK_BYTES, 1 << left.bit_length() - 1)
            try:
                block = self._pin(size)
            except RuntimeError as error:
                _log.warning("no more than %d bytes of pinned memory: %s", self._pinned, str(error).splitlines()[0])
                self._stay_small()
                break
            self._starts.append(self._pinned)
            self._blocks.append(block)
            self._pinned += size
        return self._pinned

    def _stay_small(self) -> None:
        self._capacity = self._pinned
        if self._holes.is_untouched:
            self._holes = Holes(min(self._planned_end, self._capacity), self._capacity, SLOT_ALIGNMENT)

    def _pieces(self, start: int, nbytes: int) -> tuple[tuple[int, int, int], ...]:
        """Where the bytes of a place are."""
        pieces: list[tuple[int, int, int]] = []
        done = 0
        index = bisect_right(self._starts, start) - 1
        while done < nbytes:
            inside = start + done - self._starts[index]
            size = min(nbytes - done, self._blocks[index].nbytes - inside)
            pieces.append((done, self._blocks[index].data_ptr() + inside, size))
            done += size
            index += 1
        return tuple(pieces)


def pinned(nbytes: int) -> torch.Tensor:
    """Memory that a CUDA device's copy engines can reach.

    Raises:
        RuntimeError: the system does not give that much.
    """
    with torch._C._DisableTorchDispatch():
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def unpin() -> None:
    """Have PyTorch give back to the system what it keeps pinned for nobody: that counts as used."""
    if torch.cuda.is_initialized():
        torch._C._host_emptyCache()
