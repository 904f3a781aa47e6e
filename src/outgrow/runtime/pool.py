"""The unified tensor pool: every saved value of the step, wherever its bytes are, and the moves between tiers.

SuperNeurons, section 3.3: one pool over the tiers, moves planned ahead where a plan exists, and a cache that
sends the least recently used away when an allocation would not fit (`cache.py`). What was dropped is made anew by
`dropped.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from outgrow.errors import DeviceOutOfMemory, OutgrowError
from outgrow.runtime.cache import Cache
from outgrow.runtime.copies.copy import Copies, Copy
from outgrow.runtime.copies.strays import Strays
from outgrow.runtime.departures import Departures
from outgrow.runtime.dropped import Dropped
from outgrow.runtime.entry import Entry
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.faults import is_out_of_memory
from outgrow.runtime.interrupts import Interrupts
from outgrow.runtime.page_faults import PageFaults
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.runtime.tiers.place import Place, Places
from outgrow.runtime.tiers.planned import PlannedPlaces
from outgrow.runtime.whereabouts import Whereabouts
from outgrow.tracing.ledger import Ledger, StorageRecord
from outgrow.units import format_bytes


class EmptiedStorages(Protocol):
    """Who empties storages that the program still holds, and fills them again."""

    def holds(self, record: StorageRecord) -> bool: ...

    def restore(self, record: StorageRecord) -> None: ...


class Pool:
    """Entries and their moves. Lives on the training's thread; only copies run elsewhere.

    Attributes:
        stall_seconds: time for which the computation waited for copies, since `reset_counters`.
        planned_bytes: bytes that plans sent out since then.
        evicted_bytes: bytes that the cache sent out since then.
        cache: which values leave where no plan says so.
        dropped: values that were let go of and will be made anew.
        parked: who parks storages; set once.
        arrived: told when a value has new memory, to be filled from the next tier or made anew in; set once.
        held_back_bytes: what copies back by plan leave free for what runs already.
        page_faults: what becomes of memory that an allocator refuses.
        fast_path: who is told which storages are parked.
    """

    def __init__(
        self,
        ledger: Ledger,
        budget_bytes: int,
        places: Places,
        copies: Copies,
        memory: DeviceMemory,
        least_moved_bytes: int,
        fast_path: FastPath | None = None,
        interrupts: Interrupts | None = None,
        strays: Strays | None = None,
    ) -> None:
        """`places` is the next tier, `copies` leads there, and `memory` is the device's own.

        `fast_path` is told which storages are parked. `interrupts` are let in where the pool waits for copies.
        `strays` keep memory in order where the program computes on streams of its own.
        """
        self._strays = strays or Strays()
        self._interrupts = interrupts or Interrupts()
        self.fast_path = fast_path or FastPath(ledger, budget_bytes, None)
        self.cache = Cache(ledger, self, budget_bytes, least_moved_bytes)
        self.page_faults = PageFaults(budget_bytes, ledger, memory, self.fast_path, self.cache.evict, self.holdings)
        self._ledger = ledger
        self._budget = budget_bytes
        self.held_back_bytes = 0
        self._places = places
        self._memory = memory
        self._copies = copies
        self._entries: dict[int, Entry] = {}
        self._whereabouts = Whereabouts(ledger)
        self._planned = PlannedPlaces(places)
        self._leaving = Departures()
        self.dropped = Dropped(ledger, self)
        self.parked: EmptiedStorages | None = None
        self.arrived: Callable[[Entry], None] = lambda entry: None
        # Copies back whose value nobody wants any more; their memory may go when they are done.
        self._abandoned: list[tuple[Copy, torch.UntypedStorage]] = []
        self.reset_counters()

    def reset_counters(self) -> None:
        """Start counting stalls and bytes anew."""
        self.stall_seconds = 0.0
        self.planned_bytes = self.evicted_bytes = 0
        self.page_faults.reset()
        self._leaving.reset()

    @property
    def budget_bytes(self) -> int:
        """The most that live bytes may reach."""
        return self._budget

    @property
    def leaving_bytes(self) -> int:
        """What copies out hold now."""
        return self._leaving.nbytes

    @property
    def most_leaving_bytes(self) -> int:
        """The most that they held since `reset_counters`."""
        return self._leaving.most_bytes

    @property
    def has_entries(self) -> bool:
        """Whether any saved value is still wanted."""
        return bool(self._entries)

    def entries(self) -> Iterator[Entry]:
        """All entries, in no particular order."""
        return iter(list(self._entries.values()))

    def adopt(self, tensor: torch.Tensor, record: StorageRecord, *, is_oldest: bool = False) -> Entry:
        """The entry of a tensor's value; one more saved tensor refers to it.

        What is new to the pool was touched last of all, or longest ago if it `is_oldest`.
        """
        self._unpark(record)
        entry = self._entries.get(record.serial) or self._returned(record)
        is_new = entry is None
        if entry is None:
            entry = self._entries[record.serial] = Entry(record, tensor.untyped_storage())
            self._whereabouts.put(entry)
        entry.handles += 1
        entry.is_changed = False
        self.cache.touch(entry)
        if is_new and is_oldest:
            self.cache.recent.move_to_end(entry, last=False)
        return entry

    def _returned(self, record: StorageRecord) -> Entry | None:
        """The entry of a value that came back to this storage, or was made anew: gradients' graphs save it again."""
        return next(iter(self._whereabouts.at(record)), None)

    def drop(self, entry: Entry) -> None:
        """A saved tensor is gone; with the last one the value leaves the pool."""
        falling = [entry]
        while falling:  # with a dropped value go its sources, if nobody else wants them, and theirs
            entry = falling.pop()
            entry.handles -= 1
            if entry.handles > 0:
                continue
            self._entries.pop(entry.serial, None)
            self._whereabouts.forget(entry)
            if entry.reading is not None and not entry.reading.done:
                assert entry.storage is not None
                self._abandoned.append((entry.reading, entry.storage))
            elif entry.slot is not None:
                self._places.release(entry.slot)
            self.let_go(entry)
            falling += self.dropped.take_recipe(entry)

    def values_in(self, record: StorageRecord) -> Sequence[Entry]:
        """The saved values that lie, or last lay, in a storage."""
        return self._whereabouts.at(record)

    def has_safe_copy(self, entry: Entry) -> bool:
        """Whether the value is not in memory, or has left for the next tier or is on its way there."""
        return (
            entry.storage is None
            or entry.slot is not None
            or entry.writing is not None
            or self.is_parked(entry.record)
        )

    def copy_of(self, record: StorageRecord) -> Place | Copy | None:
        """A copy of what a storage holds in the place that the plan gave it: done, under way, or none."""
        for entry in self._whereabouts.at(record):
            if entry.slot is not None and entry.slot.planned:
                return entry.slot
            if entry.writing is not None and entry.writing.slot.planned:
                return entry.writing
        return None

    def reserve(self, nbytes: int) -> Place:
        """A place in the next tier for what no plan foresaw, until it is released."""
        return self._places.reserve(nbytes)

    def release(self, slot: Place) -> None:
        """Give a place back; what a plan fixed stays the plan's."""
        self._places.release(slot)

    def place(self, offset: int, nbytes: int) -> Place:
        """The place in the next tier that the plan gave a value, or another one (see `PlannedPlaces.at`)."""
        return self._planned.at(offset, nbytes)

    def is_reading(self, storage: torch.UntypedStorage) -> bool:
        """Whether a copy out is under way that reads this memory."""
        return self._leaving.is_reading(storage)

    def wait_until_read(self, storage: torch.UntypedStorage) -> None:
        """Wait until no copy out reads this memory any more.

        Raises:
            SpillError: a copy failed. Its value is still in memory.
        """
        while self.is_reading(storage):
            self._wait_for_first()

    def is_parked(self, record: StorageRecord) -> bool:
        """Whether a storage is parked, on its way, or back ahead of its use."""
        return self.parked is not None and self.parked.holds(record)

    def _unpark(self, record: StorageRecord) -> None:
        if self.parked is not None and self.parked.holds(record):
            self.parked.restore(record)

    def put(self, entry: Entry, storage: torch.UntypedStorage) -> None:
        """A value was made anew, and lies here."""
        entry.storage = storage
        self._whereabouts.move(entry, storage)

    def keep(self, entry: Entry) -> None:
        """A value that was made anew stays until its own use."""
        self.dropped.forget_recipe(entry)
        self.cache.touch(entry)
        self.arrived(entry)

    def make_way(self, spill_bytes: int) -> None:
        """From here on a plan puts its values into the first `spill_bytes` of the next tier.

        Where values of earlier steps lie there that are nowhere else, and that a graph still wants, its own go
        elsewhere.
        """
        occupied = []
        for entry in list(self._entries.values()):
            if entry.writing is not None and entry.writing.slot.planned:
                self.wait_out(entry)
            if entry.slot is None or not entry.slot.planned:
                continue
            self.settle(entry)
            if entry.storage is None:
                occupied.append((entry.planned_at, entry.nbytes))
            else:
                entry.slot = None
        self._planned.set_aside(spill_bytes, occupied)

    def let_go(self, entry: Entry) -> None:
        """A value is safe elsewhere, or can be made anew: its memory goes, if nobody else holds it."""
        self._strays.join()
        entry.storage = None
        self.cache.forget(entry)

    def written(self, record: StorageRecord) -> None:
        """Somebody writes to a storage. What was copied of it is stale: fall back to the memory itself.

        Autograd raises when a saved tensor was changed in place; but a write that it does not see (through
        `.data`) changes what a plain backward pass would read, and so it must change what ours reads.
        """
        for entry in self._whereabouts.at(record):
            entry.is_changed = True
            storage = record.storage()
            if storage is None:
                continue
            if entry.writing is not None:
                entry.writing.wait()
                self._see_out(entry)
            if entry.slot is not None:
                self._places.release(entry.slot)
                entry.slot = None
            entry.storage = storage
            self.dropped.forget_recipe(entry)
            self.cache.touch(entry)

    def start_out(self, entry: Entry, offset: int | None = None) -> None:
        """Start a copy out, unless a copy exists or is under way. `offset` is the plan's place, if it has one."""
        if entry.storage is None or entry.slot is not None or entry.writing is not None:
            return
        if self.is_parked(entry.record):
            if entry.record.nbytes < entry.nbytes:  # it is away, by another way
                return
            self._unpark(entry.record)
        out = self._copies.out
        slot = self.reserve(entry.nbytes) if offset is None else self.place(offset, entry.nbytes)
        entry.planned_at = -1 if offset is None else offset
        entry.writing = out.submit(slot, entry.storage.data_ptr())
        self._leaving.add(entry.writing, entry, entry.storage)
        if offset is None:
            self.evicted_bytes += entry.nbytes
        else:
            self.planned_bytes += entry.nbytes

    def land(self) -> None:
        """Let go of memory whose copy out is done.

        Raises:
            SpillError: a copy failed. Its value is still in memory, and so are all that follow it.
        """
        while (copy := self._leaving.over) is not None:
            self._land(copy)
        # What is abandoned while this runs (a collector frees a graph) goes to the new list.
        abandoned, self._abandoned = self._abandoned, []
        for back, storage in abandoned:
            if back.done:
                self._places.release(back.slot)
            else:
                self._abandoned.append((back, storage))

    def _land(self, copy: Copy) -> None:
        self._strays.join()
        entry = self._leaving.land(copy)
        entry.writing = None
        if copy.error is not None or entry.handles == 0:
            self._places.release(copy.slot)
            if entry.handles > 0:  # else nobody is any the worse for it
                copy.check()
            return
        entry.slot = copy.slot
        # The bytes are safe in the next tier, or will be before anybody else gets this memory. If a backward op is
        # reading it right now, that op holds it, and the pool finds it again by its record: letting go here never
        # frees memory in use.
        self.let_go(entry)

    def _wait_for_first(self) -> None:
        first = self._leaving.first
        assert first is not None
        self.wait_for(first)
        self._land(first)

    def wait_for_departure(self) -> bool:
        """Wait for the copy out that lands next, if the memory of any is free then; False if there is none such."""
        if not self._leaving.will_free:
            return False
        self._wait_for_first()
        return True

    def wait_for_abandoned(self) -> bool:
        """Wait for the first copy back of a value that nobody wants any more; False if there is none."""
        if not self._abandoned:
            return False
        self.wait_for(self._abandoned[0][0])
        self.land()
        return True

    def wait_out(self, entry: Entry) -> None:
        """Wait until a value has left."""
        if entry.writing is not None:
            self.wait_for(entry.writing)
            self._see_out(entry)

    def _see_out(self, entry: Entry) -> None:
        """The copy out of a value is over, though others that were asked for before it may not be."""
        self.land()
        if entry.writing is not None:
            self._land(entry.writing)

    def start_in(self, entry: Entry, room_ahead: int) -> bool:
        """Start a planned copy back; False while it and the coming `room_ahead` bytes do not fit the budget."""
        if entry.storage is not None or entry.slot is None or entry.handles == 0:
            return True
        if self.find_again(entry):
            return True
        self.land()
        if self._ledger.live_bytes + entry.nbytes + max(room_ahead, self.held_back_bytes) > self._budget:
            return False
        try:
            self._start_in(entry, may_evict=False)
        except DeviceOutOfMemory:  # what runs now needs the room more than what comes later
            return False
        return True

    def request(self, entry: Entry, make_room: Callable[[int], None]) -> torch.UntypedStorage:
        """The memory of a value, whose bytes may still be on their way; `make_room` is called before a copy.

        Whoever asks holds the memory from here on: plan actions in between may well let go of the pool's hold.
        """
        if entry.reading is not None and entry.reading.error is not None:
            self.settle(entry)  # it was fetched ahead of its use, in vain: try once more
        self.cache.touch(entry)
        if entry.storage is None and not self.find_again(entry):
            if entry.slot is None:
                return self.dropped.restore(entry)
            make_room(entry.nbytes)
            self._start_in(entry, may_evict=True)
        assert entry.storage is not None
        self._unpark(entry.record)
        return entry.storage

    def wait_in(self, entry: Entry) -> None:
        """Wait until the bytes of a requested value are there.

        Raises:
            SpillError: they could not be read.
        """
        failed = self.settle(entry)
        if failed is not None:
            failed.check()

    def settle(self, entry: Entry) -> Copy | None:
        """Wait for a copy back, if there is one. If it failed, the value is away as before, and it is returned."""
        reading = entry.reading
        if reading is None:
            return None
        self.wait_for(reading)  # who is interrupted here leaves a copy under way
        entry.reading = None
        if reading.error is None:
            return None
        self.let_go(entry)
        # Somebody may still hold that memory, an exception's frames for one: it must not be found again.
        self._whereabouts.forget(entry)
        entry.record = StorageRecord(entry.record.serial, 0, entry.nbytes)
        return reading

    def find_again(self, entry: Entry) -> bool:
        """Take the memory back if somebody else kept it alive: no copy is needed then."""
        storage = entry.record.storage()
        if storage is None:
            return False
        entry.storage = storage
        self._unpark(entry.record)
        self.dropped.forget_recipe(entry)
        self.cache.touch(entry)
        return True

    def _start_in(self, entry: Entry, *, may_evict: bool) -> None:
        slot = entry.slot
        assert slot is not None, "a value that is away has a slot"
        storage = self._allocate(slot.nbytes, may_evict=may_evict)
        entry.storage = storage
        self._whereabouts.move(entry, storage)
        entry.reading = self._copies.back.submit(slot, storage.data_ptr())
        self.cache.touch(entry)
        self.arrived(entry)

    def _allocate(self, nbytes: int, *, may_evict: bool) -> torch.UntypedStorage:
        with torch._C._DisableTorchDispatch():
            while True:
                try:
                    with self._strays.at_home():
                        storage = self._memory.allocate(nbytes)
                    self.page_faults.mind_bounds()
                    return storage
                except (RuntimeError, MemoryError, OSError) as error:
                    if not is_out_of_memory(error):
                        raise
                    if not may_evict:
                        raise DeviceOutOfMemory("no memory for a saved value that was to come back") from error
                    self.page_faults.meet(error, nbytes, "a saved value on its way back")

    def wait_for(self, copy: Copy) -> None:
        """Wait for a copy, and count the time as stall."""
        if copy.done:
            return
        start = time.perf_counter()
        with self._interrupts.let_in():
            copy.wait()
        self.stall_seconds += time.perf_counter() - start

    def spare(self) -> Iterator[StorageRecord]:
        """Storages that could be sent away now: of graphs that the program keeps, between two steps."""
        there = {entry.record.serial: entry for entry in self._entries.values() if entry.storage is not None}
        for entry in there.values():
            if entry.writing is not None or self.cache.may_leave(entry):
                yield entry.record

    def holdings(self) -> str:
        """What the pool has in memory, for error messages."""
        inside = [entry for entry in self._entries.values() if entry.storage is not None]
        busy = [entry for entry in inside if not self.cache.may_leave(entry)]
        total, used = (format_bytes(sum(entry.nbytes for entry in group)) for group in (inside, busy))
        return f"{format_bytes(self._ledger.live_bytes)} are alive, {total} of them saved values, {used} in use"

    def close(self) -> None:
        """Bring back what saved tensors still want, end the copies and close the next tier.

        Raises:
            OutgrowError: something could not come back. The rest is closed all the same.
        """
        failure: Exception | None = None
        try:
            for entry in list(self._entries.values()):  # a collector may free some on the way
                try:
                    self._bring_back(entry)
                except OutgrowError as error:
                    failure = failure or error
        finally:
            with ExitStack() as stack:  # from the last to the first; each is done if the one before fails
                for close in (
                    self._places.close,
                    self.dropped.close,
                    self._whereabouts.close,
                    self.cache.recent.clear,
                    self._abandoned.clear,
                    self._leaving.close,
                    self._copies.close,
                ):
                    stack.callback(close)
        if failure is not None:
            raise failure

    def _bring_back(self, entry: Entry) -> None:
        if entry.handles > 0 and entry.storage is None and not self.find_again(entry):
            if entry.slot is None:
                self.dropped.restore(entry)
            else:
                self._start_in(entry, may_evict=False)
        self.wait_in(entry)
        entry.slot = None
