"""What may leave in a recorded step when an op would not fit otherwise: parks on demand.

A plan parks values in gaps between their uses, which it reads off a trace. Here nobody knows what comes: what the
program holds and did not touch for longest leaves, and comes back for whoever touches it. Where a trace would show
that code runs which the dispatcher does not see, everything is back before, and nothing leaves meanwhile. Training
state leaves last, and only in a backward pass.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel

from outgrow.planning.problem import STATE
from outgrow.runtime.parking import Parking
from outgrow.runtime.pool import Pool
from outgrow.tracing.ir import Kind
from outgrow.tracing.ledger import Ledger, StorageRecord
from outgrow.tracing.ops import OpFacts, accumulates_gradient, is_opaque, tensors_within

# Modules with functions that run between an op of C++ code and us.
_BETWEEN = ("outgrow.", "torch._compile", "torch._dynamo")
_BLANK_FUNCTIONS = ("empty", "new_empty", "_empty")
# What runs while an `autograd.Function` runs forward.
_APPLY: CodeType = vars(torch.autograd.Function)["apply"].__func__.__code__


class Demand:
    """The storages that may leave in the step that runs, least recently touched first.

    Attributes:
        on: the step may need more than its plan provides for, if it has one.
        nbytes: bytes that left in it.
    """

    def __init__(self, ledger: Ledger, pool: Pool, parking: Parking, least_moved_bytes: int) -> None:
        self._ledger = ledger
        self._pool = pool
        self._parking = parking
        self._least_moved = least_moved_bytes
        self.begin({}, on=False)

    def begin(self, kinds: Mapping[int, Kind], *, on: bool) -> None:
        """A step begins. `kinds` has the training state by serial number."""
        self.on = on
        self.nbytes = 0
        # Records alone: a hold on a storage would change the lifetimes that the recorder dates.
        self._idle: OrderedDict[int, StorageRecord] = OrderedDict()
        state = ((record.serial, record) for record in self._ledger.alive()) if on else ()
        self._state = OrderedDict(
            (serial, record)
            for serial, record in state
            if kinds.get(serial) in STATE and record.nbytes >= self._least_moved
        )
        self._in_use: frozenset[int] = frozenset()
        self._among_strangers = self._is_paused = False
        # Blank memory that somebody asked for whom nobody sees fill it, or not yet.
        self._blanks: set[int] = set()
        # What an `autograd.Function` that still runs has made, which it may hand to a kernel of its own; its number.
        self._inside: set[int] = set()
        self._function = 0

    # --- what the runner shows ---

    def before(self, facts: OpFacts, inputs: Sequence[torch.Tensor]) -> None:
        """An op is about to run on these tensors.

        Raises:
            BudgetTooSmall: it is a stranger, and what is parked does not fit beside it.
            SpillError: what is parked could not be read back for a stranger.
        """
        self._in_use = frozenset(record.serial for record in self._records_of(inputs))
        is_known = facts.name.startswith("aten.") or facts.is_collective
        self._among_strangers = not is_known or any(map(is_opaque, inputs))
        if self._among_strangers or (facts.is_blank and not self._is_filled_by_torch()):
            self._among_strangers = True
            self._parking.parked.restore_all()
        elif self._parking.parked.busy:
            self._parking.parked.touch(_kept_by_function())

    def ran(
        self,
        facts: OpFacts,
        inputs: Sequence[torch.Tensor],
        written: Sequence[StorageRecord],
        outputs: Sequence[torch.Tensor],
        newest: int,
    ) -> None:
        """The op ran; storages with serial numbers above `newest` were first seen in its outputs."""
        for record in written:
            self._blanks.discard(record.serial)
        for idle in (self._idle, self._state):
            for serial in self._in_use & idle.keys():
                idle.move_to_end(serial)
        fresh = [record for record in self._records_of(outputs) if record.serial > newest]
        if self._among_strangers and facts.is_blank:
            self._blanks.update(record.serial for record in fresh if record.nbytes)
        in_backward = torch._C._current_graph_task_id() != -1
        # A sparse tensor reads what it was made of.
        hides = self._among_strangers or any(map(is_opaque, outputs))
        if hides or facts.is_collective:  # threads that exchange tensors go on with them
            self._parking.expose((*inputs, *outputs))
        elif in_backward and accumulates_gradient():  # the gradient is training state from now on
            for record in self._records_of(outputs):
                self._idle.pop(record.serial, None)
                if record.nbytes >= self._least_moved:
                    self._parking.lending.add((record.serial,))
                    self._state[record.serial] = record
        elif facts.makes_outputs and not facts.is_blank:
            large = {item.serial: item for item in fresh if item.nbytes >= self._least_moved}
            if in_backward or torch.is_grad_enabled():
                self._idle.update(large)
            elif large and (function := _function_that_runs()):  # else it may be the optimizer's, and stay
                self._idle.update(large)
                self._leave_but(function)
                self._inside.update(large)
        self._in_use = frozenset()
        self._among_strangers = False

    def touched(self, record: StorageRecord) -> None:
        """Somebody asked for the value in this storage and will read it soon."""
        if record.serial in self._idle:
            self._idle.move_to_end(record.serial)

    # --- room ---

    def make_room(self, need: int) -> None:
        """Park the least recently touched until `need` more bytes fit the budget, as far as anything may leave.

        Raises:
            SpillError: something could not be written. It is still in memory.
        """
        excess = self._ledger.live_bytes + need - self._pool.budget_bytes
        if self._is_paused or self._among_strangers or self._blanks:
            return
        if self._inside:
            self._leave_but(_function_that_runs())
        kept = {record.serial for record in self._records_of(_kept_by_function())}
        in_use = self._in_use | self._parking.arguments() | self._inside | kept | self._parking.parked.sources()
        chosen = []
        for serial, record in [*self._idle.items(), *self._state.items()]:
            if excess <= 0:
                break
            storage = record.storage()
            if storage is None:
                self._idle.pop(serial, None)
                self._state.pop(serial, None)
            elif serial not in in_use and self._parking.may_leave(record, storage):
                self._pool.wait_until_read(storage)
                chosen.append(record)
                excess -= record.nbytes
        if chosen:
            self.nbytes += sum(record.nbytes for record in chosen)
            self._parking.park(chosen)

    def _leave_but(self, function: int) -> None:
        """Of `autograd.Function`s that run forward only this one still does, or none."""
        if function != self._function:
            self._function = function
            self._inside.clear()

    @property
    def is_paused(self) -> bool:
        """Whether somebody of ours reads storages whole, and nothing leaves."""
        return self._is_paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing leaves meanwhile: somebody of ours reads storages whole, past the dispatcher."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _records_of(self, tensors: Iterable[torch.Tensor]) -> list[StorageRecord]:
        return [record for record in map(self._ledger.see, tensors) if record is not None]

    def _is_filled_by_torch(self) -> bool:
        """Whether blank memory is asked for by PyTorch's own code, which fills it by ops that are seen."""
        function = self._parking.function
        if function is None:
            in_backward = torch._C._current_graph_task_id() != -1
            return (in_backward and accumulates_gradient()) or _is_for_reducer()
        is_op = isinstance(function, OpOverload | OpOverloadPacket)
        return not is_op and not getattr(function, "__name__", "").startswith(_BLANK_FUNCTIONS)


def _function_that_runs() -> int:
    """The number of the program's `autograd.Function` that runs forward; 0 where none does.

    Each call makes a node, which counts, before it runs, and while it does no other node is made.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return 0 if frame is None else 1 + int(torch._C._autograd._get_sequence_nr())


def _kept_by_function() -> Iterator[torch.Tensor]:
    """What an `autograd.Function` of the program's that runs backward has kept as attributes of its context.

    Nobody sees it hand that to a kernel of its own; what it let autograd save is seen as it takes it up.
    """
    node: Any = torch._C._current_autograd_node()
    return tensors_within(vars(node)) if isinstance(node, BackwardCFunction) else iter(())


def _is_for_reducer() -> bool:
    """Whether `DistributedDataParallel` asks, before its forward pass: it lays its gradients out anew, once.

    What asks is C++ that it calls, and so the innermost frame of Python's that is not ours is its own.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_code is DistributedDataParallel._pre_forward.__code__
