"""Sees to it that what is about to be made fits: in the budget, and in what the process holds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outgrow.runtime.demand import Demand
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.handles import node_that_unpacks
from outgrow.runtime.need import Need
from outgrow.runtime.parked import ParkedStorages
from outgrow.runtime.pool import Pool
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.tracing.ledger import Ledger

# Below this an op is too small to be worth a look at the resident set.
_LARGE_RISE_BYTES = 256 << 10


class Room:
    """The room of a step.

    Saved values leave for it first; then what is back from its park before its time; then, where nothing is known of
    the step, what was not touched for longest.

    Attributes:
        budget_bytes: what live bytes never pass.
        where: the op that runs, for errors; "" where autograd unpacks.
        had_garbage: what the program had left in cycles of references went for it in this step.
    """

    def __init__(
        self,
        budget_bytes: int,
        ledger: Ledger,
        pool: Pool,
        memory: DeviceMemory,
        fast_path: FastPath,
        too_small: Callable[[int, str], Exception],
    ) -> None:
        """`too_small` makes the error for an op at which so many bytes are needed at least."""
        self.budget_bytes = budget_bytes
        self._ledger = ledger
        self._pool = pool
        self._cache = pool.cache
        self._memory = memory
        self._fast = fast_path
        self._too_small = too_small
        self._is_counted = memory.is_counted
        self._parked: ParkedStorages | None = None
        self._demand: Demand | None = None
        self.begin(keeps_margin=False, counts_always=False)

    def ask(self, parked: ParkedStorages, demand: Demand) -> None:
        """From here on these are asked for room, too; they need some themselves."""
        self._parked, self._demand = parked, demand

    def begin(self, *, keeps_margin: bool, counts_always: bool) -> None:
        """A step begins.

        `keeps_margin`: the margin of the device's memory is left free where it can be. `counts_always`: memory in use
        is counted before each op, not only where it may be short.
        """
        self.where = ""
        self.had_garbage = False
        self._certain = self._pool.held_back_bytes = 0  # of the budget, for what is to run
        self._counts_always = counts_always
        self._cache.aim_bytes = self.budget_bytes - (self._memory.margin_bytes if keeps_margin else 0)

    def prepare(self, need: Need, where: str) -> None:
        """Make room for an op, named `where`, in the budget and in the resident set.

        Raises:
            BudgetTooSmall: the budget has no room for what the op takes for certain.
        """
        self._fast.hear()
        if self._parked is not None and self._parked.busy:
            self._parked.land()
        if self._is_counted:
            self._memory.count(self.budget_bytes if self._counts_always else need.likely_bytes)
        if self._ledger.live_bytes + need.likely_bytes > self._cache.aim_bytes:
            self.where = where
            self.make(need.likely_bytes, need.certain_bytes)
        else:
            self._pool.land()
        if need.likely_bytes >= _LARGE_RISE_BYTES:
            self._memory.make_room(need.likely_bytes)

    def make(self, likely_bytes: int, certain_bytes: int | None = None) -> None:
        """Have what can leave do so until `likely_bytes` fit.

        Raises:
            BudgetTooSmall: not even `certain_bytes` do (None: as many).
        """
        parked, demand = self._parked, self._demand
        assert parked is not None
        assert demand is not None
        certain_bytes = likely_bytes if certain_bytes is None else certain_bytes
        if parked.busy:
            parked.wait_for_room(likely_bytes)
        budget = self.budget_bytes - self._certain
        if self._cache.make_room(likely_bytes) or self._ledger.live_bytes + likely_bytes <= budget:
            return
        if parked.busy:
            parked.send_back(likely_bytes)
        if demand.on:
            demand.make_room(likely_bytes)
        if self._ledger.live_bytes + certain_bytes > budget and not demand.is_paused:
            self.collect()
            self._cache.make_room(likely_bytes)  # what garbage held as well may leave by now
        if self._ledger.live_bytes + certain_bytes > budget:
            where = self.where or f"the unpacking for {node_that_unpacks() or 'a saved tensor'}"
            raise self._too_small(self._ledger.live_bytes + certain_bytes + self._certain, where)

    @contextmanager
    def holding_back(self, nbytes: int, *, is_certain: bool) -> Iterator[None]:
        """Inside, what comes back leaves so much free for what is to run.

        Where that is not certain, what is wanted now does so if it can, and nothing comes back ahead of time: what
        runs may take more, and is measured.
        """
        certain, kept = (nbytes, nbytes) if is_certain else (0, self.budget_bytes)
        self._cache.aim_bytes -= nbytes
        self._pool.held_back_bytes += kept
        self._certain += certain
        try:
            yield
        finally:
            self._cache.aim_bytes += nbytes
            self._pool.held_back_bytes -= kept
            self._certain -= certain

    def collect(self) -> None:
        """Have what the program left in cycles of references go: it counts until Python's collector comes.

        Not while a value is made anew, which may be such.
        """
        before = self._ledger.live_bytes
        gc.collect()
        self._ledger.book_deaths_elsewhere()
        self.had_garbage = self.had_garbage or self._ledger.live_bytes < before

    def fill_up(self) -> None:
        """What came back by the plan may have taken what was held back: make room for that again."""
        if self._pool.held_back_bytes:
            self.make(0)

    def check(self, live_bytes: int, where: str) -> None:
        """Live bytes were measured, at an op that nobody could make room for as it was not known.

        Raises:
            BudgetTooSmall: they are more than the budget has.
        """
        if live_bytes > self.budget_bytes:
            raise self._too_small(live_bytes, where)
