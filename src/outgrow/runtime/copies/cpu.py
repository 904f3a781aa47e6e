"""The copy engine of CPU training: one lane to the disk and one back, each a worker thread.

`os.pwrite` and `os.preadv` release the GIL and the disk does the work, so that copies run beside the computation.
Small values that wait in a lane, and lie beside each other on the disk, are moved at once.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from outgrow.errors import SessionError
from outgrow.runtime.copies.copy import Copy
from outgrow.runtime.threads import stacks_of
from outgrow.runtime.tiers.disk import Run, Slot, SpillFile
from outgrow.runtime.tiers.place import Place

# A copy needs little.
_STACK_BYTES = 512 << 10
# Fewer bytes than these say nothing of a lane's speed.
_WORTH_MEASURING = 8 << 20


class LaneCopy(Copy):
    """A copy that a lane's thread makes.

    The lane knows the address alone: no memory is ever freed (and no weak reference called) on a worker thread.
    """

    __slots__ = ("_gate", "_is_over")

    def __init__(self, slot: Place, address: int) -> None:
        super().__init__(slot, address)
        self._is_over = False
        self._gate = threading.Lock()  # an event is three times as dear, and copies are many
        self._gate.acquire()

    @property
    def done(self) -> bool:
        """Whether it is over, well or badly."""
        return self._is_over

    def wait(self) -> None:
        """Wait for its end."""
        if not self._is_over:
            with self._gate:
                pass

    def finish(self) -> None:
        """Called by the lane when the copy is over."""
        self._is_over = True
        self._gate.release()


class Lane(ABC):
    """Copies in one direction, first in first out, on one thread that starts with the first copy."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[LaneCopy | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._process = os.getpid()

    def hand_over(self, copy: LaneCopy) -> None:
        """Have the thread make a copy; where there can be none, make it here and now.

        Raises:
            SessionError: this is a copy of the process whose session it is. Threads do not come along, and the places
                in the next tier are the other's.
        """
        if os.getpid() != self._process:
            raise SessionError(
                "this process was forked from one whose session was open: train there, or open a session here"
            )
        if self._thread is None and (self._closed or not self._start()):
            self._carry_out(copy)
        else:
            self._queue.put(copy)

    def close(self) -> None:
        """Finish what was asked for and end the thread. A copy that is asked for later runs where it is asked."""
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
            atexit.unregister(self.close)

    def _start(self) -> bool:
        """Start the thread; False where the system has no memory for one, which is when copies matter most."""
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        try:
            with stacks_of(_STACK_BYTES):
                thread.start()
        except (RuntimeError, MemoryError):
            return False
        self._thread = thread
        # A session that an error leaves open: the interpreter must not end while a thread of its own still runs.
        atexit.register(self.close)
        return True

    def _work(self) -> None:
        while (copy := self._next()) is not None:
            self._carry_out(copy)
            del copy

    def _next(self) -> LaneCopy | None:
        """Wait for a copy to make; None where the lane ends."""
        return self._queue.get()

    @abstractmethod
    def _carry_out(self, copy: LaneCopy) -> None:
        """Make a copy, and finish it, well or badly."""


class DiskLane(Lane):
    """Copies between RAM and the disk. Small ones that wait, and lie side by side there, are made together."""

    def __init__(
        self,
        name: str,
        move: Callable[[Slot, int], None],
        move_run: Callable[[Sequence[tuple[Slot, int]]], None],
        ring: Callable[[], None] = lambda: None,
    ) -> None:
        """`move` copies between a slot and memory at an address, `move_run` does that for several slots at once.

        `ring` is called on the lane's thread when copies are over.
        """
        super().__init__(name)
        self._move = move
        self._move_run = move_run
        self._ring = ring
        self._ahead: list[LaneCopy | None] = []  # taken out of the queue already
        self.moved_bytes = 0
        self.busy_seconds = 0.0
        self.processor_seconds = 0.0

    def submit(self, slot: Place, address: int) -> Copy:
        """Ask for a copy between memory at `address` and a slot."""
        copy = LaneCopy(slot, address)
        self.hand_over(copy)
        return copy

    def bandwidth(self) -> float | None:
        """Bytes per second over all copies so far; None before there were any worth measuring."""
        return self.moved_bytes / self.busy_seconds if self.moved_bytes > _WORTH_MEASURING else None

    def cost_per_byte(self) -> float | None:
        """Seconds of a processor that a copied byte took; None before there were any worth measuring."""
        return self.processor_seconds / self.moved_bytes if self.moved_bytes > _WORTH_MEASURING else None

    def _next(self) -> LaneCopy | None:
        return self._ahead.pop() if self._ahead else super()._next()

    def _carry_out(self, copy: LaneCopy) -> None:
        self._make([copy, *self._beside(copy)])

    def _beside(self, copy: LaneCopy) -> list[LaneCopy]:
        """What waits behind a copy and can be made along with it. What comes next then may be taken out, too."""
        found: list[LaneCopy] = []
        run = Run(_slot_of(copy)) if _slot_of(copy).is_small else None
        while run is not None:
            try:
                other = self._queue.get_nowait()
            except Empty:
                break
            if other is None or not run.takes(_slot_of(other)):
                self._ahead.append(other)
                break
            found.append(other)
        return found

    def _make(self, copies: Sequence[LaneCopy]) -> None:
        start, processor = time.perf_counter(), time.thread_time()
        moves = [(_slot_of(copy), copy.address) for copy in copies]
        try:
            if len(moves) == 1:
                self._move(*moves[0])
            else:
                self._move_run(moves)
        except Exception as caught:  # handed to whoever waits for the copy
            if len(copies) > 1:
                for copy in copies:  # each by itself, to tell which of them fail
                    self._make([copy])
                return
            copies[0].error = caught.with_traceback(None)
        else:
            self.busy_seconds += time.perf_counter() - start
            self.processor_seconds += time.thread_time() - processor
            self.moved_bytes += sum(slot.nbytes for slot, _ in moves)
        for copy in copies:
            copy.finish()
        self._ring()


def _slot_of(copy: LaneCopy) -> Slot:
    assert isinstance(copy.slot, Slot)
    return copy.slot


class CpuCopies:
    """Copies between RAM and the spill file."""

    def __init__(self, spill: SpillFile, ring: Callable[[], None] = lambda: None) -> None:
        """`ring` is called when a copy out is over, and its memory can go, on the thread that made it."""
        self.out = DiskLane("outgrow-copy-out", spill.write, spill.write_run, ring)
        self.back = DiskLane("outgrow-copy-in", spill.read, spill.read_run)

    def close(self) -> None:
        """Finish all copies and end both threads."""
        self.out.close()
        self.back.close()
