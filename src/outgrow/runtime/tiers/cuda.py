"""CUDA memory as the device tier: what the caching allocator holds, and the wall that it must not pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from outgrow.tracing.ledger import Ledger

# This near to the budget the allocator is asked what it has really given out: blocks are rounded up, cuBLAS keeps
# workspaces, and none of that is a storage that the ledger sees.
_NEAR_SHARE = 8


class CudaMemory:
    """Keeps the caching allocator under a budget while a session is open.

    The allocator is forbidden to hold more than the budget, so that blocks in use and free ones together stay under
    it, whatever the ledger missed: it gives free blocks back before it refuses. Where blocks of many sizes come and
    go that costs time at small budgets. With `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` there are next to no
    holes; it must be set before the first allocation, and is the user's to set.
    """

    def __init__(self, device: torch.device, budget_bytes: int, ledger: Ledger) -> None:
        self._device = device
        self._budget = budget_bytes
        self._ledger = ledger
        self._total = torch.cuda.mem_get_info(device)[1]
        self._usual_share = torch.cuda.get_per_process_memory_fraction(device)
        self._share = min(budget_bytes / self._total, self._usual_share)
        self._refused = self._count_refusals()
        # Free blocks of the time before would count against the wall.
        torch.cuda.empty_cache()
        self._stand(self._share)
        self._settle()

    @property
    def is_counted(self) -> bool:
        """True: the allocator rounds up, and gives memory to libraries."""
        return True

    def count(self, nbytes: int) -> None:
        """Have the ledger know what is really given out where `nbytes` more may not fit."""
        if self._ledger.live_bytes + nbytes > self._budget - self._budget // _NEAR_SHARE:
            self._settle()

    @property
    def margin_bytes(self) -> int:
        """0: what is beside tensors counts as live."""
        return 0

    def begin_step(self) -> None:
        """Nothing to do."""

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
        """Inside, the allocator may pass the wall, if it might have to for an op that adds `nbytes`.

        cuDNN tries another algorithm where it gets no workspace for the first, tells nobody, and remembers that: the
        result would not be plain PyTorch's to the bit. So where holes might keep a workspace out that the budget has
        room for, holes may add to it for a moment.
        """
        if self._current("reserved_bytes") + nbytes <= self._share * self._total:
            yield
            return
        self._stand(self._usual_share)
        try:
            yield
        finally:
            self._stand(self._share)

    def refusals(self) -> int:
        """How often the allocator refused memory since this was asked last, to libraries that keep quiet too."""
        before, self._refused = self._refused, self._count_refusals()
        return self._refused - before

    def reserve(self, *, anew: bool) -> None:
        """Nothing to do: what libraries take for themselves on a GPU is refused with an error."""

    def relieve(self) -> None:
        """The allocator refused memory: give all free blocks back to the device."""
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Take the wall away."""
        self._stand(self._usual_share)

    def _settle(self) -> None:
        """Set the ledger's live bytes to what the allocator has given out."""
        self._ledger.settle(self._current("allocated_bytes"))

    def _stand(self, share: float) -> None:
        torch.cuda.set_per_process_memory_fraction(share, self._device)

    def _current(self, name: str) -> int:
        # The nested form is the allocator's own; the flat one takes ten times as long.
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)[name]["all"]["current"])

    def _count_refusals(self) -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["num_ooms"])
