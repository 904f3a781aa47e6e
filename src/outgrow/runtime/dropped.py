"""The values that were let go of and will be made anew, and what each of them is made from."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

from outgrow.runtime.entry import Entry
from outgrow.runtime.recipes import Recipe

_Key = TypeVar("_Key", bound=Hashable)


class Dropped:
    """Entries whose memory is gone and whose recipes are still to be used, in the order in which they were dropped.

    Who writes to a storage asks which of them start from it. Writes are many, and so are dropped values: both are
    found by what the recipes start from.
    """

    def __init__(self) -> None:
        self._recipes: dict[Entry, Recipe] = {}
        self._by_leaf: dict[int, dict[Entry, None]] = {}  # by the serial number of a storage that recipes read
        self._by_source: dict[Entry, dict[Entry, None]] = {}

    def __len__(self) -> int:
        return len(self._recipes)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._recipes)

    def __contains__(self, entry: object) -> bool:
        return entry in self._recipes

    def add(self, entry: Entry, recipe: Recipe) -> None:
        """A value that is not among them was let go of, which `recipe` makes anew."""
        self._recipes[entry] = recipe
        for serial in recipe.leaves:
            self._by_leaf.setdefault(serial, {})[entry] = None
        for source in recipe.sources.values():
            self._by_source.setdefault(source, {})[entry] = None

    def discard(self, entry: Entry) -> None:
        """It was made anew for its own use, or nobody wants it any more."""
        recipe = self._recipes.pop(entry, None)
        if recipe is None:
            return
        for serial in recipe.leaves:
            _take_out(self._by_leaf, serial, entry)
        for source in recipe.sources.values():
            _take_out(self._by_source, source, entry)

    def readers_of(self, serial: int, values: Iterable[Entry]) -> list[Entry]:
        """Those that are made from the storage with this serial number, or from values that came back to it."""
        found = dict(self._by_leaf.get(serial, {}))
        for value in values:
            found |= self._by_source.get(value, {})
        return list(found)


def _take_out(readers: dict[_Key, dict[Entry, None]], key: _Key, entry: Entry) -> None:
    there = readers.get(key)
    if there is None:  # a recipe starts from some values by two names
        return
    there.pop(entry, None)
    if not there:
        del readers[key]
