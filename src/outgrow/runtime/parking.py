"""Long skips: values that the program still holds leave the device and come back before anybody looks.

What leaves and when is decided here, out and back are in `parked.py`. Whoever reads or writes a parked storage
restores it first: the runner before each op, the pool before it touches a saved value, and `access.py` where Python
code gets at memory past the dispatcher.

Training state can leave as well, inside a backward pass, and is back when that is over: what runs then, an optimizer
in C++ or a library that averages gradients, may read it unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from outgrow.planning.plan import Plan
from outgrow.runtime.copies.copy import Copies, Copy
from outgrow.runtime.entry import Entry
from outgrow.runtime.lending import Lending
from outgrow.runtime.parked import ParkedStorages
from outgrow.runtime.pool import Pool
from outgrow.runtime.recompute import Verdicts
from outgrow.runtime.remake import Remake
from outgrow.runtime.sightings import Sightings
from outgrow.runtime.tiers.place import Place
from outgrow.tracing.functions import reads_by_ops
from outgrow.tracing.ir import Kind
from outgrow.tracing.ledger import Ledger, StorageRecord
from outgrow.tracing.ops import OpFacts, is_opaque, tensors_within


class Parking:
    """Which storages of the step that runs are parked, and when.

    Attributes:
        parked: those storages.
        on: values may be parked: the step's plan does so, and the step is still the plan's; or it is on demand.
        nbytes: bytes that were sent out in this step.
        lending: which training state may leave, and when.
        proofs: gradients that were made anew beside a copy, to see whether they are the same.
        is_watched: says whether what Python code calls is seen; set when somebody does.
        lose_count: told when another op than the plan's made what was to be parked; set once.
    """

    def __init__(
        self,
        ledger: Ledger,
        pool: Pool,
        copies: Copies,
        parked: ParkedStorages,
        gradients: Callable[[], Iterable[torch.Tensor]],
        may_lend: Callable[[], bool],
    ) -> None:
        """`gradients` are those that the parameters have now; `may_lend` says whether training state may leave."""
        self._ledger = ledger
        self._pool = pool
        self._copies = copies
        self.parked = parked
        parked.judge = self._judge
        self.lending = Lending(gradients, may_lend)
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
        self.parked.begin()
        self.nbytes = self.proofs = 0
        self._kinds = kinds
        self._follow(plan, verdicts, recorded=recorded, is_foreign=is_foreign)
        self._own: set[int] = set()
        self._exposed: set[int] = set()
        self._postponed: list[tuple[int, int]] = []
        # The functions that run now, with their arguments: some read memory past the dispatcher.
        self._calls: list[tuple[Any, Any, Any]] = []
        self.is_watched: Callable[[], bool] = lambda: False

    def is_for(self, plan: Plan | None) -> bool:
        """Whether a plan parks anything here."""
        return plan is not None and bool(plan.parks) and self._ledger.device_type == "cpu"

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
                self.parked.restore(record)
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
            self.parked.empty(record, storage, known)
            return
        if not isinstance(known, Copy):
            known = self._copies.out.submit(self._pool.place(offset, record.nbytes), storage.data_ptr())
            self.nbytes += record.nbytes
        self._send(record, storage, known)

    def may_leave(self, record: StorageRecord, storage: torch.UntypedStorage) -> bool:
        """Whether a storage may be parked at all, if no function that runs was given it."""
        return (
            self.on
            and (self.lending.may_leave(record) if self.lending.is_state(record) else record.serial in self._own)
            and record.serial not in self._exposed
            and not self.parked.holds(record)
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
            self.parked.drop(record, storage, slot, remake)
            return
        self._send(record, storage, self._copies.out.submit(slot, storage.data_ptr()), remake)
        self.nbytes += record.nbytes

    def _send(
        self, record: StorageRecord, storage: torch.UntypedStorage, copy: Copy, trial: Remake | None = None
    ) -> None:
        self.parked.send(record, storage, copy, is_lent=self.lending.is_state(record), trial=trial)

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
            self._send(record, storage, leaving[-1])
            self.nbytes += record.nbytes
        for copy in leaving:
            self._pool.wait_for(copy)
        self.parked.land()

    def start_in(self, value: int, room_ahead: int) -> bool:
        """Start a planned copy back; False while it and the coming `room_ahead` bytes do not fit the budget."""
        record = self._seen.find(value)
        return record is None or self.parked.start_in(record, room_ahead)

    # --- coming back ---

    def before_change(self, record: StorageRecord) -> None:
        """What a storage holds may change: nothing may have to be made anew from it any more."""
        self._seen.before_change(record)
        self.parked.before_change(record)

    def return_state(self) -> None:
        """A backward pass is over: all of the training state comes back. Raises what `restore` raises."""
        self._seen.forget_remakes()
        self.parked.return_lent()

    @contextmanager
    def peeking(self) -> Iterator[None]:
        """What a plan has parked and our own code reads meanwhile leaves again afterwards."""
        before = [] if self._on_demand else self.parked.all()
        yield
        for parked in before:
            storage = parked.record.storage()
            if storage is not None and self.may_leave(parked.record, storage):
                self._send(parked.record, storage, self._copies.out.submit(parked.slot, storage.data_ptr()))

    def _judge(self, record: StorageRecord, is_same: bool) -> None:
        """A gradient is back from the disk: was it the same when it was made anew?"""
        for value in self._seen.values_of(record):
            self._verdicts.gradients[self._remade[value]] = is_same
        self.proofs += 1

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
            self.parked.restore_all()
        self.parked.restore_what_fits()

    def end(self) -> None:
        """The step is over, well or badly: everything comes back, whatever the budget says.

        Raises:
            KeyboardInterrupt: somebody was impatient; everything is back all the same.
        """
        self.on = self.lending.on = False
        self._seen.forget_remakes()
        try:
            self.parked.end()
        finally:
            self._seen.forget()
            self._calls.clear()
            self._postponed.clear()
