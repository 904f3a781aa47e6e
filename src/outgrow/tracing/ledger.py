"""Which storages are alive on the training's device, and how many bytes they are.

The one place that measures live bytes: the recorder dates values by it, the runtime holds the budget by it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor


class Count(Protocol):
    """Who counts the bytes of some storages from the moment that they are made, seen or not."""

    @property
    def nbytes(self) -> int:
        """Bytes of those that are alive."""

    def has(self, address: int) -> bool:
        """Whether the memory at `address` is one of them."""


class StorageRecord:
    """One storage that was seen, for as long as it lives."""

    __slots__ = ("address", "aliases", "booked", "followers", "nbytes", "ref", "serial", "writes")

    def __init__(self, serial: int, address: int, nbytes: int) -> None:
        self.serial = serial
        self.address = address
        self.nbytes = nbytes
        self.booked = 0  # bytes of it that the ledger counts itself
        self.aliases = 0  # tensors of ours on this storage
        self.writes = 0  # ops that were seen to write to it: all, while it has `followers`
        self.followers = 0
        self.ref: _StorageRef | None = None

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, or None when it is gone."""
        return None if self.ref is None else self.ref()

    def other_holders(self) -> int:
        """How many hold the storage besides our aliases and one Python reference (which the caller must have)."""
        return int(torch._C._storage_Use_Count(self.address)) - 1 - self.aliases


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows its record. The Python object of a storage lives as long as the storage."""

    __slots__ = ("record",)
    record: StorageRecord


class Ledger:
    """Live storages of one device and their total.

    Attributes:
        booked: the part of the live bytes that is counted here, where native code can read it.
        count: who counts the others; None for nobody.
        unseen_bytes: what an allocator said it had given out beyond those, when it was asked last; 0 if it never was.
        hidden_bytes: bytes of storages that are known to be alive, and that no op was given so far.
        on_death: called with the record of each storage that goes; None for nobody.
        on_follow: called with a record that has got its first follower (and True), or has lost its last one or its
            storage (and False): another one may soon lie where that lay. None for nobody.
        on_book: the same of a record whose bytes are counted here (`booked`), or no longer.
    """

    def __init__(self, device_type: str, index: int | None = None, *, counts_fakes: bool = False) -> None:
        """`index` tells devices of a type apart; None takes all of them for one.

        Fake tensors, which have no memory, count as what they stand for, or not at all.
        """
        self.device_type = device_type
        self._counts_fakes = counts_fakes
        self._index = index
        self.booked = ctypes.c_longlong(0)
        self.count: Count | None = None
        self.unseen_bytes = 0
        self.hidden_bytes = 0
        self.on_death: Callable[[StorageRecord], None] | None = None
        self.on_follow: Callable[[StorageRecord, bool], None] | None = None
        self.on_book: Callable[[StorageRecord, bool], None] | None = None
        self._records: dict[int, StorageRecord] = {}
        self._serial = 0
        self._thread = threading.get_ident()
        # Storages whose last reference went on another thread (garbage collection runs anywhere), not yet booked.
        self._gone_elsewhere: deque[StorageRecord] = deque()

    @property
    def device(self) -> torch.device:
        """The device whose storages it sees."""
        return torch.device(self.device_type if self._index is None else f"{self.device_type}:{self._index}")

    @property
    def live_bytes(self) -> int:
        """Bytes of all storages alive that were ever shown to the ledger, `unseen_bytes` and `hidden_bytes`."""
        count = self.count
        return self.booked.value if count is None else self.booked.value + count.nbytes

    @property
    def newest(self) -> int:
        """The serial number of the storage that was seen first last."""
        return self._serial

    def alive(self) -> list[StorageRecord]:
        """The storages that are alive."""
        return [record for record in self._records.values() if record.ref is not None]

    def settle(self, allocated_bytes: int) -> None:
        """An allocator was asked how much it has given out: with rounding, and to those who show no storage.

        From here on live bytes go up and down from that.
        """
        self.book_deaths_elsewhere()
        self.unseen_bytes += allocated_bytes - self.booked.value
        self.booked.value = allocated_bytes

    def hide(self, nbytes: int) -> None:
        """So many bytes are alive in storages that nobody can show yet."""
        self.hidden_bytes += nbytes
        self.booked.value += nbytes

    def suppose(self, nbytes: int) -> None:
        """So many bytes are likely to be alive that nobody will show; fewer than was supposed, where negative."""
        self.booked.value += nbytes

    def show_hidden(self, known: int) -> None:
        """The storages with serial numbers above `known` are some of those that were hidden."""
        for record in self._records.values():
            if record.serial > known:
                shown = min(record.nbytes, self.hidden_bytes)
                self.hidden_bytes -= shown
                self.booked.value -= shown

    def follow(self, record: StorageRecord) -> None:
        """Somebody has to know of each write to a storage from here on: it gets one more follower."""
        record.followers += 1
        if record.followers == 1 and record.ref is not None and self.on_follow is not None:
            self.on_follow(record, True)

    def unfollow(self, record: StorageRecord) -> None:
        """One of them no longer has to."""
        record.followers -= 1
        if record.followers == 0 and record.ref is not None and self.on_follow is not None:
            self.on_follow(record, False)

    def work_here(self) -> None:
        """From now on the calling thread is the training's."""
        self._thread = threading.get_ident()
        self.book_deaths_elsewhere()

    def see(self, tensor: torch.Tensor) -> StorageRecord | None:
        """The record of a tensor's storage, made if it is new; None for what has no storage on the device."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse and opaque layouts
            return None
        # Most were seen before, and each op asks for all of its arguments.
        record = self._records.get(storage._cdata)
        if record is not None and record.nbytes == storage.nbytes():
            ref = record.ref
            if ref is not None and ref() is not None:
                return record
        return self.see_storage(storage) if self._is_here(tensor) else None

    def at(self, address: int) -> StorageRecord | None:
        """The record of the storage at an address, if it is known and alive."""
        record = self._records.get(address)
        return None if record is None or record.storage() is None else record

    def _is_here(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor) and not self._counts_fakes:
            return False
        if self.device_type == "cpu":  # there is but one, and this asks for no object
            return tensor.is_cpu
        device = tensor.device
        return device.type == self.device_type and (self._index is None or device.index == self._index)

    def see_storage(self, storage: torch.UntypedStorage) -> StorageRecord:
        """As `see`, for a storage that is known to be on the device."""
        address = storage._cdata
        record = self._records.get(address)
        if record is not None and record.ref is not None and record.ref() is None:  # who told of it was interrupted
            self._died(record.ref)
        if record is None or record.ref is None:
            self.book_deaths_elsewhere()
            self._serial += 1
            record = StorageRecord(self._serial, address, storage.nbytes())
            record.ref = _StorageRef(storage, self._died)
            record.ref.record = record
            self._records[address] = record
            self._book(record, storage)
        elif record.nbytes != (size := storage.nbytes()):  # resized in place
            record.nbytes = size
            self._book(record, storage)
        return record

    def _book(self, record: StorageRecord, storage: torch.UntypedStorage) -> None:
        """Count a storage that is new or has other memory, unless that is counted already."""
        booked = 0 if self._is_counted(storage) else record.nbytes
        if self.on_book is not None and (booked > 0) != (record.booked > 0):
            self.on_book(record, booked > 0)
        self.booked.value += booked - record.booked
        record.booked = booked

    def _is_counted(self, storage: torch.UntypedStorage) -> bool:
        if self.count is None:
            return False
        try:
            return self.count.has(storage.data_ptr())
        except RuntimeError:  # no memory behind it: a compiler traces
            return False

    def _died(self, ref: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(ref, _StorageRef)
        record = ref.record
        self._end(record)
        if threading.get_ident() == self._thread:
            self._book_death(record)
        else:
            self._gone_elsewhere.append(record)

    def _end(self, record: StorageRecord) -> None:
        """Its storage is gone, or is nothing to this ledger any more."""
        record.ref = None
        if record.followers > 0 and self.on_follow is not None:
            self.on_follow(record, False)
        if record.booked > 0 and self.on_book is not None:
            self.on_book(record, False)

    def book_deaths_elsewhere(self) -> None:
        """Count no more what ended on other threads, where collectors run as well."""
        while self._gone_elsewhere:
            self._book_death(self._gone_elsewhere.popleft())

    def _book_death(self, record: StorageRecord) -> None:
        if self._records.get(record.address) is record:
            del self._records[record.address]
        self.booked.value -= record.booked
        if self.on_death is not None:
            self.on_death(record)

    def close(self) -> None:
        """Forget everything and let go of the weak references."""
        for record in self._records.values():
            self._end(record)
        self._records.clear()
        self.booked.value = self.unseen_bytes = self.hidden_bytes = 0
        self.count = None
        self.on_death = None
