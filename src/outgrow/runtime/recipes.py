"""Recipes at run time: the calls of this very step, kept without their tensors, and run again to make a value anew.

Calls are taken down as they run, so that a number that changes from step to step is right in each. What a call read
is named by contents: (storage, how often it was written to). A recipe holds what it starts from: entries of the pool
stay, wherever they are, and training state is compared by version before it is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from outgrow.errors import TraceMismatch
from outgrow.runtime.dice import Dice, all_cast_again
from outgrow.runtime.entry import Entry
from outgrow.runtime.settings import Settings, settings, under
from outgrow.tracing.compiled import COMPILED
from outgrow.tracing.ir import Kind
from outgrow.tracing.ledger import Ledger, StorageRecord
from outgrow.tracing.ops import OpFacts, outputs_of, tensors_in, updated_statistics, written_tensors

# Runs an op of a recipe inside the budget, given what tells what it needs, if that is known.
RunAgain = Callable[[Any, tuple[Any, ...], dict[str, Any], Hashable], Any]

Contents = tuple[int, int]  # serial number of a storage, and how many writes it had seen

_MOST_CALLS = 64


class Window(NamedTuple):
    """Where a tensor lies in its storage."""

    contents: Contents
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, on another storage with the same contents."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class State:
    """A parameter or buffer that a call read. `alias` costs no memory: it counts as ours where state may be lent."""

    alias: torch.Tensor
    record: StorageRecord
    writes: int
    is_buffer: bool

    def is_as_it_was(self) -> bool:
        """Whether nobody has written to it since."""
        # The alias does not tell: made below autograd, it has versions of its own.
        return self.record.writes == self.writes


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor of which a call read no elements, kept without memory (on the meta device)."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Blank:
    """Running statistics that a call updates and does not read: memory like theirs does when it runs again."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Blank:
        """In place of these statistics."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def made(self) -> torch.Tensor:
        """Such memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a buffer held before a call that reads and writes it: it writes to a copy of that when it runs again."""

    contents: torch.Tensor

    def made(self) -> torch.Tensor:
        """Such a copy."""
        return self.contents.clone()


@dataclass(frozen=True, slots=True)
class Given:
    """What an op is given before it runs: the contents of its arguments by storage, and its dice if it draws.

    `records` are those of the storages that its tensors lie in, by the tensor's `id`.
    """

    contents: Mapping[int, Contents]
    records: Mapping[int, StorageRecord]
    dice: tuple[Dice, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op, or of compiled code. `args` and `kwargs` have a `Window`, a `State`, a `Shape`, a `Blank`
    or a `Snapshot` in place of each tensor.

    `writes` are the contents that it replaced, each with what they became; `made` what its outputs are, in order
    (None for one that is no plain tensor). `dice` are as they were before it drew random numbers, and `settings` as
    they were when it ran. `signature` tells what it needs (`OpNeeds`); None where that is nothing.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[Contents, ...]
    states: tuple[State, ...]
    writes: tuple[tuple[Contents, Contents], ...]
    made: tuple[Contents | None, ...]
    dice: tuple[Dice, ...]
    settings: Settings
    signature: Hashable
    is_compiled: bool


class OtherOutputs(TraceMismatch):
    """A call that ran again gave other tensors than before."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Calls that make `target`, in order, the entries that they start from, and the training state that they read.

    `leaves` are the serial numbers of all those storages, which must not be written to before the recipe is used.
    """

    target: Contents
    calls: tuple[Call, ...]
    sources: Mapping[Contents, Entry]
    states: tuple[StorageRecord, ...]
    leaves: frozenset[int]

    def states_are_as_they_were(self) -> bool:
        """Whether the training state that it reads is still what the step read."""
        return all(state.is_as_it_was() for call in self.calls for state in call.states)

    def ends_as(self, other: Recipe) -> bool:
        """Whether its last call is that of another one."""
        return self.calls[-1] is other.calls[-1]

    @property
    def makes_several(self) -> bool:
        """Whether its last call is one of compiled code, whose results come back together."""
        return self.calls[-1].is_compiled


class Cookbook:
    """The calls of one step that recipes may need."""

    def __init__(self, ledger: Ledger, kinds: Mapping[int, Kind]) -> None:
        self._ledger = ledger
        self._kinds = kinds
        self._made_by: dict[Contents, Call] = {}
        self._aliased: list[StorageRecord] = []
        self._followed: dict[int, StorageRecord] = {}
        self._rests = False

    def rest(self) -> None:
        """No recipe is wanted any more of what was taken down: writes to what its calls read pass unseen.

        Recipes that are still to be used have what they read followed for them.
        """
        self._rests = True
        for record in self._followed.values():
            self._ledger.unfollow(record)
        self._followed.clear()

    def close(self) -> None:
        """The step is over: its calls are nobody's any more, but those of recipes that are still wanted."""
        self.rest()
        for record in self._aliased:
            record.aliases -= 1
        self._aliased.clear()
        self._made_by.clear()

    def take_down(
        self,
        func: Any,
        facts: OpFacts,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        before: Given,
        result: Any,
        signature: Hashable,
    ) -> None:
        """Remember a call that has just run. `before` has what it was given."""
        if self._rests:
            return
        # What writes may have given a tensor other memory.
        known = {} if facts.writes else before.records

        def see(tensor: torch.Tensor) -> StorageRecord | None:
            return known.get(id(tensor)) or self._ledger.see(tensor)

        reads: list[Contents] = []
        states: list[State] = []
        if facts.reads_shape and _is_strided(args[0]):
            # The result is made where the true one was, not where its shape's stand-in is.
            kwargs = {**kwargs, "device": kwargs.get("device") or args[0].device}
            args = (Shape(_on_meta(args[0])), *args[1:])
        # What they become is no recipe's: a value that is made from it has none.
        statistics = {id(tensor) for tensor in updated_statistics(facts, args)}
        given = [Blank.like(item) if id(item) in statistics else item for item in args]
        try:
            kept_args = [self._kept(item, see, before.contents, reads, states) for item in given]
            kept_kwargs = {
                name: self._kept(item, see, before.contents, reads, states) for name, item in kwargs.items()
            }
        except _NoWindow:
            return
        writes: list[tuple[Contents, Contents]] = []
        for tensor in written_tensors(facts, given, kwargs):
            record = self._ledger.see(tensor)
            if record is None or self._kinds.get(record.serial, Kind.BUFFER) is not Kind.BUFFER:
                return  # training state cannot be changed twice
            if record.serial not in self._kinds:
                writes.append((before.contents[record.serial], contents_of(record)))
        made: list[Contents | None] = []
        touched = [see(tensor) for tensor in tensors_in(given, kwargs)]
        for tensor in outputs_of(result):
            record = self._ledger.see(tensor)
            touched.append(record)
            contents = None if record is None or tensor.layout is not torch.strided else contents_of(record)
            was_given = record is not None and before.contents.get(record.serial) == contents
            made.append(None if was_given else contents)
        call = Call(
            func,
            tuple(kept_args),
            kept_kwargs,
            tuple(reads),
            tuple(states),
            tuple(writes),
            tuple(made),
            before.dice,
            settings(),
            signature,
            facts is COMPILED,
        )
        targets = [
            contents
            for contents in (*made, *(new for _, new in writes))
            if contents is not None and contents[0] not in self._kinds
        ]
        self._made_by.update(dict.fromkeys(targets, call))
        # Contents are named by how often storages were written to: as long as recipes are made that has to be known.
        for record in touched:
            if record is not None and record.serial not in self._followed:
                self._followed[record.serial] = record
                self._ledger.follow(record)
        for state in states if targets else ():
            state.record.aliases += 1
            self._aliased.append(state.record)

    def _kept(
        self,
        item: Any,
        see: Callable[[torch.Tensor], StorageRecord | None],
        before: Mapping[int, Contents],
        reads: list[Contents],
        states: list[State],
    ) -> Any:
        if isinstance(item, list | tuple):
            return [self._kept(inner, see, before, reads, states) for inner in item]
        if not isinstance(item, torch.Tensor):
            return item
        record = see(item) if item.layout is torch.strided else None
        if record is None or item.is_conj() or item.is_neg():
            raise _NoWindow
        kind = self._kinds.get(record.serial)
        if kind is not None:
            states.append(State(item.detach(), record, record.writes, kind is Kind.BUFFER))
            return states[-1]
        offset = int(item.storage_offset())
        window = Window(before[record.serial], item.dtype, item.shape, item.stride(), offset)
        reads.append(window.contents)
        return window

    def compile(self, target: Contents, entries: Callable[[Contents], Entry | None]) -> Recipe | None:
        """The recipe of what `target` names; None where a call of it was not taken down, or written to unseen."""
        search = _Search(self._made_by, target, entries)
        if self._rests or not search.finds(target):
            return None
        order, sources = search.order, search.sources
        states = {state.record.serial: state.record for call in order for state in call.states}
        leaves = frozenset((*states, *(serial for serial, _ in sources)))
        return Recipe(target, tuple(order), sources, tuple(states.values()), leaves)


