"""Out of memory is a page fault: where an allocator refuses memory, something leaves, and it is asked again."""

from __future__ import annotations

import logging
from collections.abc import Callable

from outgrow.errors import DeviceOutOfMemory
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.tracing.ledger import Ledger
from outgrow.units import format_bytes

_LOG = logging.getLogger(__name__)

# Where the allocator refuses memory, this share of what is alive leaves at least: faults should be few.
_FAULT_SHARE = 8
# And for what is in use between free memory: so much of the budget.
_SCATTERED_SHARE = 32
# An allocator that gave an op no room is planned to stand this share of the budget nearer from then on.
_NEARER_SHARE = 64


class PageFaults:
    """Those of the step that runs.

    Attributes:
        count: how many there were.
        level: the bytes that plans are to come to at most for them; 0 if there was none.
    """

    def __init__(
        self,
        budget_bytes: int,
        ledger: Ledger,
        memory: DeviceMemory,
        fast_path: FastPath,
        evict: Callable[[int], bool],
        holdings: Callable[[], str],
    ) -> None:
        """`evict` sends away so many bytes, budget or not, and says whether any went.

        `holdings` says what is in memory, for errors.
        """
        self._budget = budget_bytes
        self._ledger = ledger
        self._memory = memory
        self._fast = fast_path
        self._evict = evict
        self._holdings = holdings
        self.reset()

    def reset(self) -> None:
        """A step begins."""
        self.count = self.level = 0

    def meet(self, error: BaseException, nbytes: int, what: str, least_bytes: int | None = None) -> None:
        """The allocator refused `nbytes` to `what`: send something away, so that it can ask again.

        `least_bytes` are those that it needs for certain, where `nbytes` is a guess.

        Raises:
            DeviceOutOfMemory: nothing is left that could leave.
        """
        self._note(self._ledger.live_bytes, nbytes if least_bytes is None else least_bytes)
        self._memory.relieve()
        before = self._ledger.live_bytes
        if not self._evict(max(nbytes, before // _FAULT_SHARE)):
            if self._memory.stretch(nbytes if least_bytes is None else least_bytes):
                return
            raise DeviceOutOfMemory(
                f"{what} found no memory and nothing is left to evict: {self._holdings()}."
                f" The allocator said: {str(error).splitlines()[0]}"
            ) from error
        left = format_bytes(before - self._ledger.live_bytes)
        _LOG.info("page fault: %s found no memory for %s, and %s left the device", what, format_bytes(nbytes), left)
        self._memory.relieve()

    def thin_out(self, nbytes: int, *, is_fault: bool) -> bool:
        """What is free lies between others, and `nbytes` are wanted in a row: send some away; whether any went.

        Those that come next would find no more, so that more leaves than that. Where it `is_fault`, no plan is to
        come so near to the budget again.
        """
        before = self._ledger.live_bytes
        has_left = self._evict(max(nbytes, self._budget // _SCATTERED_SHARE))
        if has_left and is_fault:
            self._note(before, nbytes)
        return has_left

    def mind_bounds(self) -> None:
        """See that a step in which the allocator refuses nothing does not have it hold more and more."""
        if not self._memory.keeps_bounds():
            self._go_astray()

    def _note(self, live_bytes: int, nbytes: int) -> None:
        """So many bytes found no room beside those that were alive.

        Where an allocator counts all that it gives out, it stands about where they would have come to: to plan for no
        more than what was alive would leave out a large op altogether. Elsewhere the process has memory that nobody
        counts.
        """
        level = live_bytes
        if self._memory.is_counted:
            level += max(0, nbytes - self._budget // _NEARER_SHARE)
        self.count += 1
        self.level = min(self.level or level, level)
        self._go_astray()

    def _go_astray(self) -> None:
        self._memory.go_astray()
        self._fast.go_astray()
