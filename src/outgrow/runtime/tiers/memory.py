"""The device tier as the pool and the executor see it: memory that has to be kept in bounds beside the live bytes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


class Scattered(torch.OutOfMemoryError):
    """There is as much memory as an op is to get, but between blocks in use; the op has not begun."""


@dataclass(frozen=True, slots=True)
class Request:
    """What an op will ask the allocator for: a block for each of its results, and `work_bytes` for its work.

    `falls_back`: where the op is refused memory for its work it does something else and tells nobody.
    """

    results: tuple[int, ...]
    work_bytes: int
    falls_back: bool

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return sum(self.results) + self.work_bytes


class DeviceMemory(Protocol):
    """Where tensors get their memory while a session is open."""

    @property
    def margin_bytes(self) -> int:
        """What steps leave of the budget where they can, for what comes beside tensors."""

    def begin_step(self, *, planned: bool, again: bool) -> None:
        """A step begins, by a plan or not; `again`: it is to be as the last one was, in which nothing went wrong."""

    def end_step(self) -> None:
        """The step is over."""

    @property
    def gave_back(self) -> bool:
        """Whether the allocator, in the last step, gave all its free blocks back to the device to find room."""

    def go_astray(self) -> None:
        """The step is not as the last one was, or memory ran out."""

    @property
    def open_bytes(self) -> int:
        """While the allocator holds less than this, it refuses nothing that fits the budget, and no op needs a gate.

        0 in steps in which it may refuse.
        """

    def keeps_bounds(self) -> bool:
        """False where the allocator refuses nothing and has come to hold as much as that: the step is astray."""

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Memory for a value that comes back, in the order of what the program computes.

        Raises:
            RuntimeError, MemoryError: there is none, in the allocator's own words.
        """

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Take a storage's memory away; the storage stays, with all tensors on it."""

    def refill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give a storage that was emptied memory again, whose content is anything.

        Raises:
            RuntimeError, MemoryError: there is none, in the allocator's own words.
        """

    @property
    def is_counted(self) -> bool:
        """Whether `count` says more of the memory in use than the storages that are alive do."""

    def count(self, nbytes: int) -> None:
        """An op is about to add `nbytes`: where they may not fit, set the ledger's live bytes to what is in use."""

    def gate(self, request: Request) -> AbstractContextManager[None]:
        """Inside runs an op that asks for so much.

        Raises:
            Scattered: something has to leave first, or, where nothing can, the wall to be stretched.
        """

    def gate_for_many(self, nbytes: int) -> AbstractContextManager[None]:
        """Inside runs what adds `nbytes` in many blocks, of which nobody knows the sizes."""

    def highest_bytes(self) -> int | None:
        """The most that an allocator gave out in this step; None where that is not known."""

    def openly(self, nbytes: int) -> AbstractContextManager[None]:
        """Inside runs an op that nobody saw before, that does something else where it is refused memory.

        It is refused none, whatever the budget is; `nbytes` are what it is thought to add.
        """

    def strictly(self) -> AbstractContextManager[None]:
        """Inside runs an op that adds nobody knows how much: what the budget has no room for is refused."""

    def refusals(self) -> int:
        """How often the allocator refused memory to anybody since this was asked last, as far as it counts that."""

    def make_room(self, nbytes: int) -> None:
        """An op is about to add `nbytes`: see that the allocator finds them within its bounds."""

    def make_room_beside(self, nbytes: int) -> None:
        """So many bytes are about to be taken beside tensors, by planning: see that the bounds hold all the same."""

    def give_back_beside(self) -> None:
        """What was taken beside tensors is free again: see that others can have it."""

    def reserve(self, *, anew: bool) -> None:
        """An op is about to run, one that was never seen if `anew`: see that libraries find memory for themselves.

        Raises:
            MemoryError: there is none.
        """

    def relieve(self) -> None:
        """The allocator refused memory: give back all that it holds and nobody uses."""

    def stretch(self, nbytes: int) -> bool:
        """The allocator refused `nbytes`, and nothing is left that could leave: whether it may be asked again.

        It may where the budget has room, and only the allocator's own ways of keeping memory stand between.
        """

    def close(self) -> None:
        """Leave memory to PyTorch's usual ways."""
