"""One saved value, wherever it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outgrow.planning.plan import Replay
from outgrow.runtime.copies.copy import Copy
from outgrow.runtime.tiers.place import Place
from outgrow.tracing.ledger import StorageRecord

if TYPE_CHECKING:
    from outgrow.runtime.recipes import Recipe


class Entry:
    """One saved value.

    `storage` is the pool's own hold on its memory, None while the value is away (or only others hold it).
    `record` is the ledger's record of the storage that holds, or last held, the value. `slot` has its bytes once
    a copy out was finished, and `planned_at` is the offset that a plan gave it, if one did; `recipe` makes the value
    anew where it was dropped, and `replay` says what becomes of it when that was done for another value's sake.
    `serial` says which storage it was saved from: all that autograd saved of that is one value, whatever is written
    to it. `is_changed` says that somebody has, since it was saved last. `epoch` is the last step that saved it,
    `saved_index` its number in that step's record.
    """

    __slots__ = (
        "epoch",
        "handles",
        "is_changed",
        "nbytes",
        "planned_at",
        "reading",
        "recipe",
        "record",
        "replay",
        "saved_index",
        "serial",
        "slot",
        "storage",
        "writing",
    )

    def __init__(self, record: StorageRecord, storage: torch.UntypedStorage) -> None:
        self.record = record
        self.storage: torch.UntypedStorage | None = storage
        self.serial = record.serial
        self.nbytes = record.nbytes
        self.handles = 0
        self.is_changed = False
        self.slot: Place | None = None
        self.recipe: Recipe | None = None
        self.replay = Replay.SPEED
        self.writing: Copy | None = None
        self.reading: Copy | None = None
        self.epoch = self.saved_index = self.planned_at = -1
