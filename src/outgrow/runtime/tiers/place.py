"""Where bytes go that leave the device: what the pool asks of a tier, whichever it is."""

from __future__ import annotations

from typing import Protocol


class Place:
    """Room for one value in a lower tier.

    `offset` is in bytes from the tier's beginning; `planned` says that a plan fixed it, so that it is never given out
    to anybody else.
    """

    __slots__ = ("nbytes", "offset", "planned")

    def __init__(self, offset: int, nbytes: int, *, planned: bool) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.planned = planned


class Places(Protocol):
    """A tier that gives out places: those that plans fix first, and a free list for the rest."""

    def plan_area(self, nbytes: int) -> int:
        """Set `nbytes` aside for places that plans fix; how many bytes are now, fewer while other values lie there.

        No planned place may be in use.
        """

    def planned_slot(self, offset: int, nbytes: int) -> Place:
        """The place that the plan gave a value."""

    def reserve(self, nbytes: int) -> Place:
        """A place for a value that no plan foresaw."""

    def release(self, slot: Place) -> None:
        """Give a place back; what a plan fixed stays the plan's."""

    def close(self) -> None:
        """Give all of it back. Closing twice is harmless."""
