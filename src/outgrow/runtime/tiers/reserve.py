"""Room on the CPU's heap beside tensors: what libraries take for themselves, and what mends a shortage.

oneDNN does not look whether it got the memory for the description of a kernel: where it got none, the process ends
by a signal (seen by refusing it one block after the other, with PyTorch 2.13's oneDNN 3.12, for convolutions, GELU
and LSTMs). Sending values away takes some memory as well. So there is room before an op runs, and it is let go of
when memory has run out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Descriptions take up to 20 KiB each, and 300 to 600 KiB of them live at once while a convolution's backward kernels
# are chosen. Tensors that large take no hole this small.
_HOLE_BYTES = 32 << 10
_HOLES = 32
# What is built once is found again, with few descriptions; its machine code, where it was forgotten, takes this much.
_CODE_BYTES = 320 << 10


class Reserve:
    """Holes in the heap that large blocks cannot take, kept apart by walls: blocks that nobody uses.

    It belongs to the thread that runs the ops: glibc gives threads heaps of their own.
    """

    def __init__(self) -> None:
        self._walls: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    def hold(self, *, anew: bool) -> None:
        """Before an op: make the holes `anew` where it was never seen and may build kernels, in 0.3 milliseconds.

        Before others, and if the holes are there, only see that the heap is not full: a microsecond, or a few where
        large blocks come from the system one by one.

        Raises:
            MemoryError: there is no room.
        """
        if self._walls and not anew:
            _allocate(_CODE_BYTES)
            return
        self._walls.clear()
        blocks = [_allocate(_HOLE_BYTES) for _ in range(2 * _HOLES)]
        self._walls = blocks[::2]  # every second one goes; those that stay keep the holes apart

    def let_go(self) -> None:
        """The room is wanted now."""
        self._walls.clear()


def _allocate(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A block of the C library's heap, whose pages nobody touches."""
    try:
        return np.empty(nbytes, np.uint8)
    except MemoryError as error:
        raise MemoryError(f"can't allocate memory: no {nbytes >> 10} KiB for what libraries need") from error
