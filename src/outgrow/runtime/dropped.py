"""The values that were let go of and will be made anew: what each is made from, and having it made."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from outgrow.planning.plan import Replay
from outgrow.planning.recipes import burst
from outgrow.runtime.entry import Entry
from outgrow.runtime.recipes import Recipe
from outgrow.tracing.ledger import Ledger

_Key = TypeVar("_Key", bound=Hashable)

# Makes a value anew, and others that its recipe makes as well: their storages, in this order.
Rebuild = Callable[[Entry, Sequence[Entry]], Sequence[torch.UntypedStorage]]


class Keeper(Protocol):
    """Who keeps the values."""

    def find_again(self, entry: Entry) -> bool:
        """Take the memory of a value back if somebody else kept it alive; whether that was so."""

    def put(self, entry: Entry, storage: torch.UntypedStorage) -> None:
        """A value lies in this storage now."""

    def keep(self, entry: Entry) -> None:
        """A value that was made anew stays until its own use."""

    def let_go(self, entry: Entry) -> None:
        """The memory of a value goes."""

    def drop(self, entry: Entry) -> None:
        """A value is wanted once less."""


class Dropped:
    """Entries whose memory is gone and whose recipes are still to be used, in the order in which they were dropped.

    Attributes:
        rebuild: makes one of them anew; set once.
    """

    def __init__(self, ledger: Ledger, keeper: Keeper) -> None:
        self._ledger = ledger
        self._keeper = keeper
        self._entries: dict[Entry, None] = {}
        self._readers = Readers()
        self.rebuild: Rebuild | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __contains__(self, entry: object) -> bool:
        return entry in self._entries

    def add(self, entry: Entry, recipe: Recipe, replay: Replay) -> None:
        """Let go of a value that `recipe` makes anew. What the recipe starts from stays until then."""
        for source in recipe.sources.values():
            source.handles += 1
        for record in recipe.states:
            self._ledger.follow(record)
        entry.recipe, entry.replay = recipe, replay
        self._entries[entry] = None
        self._readers.add(entry, recipe)
        self._keeper.let_go(entry)

    def take_recipe(self, entry: Entry) -> list[Entry]:
        """A value needs no recipe any more, if it had one. Its sources, each of which is wanted once less now."""
        recipe, entry.recipe = entry.recipe, None
        if recipe is None:
            return []
        del self._entries[entry]
        self._readers.discard(entry, recipe)
        for record in recipe.states:
            self._ledger.unfollow(record)
        return list(recipe.sources.values())

    def forget_recipe(self, entry: Entry) -> None:
        """A value needs no recipe any more, and what that started from may go."""
        for source in self.take_recipe(entry):
            self._keeper.drop(source)

    def readers_of(self, serial: int, values: Iterable[Entry]) -> list[Entry]:
        """Those that are made from the storage with this serial number, or from values that came back to it."""
        return self._readers.of(serial, values)

    def restore(self, entry: Entry, wanted: Iterable[Entry] = ()) -> torch.UntypedStorage:
        """Make a dropped value anew for its own use, after those of its sources that were dropped too, and theirs.

        What its recipe makes as well comes back with it, as far as it is `wanted` now.
        """
        if entry.storage is None and not self._keeper.find_again(entry):
            assert entry.recipe is not None
            mates = _mates_of(entry, entry.recipe, wanted)
            with self.sources_of(entry, entry.recipe):
                self._make(entry, mates)
                for made in (entry, *mates):
                    self._keeper.keep(made)
        assert entry.storage is not None
        return entry.storage

    @contextmanager
    def sources_of(self, entry: Entry, recipe: Recipe) -> Iterator[None]:
        """While this lasts, the sources of `entry`'s recipe that were dropped are there.

        Those that are replayed for memory's sake (SuperNeurons, section 3.4) go again as soon as nothing in this
        burst reads them, and keep their own recipes and what those start from: of a chain only two are ever there.
        """
        lent: set[Entry] = set()

        def missing(item: Entry) -> list[Entry]:
            wanted = recipe if item is entry else item.recipe
            assert wanted is not None, "what is neither here nor on the disk has a recipe"
            gone = []
            for _, source in sorted(wanted.sources.items(), key=lambda named: named[0]):
                if source.storage is not None or source.slot is not None:
                    continue
                if source.replay is Replay.SPEED:
                    if not self._keeper.find_again(source):
                        gone.append(source)
                else:
                    lent.add(source)
                    source.storage = source.record.storage()  # somebody else may have kept it alive
                    if source.storage is None:
                        gone.append(source)
            return gone

        def give_back(items: Iterable[Entry]) -> None:
            for item in items:
                if item in lent:
                    lent.discard(item)
                    self._keeper.let_go(item)

        try:
            sources, unread = burst(entry, missing)
            for source, no_longer_read in sources:
                self._make(source)
                if source not in lent:
                    self._keeper.keep(source)
                give_back(no_longer_read)
            yield
            give_back(unread)
        finally:
            give_back(list(lent))

    def _make(self, entry: Entry, mates: Sequence[Entry] = ()) -> None:
        assert self.rebuild is not None, "nothing is dropped before somebody can make it anew"
        storages = self.rebuild(entry, mates)
        for made, storage in zip((entry, *mates), storages, strict=True):
            self._keeper.put(made, storage)

    def close(self) -> None:
        """Those that are left could not be made anew."""
        for entry in list(self._entries):
            self.take_recipe(entry)


def _mates_of(entry: Entry, recipe: Recipe, wanted: Iterable[Entry]) -> list[Entry]:
    """Those of `wanted` that were dropped, and that the last call of this recipe makes as well."""
    if not recipe.makes_several:
        return []
    others = dict.fromkeys(item for item in wanted if item is not entry and item.storage is None)
    return [item for item in others if item.recipe is not None and item.recipe.ends_as(recipe)]


class Readers:
    """Who writes to a storage asks which dropped values start from it.

    Writes are many, and so are dropped values: both are found by what the recipes start from.
    """

    def __init__(self) -> None:
        self._by_leaf: dict[int, dict[Entry, None]] = {}  # by the serial number of a storage that recipes read
        self._by_source: dict[Entry, dict[Entry, None]] = {}

    def add(self, entry: Entry, recipe: Recipe) -> None:
        """A value was dropped that is made by this recipe."""
        for serial in recipe.leaves:
            self._by_leaf.setdefault(serial, {})[entry] = None
        for source in recipe.sources.values():
            self._by_source.setdefault(source, {})[entry] = None

    def discard(self, entry: Entry, recipe: Recipe) -> None:
        """It was made anew for its own use, or nobody wants it any more."""
        for serial in recipe.leaves:
            _take_out(self._by_leaf, serial, entry)
        for source in recipe.sources.values():
            _take_out(self._by_source, source, entry)

    def of(self, serial: int, values: Iterable[Entry]) -> list[Entry]:
        """Those that are made from the storage with this serial number, or from these values."""
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
