"""Recompute in a live step: which ops are taken down, which values may be dropped, and how they are made anew.

It is shown each op and each saved tensor; the pool asks it for values that were dropped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outgrow.errors import OutgrowError, TraceMismatch
from outgrow.planning.agenda import ops_of_recipes
from outgrow.planning.plan import Plan, Replay
from outgrow.runtime.clock import DeviceClock, Span
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
        clock: DeviceClock | None = None,
    ) -> None:
        """`fetch` brings a source to the device, `run` runs one op inside the budget."""
        self._clock = clock
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
        if self._wanted_ops.get(number) != facts.name:
            return None
        dice = Dice.before(args, kwargs) if facts.draws else None
        if facts.draws and dice is None:
            return None
        return given_before(self._ledger, inputs, dice)

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

    def rest(self) -> None:
        """The plan drops nothing more in this step."""
        self._cookbook.rest()

    def before_write(self, written: Sequence[StorageRecord]) -> None:
        """An op is about to write to what recipes may start from: make their values anew before that."""
        if self._pool.dropped:
            with torch._C._DisableTorchDispatch():
                for record in written:
                    self._save_readers_of(record)
        if self._entry_at:
            for record in written:
                self._entry_at.pop(contents_of(record), None)

    def _save_readers_of(self, record: StorageRecord) -> None:
        readers = [
            entry for entry in self._pool.dropped if entry.recipe is not None and record.serial in entry.recipe.leaves
        ]
        for entry in readers:
            if entry.recipe is not None:  # not made anew on behalf of another one
                self._pool.restore(entry)

    # --- dropping, and making anew ---

    def drop(self, entry: Entry, value: int) -> None:
        """Let go of a value, if its recipe makes the very same bits."""
        contents = self._contents.get(entry)
        if contents is None or self._entry_at.get(contents) is not entry:  # written to since it was saved
            return
        first_save = self._first_save[value]
        if first_save in self._verdicts.bad or self._verdicts.cramped[first_save] >= _MOST_TRIES:
            return
        if self._pool.has_safe_copy(entry):
            return
        recipe = self._cookbook.compile(contents, self._entry_at.get)
        if recipe is None or not recipe.states_are_as_they_were():  # a parameter was written to since
            return
        is_proved = entry.nbytes <= self._verdicts.good.get(first_save, -1)
        if not is_proved and not self._verify(entry, first_save, recipe):
            return
        if self._pool.has_safe_copy(entry):  # the proof took room, and the cache sent this very value away for it
            return
        self._pool.drop_for(entry, recipe, self._replays.get(value, Replay.SPEED))

    def _verify(self, entry: Entry, first_save: int, recipe: Recipe) -> bool:
        """The true value is still there: make it anew and compare, once for each kind of step, if none is larger."""
        true = entry.storage
        assert true is not None
        try:
            with self._pool.sources_of(entry, recipe):
                made = self._replay(recipe)
            same = made.nbytes() == true.nbytes() and self._are_equal(made, true)
        except OtherOutputs:
            same = False
        except OutgrowError:  # no room to try
            self._verdicts.cramped[first_save] += 1
            return False
        self.proofs += 1
        if same:
            self._verdicts.good[first_save] = entry.nbytes
        else:
            self._verdicts.bad.add(first_save)
        return same

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
            return all(self._run(torch.ops.aten.equal.default, part, {}, None) for part in parts)

    def rebuild(self, entry: Entry) -> torch.UntypedStorage:
        """Make a dropped value anew; the pool asks for it.

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
        storage = self._replay(recipe)
        self.nbytes += entry.nbytes
        return storage

    def _replay(self, recipe: Recipe) -> torch.UntypedStorage:
        started, inner = time.perf_counter(), self.seconds
        began = self._clock.mark() if self._clock is not None and self._depth == 0 else None
        self._depth += 1
        try:
            storage = self._replay_now(recipe)
        finally:
            self._depth -= 1
        if self._clock is not None and began is not None:
            self.spans.append((began, self._clock.mark()))
        self.seconds = inner + time.perf_counter() - started  # sources that were dropped too are in there
        return storage

    def _replay_now(self, recipe: Recipe) -> torch.UntypedStorage:
        with (
            torch.no_grad(),
            torch._C._DisableTorchDispatch(),
            torch._C._DisableAutocast(),
            torch._C._AutoDispatchBelowAutograd(),
        ):
            return replay(recipe, self._fetch, self._run)


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
