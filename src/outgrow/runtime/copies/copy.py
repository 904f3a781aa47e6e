"""What a copy engine is to the pool: lanes that copies are asked of, and copies that can be waited for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from outgrow.runtime.tiers.place import Place


class Copy(ABC):
    """A copy that was asked for, between memory at `address` on the device and a place in a lower tier.

    Whoever asks must hold the memory until the copy is `done`, and let go of it on its own thread: the engine knows
    the address alone.
    """

    __slots__ = ("address", "error", "slot")

    def __init__(self, slot: Place, address: int) -> None:
        self.slot = slot
        self.address = address
        self.error: Exception | None = None

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether what the program computes from here on comes after it, so that memory may change hands."""

    @abstractmethod
    def wait(self) -> None:
        """See to it that it is done: on a CPU by waiting, on CUDA by having the computation wait."""

    def check(self) -> None:
        """Raise what went wrong, once.

        An error holds the frames that it went through, and with them the step's graph: whoever catches it must be
        the last to hold it.

        Raises:
            SpillError: the copy failed.
        """
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error


class CopyLane(Protocol):
    """Copies in one direction, first in first out."""

    def submit(self, slot: Place, address: int) -> Copy:
        """Ask for a copy between memory at `address` and a place."""

    def bandwidth(self) -> float | None:
        """Bytes per second over all copies so far; None before there were any worth measuring."""

    def cost_per_byte(self) -> float | None:
        """Seconds of a processor that a copied byte took; None where nobody measured."""


class Copies(Protocol):
    """An engine: one lane out, one back."""

    @property
    def out(self) -> CopyLane:
        """The lane that leads away from the device."""

    @property
    def back(self) -> CopyLane:
        """The lane that leads back."""

    def close(self) -> None:
        """Finish all copies, and end threads. The host waits."""
