"""Which storages of the step that runs are which of a plan's values: known as soon as the op that makes them ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from outgrow.planning.agenda import makers_of
from outgrow.planning.parks import may_park
from outgrow.planning.plan import Plan
from outgrow.runtime.remake import Remake, can_remake
from outgrow.tracing.ir import Kind, Trace
from outgrow.tracing.ledger import Ledger, StorageRecord


class Sightings:
    """The values that a plan parks, as far as this step has shown them; and how to make some of them anew.

    Attributes:
        is_loose: those of the step that runs may be smaller.
        has_missed: another op ran in place of one that makes such a value: ops have other numbers than the plan's.
    """

    def __init__(
        self,
        ledger: Ledger,
        plan: Plan | None,
        kinds: Mapping[int, Kind],
        remade: Mapping[int, int],
        *,
        is_foreign: bool,
    ) -> None:
        """`kinds` has the training state by serial number, `remade` the op that makes each gradient to remake.

        `is_foreign` says that the plan's trace was recorded elsewhere: its storages have other numbers.
        """
        self._ledger = ledger
        self.is_loose = self.has_missed = False
        self._remade = remade
        self._records: dict[int, StorageRecord] = {}
        self._sizes: dict[int, int] = {}
        self._births: dict[int, list[tuple[int, int]]] = {}  # by op, its values with their places among its outputs
        self._names: dict[int, str] = {}
        self._makers: set[int] = set()  # ops that make the storages in which those values lie
        self._gradients: set[int] = set()
        self._lasting: set[int] = set()  # as large with any batch
        self._remakes: dict[int, Remake] = {}
        if plan is not None and plan.parks:
            found = {record.serial: record for record in ledger.alive() if record.serial in kinds}
            if is_foreign:
                found = _in_order(found.values(), plan.problem.trace, kinds)
            self._look_out_for(plan, found)

    def _look_out_for(self, plan: Plan, state: Mapping[int, StorageRecord]) -> None:
        """`state` has the storages of training state by their numbers in the trace."""
        problem = plan.problem
        for index in {item.value for item in plan.parks}:
            value = problem.trace.values[index]
            if not may_park(problem, index):
                continue
            self._sizes[index] = value.nbytes
            if value.kind.lasts:
                self._lasting.add(index)
            if value.birth < 0:
                record = state.get(value.storage)
                if record is not None:
                    self._records[index] = record
            elif index in (made := problem.trace.ops[value.birth].outputs):
                self._births.setdefault(value.birth, []).append((made.index(index), index))
                self._names[value.birth] = problem.trace.ops[value.birth].name
                self._makers.update(makers_of(plan, index))
                if value.kind is Kind.GRADIENT:
                    self._gradients.add(index)

    def ran(
        self,
        number: int,
        name: str,
        func: Any,
        args: Sequence[Any],
        outputs: Sequence[torch.Tensor],
        born: Sequence[StorageRecord],
    ) -> list[int]:
        """Op `number` ran and wrote or made the storages `born`. Gives the serial numbers of gradients among them."""
        if self._names.get(number) != name:
            self.has_missed = self.has_missed or number in self._names
            return []
        gradients = []
        for place, value in self._births[number]:
            if place < len(born) and self._suits(born[place].nbytes, value):
                self._records[value] = born[place]
                self._sizes[value] = born[place].nbytes
                if value in self._gradients:
                    gradients.append(born[place].serial)
                if self._remade.get(value) == number and can_remake(func, args, outputs):
                    self._remakes[value] = Remake(self._ledger, func, args, outputs[0])
        return gradients

    def _suits(self, nbytes: int, value: int) -> bool:
        """Whether something of so many bytes can be a value of the plan's: in a smaller batch it may be smaller."""
        if nbytes == self._sizes[value]:
            return True
        return self.is_loose and value not in self._lasting and 0 < nbytes < self._sizes[value]

    def looks_out_for(self, number: int) -> bool:
        """Whether op `number` makes a value of the plan's, or the storage that a later op writes it to."""
        return number in self._births or number in self._makers

    def find(self, value: int) -> StorageRecord | None:
        """The storage of a value; None where it was not seen."""
        return self._records.get(value)

    def find_whole(self, value: int) -> StorageRecord | None:
        """The same; None also where the storage is of another size by now."""
        record = self._records.get(value)
        return record if record is not None and record.nbytes == self._sizes[value] else None

    def agrees(self, value: int, serial: int) -> bool:
        """Whether a value is where the op that made it left it, as far as is known here."""
        record = self._records.get(value)
        return record is None or record.serial == serial

    def values_of(self, record: StorageRecord) -> list[int]:
        """The plan's values that lie in a storage."""
        return [value for value, other in self._records.items() if other is record]

    # --- how to make them anew ---

    def take_remake(self, value: int) -> Remake | None:
        """How to make a gradient anew, where that is known; whoever takes it lets go of it."""
        return self._remakes.pop(value, None)

    def before_change(self, record: StorageRecord) -> None:
        """What a storage holds may change: nothing that is still here will be made anew from it."""
        for value, remake in list(self._remakes.items()):
            if remake.reads(record):
                self._remakes.pop(value).let_go()

    def forget_remakes(self) -> None:
        """What was to be made anew, and did not leave after all, will not."""
        for remake in self._remakes.values():
            remake.let_go()
        self._remakes.clear()

    def forget(self) -> None:
        """The step is over."""
        self.forget_remakes()
        self._records.clear()
        self.has_missed = False


def _in_order(state: Iterable[StorageRecord], trace: Trace, kinds: Mapping[int, Kind]) -> dict[int, StorageRecord]:
    """The storages of training state, by the numbers that they have in a trace from elsewhere.

    Those of one kind and size agree in the order in which they were seen first, as far as there are as many: an
    optimizer makes its state anew in each process, and in one order.
    """
    now: dict[tuple[Kind, int], list[StorageRecord]] = {}
    for record in sorted(state, key=lambda record: record.serial):
        now.setdefault((kinds[record.serial], record.nbytes), []).append(record)
    found: dict[int, StorageRecord] = {}
    for alike, numbers in trace.lasting_storages.items():
        records = now.get(alike, [])
        if len(records) == len(numbers):
            found.update(zip(numbers, records, strict=True))
    return found
