"""How a session says that a budget is too small: with the least one that would do, as far as that is known."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

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
_NUMBERS_BYTES = 64


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
class _Moment:
    """What is alive at a moment, and what an optimizer keeps then, in bytes."""

    live_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class _Refused:
    """What a step was refused, whether in a backward pass, and how many bytes were alive."""

    need: _Need
    in_backward: bool
    live_bytes: int

    def at(self, moment: _Moment, kept_bytes: int) -> _Need:
        """What was there at a moment of the update that was refused it, when its optimizer kept so much."""
        holders = self.need.with_state(moment.kept_bytes - kept_bytes).holders
        others = moment.live_bytes - sum(nbytes for name, nbytes in holders.items() if name != _OTHERS)
        return _Need(moment.live_bytes, {**holders, _OTHERS: max(0, others)}, "")


@dataclass(frozen=True)
class _First:
    """The first update by an optimizer."""

    optimizer: Optimizer
    update: Update

    def beside(self, there: _Need, kept_bytes: int, what: str = "") -> _Need:
        """What it needs with what is there, of which its optimizer keeps so much; `what` says more of it."""
        beside = self.update.beside_bytes + _NUMBERS_BYTES
        holders = {**there.holders, "the update's own": beside}
        where = f"the first update by {type(self.optimizer).__name__}{what}"
        need = _Need(there.nbytes + beside, holders, where)
        return need.with_state(self.update.state_bytes - kept_bytes)


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
        coming = _alone(_firsts_of(state.optimizers, of_all=True), state)
        raise _error_of(budget_bytes, replace(_most_of(need, coming), where=""))


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
        self._begun: weakref.WeakKeyDictionary[Optimizer, _Moment] = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        """A step begins: nothing was refused in it so far."""
        self._last = None
        self._begun.clear()

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to make its state in this step."""
        self._begun[optimizer] = _Moment(self._ledger.live_bytes, self._state.state_bytes(optimizer))

    def too_small(self, needed: int, where: str) -> BudgetTooSmall:
        """An op, or what is named by `where`, has come to need so many bytes."""
        holders = self._state.holders()
        saved = sum(entry.nbytes for entry in self._pool.entries() if entry.storage is not None)
        holders["saved values in use"] = saved
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
        begun = {item: moment for item, moment in self._begun.items() if self._updates.is_under_way(item)}
        others = self._rest_of(begun, refused) if begun else self._still_to_come(error, refused)
        found = _most_of(refused.need, others)
        error.say(found.nbytes, found.holders, found.where)

    def _rest_of(self, begun: Mapping[Optimizer, _Moment], refused: _Refused) -> list[_Need]:
        """What updates under way, that began at these moments, come to.

        What was there then may have left meanwhile; and what was made since may be nowhere to be seen yet: SGD shows
        its momentum once all is done. So the lesser of both.
        """
        found = []
        for first in _firsts_of(begun, of_all=False):
            kept = self._state.state_bytes(first.optimizer)
            moments = begun[first.optimizer], _Moment(refused.live_bytes, kept)
            needs = (first.beside(refused.at(moment, kept), moment.kept_bytes) for moment in moments)
            found.append(min(needs, key=_nbytes))
        return found

    def _still_to_come(self, error: BudgetTooSmall, refused: _Refused) -> list[_Need]:
        """What each first update comes to; and what was refused, where state will be there in the next steps."""
        firsts = _firsts_of(self._state.optimizers, of_all=True)
        found = _alone(firsts, self._state)
        # In a backward pass state may be away; what comes back as it ends may be refused once more.
        if not (refused.in_backward or isinstance(error.__context__, BudgetTooSmall)):
            more = (first.update.state_bytes - self._state.state_bytes(first.optimizer) for first in firsts)
            found.append(refused.need.with_state(sum(nbytes for nbytes in more if nbytes > 0)))
        return found


def _error_of(budget_bytes: int, need: _Need) -> BudgetTooSmall:
    return BudgetTooSmall(budget_bytes, need.nbytes, need.holders, need.where, exact=False)


def _nbytes(need: _Need) -> int:
    return need.nbytes


def _most_of(need: _Need, others: Iterable[_Need]) -> _Need:
    return max([need, *others], key=_nbytes)


def _alone(firsts: Iterable[_First], state: TrainingState) -> list[_Need]:
    """What those updates need that are still to come, each with the training state and its gradients alone."""
    found, known = [], state.holders()
    for first in firsts:
        kept = state.state_bytes(first.optimizer)
        if first.update.state_bytes > kept:
            holders = known | {Kind.GRADIENT.value: state.gradient_bytes(first.optimizer)}
            there = _Need(sum(holders.values()), holders, "")
            found.append(first.beside(there, kept, " of all its parameters"))
    return found


def _firsts_of(optimizers: Iterable[Optimizer], *, of_all: bool) -> list[_First]:
    """Their first updates, as far as they are known: seen on a thread on which no mode of the program's is on."""

    def see() -> list[_First]:
        seen = ((optimizer, update_of(optimizer, of_all=of_all)) for optimizer in optimizers)
        return [_First(optimizer, update) for optimizer, update in seen if update is not None]

    try:
        return run_on_new_thread(see)
    except (RuntimeError, MemoryError):  # no memory for a thread
        return []
