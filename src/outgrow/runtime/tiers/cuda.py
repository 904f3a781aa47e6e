"""CUDA memory as the device tier: what the caching allocator holds, and the wall that it must not pass."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakSet

import torch

from outgrow.runtime.tiers.memory import Request, Scattered
from outgrow.tracing.ledger import Ledger

# This near to the budget the allocator is asked what it has really given out: blocks are rounded up, cuBLAS keeps
# workspaces, and none of that is a storage that the ledger sees.
_NEAR_SHARE = 8
# The allocator takes memory from the device in pieces of 20 MiB (2.11 to 2.13: `large_segment_size`), whose free ends
# are of no use to others. Blocks in use are kept under the budget; with those ends, under this many times as much.
_RESERVED_SHARE = 1.05
_PIECE_BYTES = 20 << 20
# The same for blocks up to 1 MiB. An op takes some of them beside its large ones.
_SMALL_PIECES_BYTES = 4 * (2 << 20)
# What an op's outputs and its workspace may take beyond their own bytes, each in pieces of its own.
_PIECES_BYTES = 5 * _PIECE_BYTES
# What all such ends come to when free blocks have been given back: tried in turn, 256 MiB were never too little.
_ENDS_BYTES = (64 << 20, 128 << 20, 256 << 20)
# So often the allocator is asked for the blocks of an op.
_MOST_QUESTIONS = 3
# Small budgets consist of few pieces: so far the wall may always give way; and from here on it matters little whether
# it stands a few pieces nearer.
_LEAST_SLACK_BYTES = 128 << 20
_AMPLE_BYTES = 256 << 20
# A block may be so much larger than what was asked for: smaller rests are not split off (`kSmallSize`).
ROUNDING_BYTES = 1 << 20
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
        gave_back: free blocks were given back in the last step, for which the device stands still.

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
        others = _open_on(device)
        self._usual_share: float = (
            next(iter(others))._usual_share if others else torch.cuda.get_per_process_memory_fraction(device)
        )
        others.add(self)
        # It is compared before whole pieces are taken. Small budgets need each piece that they may have.
        slack = int(budget_bytes * (_RESERVED_SHARE - 1))
        self._most_reserved = budget_bytes + slack
        beyond = _PIECE_BYTES + (_SMALL_PIECES_BYTES if slack >= _AMPLE_BYTES else 0)
        self._wall = self._most_reserved - min(beyond, max(0, slack - _PIECES_BYTES))
        self._bound = budget_bytes + max(slack, _LEAST_SLACK_BYTES)  # what is held before saved values leave for it
        self._refused = self._counter("num_ooms")
        self._is_planned = False
        self._highest_before = 0
        self.is_open = False
        # Free blocks of the time before would count against the wall.
        torch.cuda.empty_cache()
        self._is_calm = False
        # How often free blocks were given back, and reserved bytes, when the last step began and was over.
        self._at_begin = self._at_end = self._state()
        self.gave_back = self._has_given = False  # in the last step, and in this one for what had come too far
        self._wayward: set[Request] = set()  # what took more than was found for it
        self._raised: list[int] = []  # where the wall stands at the least, for what runs now
        self._stretched_to = 0  # and for this step
        self._stand()
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

    def begin_step(self, *, planned: bool, again: bool) -> None:
        """Have the wall out of the way where the last step was the same, and took and gave back nothing.

        An allocator that is asked for the same blocks in the same order gives the same ones out, if the same ones are
        free. A wall of the user's that is nearer than ours stays where it is.
        """
        self._is_planned = planned
        self._highest_before = self._highest()
        self._at_begin = self._state()
        is_as_it_was = self._at_end == self._at_begin
        is_ours = self._usual_share * self._total >= self._wall + _PIECES_BYTES
        self.is_open = again and self._is_calm and is_as_it_was and is_ours
        self._stand()

    def end_step(self) -> None:
        """Put the wall where it should be, and remember how the allocator was left."""
        self._at_end = self._state()
        reserved = self._at_end[1]
        self._is_calm = self._at_end == self._at_begin and reserved <= self._most_reserved
        if reserved > self._most_reserved:  # else the next step would go on from there
            self._give_back()
        self.gave_back, self._has_given = self._has_given or self._at_end[0] != self._at_begin[0], False
        self.is_open = False
        self._stretched_to = 0
        self._stand()

    def go_astray(self) -> None:
        """Put the wall back."""
        self.is_open = False
        self._stand()

    @property
    def open_bytes(self) -> int:
        """What a step without a wall does not come to hold, as it takes nothing; 0 where there is a wall."""
        return self._at_begin[1] + 1 if self.is_open else 0

    def keeps_bounds(self) -> bool:
        """False where a step without a wall takes something all the same: its copies were over at other moments."""
        return not self.is_open or self._now()[1] < self.open_bytes

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
    def gate(self, request: Request) -> Iterator[None]:
        """Inside, an op is refused nothing of its request, which the budget has room for.

        cuDNN tries another algorithm where it gets no workspace for the first, tells nobody, and remembers that: the
        result would not be plain PyTorch's to the bit. Near the wall, the allocator is asked for as much before: it
        gives free blocks back for that if it has to, and has the memory then. Where ends of pieces keep it out all
        the same, the wall gives way: how much they come to, nobody can tell beforehand. It does so for the op too,
        which may ask in an order of its own.
        """
        allocated, reserved = self._now()
        if reserved + request.nbytes + _PIECES_BYTES <= self._stands_at:
            yield
            return
        found = False
        blocks = len(request.results) + (request.work_bytes > 0)
        if request.nbytes + blocks * ROUNDING_BYTES <= self._budget - allocated:
            found = self._finds(request)
            further = iter(_ENDS_BYTES)
            while not found and (ends := next(further, 0)):
                with self._moved_to(self._as_far_as(allocated + request.nbytes + ends)):
                    found = self._finds(request)
            if not found:
                self._refuse(request.nbytes)
        reserved = self._now()[1]
        wall = reserved + request.nbytes + _PIECES_BYTES
        with self._moved_to(min(wall, self._most_reserved) if found and not request.falls_back else wall):
            yield
        if found and self._now()[1] > max(reserved, self._most_reserved):
            self._wayward.add(request)
            self._give_back()

    @contextmanager
    def gate_for_many(self, nbytes: int) -> Iterator[None]:
        """Inside, `nbytes` in blocks of any sizes are found: to ask for one that large has free ones given back."""
        with self._moved_to(self._now()[1] + nbytes + _PIECES_BYTES):
            yield

    def highest_bytes(self) -> int | None:
        """The most that the allocator gave out in this step, if that is more than it ever did before.

        It keeps the highest of all, which is the user's to read, and to forget.
        """
        highest = self._highest()
        return highest if highest != self._highest_before else None

    @contextmanager
    def openly(self, nbytes: int) -> Iterator[None]:
        """Inside, nothing is refused that the device has; `nbytes` are a guess."""
        if self._now()[1] + nbytes + _PIECES_BYTES > self._stands_at and not self._is_planned:
            torch.cuda.empty_cache()  # else they are kept for later steps, which have to find them where they were
        with self._moved_to(self._total):
            yield

    @contextmanager
    def _moved_to(self, wall_bytes: int) -> Iterator[None]:
        """Inside, the wall stands at `wall_bytes` at the least."""
        self._raised.append(wall_bytes)
        self._stand()
        try:
            yield
        finally:
            self._raised.remove(wall_bytes)
            self._stand()

    def _give_back(self) -> None:
        """Give free blocks back, as there is more than may be held."""
        self._has_given = True
        torch.cuda.empty_cache()

    def _as_far_as(self, wall_bytes: int) -> int:
        """How far the wall gives way for ends of pieces: in the first place so far that a piece more is in bounds."""
        return wall_bytes if self._stretched_to else min(wall_bytes, self._bound - _PIECE_BYTES)

    def _refuse(self, nbytes: int) -> None:
        """Have saved values leave for ends of pieces, as long as there are some that can.

        Raises:
            Scattered: in the first place; not where the wall has been stretched since.
        """
        if not self._stretched_to:
            raise Scattered(f"CUDA out of memory: no {nbytes} bytes in a row between blocks in use")

    def _finds(self, request: Request) -> bool:
        """Whether the allocator has the blocks of a request behind the wall, free or to be taken.

        It is asked as ATen's convolutions ask: for a result, for work on that, which is given back, and for the next
        result. Whoever asks next finds what was found if nothing had to be taken or given back for that; else other
        blocks may be free, and it is asked again. In one block of all bytes any order finds them.
        """
        for _ in range(0 if request in self._wayward else _MOST_QUESTIONS):
            before = self._state()
            if not self._gives(request.results, request.work_bytes):
                return False
            if self._state() == before:
                return True
        return self._gives((), request.nbytes)

    def _gives(self, results: Sequence[int], work_bytes: int) -> bool:
        """Whether it gives blocks for results, and one for work after the first of them and after the last.

        The most work was measured beside the last one, so that beside the first it may be more by all the others.
        """
        held: list[torch.UntypedStorage] = []
        try:
            for number, nbytes in enumerate(results):
                held.append(self._block(nbytes))
                if number == 0 and len(results) > 1:
                    self._block(sum(results[1:]) + work_bytes)
            if work_bytes:
                self._block(work_bytes)
        except torch.OutOfMemoryError:
            self._refused += 1  # to us, which is no library that keeps quiet
            return False
        return True

    def _block(self, nbytes: int) -> torch.UntypedStorage:
        return torch.UntypedStorage(nbytes, device=self._device)

    @contextmanager
    def strictly(self) -> Iterator[None]:
        """Inside nobody gets more than the budget has, whatever it is."""
        if self._now()[1] > self._budget:
            torch.cuda.empty_cache()  # free blocks are given out wherever the wall stands
        self._stand_at(min(self._stands_at, max(self._budget, self._stretched_to)))
        try:
            yield
        finally:
            self._stand()

    def stretch(self, nbytes: int) -> bool:
        """Have the allocator pass the wall until the step is over, for `nbytes` that the budget has room for.

        False if it has not, or if the wall is as far out already.
        """
        allocated, reserved = self._now()
        wall = reserved + nbytes + _PIECES_BYTES
        if allocated + nbytes > self._budget or wall <= self._stretched_to:
            return False
        self._stretched_to = max(self._stands_at, wall)
        self._stand()
        return True

    def refusals(self) -> int:
        """How often the allocator refused memory since this was asked last, to libraries that keep quiet too."""
        before, self._refused = self._refused, self._counter("num_ooms")
        return self._refused - before

    def reserve(self, *, anew: bool) -> None:
        """Nothing to do: what libraries take for themselves on a GPU is refused with an error."""

    def relieve(self) -> None:
        """The allocator refused memory: give all free blocks back to the device."""
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Take the wall away, or leave another session its own."""
        others = _open_on(self._device)
        others.discard(self)
        if others:
            next(iter(others))._stand()
        else:
            torch.cuda.set_per_process_memory_fraction(self._usual_share, self._device)

    def _stand(self) -> None:
        """Put the wall where it has to be now."""
        usual = self._total if self.is_open else max(self._wall, self._stretched_to)
        self._stand_at(max([usual, *self._raised]))

    def _stand_at(self, wall_bytes: int) -> None:
        """Put the wall somewhere, but never where the user's own would not be."""
        self._stands_at = wall_bytes
        share = min(wall_bytes / self._total, self._usual_share)
        torch.cuda.set_per_process_memory_fraction(share, self._device)

    def _now(self) -> tuple[int, int]:
        """Bytes of blocks in use, and of all that the allocator holds."""
        if isinstance(self._ledger.count, AllocatorCount):
            return self._ledger.count.in_all
        stats = self._stats()
        return int(stats["allocated_bytes"]["all"]["current"]), int(stats["reserved_bytes"]["all"]["current"])

    def _highest(self) -> int:
        return int(self._stats()["allocated_bytes"]["all"]["peak"])

    def _state(self) -> tuple[int, int]:
        """How often the allocator gave free blocks back to find room, and what it holds."""
        return self._counter("num_alloc_retries"), self._now()[1]

    def _counter(self, what: str) -> int:
        return int(self._stats()[what])

    def _stats(self) -> dict[str, Any]:
        # The nested form is the allocator's own; the flat one takes ten times as long.
        return torch.cuda.memory_stats_as_nested_dict(self._device)


@cache
def _open_on(device: torch.device) -> WeakSet[CudaMemory]:
    """Those that have a wall on a device: who is not the first does not find the user's own there."""
    return WeakSet()
