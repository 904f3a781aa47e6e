"""Storages that the program still holds and that are empty meanwhile: out, away, and back before anybody looks.

A parked value's storage stays what it is, with all tensors on it, and is empty for a while: `resize_(0)` bumps no
version. What leaves, and when, is decided in `parking.py`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from outgrow.errors import DeviceOutOfMemory, SpillError
from outgrow.runtime.copies.copy import Copies, Copy
from outgrow.runtime.faults import is_out_of_memory
from outgrow.runtime.pool import Pool
from outgrow.runtime.remake import Remake, RunOp, digest
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.runtime.tiers.place import Place
from outgrow.tracing.ledger import Ledger, StorageRecord
from outgrow.tracing.ops import is_opaque

# A byte; four of them, or two or eight, are no floating-point number.
_NOT_A_NUMBER = 0xFF


@dataclass(slots=True, eq=False)
class Parked:
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


class ParkedStorages:
    """The parked storages of the step that runs.

    Attributes:
        failure: what went wrong when everything came back, if anything did.
        remade_nbytes: bytes of the gradients that were made anew in this step, and `remake_seconds` the time for it.
        judge: told of a storage that was made anew and read from the disk whether both are the same; set once.
    """

    def __init__(
        self,
        ledger: Ledger,
        pool: Pool,
        copies: Copies,
        memory: DeviceMemory,
        make_room: Callable[[int], None],
        run: RunOp,
    ) -> None:
        """`make_room` is called before a copy back that somebody waits for, and raises where there is none.

        `run` runs one op inside the budget.
        """
        self._ledger = ledger
        self._pool = pool
        self._copies = copies
        self._memory = memory
        self._make_room = make_room
        self._run = run
        self._parked: dict[int, Parked] = {}
        self.judge: Callable[[StorageRecord, bool], None] = lambda record, is_same: None
        self.begin()

    def begin(self) -> None:
        """A step begins. Nothing is parked."""
        self.failure: Exception | None = None
        self.remade_nbytes = 0
        self.remake_seconds = 0.0
        self._filling: list[Parked] = []  # each for the sake of the one before
        self._cancelled: list[Parked] = []

    @property
    def busy(self) -> bool:
        """Whether anything is parked, on its way, or back ahead of its use."""
        return bool(self._parked or self._cancelled)

    def holds(self, record: StorageRecord) -> bool:
        """Whether a storage is parked, on its way, or back ahead of its use."""
        return record.serial in self._parked

    def all(self) -> list[Parked]:
        """Those that are parked, on their way, or back ahead of their use."""
        return list(self._parked.values())

    def sources(self) -> frozenset[int]:
        """The storages that something is being made anew from right now, by serial number: they have to stay."""
        remakes = (parked.remake for parked in self._filling)
        return frozenset(serial for remake in remakes if remake is not None for serial in remake.serials)

    @property
    def has_planned_places(self) -> bool:
        """Whether anything is parked where a plan put it."""
        return any(parked.slot.planned for parked in self._parked.values())

    @property
    def away_bytes(self) -> int:
        """Bytes of what is away, and comes back."""
        return sum(parked.nbytes for parked in self._parked.values() if self._is_away(parked))

    # --- out ---

    def send(
        self, record: StorageRecord, storage: torch.UntypedStorage, copy: Copy, *, is_lent: bool, trial: Remake | None
    ) -> None:
        """A storage is parked that is being copied, and made anew on `trial` when it comes back."""
        self._add(Parked(record, record.nbytes, copy.slot, is_lent, storage, copy, remake=trial))

    def empty(self, record: StorageRecord, storage: torch.UntypedStorage, slot: Place) -> None:
        """A storage is parked of which there is a copy already."""
        self._empty(self._add(Parked(record, record.nbytes, slot, lent=False, held=storage)))

    def drop(self, record: StorageRecord, storage: torch.UntypedStorage, slot: Place, remake: Remake) -> None:
        """A gradient is let go of that can be made anew."""
        self._add(Parked(record, record.nbytes, slot, lent=True, remake=remake, copied=False))
        self._take_memory(storage)

    def _add(self, parked: Parked) -> Parked:
        self._parked[parked.record.serial] = parked
        self._pool.fast_path.parked(parked.record, is_parked=True)
        return parked

    def _remove(self, parked: Parked) -> None:
        del self._parked[parked.record.serial]
        self._pool.fast_path.parked(parked.record, is_parked=False)

    # --- back ---

    def start_in(self, record: StorageRecord, room_ahead: int) -> bool:
        """Start a planned copy back; False while it and the coming `room_ahead` bytes do not fit the budget."""
        parked = self._parked.get(record.serial)
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
        for parked in self.all():
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
        for parked in self.all():
            self.restore(parked.record)

    def return_lent(self) -> None:
        """All of the training state comes back. Raises what `restore` raises."""
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

    def restore_what_fits(self) -> None:
        """Bring back what there is room for. The rest comes back when somebody looks at it."""
        for parked in self.all():
            if not self._is_away(parked) or self._pool.cache.make_room(parked.nbytes):
                self.restore(parked.record)

    def _forget(self, parked: Parked) -> None:
        """It is parked no more: the place on the disk is free, unless a plan fixed it."""
        self._remove(parked)
        self._pool.release(parked.slot)
        if parked.remake is not None:
            parked.remake.let_go()

    @staticmethod
    def _is_away(parked: Parked) -> bool:
        return (
            parked.writing is None
            and parked.reading is None
            and parked.record.nbytes == 0
            and parked.record.storage() is not None
        )

    def _settle_out(self, parked: Parked) -> None:
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

    def _start_back(self, parked: Parked, *, may_evict: bool, run: RunOp | None = None) -> None:
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
        self._filling.append(parked)  # what it is made from may have to come back before
        try:
            self._fill(parked, storage, run)
        except BaseException:  # without its bytes it must not pass for one that is back
            self._take_memory(storage)
            raise
        finally:
            self._filling.pop()

    def _fill(self, parked: Parked, storage: torch.UntypedStorage, run: RunOp) -> None:
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

    def _settle_in(self, parked: Parked) -> None:
        reading = parked.reading
        if reading is None:
            return
        self._pool.wait_for(reading)
        held, parked.held, parked.reading = parked.held, None, None
        assert held is not None
        if reading.error is None:
            if parked.trial:
                is_same, parked.trial = parked.trial == digest(held), b""
                self.judge(parked.record, is_same)
            return
        self._take_memory(held)
        reading.check()

    # --- room ---

    def land(self) -> None:
        """Empty the storages whose copy out is done, and let go of the memory of those whose copy back is.

        Raises:
            SpillError: a copy out failed. Its value is still in memory.
        """
        for parked in self.all():
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

    def _empty(self, parked: Parked) -> None:
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
        for parked in reversed(self.all()):
            if self._ledger.live_bytes + need <= self._pool.budget_bytes:
                return
            if parked in self._filling:
                continue
            self._settle_in(parked)
            storage = parked.record.storage()
            if parked.writing is None and storage is not None and not self._pool.is_reading(storage):
                self._take_memory(storage)

    # --- the end ---

    def end(self) -> None:
        """The step is over, well or badly: everything comes back, whatever the budget says.

        Raises:
            KeyboardInterrupt: somebody was impatient; everything is back all the same.
        """
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
        for parked in self.all():
            self._forget(parked)
        for parked in self._cancelled:
            assert parked.writing is not None
            parked.writing.wait()
        self._forget_cancelled()
        if impatience is not None:
            raise impatience

    def _come_back(self, parked: Parked) -> None:
        if parked.record.serial not in self._parked:
            return
        if parked.writing is not None:
            self._settle_out(parked)
            return
        if self._is_away(parked):
            with suppress(SpillError):  # of copies that others needed
                self._pool.cache.make_room(parked.nbytes)
            self._start_back(parked, may_evict=True, run=_call)
        self._settle_in(parked)

    def _give_up_on(self, parked: Parked, error: Exception) -> None:
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
