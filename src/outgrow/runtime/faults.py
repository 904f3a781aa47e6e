"""How to tell that memory was refused."""

from __future__ import annotations

import errno

import torch

# What the CPU allocator says, what C++ does, what oneDNN makes of either, and what Python says where there is no room
# for a stack.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "std::bad_alloc",
    "could not create a primitive",
    "could not create a memory",
    "could not create an engine",
    "could not execute a primitive",
    "can't start new thread",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator of PyTorch, or the system, refused memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