class _Search:
    """Looks for the calls that make `target`, and for the entries that they start from.

    No function inside a function: one that calls itself is garbage for a collector, and holds all that it found.
    """

    def __init__(
        self, made_by: Mapping[Contents, Call], target: Contents, entries: Callable[[Contents], Entry | None]
    ) -> None:
        self._made_by = made_by
        self._target = target
        self._entries = entries
        self._asked: set[int] = set()
        self.order: list[Call] = []
        self.sources: dict[Contents, Entry] = {}

    def finds(self, contents: Contents) -> bool:
        """Whether it is known how to make these; the call that does is in the order then, after all that it reads."""
        call = self._made_by.get(contents)
        if call is None or len(self.order) > _MOST_CALLS:
            return False
        if id(call) in self._asked:
            return True
        self._asked.add(id(call))
        for wanted in call.reads:
            entry = self._entries(wanted) if wanted != self._target else None
            if entry is not None:
                self.sources[wanted] = entry
            elif not self.finds(wanted):
                return False
        self.order.append(call)
        return True


class _NoWindow(Exception):
    """An argument that cannot be named by contents."""


def _is_strided(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.layout is torch.strided and not item.is_nested


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def contents_of(record: StorageRecord) -> Contents:
    """What a storage holds now."""
    return record.serial, record.writes


def given_before(ledger: Ledger, tensors: Iterable[torch.Tensor], dice: tuple[Dice, ...]) -> Given:
    """What some tensors hold now that an op is given, with its dice."""
    seen = ((id(tensor), ledger.see(tensor)) for tensor in tensors)
    records = {number: record for number, record in seen if record is not None}
    return Given({record.serial: contents_of(record) for record in records.values()}, records, dice)


def replay(
    recipe: Recipe,
    fetch: Callable[[Entry], torch.UntypedStorage],
    run: RunAgain,
    mates: Collection[Contents] = (),
) -> list[torch.UntypedStorage]:
    """Make a value anew, and its `mates`, which the last call makes as well; the storages of all in this order.

    `fetch` brings a source, `run` runs one op inside the budget.

    Contents that a call writes to are cloned first unless the replay itself made them and reads them no more, and
    so are buffers: an op may write to them without saying so.

    Raises:
        OtherOutputs: a call gave more tensors than before, or fewer.
    """
    there = {contents: fetch(entry) for contents, entry in recipe.sources.items()}
    left: dict[Contents, int] = {}
    for call in recipe.calls:
        for contents in call.reads:
            left[contents] = left.get(contents, 0) + 1
    own: set[Contents] = set()
    wanted = (recipe.target, *mates)
    # Most run under the same settings as the one before.
    now: Settings | None = None
    with ExitStack() as stack:
        for call in recipe.calls:
            for contents in call.reads:
                left[contents] -= 1
            changed = dict(call.writes)
            given: dict[Contents, torch.UntypedStorage] = {}
            for contents in call.reads:
                storage = there[contents]
                if contents in changed and contents not in given and (contents not in own or left[contents] > 0):
                    storage = _clone(storage, run)
                given.setdefault(contents, storage)
            args = tuple(_given(item, given) for item in call.args)
            kwargs = {name: _given(item, given) for name, item in call.kwargs.items()}
            if call.settings != now:
                stack.close()
                stack.enter_context(under(call.settings))
                now = call.settings
            with all_cast_again(call.dice) if call.dice else nullcontext():
                result = run(call.func, args, kwargs, call.signature)
            outputs = outputs_of(result)
            if len(outputs) != len(call.made):
                raise OtherOutputs(
                    f"{call.func} gave {len(outputs)} tensors when it ran again, and {len(call.made)} before"
                )
            for contents in call.reads:
                if left[contents] == 0 and contents not in wanted:
                    there.pop(contents, None)
            for old, new in call.writes:
                there[new] = given[old]
                own.add(new)
            for made, tensor in zip(call.made, outputs, strict=True):
                if made is not None and made not in there and (made in wanted or left.get(made)):
                    there[made] = tensor.untyped_storage()
                    own.add(made)
            del given, args, kwargs, result, outputs
    return [there[contents] for contents in wanted]


def _clone(storage: torch.UntypedStorage, run: RunAgain) -> torch.UntypedStorage:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
    copy: torch.Tensor = run(torch.ops.aten.clone.default, (whole,), {}, None)
    return copy.untyped_storage()


def _given(item: Any, storages: Mapping[Contents, torch.UntypedStorage]) -> Any:
    if isinstance(item, list):
        return [_given(inner, storages) for inner in item]
    if isinstance(item, Window):
        return item.on(storages[item.contents])
    if isinstance(item, State):
        return item.alias.clone() if item.is_buffer else item.alias
    if isinstance(item, Blank | Snapshot):
        return item.made()
    return item.tensor if isinstance(item, Shape) else item
