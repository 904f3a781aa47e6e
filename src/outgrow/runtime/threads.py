"""Threads that start where memory is short, or say that they cannot."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")

# The usual 8 MiB are taken from the address space at once, which counts where that is limited, and glibc keeps them.
_STACK_BYTES = 2 << 20
# The stack of one that OpenMP starts, where neither OMP_STACKSIZE nor the system's limit says otherwise.
_OPENMP_STACK_BYTES = 8 << 20
# What glibc, Python and libraries set aside for a thread when it first runs their code, and much more: others take
# memory meanwhile.
_BESIDE_BYTES = 8 << 20
# The size of stacks is the process's: two sessions must not put back what the other one set.
_one_at_a_time = threading.Lock()


@contextmanager
def stacks_of(nbytes: int, others_bytes: int = 0) -> Iterator[None]:
    """Threads that start inside have stacks of `nbytes`, and there is room for one, and for `others_bytes`.

    Where one starts that finds no memory, glibc or OpenMP may end the process, or Python may wait for it without end.

    Raises:
        MemoryError: there is no room.
    """
    try:  # as stacks are mapped: a hole in the heap would be no proof, and shared memory is not counted as theirs is
        mmap.mmap(-1, nbytes + others_bytes + _BESIDE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        raise MemoryError("can't allocate memory for the stacks of threads") from error
    with _one_at_a_time:
        usual = threading.stack_size(nbytes)
        try:
            yield
        finally:
            threading.stack_size(usual)


def run_on_new_thread(work: Callable[[], _T], threads: int = 1) -> _T:
    """Wait for what `work` returns on a thread that never ran anything, and that makes it `threads` in all.

    Raises:
        MemoryError: there is no room for their stacks.
        RuntimeError: the system has no more threads.
        BaseException: what `work` raises.
    """
    with ThreadPoolExecutor(1) as executor:
        with stacks_of(_STACK_BYTES, (threads - 1) * _OPENMP_STACK_BYTES):
            running = executor.submit(work)
        try:
            return running.result()
        finally:
            del running  # it holds an error whose traceback holds this frame, and what `work` had in its hands
