"""The part of a tier that plans put their values in."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from outgrow.planning.plan import slot_bytes
from outgrow.runtime.tiers.place import Place, Places


class PlannedPlaces:
    """Places by the offsets of a plan, around what a graph of an earlier step still has there."""

    def __init__(self, places: Places) -> None:
        """`places` is the whole tier."""
        self._places = places
        self._set_aside = 0
        self._occupied: list[tuple[int, int]] = []  # where each value of earlier steps begins and ends, in order

    def set_aside(self, spill_bytes: int, occupied: Iterable[tuple[int, int]]) -> None:
        """From here on a plan has the first `spill_bytes` of the tier, where values may lie: offsets and bytes."""
        self._occupied = sorted((offset, offset + slot_bytes(nbytes)) for offset, nbytes in occupied)
        if not self._occupied:
            self._set_aside = self._places.plan_area(spill_bytes)

    def at(self, offset: int, nbytes: int) -> Place:
        """The place that the plan gave a value.

        Another one if that was not set aside, or if a value of an earlier step lies there.
        """
        end = offset + slot_bytes(nbytes)
        after = bisect_right(self._occupied, offset, key=_end_of)
        if end > self._set_aside or (after < len(self._occupied) and self._occupied[after][0] < end):
            return self._places.reserve(nbytes)
        return self._places.planned_slot(offset, nbytes)


def _end_of(span: tuple[int, int]) -> int:
    return span[1]
