"""The step that runs, as far as all have to know of it who have a part in it."""

from __future__ import annotations

from collections.abc import Mapping

from outgrow.runtime.pool import Pool
from outgrow.runtime.recording import Recording
from outgrow.tracing.ir import Kind
from outgrow.tracing.ledger import Ledger


class CurrentStep:
    """What the executor knows of the step that runs, and what the others have to say of it.

    Attributes:
        epoch: its number: a graph may live on into later steps.
        kinds: which storages are training state, by serial number: the pool never moves those.
        recording: where its ops are noted, if they are.
        is_watched: whether a dispatch mode sees its ops.
        sees_functions: whether a mode sees what Python code calls, and with it our own code if nobody looks away.
        peak_bytes: the most live bytes seen in it so far, and `leaving_at_peak` those of them that copies out held.
        is_blind: it had ops of which nobody could tell how far they lift live bytes.
    """

    def __init__(self, ledger: Ledger, pool: Pool) -> None:
        self._ledger = ledger
        self._pool = pool
        self.epoch = 0
        self.kinds: Mapping[int, Kind] = {}
        self.recording: Recording | None = None
        self.forget()

    def forget(self) -> None:
        """It is over, or begins: nothing was seen of it yet."""
        self.peak_bytes = self.leaving_at_peak = 0
        self.is_watched = self.sees_functions = self.is_blind = False

    def came_to(self, live_bytes: int) -> None:
        """There are, or were, so many live bytes."""
        if live_bytes > self.peak_bytes:
            self.peak_bytes, self.leaving_at_peak = live_bytes, self._pool.leaving_bytes

    def look(self) -> None:
        """There are so many live bytes now."""
        self.came_to(self._ledger.live_bytes)
