"""Gradients that are dropped in a backward pass and made anew when it is over, by the product that made them.

The gradient of a linear layer's weight is a product of two matrices that may be much smaller than it: for VGG-16's
first at batch 16, 4,096 x 16 and 16 x 25,088 numbers make 392 MiB. To multiply once more is faster than to read that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import torch

from outgrow.tracing.ledger import Ledger, StorageRecord

# How an operator writes its result to memory that is there.
_INTO = {torch.ops.aten.mm.default: torch.ops.aten.mm.out}

RunOp = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Remake:
    """One operator's call, with what it read and where in its storage the result lies.

    It holds what the op read; `let_go` ends that.
    """

    def __init__(self, ledger: Ledger, func: Any, args: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            self._func = _INTO[func]
            self._sources = [tensor.detach() for tensor in args]
            self._records = [record for record in map(ledger.see, args) if record is not None]
            self._window = (result.storage_offset(), result.shape, result.stride())
            self._dtype = result.dtype
        for record in self._records:
            record.aliases += 1
        made = ledger.see(result)
        # Not held: a hold on the gradient's storage is not what this is for.
        self._ledger = ledger
        self._watched = [*self._records, *(() if made is None else (made,))]
        self._writes = [record.writes for record in self._watched]
        for record in self._watched:
            ledger.follow(record)

    @property
    def sources(self) -> Sequence[torch.Tensor]:
        """What the op read."""
        return self._sources

    @property
    def is_true(self) -> bool:
        """Whether nobody wrote to what the op read, nor to its result."""
        return [record.writes for record in self._watched] == self._writes

    @property
    def serials(self) -> Sequence[int]:
        """The serial numbers of their storages."""
        return [record.serial for record in self._records]

    def reads(self, record: StorageRecord) -> bool:
        """Whether the op read this storage."""
        return record in self._records

    def run(self, storage: torch.UntypedStorage, run: RunOp) -> None:
        """Write the result to `storage`; `run` runs one op inside the budget."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            window = torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._window)
            run(self._func, tuple(self._sources), {"out": window})

    def let_go(self) -> None:
        """Let go of what the op read."""
        for record in self._records:
            record.aliases -= 1
        for record in self._watched:
            self._ledger.unfollow(record)
        self._sources, self._records, self._watched = [], [], []


def can_remake(func: Any, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> bool:
    """Whether a call is one that `Remake` knows how to repeat."""
    return (
        func in _INTO
        and len(outputs) == 1
        and all(type(item) in (torch.Tensor, torch.nn.Parameter) for item in args)
        and outputs[0].is_contiguous()
    )


def digest(storage: torch.UntypedStorage) -> bytes:
    """A hash of all bytes of a storage."""
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return blake2b(memory, digest_size=32).digest()
