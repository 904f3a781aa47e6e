"""Recompute in a live step: which ops are taken down, which values may be dropped, and how they are made anew.

It is shown each op and each saved tensor; the pool asks it for values that were dropped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

import torch

from outgrow.errors import OutgrowError, TraceMismatch
from outgrow.planning.agenda import ops_of_recipes
from outgrow.planning.plan import Plan, Replay
from outgrow.runtime.clock import DeviceClock, Span
from outgrow.runtime.copies.strays import Strays
from outgrow.runtime.dice import Dice
from outgrow.runtime.entry import Entry
from outgrow.runtime.pool import Pool
from outgrow.runtime.recipes import (
    Contents,
    Cookbook,
    Given,
    OtherOutputs,
    Recipe,
    RunAgain,
    contents_of,
    given_before,
    replay,
)
from outgrow.tracing.ir import Kind
from outgrow.tracing.ledger import Ledger, StorageRecord
from outgrow.tracing.ops import OpFacts

# So many bytes at a time are compared on a GPU, which takes an eighth of that, or as many where they are no large
# numbers.
_COMPARED_BYTES = 16 << 20
_NUMBER = torch.int64
# A recipe that found no room beside its true value so often is not tried again under the same plan.
_MOST_TRIES = 3


@dataclass
class Verdicts:
    """What became of a plan's recipes: values whose recipes gave the very same bits, and those whose did not.

    A value is named by the number of the first saved tensor that has it, which means the same in all traces of one
    kind of step. `good` says up to how many bytes: a larger one is proved anew. `cramped` counts how often there was
    no room to try its recipe under the plan of now. `gradients` says of gradients that are made anew, by the number
    of the op that makes them, whether they were the same.
    """

    good: dict[int, int] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)
    gradients: dict[int, bool] = field(default_factory=dict)
    cramped: Counter[int] = field(default_factory=Counter)

    def for_other_sizes(self) -> Verdicts:
        """What they say of a step that differs in its sizes alone."""
        return Verdicts(dict(self.good), set(self.bad))


@dataclass(frozen=True, slots=True)
class _Drop:
    """A value that may be let go of."""

    entry: Entry
    first_save: int
    recipe: Recipe
    replay: Replay


class Recomputer:
    """The recompute half of an executor.

    Attributes:
        seconds: time spent on making values anew in this step.
        spans: the same as marks on the device, where it has a clock of its own.
        nbytes: bytes of the values that were made anew in this step.
        proofs: recipes that were tried beside the true values in this step, as far as there was room.
    """

    def __init__(
        self,
        ledger: Ledger,
        pool: Pool,
        fetch: Callable[[Entry], torch.UntypedStorage],
        run: RunAgain,
        strays: Strays,
        clock: DeviceClock | None = None,
    ) -> None:
        """`fetch` brings a source to the device, `run` runs one op inside the budget, on the stream of the step."""
        self._clock = clock
        self._strays = strays
        self._ledger = ledger
        self._pool = pool
        self._fetch = fetch
        self._run = run
        self._cookbook = Cookbook(ledger, {})
        self.begin(None, {}, Verdicts())

    def begin(self, plan: Plan | None, kinds: Mapping[int, Kind], verdicts: Verdicts) -> None:
        """A step begins. `verdicts` says which of the plan's recipes can be trusted, and is added to."""
        self.seconds = 0.0
        self.spans: list[Span] = []
        self._depth = 0  # a source may be made anew for another
        self.nbytes = 0
        self.proofs = 0
        self._verdicts = verdicts
        self._cookbook.close()
        self._cookbook = Cookbook(self._ledger, kinds)
        self._wanted_ops = ops_of_recipes(plan) if plan is not None else {}
        self._replays = {item.value: item.replay for item in plan.recomputes} if plan is not None else {}
        self._first_save = _first_saves(plan) if plan is not None else {}
        self._entry_at: dict[Contents, Entry] = {}
        self._contents: dict[Entry, Contents] = {}
        self._waits = self._rests_then = False
        self._waiting: list[tuple[Entry, int]] = []

    # --- what the runner shows ---

    @property
    def on(self) -> bool:
        """Whether the plan makes anything anew."""
        return bool(self._wanted_ops)

    def packed(self, record: StorageRecord, entry: Entry) -> None:
        """A value was saved: recipes may start from it."""
        if self._wanted_ops:
            contents = contents_of(record)
            self._entry_at[contents] = entry
            self._contents[entry] = contents

    def contents_before(
        self,
        number: int,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[torch.Tensor],
    ) -> Given | None:
        """What an op is given before it runs, if it is one that recipes run again; None for the others."""
        if not self.runs_again(number, facts.name):
            return None
        dice = Dice.before(args, kwargs) if facts.draws else None
        if facts.draws and dice is None:
            return None
        return given_before(self._ledger, inputs, () if dice is None else (dice,))

    def take_down(
        self,
        func: Any,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: Given,
        result: Any,
        signature: Hashable,
    ) -> None:
        """Remember an op that has just run; `signature` tells what it needs."""
        with torch._C._DisableTorchDispatch():
            self._cookbook.take_down(func, facts, args, kwargs, before, result, signature)

    def runs_again(self, number: int, name: str) -> bool:
        """Whether recipes run op `number` again."""
        return self._wanted_ops.get(number) == name

    def rest(self) -> None:
        """The plan drops nothing more in this step."""
        if self._waits:
            self._rests_then = True
        else:
            self._cookbook.rest()

    def before_write(self, written: Sequence[StorageRecord]) -> None:
        """An op is about to write to what recipes may start from: make their values anew before that."""
        if self._pool.dropped:
            with torch._C._DisableTorchDispatch():
                for record in written:
                    self._save_readers_of(record)
            self._strays.follow()  # what was made anew has read what is written to
        if self._entry_at:
            for record in written:
                self._entry_at.pop(contents_of(record), None)

    def _save_readers_of(self, record: StorageRecord) -> None:
        # A source that came back lies elsewhere than where it was saved.
        for entry in self._pool.dropped.readers_of(record.serial, self._pool.values_in(record)):
            if entry.recipe is not None:  # not made anew on behalf of another one
                self._pool.dropped.restore(entry)

    # --- dropping, and making anew ---

    def drop(self, entry: Entry, value: int) -> None:
        """Let go of a value, if its recipe makes the very same bits."""
        if self._waits:
            self._waiting.append((entry, value))
            return
        found = self._dropping(entry, value)
        if found is not None and (self._is_proved(found) or self._verify([found])):
            self._let_go(found)

    def wait(self) -> None:
        """Compiled code runs, whose memory is measured: nothing is tried and nothing let go of meanwhile."""
        self._waits = True

    def settle(self) -> None:
        """It is over: let go of what should have gone. What one call made is tried together."""
        self._waits = False
        waiting, self._waiting = self._waiting, []
        found = [item for item in starmap(self._dropping, waiting) if item is not None]
        tried: dict[int, list[_Drop]] = {}
        for item in found:
            if not self._is_proved(item):
                made_by = item.recipe.calls[-1] if item.recipe.makes_several else item
                tried.setdefault(id(made_by), []).append(item)
        for together in tried.values():
            self._verify(together)
        for item in found:
            if self._is_proved(item):
                self._let_go(item)
        if self._rests_then:
            self._cookbook.rest()

    def give_up(self) -> None:
        """It has failed: what should have gone stays."""
        self._waits = False
        self._waiting.clear()
        if self._rests_then:
            self._cookbook.rest()

    def _dropping(self, entry: Entry, value: int) -> _Drop | None:
        """What it takes to let go of a value; None where it cannot be made anew."""
        contents = self._contents.get(entry)
        if contents is None or self._entry_at.get(contents) is not entry:  # written to since it was saved
            return None
        first_save = self._first_save[value]
        if first_save in self._verdicts.bad or self._verdicts.cramped[first_save] >= _MOST_TRIES:
            return None
        if entry.handles == 0 or self._pool.has_safe_copy(entry):
            return None
        recipe = self._cookbook.compile(contents, self._entry_at.get)
        if recipe is None or not recipe.states_are_as_they_were():  # a parameter was written to since
            return None
        return _Drop(entry, first_save, recipe, self._replays.get(value, Replay.SPEED))

    def _is_proved(self, item: _Drop) -> bool:
        return item.entry.nbytes <= self._verdicts.good.get(item.first_save, -1)

    def _let_go(self, item: _Drop) -> None:
        # A proof takes room, for which the cache may have sent this very value away.
        if not self._pool.has_safe_copy(item.entry):
            self._pool.dropped.add(item.entry, item.recipe, item.replay)

    def _verify(self, items: Sequence[_Drop]) -> bool:
        """The true values are still there: make them anew and compare, once for each kind of step, if none is larger.

        They are what one call makes. Whether all are the same. Of what has left for the proof before nothing is said.
        """
        there = [(item, storage) for item in items if (storage := item.entry.storage) is not None]
        if not there:
            return False
        items = [item for item, _ in there]
        first, *others = items
        try:
            with self._pool.dropped.sources_of(first.entry, first.recipe):
                made = self._replay(first.recipe, [item.recipe.target for item in others])
            same = [self._is_same(new, true) for new, (_, true) in zip(made, there, strict=True)]
        except OtherOutputs:
            same = [False] * len(items)
        except OutgrowError:  # no room to try
            self._verdicts.cramped.update(item.first_save for item in items)
            return False
        self.proofs += 1
        for item, is_same in zip(items, same, strict=True):
            if is_same:
                self._verdicts.good[item.first_save] = item.entry.nbytes
            else:
                self._verdicts.bad.add(item.first_save)
        return all(same)

    def _is_same(self, made: torch.UntypedStorage, true: torch.UntypedStorage) -> bool:
        return made.nbytes() == true.nbytes() and self._are_equal(made, true)

    def _are_equal(self, one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
        """Whether two storages of one size hold the same bytes.

        On a GPU the comparison takes memory, a byte for each number: it goes by parts, of large numbers.
        """
        with torch._C._DisableTorchDispatch():
            rows = _bytes_of(one), _bytes_of(other)
            if one.device.type == "cpu":
                return torch.equal(*rows)
            if one.nbytes() % _NUMBER.itemsize == 0:
                rows = rows[0].view(_NUMBER), rows[1].view(_NUMBER)
            parts = zip(*(row.split(_COMPARED_BYTES // row.itemsize) for row in rows), strict=True)
            with self._strays.at_home():
                return all(self._run(torch.ops.aten.equal.default, part, {}, None) for part in parts)

    def rebuild(self, entry: Entry, mates: Sequence[Entry]) -> Sequence[torch.UntypedStorage]:
        """Make a dropped value anew, and its `mates`, which its recipe makes as well; the pool asks for it.

        Raises:
            TraceMismatch: a parameter that the recipe reads was changed since.
        """
        recipe = entry.recipe
        assert recipe is not None
        if not recipe.states_are_as_they_were():
            raise TraceMismatch(
                "a parameter or buffer was changed between the forward and the backward pass in a way that PyTorch"
                " does not show: train this model with a policy that does not recompute, such as policy='lru'"
            )
        storages = self._replay(recipe, [mate.recipe.target for mate in mates if mate.recipe is not None])
        self.nbytes += sum(made.nbytes for made in (entry, *mates))
        return storages

    def _replay(self, recipe: Recipe, mates: Sequence[Contents]) -> list[torch.UntypedStorage]:
        started, inner = time.perf_counter(), self.seconds
        began = self._clock.mark() if self._clock is not None and self._depth == 0 else None
        self._depth += 1
        try:
            storages = self._replay_now(recipe, mates)
        finally:
            self._depth -= 1
        if self._clock is not None and began is not None:
            self.spans.append((began, self._clock.mark()))
        self.seconds = inner + time.perf_counter() - started  # sources that were dropped too are in there
        return storages

    def _replay_now(self, recipe: Recipe, mates: Sequence[Contents]) -> list[torch.UntypedStorage]:
        with (
            self._strays.at_home(),
            torch.no_grad(),
            torch._C._DisableTorchDispatch(),
            torch._C._DisableAutocast(),
            torch._C._AutoDispatchBelowAutograd(),
        ):
            return replay(recipe, self._fetch, self._run, mates)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _first_saves(plan: Plan) -> dict[int, int]:
    """For each value that the plan drops the number of the first saved tensor that has it."""
    dropped = {item.value for item in plan.recomputes}
    trace = plan.problem.trace
    first: dict[int, int] = {}
    for number, saved in enumerate(trace.saved):
        if saved.value in dropped:
            first.setdefault(saved.value, number)
    return first
