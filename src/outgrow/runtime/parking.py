"""Long skips: values that the program still holds leave the device and come back before anybody looks.

A parked value's storage stays what it is, with all tensors on it, and is empty for a while: `resize_(0)` bumps no
version. Whoever reads or writes such a storage restores it first: the runner before each op, the pool before it
touches a saved value, and `access.py` where Python code gets at memory past the dispatcher.

Training state can leave as well, inside a backward pass, and is back when that is over: what runs then, an optimizer
in C++ or a library that averages gradients, may read it unseen.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from outgrow.errors import DeviceOutOfMemory, SpillError
from outgrow.planning.plan import Plan
from outgrow.runtime.copies.copy import Copies, Copy
from outgrow.runtime.entry import Entry
from outgrow.runtime.faults import is_out_of_memory
from outgrow.runtime.lending import Lending
from outgrow.runtime.pool import Pool
from outgrow.runtime.recompute import Verdicts
from outgrow.runtime.remake import Remake, RunOp, digest
from outgrow.runtime.sightings import Sightings
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.runtime.tiers.place import Place
from outgrow.tracing.functions import reads_by_ops
from outgrow.tracing.ir import Kind
from outgrow.tracing.ledger import Ledger, StorageRecord
from outgrow.tracing.ops import OpFacts, is_opaque, tensors_within

# A byte; four of them, or two or eight, are no floating-point number.
_NOT_A_NUMBER = 0xFF


@dataclass(slots=True)
class _Parked:
    """A storage on its way out (`writing`), away, on its way back (`reading`), or back before anybody looked.

    `held` keeps the memory alive while a copy is in flight; else nothing of ours holds the storage. What is `lent` is
    training state. What has a `remake` but no `copied` was dropped; where it has both, the former is tried beside the
    latter, and `trial` is the hash of what it gave.
    """

    record: StorageRecord
    nbytes: int
    slot: Place
    lent: bool
    held: torch.UntypedStorage | None = None
    writing: Copy | None = None
    reading: Copy | None = None
    remake: Remake | None = None
    copied: bool = True
    trial: bytes = b""


class Parking:
    """The parked storages of the step that runs.

    Attributes:
        on: values may be parked: the step's plan does so, and the step is still the plan's; or it is on demand.
        nbytes: bytes that were sent out in this step.
        lending: which training state may leave, and when.
        failure: what went wrong when everything came back, if anything did.
        remade_nbytes: bytes of the gradients that were made anew in this step, and `remake_seconds` the time for it.
        proofs: gradients that were made anew beside a copy, to see whether they are the same.
        is_watched: says whether what Python code calls is seen; set when somebody does.
        lose_count: told when another op than the plan's made what was to be parked; set once.
    """

    def __init__(
        self,
        ledger: Ledger,
        pool: Pool,
        copies: Copies,
        memory: DeviceMemory,
        make_room: Callable[[int], None],
        run: RunOp,
        gradients: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        """`make_room` is called before a copy back that somebody waits for, and raises where there is none.

        `run` runs one op inside the budget; `gradients` are those that the parameters have now.
        """
        self._ledger = ledger
        self._pool = pool
        self._copies = copies
        self._memory = memory
        self._make_room = make_room
        self._run = run
        self.lending = Lending(gradients)
        self._parked: dict[int, _Parked] = {}
        self.lose_count: Callable[[], None] = lambda: None
        self.begin(None, {}, Verdicts())

    def begin(
        self,
        plan: Plan | None,
        kinds: Mapping[int, Kind],
        verdicts: Verdicts,
        *,
        on_demand: bool = False,
        recorded: bool = False,
        is_foreign: bool = False,
    ) -> None:
        """A step begins. `kinds` has the training state by serial number; `on_demand`: see `demand.py`.

        In a step that is `recorded` nothing is made anew: lifetimes are those of the plain step. `verdicts` says
        which gradients were the same when they were made anew, and is added to; `is_foreign` that the plan's trace is
        not this session's.
        """
        self.lending.begin(kinds)
        self._on_demand = on_demand
        # Elsewhere than on a CPU no plan of ours parks (`planning/parks.py` says why), and others' are not followed.
        self.on = on_demand or self.is_for(plan)
        self.nbytes = 0
        self.failure: Exception | None = None
        self._filling: _Parked | None = None
        self._kinds = kinds
        self.remade_nbytes = self.proofs = 0
        self.remake_seconds = 0.0
        self._follow(plan, verdicts, recorded=recorded, is_foreign=is_foreign)
        self._own: set[int] = set()
        self._exposed: set[int] = set()
        self._cancelled: list[_Parked] = []
        self._postponed: list[tuple[int, int]] = []
        # The functions that run now, with their arguments: some read memory past the dispatcher.
        self._calls: list[tuple[Any, Any, Any]] = []
        self.is_watched: Callable[[], bool] = lambda: False

    def is_for(self, plan: Plan | None) -> bool:
        """Whether a plan parks anything here."""
        return plan is not None and bool(plan.parks) and self._ledger.device_type == "cpu"

    @property
    def has_planned_places(self) -> bool:
        """Whether anything is parked where a plan put it."""
        return any(parked.slot.planned for parked in self._parked.values())

    def turn_to(self, plan: Plan, verdicts: Verdicts, *, is_foreign: bool) -> None:
        """The step goes by another plan from here on; what the one before parked comes back when it is wanted."""
        self._postponed.clear()
        self._seen.forget_remakes()
        self.on = self.on or self.is_for(plan)
        self._follow(plan, verdicts, recorded=False, is_foreign=is_foreign)

    def _follow(self, plan: Plan | None, verdicts: Verdicts, *, recorded: bool, is_foreign: bool) -> None:
        self._verdicts = verdicts
        self._remade: dict[int, int] = {}  # gradients that are made anew, with the op that makes each
        if plan is not None and not recorded:
            births = ((item.value, plan.problem.trace.values[item.value].birth) for item in plan.parks if item.remade)
            self._remade = {value: birth for value, birth in births if verdicts.gradients.get(birth, True)}
        self._seen = Sightings(self._ledger, plan, self._kinds, self._remade, is_foreign=is_foreign)

    def loosen(self) -> None:
        """What the plan parks may be smaller in this step."""
        self._seen.is_loose = True

    @property
    def busy(self) -> bool:
        """Whether anything is parked, on its way, or back ahead of its use."""
        return bool(self._parked or self._cancelled)

    def holds(self, record: StorageRecord) -> bool:
        """Whether a storage is parked, on its way, or back ahead of its use."""
        return record.serial in self._parked

    # --- what the runner shows ---

    def ran(
        self,
        number: int,
        func: Any,
        facts: OpFacts,
        args: Sequence[Any],
        inputs: Sequence[torch.Tensor],
        written: Sequence[StorageRecord],
        outputs: Sequence[torch.Tensor],
        newest: int,
    ) -> None:
        """Op `number` ran; storages with serial numbers above `newest` were first seen in its outputs."""
        # It may keep the memory of what it was given.
        if not facts.name.startswith("aten.") or any(map(is_opaque, (*inputs, *outputs))):
            self.expose((*inputs, *outputs))
            return
        records = [*written]
        for tensor in outputs:
            record = self._ledger.see(tensor)
            if record is not None and record.serial > newest:
                records.append(record)
                self._own.add(record.serial)
        born = list({record.serial: record for record in records}.values())
        had_missed = self._seen.has_missed
        self.lending.add(self._seen.ran(number, facts.name, func, args, outputs, born))
        if self._seen.has_missed and not had_missed:
            self.lose_count()

    def looks_out_for(self, number: int) -> bool:
        """Whether op `number` of the step makes something that may be parked: it has to be seen."""
        return self._seen.looks_out_for(number)

    def agrees(self, value: int, entry: Entry) -> bool:
        """Whether a saved value is where the op that made it left it, as far as is known here."""
        return self._seen.agrees(value, entry.serial)

    def expose(self, tensors: Iterable[torch.Tensor]) -> None:
        """Somebody has the address of this memory: it stays where it is, to the end of the step."""
        for tensor in tensors:
            record = self._ledger.see(tensor)
            if record is not None:
                self.restore(record)
                self.before_change(record)
                self._exposed.add(record.serial)

    # --- functions that run ---

    @property
    def function(self) -> Any:
        """PyTorch's function that runs, as Python code called it; None outside of any."""
        return self._calls[-1][0] if self._calls else None

    def enter(self, function: Any, args: Any, kwargs: Any) -> None:
        """A function begins."""
        self._calls.append((function, args, kwargs))

    def leave(self) -> None:
        """It is over."""
        self._calls.pop()
        postponed, self._postponed = self._postponed, []
        for value, offset in postponed:
            self.start_out(value, offset)

    def arguments(self) -> set[int]:
        """The serial numbers of the storages that the running functions were given, and may read unseen."""
        calls = (call for call in self._calls if not reads_by_ops(call[0]))
        records = (self._ledger.see(tensor) for call in calls for tensor in tensors_within(call))
        return {record.serial for record in records if record is not None}

    # --- ticks ---

    def start_out(self, value: int, offset: int) -> None:
        """Start the copy out of a value, if all that is known of it allows that."""
        record = self._seen.find_whole(value)
        storage = None if record is None else record.storage()
        if record is None or storage is None or not self.may_leave(record, storage):
            return
        if record.serial in self.arguments():
            self._postponed.append((value, offset))
            return
        remake = self._seen.take_remake(value)
        if remake is not None and remake.is_true:
            self._drop(value, record, storage, remake, self._pool.place(offset, record.nbytes))
            return
        if remake is not None:
            remake.let_go()
        known = self._pool.copy_of(record)
        if isinstance(known, Place) and not self._pool.is_reading(storage):
            parked = _Parked(record, record.nbytes, known, lent=False, held=storage)
            self._add(parked)
            self._empty(parked)
            return
        if not isinstance(known, Copy):
            known = self._copies.out.submit(self._pool.place(offset, record.nbytes), storage.data_ptr())
            self.nbytes += record.nbytes
        self._start_writing(record, storage, known)

    def may_leave(self, record: StorageRecord, storage: torch.UntypedStorage) -> bool:
        """Whether a storage may be parked at all, if no function that runs was given it."""
        return (
            self.on
            and (self.lending.may_leave(record) if self.lending.is_state(record) else record.serial in self._own)
            and record.serial not in self._exposed
            and record.serial not in self._parked
            and record.nbytes == storage.nbytes()
            and not storage.is_shared()
            and self.is_watched()
            and (
                storage.resizable() or (self.lending.is_state(record) and self._pool.fast_path.make_resizable(record))
            )
        )

    def _drop(
        self, value: int, record: StorageRecord, storage: torch.UntypedStorage, remake: Remake, slot: Place
    ) -> None:
        """Let go of a gradient that can be made anew; the first time it is copied as well, to see whether it can."""
        if self._remade[value] in self._verdicts.gradients:
            self._add(_Parked(record, record.nbytes, slot, lent=True, remake=remake, copied=False))
            self._take_memory(storage)
            return
        copy = self._copies.out.submit(slot, storage.data_ptr())
        self._start_writing(record, storage, copy)
        self._parked[record.serial].remake = remake
        self.nbytes += record.nbytes

    def _start_writing(self, record: StorageRecord, storage: torch.UntypedStorage, copy: Copy) -> None:
        lent = self.lending.is_state(record)
        self._add(_Parked(record, record.nbytes, copy.slot, lent, storage, copy))

    def _add(self, parked: _Parked) -> None:
        self._parked[parked.record.serial] = parked
        self._pool.fast_path.parked(parked.record, is_parked=True)

    def _remove(self, parked: _Parked) -> None:
        del self._parked[parked.record.serial]
        self._pool.fast_path.parked(parked.record, is_parked=False)

    def park(self, records: Sequence[StorageRecord]) -> None:
        """Park storages that may leave, and wait until they are away.

        Raises:
            SpillError: a copy failed. Its value is still in memory.
        """
        leaving: list[Copy] = []
        for record in records:
            storage = record.storage()
            assert storage is not None, "only what is alive may leave"
            slot = self._pool.reserve(record.nbytes)
            leaving.append(self._copies.out.submit(slot, storage.data_ptr()))
            self._start_writing(record, storage, leaving[-1])
            self.nbytes += record.nbytes
        for copy in leaving:
            self._pool.wait_for(copy)
        self.land()

    def start_in(self, value: int, room_ahead: int) -> bool:
        """Start a planned copy back; False while it and the coming `room_ahead` bytes do not fit the budget."""
        record = self._seen.find(value)
        parked = None if record is None else self._parked.get(record.serial)
        if parked is None or not self._is_away(parked):
            return True
        self._pool.land()
        if self._ledger.live_bytes + parked.nbytes + room_ahead > self._pool.budget_bytes:
            return False
        try:
            self._start_back(parked, may_evict=False)
        except DeviceOutOfMemory:
            return False
        return True

    # --- coming back ---

    def touch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Somebody is about to read these tensors, or to write to them."""
        for tensor in tensors:
            if is_opaque(tensor):  # and what else, nobody knows
                self.restore_all()
                return
            record = self._ledger.see(tensor)
            if record is not None and record.serial in self._parked:
                self.restore(record)

    def before_change(self, record: StorageRecord) -> None:
        """What a storage holds may change: nothing may have to be made anew from it any more."""
        self._seen.before_change(record)
        for parked in list(self._parked.values()):
            if parked.remake is not None and parked.remake.reads(record):
                self.restore(parked.record)

    def before_write(self, record: StorageRecord) -> None:
        """Somebody is about to write to a storage: no copy of ours may still read it."""
        for parked in list(self._cancelled):
            if parked.record is record and parked.writing is not None:
                self._pool.wait_for(parked.writing)
        self._forget_cancelled()

    def restore(self, record: StorageRecord) -> None:
        """Have a storage's bytes back where they were.

        Raises:
            SpillError: they could not be read. The value is away as before.
            DeviceOutOfMemory: there is no memory for them.
        """
        parked = self._parked.get(record.serial)
        if parked is None:
            return
        if parked.writing is not None:
            self._settle_out(parked)
            return
        if self._is_away(parked):
            self._make_room(parked.nbytes)
            self._start_back(parked, may_evict=True)
        self._settle_in(parked)
        self._forget(parked)

    def restore_all(self) -> None:
        """As `restore`, for whatever is parked."""
        for parked in list(self._parked.values()):
            self.restore(parked.record)

    def return_state(self) -> None:
        """A backward pass is over: all of the training state comes back. Raises what `restore` raises."""
        self._seen.forget_remakes()
        lent = [parked for parked in self._parked.values() if parked.lent]
        # All copies are on the lane before the first is waited for, or anything is made anew.
        for parked in sorted(lent, key=lambda parked: parked.remake is not None):
            if self._is_away(parked):
                self._make_room(parked.nbytes)
                self._start_back(parked, may_evict=True)
                if parked.remake is not None:  # what it was made from is wanted no more
                    self._forget(parked)
        for parked in lent:
            self.restore(parked.record)

    @contextmanager
    def peeking(self) -> Iterator[None]:
        """What a plan has parked and our own code reads meanwhile leaves again afterwards."""
        before = [] if self._on_demand else list(self._parked.values())
        yield
        for parked in before:
            storage = parked.record.storage()
            if storage is not None and self.may_leave(parked.record, storage):
                self._start_writing(parked.record, storage, self._copies.out.submit(parked.slot, storage.data_ptr()))

    def _forget(self, parked: _Parked) -> None:
        """It is parked no more: the place on the disk is free, unless a plan fixed it."""
        self._remove(parked)
        self._pool.release(parked.slot)
        if parked.remake is not None:
            parked.remake.let_go()

    @staticmethod
    def _is_away(parked: _Parked) -> bool:
        return (
            parked.writing is None
            and parked.reading is None
            and parked.record.nbytes == 0
            and parked.record.storage() is not None
        )

    def _settle_out(self, parked: _Parked) -> None:
        """It is wanted before it left: it stays. The copy goes on, and holds the memory until it is done."""
        self._remove(parked)
        if parked.remake is not None:
            parked.remake.let_go()
        self._cancelled.append(parked)
        self._ledger.follow(parked.record)
        self._forget_cancelled()

    def _forget_cancelled(self) -> None:
        under_way = []
        for item in self._cancelled:
            if item.writing is not None and not item.writing.done:
                under_way.append(item)
            else:
                self._pool.release(item.slot)
                self._ledger.unfollow(item.record)
        self._cancelled = under_way

    def _start_back(self, parked: _Parked, *, may_evict: bool, run: RunOp | None = None) -> None:
        """Give a storage its memory, and start to fill it. `run` runs one op, inside the budget if not given."""
        run = run or self._run
        storage = parked.record.storage()
        if storage is None:  # nobody wants it any more
            return
        self._memory.make_room(parked.nbytes)
        while True:
            try:
                self._memory.refill(storage, parked.nbytes)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if not may_evict:
                    raise DeviceOutOfMemory("no memory for a parked value that was to come back") from error
                self._pool.page_faults.meet(error, parked.nbytes, "a parked value on its way back")
        self._ledger.see_storage(storage)
        self._filling = parked
        try:
            self._fill(parked, storage, run)
        except BaseException:  # without its bytes it must not pass for one that is back
            self._take_memory(storage)
            raise
        finally:
            self._filling = None

    def _fill(self, parked: _Parked, storage: torch.UntypedStorage, run: RunOp) -> None:
        """Start to read a storage's bytes, or make them anew; the first time both, to see whether they agree."""
        remake = parked.remake
        if remake is not None:
            self.touch(remake.sources)
            started = time.perf_counter()
            remake.run(storage, run)
            self.remake_seconds += time.perf_counter() - started
            self.remade_nbytes += storage.nbytes()
            if not parked.copied:
                return
            parked.trial = digest(storage)
            parked.remake = None
            remake.let_go()
        parked.reading = self._copies.back.submit(parked.slot, storage.data_ptr())
        parked.held = storage

    def _settle_in(self, parked: _Parked) -> None:
        reading = parked.reading
        if reading is None:
            return
        self._pool.wait_for(reading)
        held, parked.held, parked.reading = parked.held, None, None
        assert held is not None
        if reading.error is None:
            if parked.trial:
                self._judge(parked, digest(held))
            return
        self._take_memory(held)
        reading.check()

    def _judge(self, parked: _Parked, truth: bytes) -> None:
        """A gradient is back from the disk: was it the same when it was made anew?"""
        for value in self._seen.values_of(parked.record):
            self._verdicts.gradients[self._remade[value]] = parked.trial == truth
        parked.trial = b""
        self.proofs += 1

    # --- room ---

    def land(self) -> None:
        """Empty the storages whose copy out is done, and let go of the memory of those whose copy back is.

        Raises:
            SpillError: a copy out failed. Its value is still in memory.
        """
        for parked in list(self._parked.values()):
            if parked.writing is not None and parked.writing.done:
                if parked.writing.error is not None:
                    self._forget(parked)
                    parked.writing.check()
                self._empty(parked)
            elif parked.reading is not None and parked.reading.done and parked.reading.error is None:
                self._settle_in(parked)
            elif parked.held is None and parked.record.storage() is None:
                self._forget(parked)
        self._forget_cancelled()

    def _empty(self, parked: _Parked) -> None:
        """The bytes are on the disk: the memory goes, unless another copy still reads it."""
        storage = parked.held
        assert storage is not None
        if self._pool.is_reading(storage):
            return
        parked.writing = None
        self._take_memory(storage)
        parked.held = None

    def _take_memory(self, storage: torch.UntypedStorage) -> None:
        self._memory.empty(storage)
        self._ledger.see_storage(storage)

    def wait_for_room(self, need: int) -> None:
        """Wait for values that are leaving as planned until so many bytes fit: they go before anything else must."""
        for parked in [item for item in self._parked.values() if item.writing is not None]:
            if self._ledger.live_bytes + need <= self._pool.budget_bytes:
                return
            if parked.writing is not None:
                self._pool.wait_for(parked.writing)
                self._pool.land()
                self.land()

    def send_back(self, need: int) -> None:
        """Empty what came back and nobody looked at yet, until so many bytes fit: the last thing to try.

        Before that, wait for copies that were called off and hold what nobody else does.
        """
        for parked in list(self._cancelled):
            if self._ledger.live_bytes + need <= self._pool.budget_bytes:
                return
            if parked.writing is not None and parked.record.other_holders() <= 0:  # only the copy still holds it
                self._pool.wait_for(parked.writing)
                self._forget_cancelled()
                parked.held = None
        for parked in reversed(list(self._parked.values())):
            if self._ledger.live_bytes + need <= self._pool.budget_bytes:
                return
            if parked is self._filling:
                continue
            self._settle_in(parked)
            storage = parked.record.storage()
            if parked.writing is None and storage is not None and not self._pool.is_reading(storage):
                self._take_memory(storage)

    # --- the end ---

    def end_on_demand(self, plan: Plan) -> None:
        """From here on nothing is parked but what the plan parks. Nothing may be parked now."""
        self._on_demand, self.on = False, self.is_for(plan)

    def begin_on_demand(self) -> None:
        """From here on values may be parked that no plan parks (`demand.py`)."""
        self.on = self._on_demand = True

    def depart(self) -> None:
        """The step is not the plan's: what was planned is over."""
        self._postponed.clear()
        self._seen.forget_remakes()
        if not self._on_demand:
            self.give_up()

    def give_up(self) -> None:
        """Park no more, and bring back what there is room for.

        What does not fit comes back when somebody looks at it. What left on demand may be read unseen from here on,
        for all that is known: where it does not fit, that is an error.
        """
        self.on = False
        self._postponed.clear()
        self._seen.forget_remakes()
        if self._on_demand:
            self.restore_all()
        for parked in list(self._parked.values()):
            if not self._is_away(parked) or self._pool.make_room(parked.nbytes):
                self.restore(parked.record)

    def end(self) -> None:
        """The step is over, well or badly: everything comes back, whatever the budget says.

        Raises:
            KeyboardInterrupt: somebody was impatient; everything is back all the same.
        """
        self.on = self.lending.on = False
        self._seen.forget_remakes()
        impatience: KeyboardInterrupt | None = None
        # What is made anew may be made from what comes back.
        for parked in sorted(self._parked.values(), key=lambda parked: parked.remake is not None):
            for is_last in (False, False, True):
                try:
                    self._come_back(parked)
                    break
                except KeyboardInterrupt as error:
                    impatience = error
                except Exception as error:
                    if is_last:
                        self._give_up_on(parked, error)
        for parked in list(self._parked.values()):
            self._forget(parked)
        for parked in self._cancelled:
            assert parked.writing is not None
            parked.writing.wait()
        self._forget_cancelled()
        self._seen.forget()
        self._calls.clear()
        self._postponed.clear()
        if impatience is not None:
            raise impatience

    @property
    def away_bytes(self) -> int:
        """Bytes of what is away, and comes back."""
        return sum(parked.nbytes for parked in self._parked.values() if self._is_away(parked))

    def _come_back(self, parked: _Parked) -> None:
        if parked.record.serial not in self._parked:
            return
        if parked.writing is not None:
            self._settle_out(parked)
            return
        if self._is_away(parked):
            with suppress(SpillError):  # of copies that others needed
                self._pool.make_room(parked.nbytes)
            self._start_back(parked, may_evict=True, run=_call)
        self._settle_in(parked)

    def _give_up_on(self, parked: _Parked, error: Exception) -> None:
        """Its bytes are lost. The memory is there again, and shows it: nobody is to read an address that is not."""
        self.failure = self.failure or (_lost_state(error) if parked.lent else error)
        storage = parked.record.storage()
        if storage is None:
            return
        with suppress(RuntimeError, MemoryError):
            self._memory.refill(storage, parked.nbytes)
            self._ledger.see_storage(storage)
            ctypes.memset(storage.data_ptr(), _NOT_A_NUMBER, parked.nbytes)


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _lost_state(error: Exception) -> SpillError:
    return SpillError(
        f"training state that was parked could not be brought back, and is lost: {error}. Load the model and the"
        " optimizer from your last checkpoint, and choose another spill_dir or a larger budget."
    )
