"""How a session says that a budget is too small: with the least one that would do, as far as that is known."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.optim import Optimizer

from outgrow.errors import BudgetTooSmall
from outgrow.runtime.pool import Pool
from outgrow.runtime.threads import run_on_new_thread
from outgrow.runtime.updates import FirstUpdates
from outgrow.session.state import TrainingState
from outgrow.tracing.ir import Kind
from outgrow.tracing.ledger import Ledger
from outgrow.tracing.optimizers import Update, update_of

_OTHERS = "other tensors and this op"
# Numbers that become tensors while an optimizer updates.
_NUMBERS_BYTES = 4 << 10


@dataclass(frozen=True)
class _Need:
    """So many bytes are there at one moment of a step, and what they are."""

    nbytes: int
    holders: Mapping[str, int]
    where: str

    def with_state(self, nbytes: int) -> _Need:
        """Once optimizers have made so much state."""
        kept = Kind.OPTIMIZER.value
        holders = {**self.holders, kept: self.holders.get(kept, 0) + nbytes}
        return replace(self, nbytes=self.nbytes + nbytes, holders=holders)


@dataclass(frozen=True)
class _Refused:
    """What a step was refused last, whether in a backward pass, and how many bytes were alive then."""

    need: _Need
    in_backward: bool
    live_bytes: int

    @property
    def holders_then(self) -> Mapping[str, int]:
        """What those bytes were."""
        missing = self.need.nbytes - self.live_bytes
        return {**self.need.holders, _OTHERS: max(0, self.need.holders[_OTHERS] - missing)}


@dataclass(frozen=True)
class _First:
    """An update that will make state: `more_bytes` of it, and so many for itself beside that at its worst moment."""

    optimizer: Optimizer
    more_bytes: int
    beside_bytes: int

    def alone(self, state: TrainingState) -> _Need:
        """What it needs with the training state and gradients, and nothing else."""
        holders = state.holders() | {Kind.GRADIENT.value: state.gradient_bytes(self.optimizer)}
        return self.beside(sum(holders.values()), holders)

    def beside(self, live_bytes: int, holders: Mapping[str, int]) -> _Need:
        """What it needs with all that is alive."""
        where = f"the first update by {type(self.optimizer).__name__}"
        holders = {**holders, "the update's own": self.beside_bytes}
        return _Need(live_bytes + self.beside_bytes, holders, where).with_state(self.more_bytes)


def refuse_hopeless_budget(budget_bytes: int, state: TrainingState, ledger: Ledger) -> None:
    """Refuse a budget before the first step that no plan could keep.

    Parameters are alive together whatever the plan, and so are the gradients that one optimizer reads. (A model that
    is not frozen may never get any; and programs that update each parameter as its gradient comes, by an optimizer of
    its own, have one at a time.) The error names what they come to with the optimizer's state, where that is known.

    Raises:
        BudgetTooSmall: it does not hold even parameters and gradients.
    """
    state.kinds()  # has the ledger see all of it
    live, gradients = ledger.live_bytes, max(map(state.coming_gradient_bytes, state.optimizers), default=0)
    if live + gradients > budget_bytes:
        need = _Need(live + gradients, {"training state": live, "gradients": gradients}, "")
        firsts = _firsts_of(state, state.optimizers, of_all=True)
        raise _error_of(budget_bytes, replace(_most_of(need, (first.alone(state) for first in firsts)), where=""))


class Refusals:
    """Makes a session's errors.

    A first step is refused at the op that it has come to. What comes after that nobody has seen yet; but that an
    optimizer will make its state, and how large that is, can be known.
    """

    def __init__(
        self, budget_bytes: int, state: TrainingState, ledger: Ledger, pool: Pool, updates: FirstUpdates
    ) -> None:
        """`updates` tells which optimizers are making their state."""
        self._budget = budget_bytes
        self._state = state
        self._ledger = ledger
        self._pool = pool
        self._updates = updates
        self._last: _Refused | None = None
        # Errors hold what their frames hold, and are not held.
        self._refused: weakref.WeakKeyDictionary[BudgetTooSmall, _Refused] = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        """A step begins: nothing was refused in it so far."""
        self._last = None
        self._updates.forget()

    def too_small(self, needed: int, where: str) -> BudgetTooSmall:
        """An op, or what is named by `where`, has come to need so many bytes."""
        holders = self._state.holders()
        holders["saved values in use"] = sum(
            entry.nbytes for entry in self._pool.entries() if entry.storage is not None
        )
        holders["buckets of gradients"] = self._state.hidden_bucket_bytes()
        holders[_OTHERS] = max(0, needed - sum(holders.values()))
        in_backward = torch._C._current_graph_task_id() != -1
        self._last = _Refused(_Need(needed, holders, where), in_backward, self._ledger.live_bytes)
        return self._error_of(self._last)

    def last(self) -> BudgetTooSmall | None:
        """The last error of this step, made anew; None where there was none."""
        return None if self._last is None else self._error_of(self._last)

    def _error_of(self, refused: _Refused) -> BudgetTooSmall:
        error = _error_of(self._budget, refused.need)
        self._refused[error] = refused
        return error

    def foresee(self, error: BudgetTooSmall) -> None:
        """An error has ended the step: have it name what the rest of that would have come to, if that is more."""
        refused = self._refused.pop(error, None)
        if refused is None:  # it is not of this session's making, or says all already
            return
        under_way = self._updates.beginning
        if under_way:
            firsts = _firsts_of(self._state, under_way, of_all=False)
            others = [first.beside(refused.live_bytes, refused.holders_then) for first in firsts]
        else:
            firsts = _firsts_of(self._state, self._state.optimizers, of_all=True)
            others = [first.alone(self._state) for first in firsts]
            if not refused.in_backward:  # in there state may be away
                others.append(refused.need.with_state(sum(first.more_bytes for first in firsts)))
        found = _most_of(refused.need, others)
        error.say(found.nbytes, found.holders, found.where)


def _error_of(budget_bytes: int, need: _Need) -> BudgetTooSmall:
    return BudgetTooSmall(budget_bytes, need.nbytes, need.holders, need.where, exact=False)


def _most_of(need: _Need, others: Iterable[_Need]) -> _Need:
    return max([need, *others], key=lambda item: item.nbytes)


def _firsts_of(state: TrainingState, optimizers: Iterable[Optimizer], *, of_all: bool) -> list[_First]:
    """The first updates to come that are known."""
    found = []
    for optimizer in optimizers:
        update = _seen_apart(optimizer, of_all=of_all)
        more = 0 if update is None else update.state_bytes - state.state_bytes(optimizer)
        if update is not None and more > 0:
            found.append(_First(optimizer, more, update.beside_bytes + _NUMBERS_BYTES))
    return found


def _seen_apart(optimizer: Optimizer, *, of_all: bool) -> Update | None:
    """What an update takes, seen on a thread on which no mode of the program's is on; None where nobody can tell."""
    try:
        return run_on_new_thread(partial(update_of, optimizer, of_all=of_all))
    except (RuntimeError, MemoryError):  # no memory for a thread
        return None
