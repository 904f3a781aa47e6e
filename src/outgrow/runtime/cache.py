"""Which saved values leave the device where no plan says so: the least recently used (SuperNeurons, section 3.3)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from outgrow.runtime.entry import Entry
from outgrow.tracing.ledger import Ledger, StorageRecord


class Moves(Protocol):
    """Who moves values."""

    def land(self) -> None:
        """Let go of memory whose copy out is done."""

    def wait_for_departure(self) -> bool:
        """Wait for the copy out that lands next, if the memory of any is free then; False if there is none such."""

    def wait_for_abandoned(self) -> bool:
        """Wait for a copy back of a value that nobody wants any more; False if there is none."""

    def settle(self, entry: Entry) -> object:
        """Wait for the copy back of a value, if there is one."""

    def start_out(self, entry: Entry) -> None:
        """Start a copy out."""

    def let_go(self, entry: Entry) -> None:
        """The value has a copy: its memory goes."""

    def is_parked(self, record: StorageRecord) -> bool:
        """Whether a storage is parked, on its way, or back ahead of its use."""


class Unknown(Protocol):
    """Who holds saved values that need not be known of as long as there is memory."""

    @property
    def foretells(self) -> bool:
        """Whether those that are foretold to leave are none of them."""

    def show(self, nbytes: int) -> bool:
        """Show the oldest, of `nbytes` at least if there are as many; whether there were any."""


class Cache:
    """The saved values that are in memory, as a cache of the next tier.

    Attributes:
        recent: those values, the last used last.
        aim_bytes: what live bytes are kept under where they can be: the budget, or somewhat less.
        unknown: who knows more saved values; set once.
    """

    def __init__(self, ledger: Ledger, moves: Moves, budget_bytes: int, least_moved_bytes: int) -> None:
        self._ledger = ledger
        self._moves = moves
        self._least_moved = least_moved_bytes
        self.recent: OrderedDict[Entry, None] = OrderedDict()
        self.aim_bytes = budget_bytes
        self.unknown: Unknown | None = None

    def touch(self, entry: Entry) -> None:
        """A value is used."""
        if entry.recipe is None:  # else it is away, or there for a moment: nothing that could be sent away
            self.recent[entry] = None
            self.recent.move_to_end(entry)

    def forget(self, entry: Entry) -> None:
        """It is not in memory any more, or nobody's."""
        self.recent.pop(entry, None)

    def may_leave(self, entry: Entry) -> bool:
        """Whether a value can be sent away, and its memory is free then."""
        return (
            entry.storage is not None
            and entry.writing is None
            and entry.nbytes >= self._least_moved
            and not self._moves.is_parked(entry.record)
            and entry.record.other_holders() <= 0
        )

    def make_room(self, need: int) -> bool:
        """Send the least recently used away until `need` more bytes fit what is aimed at; whether they do now."""
        self._moves.land()
        while (excess := self._ledger.live_bytes + need - self.aim_bytes) > 0:
            if not self._send_away(excess):
                return False
        return True

    def evict(self, nbytes: int) -> bool:
        """Send the least recently used away until `nbytes` are free, budget or not; whether anything went."""
        before = self._ledger.live_bytes
        while before - self._ledger.live_bytes < nbytes and self._send_away(nbytes):
            pass
        return self._ledger.live_bytes < before

    def _send_away(self, nbytes: int) -> bool:
        """Take one step towards `nbytes` of free memory, the quickest there is; False if there is none."""
        if self._moves.wait_for_departure():
            return True
        if self.unknown is not None and self.unknown.foretells and self._start_away(nbytes, but_not_again=True):
            return True
        while True:
            were_more = self.unknown is not None and self.unknown.show(nbytes)
            if self._start_away(nbytes):
                return True
            if not were_more:
                break
        # Nobody wants it any more, and its memory is all that is left to hope for.
        return self._moves.wait_for_abandoned()

    def _start_away(self, nbytes: int, *, but_not_again: bool = False) -> bool:
        """Let go of the least recently used, or start to copy them out, until that frees `nbytes`; whether any left.

        What has come back since it left is only sent away once more where that may be.
        """
        before, submitted = self._ledger.live_bytes, 0
        for entry in list(self.recent):
            if submitted + before - self._ledger.live_bytes >= nbytes:
                break
            if not self.may_leave(entry) or (but_not_again and entry.slot is not None):
                continue
            self._moves.settle(entry)  # fetched ahead of need, and now the room is needed more
            if entry.slot is not None:  # a clean copy: nothing to write
                self._moves.let_go(entry)
            else:
                self._moves.start_out(entry)
                submitted += entry.nbytes
        return submitted > 0 or self._ledger.live_bytes < before
