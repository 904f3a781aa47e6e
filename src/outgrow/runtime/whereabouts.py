"""Which storage each saved value lies in, or was last in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outgrow.runtime.entry import Entry
from outgrow.tracing.ledger import Ledger, StorageRecord


class Whereabouts:
    """Entries by the storage that holds, or last held, their value. The ledger follows those storages."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._at: dict[int, list[Entry]] = {}  # by the storage's serial number

    def at(self, record: StorageRecord) -> Sequence[Entry]:
        """The values that lie, or last lay, in a storage."""
        return self._at.get(record.serial, ())

    def put(self, entry: Entry) -> None:
        """A value lies in the storage of its record."""
        there = self._at.setdefault(entry.record.serial, [])
        if not there:
            self._ledger.follow(entry.record)
        there.append(entry)

    def forget(self, entry: Entry) -> None:
        """It lies there no longer, or nobody wants to know."""
        there = self._at.get(entry.record.serial)
        if there is None:
            return
        if entry in there:
            there.remove(entry)
        if not there:
            del self._at[entry.record.serial]
            self._ledger.unfollow(entry.record)

    def move(self, entry: Entry, storage: torch.UntypedStorage) -> None:
        """Its value lies in another storage from now on."""
        self.forget(entry)
        entry.record = self._ledger.see_storage(storage)
        self.put(entry)

    def close(self) -> None:
        """Forget them all."""
        for there in self._at.values():
            self._ledger.unfollow(there[0].record)
        self._at.clear()
