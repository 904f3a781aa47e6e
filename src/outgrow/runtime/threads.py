"""Threads that start where memory is short, or say that they cannot."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")

# Addresses that the stack of a thread takes.
_STACK_BYTES = 8 << 20
# What glibc, Python and libraries set aside for a thread when it first runs their code, and much more: others take
# memory meanwhile.
_BESIDE_BYTES = 8 << 20


def find_room_for_threads(stack_bytes: int) -> None:
    """See that threads can start whose stacks take so many bytes together.

    Where one starts that finds no memory, glibc or OpenMP may end the process, or Python may wait for it without end.

    Raises:
        MemoryError: there is no room.
    """
    try:  # as stacks are mapped: a hole in the heap would be no proof, and shared memory is not counted as theirs is
        mmap.mmap(-1, stack_bytes + _BESIDE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        raise MemoryError("can't allocate memory for the stacks of threads") from error


def run_on_new_thread(work: Callable[[], _T], threads: int = 1) -> _T:
    """Wait for what `work` returns on a thread that never ran anything, and that makes it `threads` in all.

    Raises:
        MemoryError: there is no room for their stacks.
        BaseException: what `work` raises.
    """
    find_room_for_threads(_STACK_BYTES * threads)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()
