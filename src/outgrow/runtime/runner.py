"""Runs the ops of a live step: room is made for each before it runs, and what comes of it is booked."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

import torch

from outgrow.errors import OutgrowError
from outgrow.runtime.calls import Calls
from outgrow.runtime.care import OpNeeds, Precedent
from outgrow.runtime.compiled import CompiledCode
from outgrow.runtime.convolutions import Convolutions
from outgrow.runtime.current import CurrentStep
from outgrow.runtime.demand import Demand
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.hooks import Hooks
from outgrow.runtime.interrupts import Interrupts
from outgrow.runtime.need import NOTHING, Need
from outgrow.runtime.parking import Parking
from outgrow.runtime.pool import Pool
from outgrow.runtime.recompute import Recomputer
from outgrow.runtime.reuse import Reuser
from outgrow.runtime.room import Room
from outgrow.tracing.ledger import Ledger, StorageRecord
from outgrow.tracing.ops import (
    OpFacts,
    OpTable,
    accumulates_gradient,
    is_opaque,
    outputs_of,
    parts_of,
    tensors_in,
    updated_statistics,
    written_tensors,
)

_LOG = logging.getLogger(__name__)

# Ops over lists call one op for each tensor, which count the writes, but not beneath a dispatch mode. These write by
# themselves, and count nothing in plain PyTorch either.
_COUNT_NO_WRITES = ("aten._fused_", "aten._amp_")
# A number that each tensor of a list is multiplied with becomes a tensor: the heap has as much where an op passes.
_ALWAYS_FREE_BYTES = 4 << 10


class Runner:
    """Runs the program's ops, as the dispatch mode shows them (`watch.py`), and our own."""

    def __init__(
        self,
        current: CurrentStep,
        ledger: Ledger,
        pool: Pool,
        room: Room,
        fast_path: FastPath,
        table: OpTable,
        calls: Calls,
        convolutions: Convolutions,
        recomputer: Recomputer,
        reuser: Reuser,
        parking: Parking,
        demand: Demand,
        compiled: CompiledCode,
        hooks: Hooks,
        interrupts: Interrupts,
    ) -> None:
        """`calls` runs an op where memory may run out inside it. `interrupts` wait until ops are booked."""
        self._current = current
        self._ledger = ledger
        self._pool = pool
        self._room = room
        self._fast = fast_path
        self._table = table
        self._calls = calls
        self._convolutions = convolutions
        self._recomputer = recomputer
        self._reuser = reuser
        self._parking = parking
        self._demand = demand
        self._compiled = compiled
        self._hooks = hooks
        self._interrupts = interrupts
        self._precedent: Precedent | None = None
        self._needs = OpNeeds(
            ledger.device_type,
            searched_convolutions=convolutions.searches,
            open_convolutions=convolutions.take_what_is_free,
        )

    def goes_by(self, precedent: Precedent | None) -> None:
        """What is known of this step's ops from a larger one, if it is a smaller step."""
        self._precedent = precedent

    # --- the program's ---

    def run(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op inside the pool's care."""
        if self._interrupts.waiting:
            self._interrupts.check()
        self._hooks.come_here()  # autograd may have gone on on another thread
        current, fast = self._current, self._fast
        recording = current.recording
        if recording is not None:
            recording.reach()
        # Before anything of ours holds the arguments: it counts who refers to them.
        number = fast.number
        is_free = self._reuser.on and self._reuser.may_write_over(number, facts.name, args)
        inputs = tensors_in(args, kwargs)
        unsaid = updated_statistics(facts, args)
        ledger, parking, recomputer = self._ledger, self._parking, self._recomputer
        see, known = ledger.see, ledger.newest
        for tensor in inputs:
            see(tensor)
        if facts.takes_storage:
            _show_storages(ledger, args)
        if ledger.hidden_bytes and ledger.newest > known and _is_of_reducer():
            ledger.show_hidden(known)
        self._room.where = facts.name
        if self._demand.on:
            self._demand.before(facts, inputs)
        if parking.parked.busy:
            parking.parked.touch(inputs)
            for tensor in chain(written_tensors(facts, args, kwargs), unsaid):
                changed = see(tensor)
                if changed is not None:
                    parking.before_change(changed)
        contents = recomputer.contents_before(number, facts, args, kwargs, inputs) if recomputer.on else None
        newest = ledger.newest
        fast.number = number + 1
        if fast.learns:
            fast.needs_care(number)
        signature, need = self._needs.before(func, facts, args, kwargs)
        if self._precedent is not None and not (need.measured or need.depends_on_data):
            given = {record.serial: record.nbytes for record in map(see, inputs) if record is not None}
            need = self._precedent.bound(need, number, facts.name, sum(given.values()))
        is_free = is_free and contents is None
        # A recorded step runs the plain ops: their trace is that of the plain step.
        reuses = is_free and recording is None and self._reuser.is_proved(facts.name, args, kwargs)
        if reuses:
            need = NOTHING
        self._room.prepare(need, facts.name)
        written: list[StorageRecord] = []
        statistics: list[StorageRecord] = []
        versions: list[tuple[torch.Tensor, int]] = []
        if facts.writes or is_free:
            places = list(written_tensors(facts, args, kwargs)) if facts.writes else args[:1]
            records = (see(tensor) for tensor in places)
            written = [record for record in records if record is not None]
            self._before_write(written)
            if facts.over_lists and not facts.name.startswith(_COUNT_NO_WRITES):
                versions = [(tensor, tensor._version) for tensor in places if not tensor.is_inference()]
        if unsaid:
            records = (see(tensor) for tensor in unsaid)
            statistics = [record for record in records if record is not None and record not in written]
            self._before_write(statistics)
        before = ledger.live_bytes
        if recording is not None:
            recording.begin(is_timed=not facts.is_view)
        measured: int | None = None
        if reuses:
            result, rise = self._reuser.write_over(func, args, kwargs), 0
        else:
            result, measured = self._calls.call(func, facts, args, kwargs, need)
            _count_writes(versions)
            rise = self._rise_of(signature, need, measured)
            if recording is not None:
                recording.begin_anew(self._convolutions.settled(facts))
            # A library was given what it wanted; or there was no room for what a larger batch shows of it.
            is_short = self._precedent is not None and before + need.likely_bytes > self._room.budget_bytes
            if measured is not None and (is_short or self._calls.wants_gate(facts)):
                self._room.check(before + rise, facts.name)
        if recording is not None:
            recording.end()
        if is_free and not reuses:
            self._reuser.prove(facts.name, func, args, kwargs, result)
        outputs = [tensor for made in outputs_of(result) for tensor in (made, *parts_of(made))]
        for tensor in outputs:
            see(tensor)
        if not self._hooks.are_trusted():
            parking.expose((*inputs, *outputs))
        elif parking.on:
            parking.ran(number, func, facts, args, inputs, written, outputs, newest)
        if self._demand.on:
            self._demand.ran(facts, inputs, written, outputs, newest)
        for record in chain(written, statistics):
            record.writes += 1
        if contents is not None:
            recomputer.take_down(func, facts, args, kwargs, contents, result, signature)
        elif (
            fast.learns
            and (need.measured or (fast.is_loose and measured is not None and not need.depends_on_data))
            and not (is_free or parking.looks_out_for(number) or self._wants_care(facts, inputs, outputs, rise))
        ):
            self._let_pass(number, facts, rise, [*written, *statistics])
        current.came_to(max(before + rise, ledger.live_bytes))
        if recording is not None:
            recording.tell(func, facts, args, kwargs, inputs, outputs, result, rise_bytes=rise)
        return result

    def _before_write(self, written: Sequence[StorageRecord]) -> None:
        """An op is about to write to these storages."""
        self._recomputer.before_write(written)
        for record in written:
            if self._parking.parked.busy:
                self._parking.parked.before_write(record)
            self._pool.written(record)

    def _wants_care(
        self, facts: OpFacts, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], rise_bytes: int
    ) -> bool:
        """Whether ops like this one, that took so much, are never let past the mode."""
        # Where memory runs out half way through a list, that is an error.
        may_end_half_done = facts.over_lists and bool(facts.writes) and rise_bytes > _ALWAYS_FREE_BYTES
        draws_elsewhere = facts.draws and not all(tensor.is_cpu for tensor in (*inputs, *outputs))
        is_special = may_end_half_done or facts.sized_by_floats or draws_elsewhere or self._convolutions.seen(facts)
        return is_special or any(map(is_opaque, (*inputs, *outputs)))

    def _let_pass(self, number: int, facts: OpFacts, rise_bytes: int, written: Sequence[StorageRecord]) -> None:
        """Op `number` may pass from the next step on, if it writes to nothing that matters."""
        if not any(record.followers for record in written):
            gated = not facts.writes and self._calls.wants_gate(facts)
            writes = bool(facts.writes or written)
            self._fast.needs_no_care(number, rise_bytes, writes=writes, gated=gated, draws=facts.draws)

    def pass_view(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A view will be made: an op of the trace, which needs no care."""
        self._fast.pass_view()
        if self._parking.parked.busy:  # bounds are checked against the storage
            self._parking.parked.touch(tensors_in(args, kwargs))

    @property
    def is_inside_compiled(self) -> bool:
        """Whether what runs now is compiled code, whose ops are not the step's."""
        return self._compiled.is_inside

    @property
    def parks(self) -> bool:
        """Whether Python functions are watched, ours too if nobody looks away."""
        return self._current.sees_functions or self._parking.parked.busy

    @property
    def sees_views(self) -> bool:
        """Whether every op is wanted, views too: by a recorder, or where values are parked that no plan parks."""
        return self._demand.on or self._current.recording is not None

    def let_go_of(self, address: int) -> None:
        """Gradients are about to be summed up in the storage there: nothing of ours is to hold or read it.

        Native code calls this, which knows of no errors: what stands in the way here stands in the way of the sum.
        """
        self._hooks.come_here()
        with self._interrupts.shut(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            record = self._ledger.at(address)
            if record is None or not self._parking.parked.busy:
                return
            try:
                self._parking.parked.restore(record)
                self._parking.before_change(record)
                self._parking.parked.before_write(record)
            except (OutgrowError, RuntimeError, MemoryError) as error:
                _LOG.info("fallback: gradients are not summed up in place: %s", error)

    # --- ours ---

    def run_inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Hashable = None) -> Any:
        """Run one op of ours inside the pool's care; its `signature` is known where the program ran the same."""
        facts = self._table[func]
        need = self._needs.known(signature)
        if need is None:
            signature, need = self._needs.before(func, facts, args, kwargs)
        self._room.prepare(need, facts.name)
        before = self._ledger.live_bytes
        result, rise = self._calls.call(func, facts, args, kwargs, need)
        rise = self._rise_of(signature, need, rise)
        for tensor in outputs_of(result):
            self._ledger.see(tensor)
        self._current.came_to(max(before + rise, self._ledger.live_bytes))
        return result

    def _rise_of(self, signature: Hashable, need: Need, measured: int | None) -> int:
        """How far an op that has run lifted live bytes; remembered where it was measured."""
        if measured is None:
            if not need.seen:
                self._needs.ran(signature)
            self._current.is_blind = self._current.is_blind or not need.measured
            return need.likely_bytes
        if self._needs.measured(signature, measured):
            self._fast.was_measured()
        return measured


def _show_storages(ledger: Ledger, args: Sequence[Any]) -> None:
    """Have the ledger count memory that somebody has filled, before room is made beside it."""
    for item in args:
        if isinstance(item, torch.UntypedStorage) and item.device.type == ledger.device_type:
            ledger.see_storage(item)


def _count_writes(versions: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Count a write to each of these, as autograd would have, if they are still at the versions that they had."""
    lost = [tensor for tensor, version in versions if tensor._version == version]
    if lost:
        torch.autograd.graph.increment_version(lost)


def _is_of_reducer() -> bool:
    """Whether memory that an op is given here, and that nobody saw being made, is where gradients are collected.

    `DistributedDataParallel` collects them in hooks of the nodes that add to them, or at the end of the pass.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    return accumulates_gradient() or torch._C._current_autograd_node() is None
