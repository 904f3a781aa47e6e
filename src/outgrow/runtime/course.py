"""What a step goes by once it proves to be another than it was thought to be.

It goes on by the plan of another kind of step, or by its own plan in other sizes, or by none; and where nobody knows
any more what it needs it is watched, and parks on demand, if it can be.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from operator import le
from typing import Any, Protocol, TypeVar

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack

from outgrow.planning.agenda import actions_of
from outgrow.planning.plan import Plan
from outgrow.runtime.access import Access
from outgrow.runtime.care import Precedent
from outgrow.runtime.compiled import CompiledCode
from outgrow.runtime.current import CurrentStep
from outgrow.runtime.demand import Demand
from outgrow.runtime.entry import Entry
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.follower import Follower
from outgrow.runtime.handles import Handle
from outgrow.runtime.hooks import Hooks
from outgrow.runtime.parking import Parking
from outgrow.runtime.recompute import Recomputer, Verdicts
from outgrow.runtime.reuse import Reuser
from outgrow.runtime.runner import Runner
from outgrow.runtime.staying import Stay
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.runtime.watch import Watch
from outgrow.tracing.ir import Event, Fit
from outgrow.tracing.ledger import Ledger
from outgrow.tracing.ops import OpTable

_LOG = logging.getLogger(__name__)


class Known(Protocol):
    """A kind of step that is known: its plan, and what is known of that (see `Executor.begin`)."""

    @property
    def plan(self) -> Plan: ...
    @property
    def verdicts(self) -> Verdicts: ...
    @property
    def is_foreign(self) -> bool: ...
    @property
    def held(self) -> Sequence[int] | None: ...


_Known = TypeVar("_Known", bound=Known)


class Others(Protocol[_Known]):
    """The kinds of step that are known."""

    def find(self, packs: Sequence[int], *, is_late: bool = False, is_watched: bool = True) -> _Known | None:
        """One whose steps begin by saving tensors of so many bytes, or like it but for sizes that nobody knows.

        Where it `is_late`, the step goes on by the plan that it goes by, or by none. One that nobody watches goes by
        none that was made for less.
        """

    def turn_to(self, kind: _Known, fit: Fit, /) -> None:
        """The step is of that kind, or like it but for sizes."""

    @property
    def any_parks(self) -> bool:
        """Whether any of their plans parks."""

    @property
    def are_ragged(self) -> bool:
        """Whether steps are of ever other sizes."""


class Course:
    """Which plan the open step goes by, and who watches it.

    Attributes:
        unseen: it departed from its plan where nobody could begin to watch it.
        turned_late: it went by another plan when it had saved something already.
        lost_count: its ops had other numbers than its plan's.
    """

    def __init__(
        self,
        current: CurrentStep,
        ledger: Ledger,
        memory: DeviceMemory,
        fast_path: FastPath,
        table: OpTable,
        hooks: Hooks,
        follower: Follower,
        runner: Runner,
        recomputer: Recomputer,
        reuser: Reuser,
        parking: Parking,
        demand: Demand,
        compiled: CompiledCode,
        others: Others[Any],
    ) -> None:
        """`others` are asked where a step departs from its plan."""
        self._current = current
        self._ledger = ledger
        self._memory = memory
        self._fast = fast_path
        self._table = table
        self._hooks = hooks
        self._staying = hooks.staying
        self._follower = follower
        self._runner = runner
        self._recomputer = recomputer
        self._reuser = reuser
        self._parking = parking
        self._demand = demand
        self._compiled = compiled
        self._others = others
        self._stack: ExitStack | None = None
        self._supposed_bytes = 0  # of a batch that nobody saw
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.unseen = self.turned_late = self.lost_count = False
        self._limits: Sequence[int] | None = None  # what the plan was seen to hold, of a step of other sizes

    def open(self, stack: ExitStack, modes: int, function_modes: int, *, saw_functions: bool) -> None:
        """It is open, with so many modes of others on; ours are on the `stack`, where more of them may join.

        `saw_functions` says whether one sees what Python code calls from the begin.
        """
        self._stack, self._modes, self._function_modes = stack, modes, function_modes
        self._saw_functions = saw_functions

    def keep_within(self, limits: Sequence[int] | None) -> None:
        """Its plan holds it, for all that is known, as long as no saved tensor has more bytes than `limits` say."""
        self._limits = limits

    def end(self) -> None:
        """It is over, and its modes are about to be off."""
        self._stack = None
        self._ledger.suppose(-self._supposed_bytes)
        self._supposed_bytes = 0

    @property
    def can_park(self) -> bool:
        """Whether values may be parked that no plan parks: compiled code reads and writes what nobody sees."""
        return not (self._hooks.changes_threads or self._compiled)

    def advance(self, event: Event, handle: Handle | Stay, entry: Entry | None) -> None:
        """One tick: what the plan puts there is started, and a step that is not the plan's leaves it."""
        if not self._follower.on:
            # It departed in a backward pass, where nobody can join.
            if self.unseen and not self._current.is_watched and event is Event.PACK:
                self._join()
            return
        if self._follower.advance(event, handle, entry) or self._turns(event, handle, entry):
            self._current.look()
            limits = self._limits
            if limits is not None and event is Event.PACK and handle.nbytes > limits[handle.number]:
                self._needs_more()
                self._fast.see_all()
        else:
            self._depart()

    def watch(self) -> None:
        """The program is about to make what lasts: see every op from here on, and park on demand."""
        if not self._current.is_watched:
            if self._follower.plan is not None:
                self._suppose_inputs(self._follower.plan)
            self._join()
        elif not self._demand.on:
            self._needs_more()
            self._fast.see_all()

    def lose_count(self) -> None:
        """Ops have other numbers than the plan's, which knows what it parks by these: from here on park on demand."""
        self.lost_count = True
        if not self._demand.on:
            _LOG.info("fallback: ops have other numbers than in the trace; values are parked on demand from here on")
        self.watch()

    def _turns(self, event: Event, handle: Handle | Stay, entry: Entry | None) -> bool:
        """Whether the step, which is not the one of the trace, begins like one of another kind: it goes by that plan.

        What was saved so far stays where it is, unless the cache sends it away.
        """
        ticks, hooks = self._staying.ticks, self._hooks
        if self._current.recording is not None or self._compiled:
            return False  # what is recorded tells more without
        # Where something was unpacked, much was missed of any other plan.
        watched = self._current.is_watched
        other = self._others.find(hooks.packs, is_late=ticks.tick != ticks.number, is_watched=watched)
        fit = None if other is None else other.plan.problem.trace.fit_of(hooks.packs)
        if other is None or fit is None:
            return False
        if other.plan is self._follower.plan:
            return self._goes_on(other, fit, event, handle, entry)
        if _lends(other.plan) and not self._saw_functions:
            return False
        if self._parking.parked.has_planned_places:  # where the other plan may put its own
            return False
        if not watched and other.plan.needs_watch:  # ops are numbered where they are watched
            return False
        limits = other.held
        holds = limits is not None and _is_within(hooks.packs, limits) and _begins_at(other.plan, ticks.tick - 1)
        on_demand = watched and self.can_park and not holds
        parks = on_demand or self._parking.is_for(other.plan)
        if watched and not self._join_modes(parks=parks):
            return False
        self._others.turn_to(other, fit)
        self.turned_late = ticks.tick > 1
        plan, kinds, where = other.plan, self._current.kinds, self._follower.where()
        _LOG.debug("the step departs from its trace %s, and goes by the plan of another kind of step", where)
        self._staying.stop()
        self._recomputer.begin(plan, kinds, other.verdicts)
        self._reuser.begin(plan, kinds)
        self._parking.turn_to(plan, other.verdicts, is_foreign=other.is_foreign)
        self._memory.go_astray()
        self._limits = None
        if on_demand:
            self._park_on_demand()
        else:
            self._relax(plan)
            self._limits = limits
            self._staying.begin(plan, kinds, watched=watched, fit=fit, limits=limits)
        self._fast.turn_to(plan, fit, may_pass=not self._demand.on)
        self._follower.begin(plan, ticks.tick - 1)
        self._takes_sizes(fit)
        return self._follower.advance(event, handle, entry)

    def _goes_on(self, kind: Known, fit: Fit, event: Event, handle: Handle | Stay, entry: Entry | None) -> bool:
        """Whether the step, which saves what its plan's step saves but in other sizes, goes on by that plan."""
        if self._follower.fit is fit:
            return False
        _LOG.debug("the step goes by a plan that was made for other sizes, from %s on", self._follower.where())
        self._others.turn_to(kind, fit)
        self._memory.go_astray()
        watched = self._current.is_watched
        self._staying.stop()
        limits = kind.held
        holds = limits is not None and _is_within(self._hooks.packs, limits)
        if watched and self.can_park and not holds:
            self._needs_more()
        else:
            self._relax(kind.plan)
            self._limits = limits
            self._staying.begin(kind.plan, self._current.kinds, watched=watched, fit=fit, limits=limits)
        self._fast.turn_to(kind.plan, fit, may_pass=not self._demand.on)
        self._staying.ticks.tick -= 1
        self._takes_sizes(fit)
        return self._follower.advance(event, handle, entry)

    def _relax(self, plan: Plan) -> None:
        """The plan holds the step: what nobody knew of it need not leave on demand, if it did not yet."""
        if self._demand.on and not (self._demand.nbytes or self._parking.parked.busy):
            self._parking.end_on_demand(plan)
            self._demand.begin({}, on=False)

    def _needs_more(self) -> None:
        """The step may need more than its plan provides for: park on demand from here on, if that can be."""
        self._limits = None
        if self._current.is_watched and self.can_park and not self._demand.on and self._join_modes(parks=True):
            self._staying.stop()
            self._park_on_demand()

    def _takes_sizes(self, fit: Fit) -> None:
        """From here on the step may save other sizes than its plan's, as they `fit`."""
        self._follower.fit = fit
        if fit is not Fit.EXACT:
            self._parking.loosen()
            plan = self._follower.plan
            assert plan is not None
            self._runner.goes_by(Precedent(plan.problem.trace))

    def _depart(self) -> None:
        """The step is not the one of the trace: leave the plan and let the cache decide from here on."""
        where = self._follower.where()
        _LOG.info("fallback: the step departs from its trace %s; the cache decides from here on", where)
        self._follower.begin(None)
        self._limits = None
        self._runner.goes_by(None)
        self._reuser.begin(None, {})
        self._memory.go_astray()
        self._fast.stop()
        self._staying.stop()
        if not self._current.is_watched:
            kind = self._others.find(self._hooks.packs, is_watched=False)
            if kind is not None and kind.plan.problem.trace.fit_of(self._hooks.packs) is Fit.EXACT:
                self._suppose_inputs(kind.plan)
        self._join()
        self._parking.depart()

    def _suppose_inputs(self, plan: Plan) -> None:
        """The step will be watched: what nothing saves of a batch was read before, as much as in its plan's step."""
        if not self._supposed_bytes:
            self._supposed_bytes = plan.problem.trace.unsaved_input_bytes
            self._ledger.suppose(self._supposed_bytes)

    def _join(self) -> None:
        """From here on see every op, if that can be, and park on demand: nobody knows what the step will need."""
        if self._join_modes(parks=self.can_park):
            self._park_on_demand()
        self.unseen = self.unseen or not self._current.is_watched

    def _park_on_demand(self) -> None:
        """In the middle of the step: training state only if nobody can have got at its memory unseen before."""
        if self.can_park and not self._demand.on:
            self._parking.begin_on_demand()
            self._demand.begin(self._current.kinds if self._saw_functions else {}, on=True)

    def _join_modes(self, *, parks: bool) -> bool:
        """Watch ops from here on, and what Python code does to tensors if anything may be parked. Whether that is so.

        Modes can join a step that began without them, but only where contexts end in the order in which they began:
        not inside the backward pass, whose thread state is put back, and not inside modes of the user's.
        """
        in_backward = torch._C._current_graph_task_id() != -1
        if self._stack is None or in_backward or self._hooks.is_beside_compiler:
            return False
        if not self._current.is_watched:
            if _len_torch_dispatch_stack() != self._modes:
                return False
            self._current.is_watched = True
            self._stack.enter_context(mode := Watch(self._runner, self._table))
            self._stack.enter_context(self._compiled.around(mode, None))
            self._fast.join(self._modes + 1)
        if parks and not self._current.sees_functions:
            if _len_torch_function_stack() != self._function_modes:
                return False
            self._current.sees_functions = True
            self._stack.enter_context(Access(self._parking))
        return True


def _is_within(packs: Sequence[int], limits: Sequence[int]) -> bool:
    return len(packs) <= len(limits) and all(map(le, packs, limits))


def _begins_at(plan: Plan, tick: int) -> bool:
    """Whether nothing that a plan does, moves or makes anew comes before a tick.

    What it copies out is known from when it is saved, and all else from when it is made.
    """
    problem = plan.problem
    op, known = problem.trace.ticks[tick].op, problem.candidates_by_value
    recipes = (problem.recipes.find(item.value) for item in plan.recomputes)
    first = chain(
        (problem.trace.values[item.value].birth for items in (plan.recomputes, plan.parks) for item in items),
        chain.from_iterable(recipe.ops for recipe in recipes if recipe is not None),
        plan.reuses,
    )
    saves = all(item.value in known and known[item.value].first_pack >= tick for item in plan.offloads)
    return saves and min(actions_of(plan), default=tick) >= tick and not any(0 <= number < op for number in first)


def _lends(plan: Plan) -> bool:
    """Whether training state leaves by a plan."""
    return any(plan.problem.is_state(item.value) for item in plan.parks)
