"""Saved tensors that stay where they are: most of them, in a step that goes by its plan.

Parameters, statistics, and whatever the plan neither moves nor makes anything anew from. The pool need not know of
them as long as the plan holds, which is a good part of what a saved tensor costs; it is shown them once memory runs
short, and when they outlive their step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import ref

import torch

from outgrow.planning.agenda import stays_of
from outgrow.planning.plan import Plan
from outgrow.runtime.handles import Handle, Owner, Stay
from outgrow.runtime.pool import Pool
from outgrow.tracing.ir import Kind
from outgrow.tracing.ledger import Ledger, StorageRecord


class Staying:
    """Those of the step that runs."""

    def __init__(self, owner: Owner, ledger: Ledger, pool: Pool, nothing: torch.Tensor) -> None:
        """`owner` is told when autograd lets go of what the pool was shown, `nothing` a tensor without memory."""
        self._owner = owner
        self._ledger = ledger
        self._pool = pool
        self._nothing = nothing
        self.begin(None, {})

    def begin(self, plan: Plan | None, kinds: Mapping[int, Kind]) -> None:
        """A step begins; without a plan nothing is known to stay. `kinds` tells which storages are training state."""
        self._here: list[ref[Stay]] = []
        self._kinds = kinds
        self._bytes: Sequence[int] = () if plan is None else stays_of(plan)

    def take(self, tensor: torch.Tensor, record: StorageRecord, epoch: int, number: int) -> Stay | None:
        """What autograd is to keep in place of saved tensor `number`; None if that may have to leave."""
        if number >= len(self._bytes) or self._bytes[number] < 0:
            return None
        is_state = record.serial in self._kinds
        own = tensor.is_leaf and (is_state or tensor.requires_grad)
        if is_state and not own:  # an alias that has to be counted: the parameter may be lent
            return None
        stay = Stay(tensor, epoch, number, own=own)
        if not own:
            self._here.append(ref(stay))
        return stay

    def kept_bytes(self, number: int) -> int:
        """Bytes of a value that stays, if saved tensor `number` is the first one that has it, and it could leave."""
        return self._bytes[number]

    def show_all(self) -> None:
        """Show the pool those that are there, as if saved before all that it knows."""
        if not self._here:
            return
        here = [stay for stay in (reference() for reference in self._here) if stay is not None]
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            left = [stay for stay in reversed(here) if not self._show(stay)]
        self._here = [ref(stay) for stay in reversed(left)]

    def _show(self, stay: Stay) -> bool:
        """Show the pool one of them, if it is where the pool could do something about it."""
        tensor = stay.tensor
        assert tensor is not None, "what the pool knows is no longer here"
        record = self._ledger.see(tensor)
        if record is None or tensor._version != stay.version or self._pool.is_parked(record):
            return False
        # Below autograd, where recipes run, another alias would not share the version counter.
        handle = Handle(self._owner, tensor, stay.epoch, stay.number, alias=tensor)
        handle.enter(self._pool.adopt(tensor, record, is_oldest=True), self._nothing)
        stay.handle, stay.tensor = handle, None
        return True
