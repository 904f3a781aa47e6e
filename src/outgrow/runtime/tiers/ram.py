"""RAM as the device tier of CPU training: where tensors get their memory, and how much of it the process keeps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from outgrow.runtime.tiers.arena import Arena, find_arena, is_wanted
from outgrow.runtime.tiers.heap import Heap, give_back
from outgrow.runtime.tiers.memory import Request
from outgrow.runtime.tiers.reserve import Reserve
from outgrow.runtime.tiers.resident import ResidentSet

_NO_BOUNDS = (1 << 63) - 1


class Ram:
    """Keeps the resident set within base and budget, while tensors come and go."""

    # Tensors stay below that by this part of the budget: small blocks and Python grow between two looks at the set.
    _MARGIN_SHARE = 64
    # What it may be over that where there is no arena: each time glibc gives pages back it gives all of them.
    _HEAP_SLACK_SHARE = 0.05
    _HEAP_SLACK_BYTES = 32 << 20
    # So much that was moved off the heap is worth a system call that gives its pages back.
    _WORTH_TRIMMING = 16 << 20

    def __init__(self, base_bytes: int, budget_bytes: int) -> None:
        """`base_bytes` is what the process holds besides tensors."""
        self.margin_bytes = self.margin_of(budget_bytes)
        self._resident = ResidentSet()
        self._reserve = Reserve()
        arena = find_arena() if is_wanted() else None
        self._memory: Arena | Heap = arena or Heap()
        self._heap = self._memory if isinstance(self._memory, Heap) else None
        if self._heap is None:
            self._limit = base_bytes + budget_bytes - self.margin_bytes
        else:
            self._limit = base_bytes + int(budget_bytes * (1 + self._HEAP_SLACK_SHARE)) + self._HEAP_SLACK_BYTES
        self._left_bytes = 0  # on the heap, of storages that were there, and are not
        self._memory.open()
        self.make_room(0)

    @classmethod
    def margin_of(cls, budget_bytes: int) -> int:
        """Bytes of a budget that plans leave free where they can."""
        return budget_bytes // cls._MARGIN_SHARE

    def begin_step(self, *, planned: bool, again: bool) -> None:
        """A step begins: the arena, if there is one, keeps what steps fill one after the other."""
        if isinstance(self._memory, Arena):
            self._memory.begin_step()
        self._leave_heap()

    def end_step(self) -> None:
        """Nothing to do."""

    @property
    def gave_back(self) -> bool:
        """False: pages that go back to the system are no sign of a plan that comes too near to the budget."""
        return False

    def go_astray(self) -> None:
        """Nothing to do."""

    @property
    def open_bytes(self) -> int:
        """As many as can be: what is refused memory on a CPU says so."""
        return _NO_BOUNDS

    def keeps_bounds(self) -> bool:
        """True: there is no wall to pass."""
        return True

    def make_room(self, nbytes: int) -> None:
        """Give free pages back if `nbytes` more would lift the resident set over its limit."""
        self._memory.keep_under(self._limit, self._resident, nbytes)

    def make_room_beside(self, nbytes: int) -> None:
        """Give free pages back if `nbytes` beside tensors would lift the resident set over its limit."""
        self._memory.make_room_beside(self._limit, self._resident, nbytes)

    @property
    def arena(self) -> Arena | None:
        """Where all large blocks lie; None where there is no such place, or no longer."""
        return self._memory if isinstance(self._memory, Arena) and self._heap is None else None

    @property
    def limit(self) -> tuple[int, int, int]:
        """The limit of the resident set in bytes, the open file that tells its size in pages, and bytes of a page."""
        return self._limit, self._resident.descriptor, self._resident.page_bytes

    @property
    def is_counted(self) -> bool:
        """False: live storages, and what ops were seen to hold, are all there is."""
        return False

    def count(self, nbytes: int) -> None:
        """Nothing to do."""

    def gate(self, request: Request) -> AbstractContextManager[None]:
        """Nothing to do: what is refused memory on a CPU says so."""
        return nullcontext()

    def gate_for_many(self, nbytes: int) -> AbstractContextManager[None]:
        """Nothing to do: what is refused memory on a CPU says so."""
        return nullcontext()

    def highest_bytes(self) -> None:
        """The arena counts for whoever asks it to."""

    def openly(self, nbytes: int) -> AbstractContextManager[None]:
        """Nothing to do: what is refused memory on a CPU says so."""
        return nullcontext()

    def strictly(self) -> AbstractContextManager[None]:
        """Nothing to do: an allocator of the system's has bounds of its own."""
        return nullcontext()

    def refusals(self) -> int:
        """0: nobody counts them."""
        return 0

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Memory for a value that comes back."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Take a storage's memory away: what it gets later lies in the arena, if there is one.

        What was made before the session lay on the heap, and would go back there: to pages that the arena could not
        use meanwhile.
        """
        nbytes = storage.nbytes()
        arena = self.arena
        was_elsewhere = arena is not None and arena.adopt(storage)
        storage.resize_(0)
        if was_elsewhere:
            self._left_bytes += nbytes
            if self._left_bytes >= self._WORTH_TRIMMING:
                self._leave_heap()

    def refill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give a storage that was emptied memory again."""
        storage.resize_(nbytes)

    def give_back_beside(self) -> None:
        """Give back what the heap has free: planning leaves 2 KiB an op."""
        give_back()

    def _leave_heap(self) -> None:
        if self._left_bytes:
            self._left_bytes = 0
            give_back()

    def reserve(self, *, anew: bool) -> None:
        """See that libraries find memory on the heap, for an op that was never seen if `anew`.

        Raises:
            MemoryError: there is none.
        """
        self._reserve.hold(anew=anew)

    def relieve(self) -> None:
        """An allocator was refused memory: give all free pages back, and the reserve to whoever mends it.

        From now on what the arena has no room for comes from the system block by block, and goes back there: where
        addresses are counted, holes cost as much as memory in use.
        """
        self._reserve.let_go()
        if isinstance(self._memory, Arena):
            self._memory.give_back()
        if self._heap is None:
            self._heap = Heap()
            self._heap.open()
        self._heap.keep_apart()

    def stretch(self, nbytes: int) -> bool:
        """False: on a CPU who is refused memory has met the system's own bounds."""
        return False

    def close(self) -> None:
        """Give free pages back, and leave memory to PyTorch's and glibc's usual ways."""
        self._reserve.let_go()
        self._memory.close()
        if self._heap is not None:
            self._heap.close()
        self._resident.close()
