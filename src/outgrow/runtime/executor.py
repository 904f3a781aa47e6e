"""Carries a plan out in a live step.

Saved-tensor hooks are the clock (`hooks.py`): each pack and unpack is a tick, and a tick starts the copies that the
plan puts there (`follower.py`). A dispatch mode sees each op before it runs, and room is made for it (`runner.py`).
Whatever the plan says, a value that is asked for is there, and an op that does not fit sends the least recently used
away: a plan is advice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from operator import le
from typing import Any, Protocol, TypeVar

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack

from outgrow.planning.agenda import actions_of
from outgrow.planning.plan import Plan
from outgrow.runtime.access import Access
from outgrow.runtime.calls import Calls
from outgrow.runtime.care import Precedent
from outgrow.runtime.clock import DeviceClock
from outgrow.runtime.compiled import CompiledCode
from outgrow.runtime.convolutions import Convolutions
from outgrow.runtime.copies.copy import Copies
from outgrow.runtime.current import CurrentStep
from outgrow.runtime.demand import Demand
from outgrow.runtime.entry import Entry
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.follower import Follower
from outgrow.runtime.handles import Handle
from outgrow.runtime.hooks import Hooks
from outgrow.runtime.interrupts import Interrupts
from outgrow.runtime.outcome import StepOutcome
from outgrow.runtime.parking import Parking
from outgrow.runtime.pool import Pool
from outgrow.runtime.recompute import Recomputer, Verdicts
from outgrow.runtime.recording import Recording
from outgrow.runtime.reuse import Reuser
from outgrow.runtime.room import Room
from outgrow.runtime.runner import Runner
from outgrow.runtime.staying import Stay
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.runtime.watch import Watch
from outgrow.tracing.ir import Event, Fit, Kind
from outgrow.tracing.ledger import Ledger
from outgrow.tracing.ops import OpTable, tensors_in
from outgrow.tracing.recorder import Recorder

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

    def find(self, packs: Sequence[int], *, is_late: bool = False) -> _Known | None:
        """One whose steps begin by saving tensors of so many bytes, or like it but for sizes that nobody knows.

        Where it `is_late`, the step goes on by the plan that it goes by, or by none.
        """

    def turn_to(self, kind: _Known, fit: Fit, /) -> None:
        """The step is of that kind, or like it but for sizes."""

    @property
    def any_parks(self) -> bool:
        """Whether any of their plans parks."""


class Executor:
    """Sets the hooks and the mode of a session's steps, follows their plans, and says what was measured.

    Attributes:
        kept: what has to live while a step is open, and as long as a graph wants saved values: the session.
    """

    def __init__(
        self,
        ledger: Ledger,
        pool: Pool,
        copies: Copies,
        memory: DeviceMemory,
        budget_bytes: int,
        least_moved_bytes: int,
        too_small: Callable[[int, str], Exception],
        gradients: Callable[[], Iterable[torch.Tensor]],
        others: Others[Any],
        clock: DeviceClock | None = None,
        convolutions: Convolutions | None = None,
        fast_path: FastPath | None = None,
        compiled: Sequence[torch.nn.Module] = (),
        interrupts: Interrupts | None = None,
    ) -> None:
        """`too_small` makes the error for an op at which so many bytes are needed at least.

        `gradients` are those that the parameters have now; `others` are asked where a step departs from its plan.
        `clock` is the device's, where that runs beside the host; on a CPU what was asked for is over when the call
        returns, and the host's clock is right. `convolutions` says how their algorithms are chosen, where there are
        several. `fast_path` is for ops that need no care, `compiled` are the modules that stay compiled, `interrupts`
        wait until ops, packs and unpacks are booked.
        """
        self._others = others
        interrupts = interrupts or Interrupts()
        convolutions = Convolutions() if convolutions is None else convolutions
        self._ledger = ledger
        self._pool = pool
        self._memory = memory
        self._clock = clock
        self._convolutions = convolutions
        self._fast = fast = fast_path or FastPath(ledger, budget_bytes, None)
        self._current = current = CurrentStep(ledger, pool)
        self._room = room = Room(budget_bytes, ledger, pool, memory, fast, too_small)
        self._recomputer = Recomputer(ledger, pool, self._fetch, self._run_again, clock)
        self._reuser = Reuser(ledger, pool)
        self._parking = Parking(ledger, pool, copies, memory, room.make, self._run_inside, gradients)
        pool.parked, pool.maker = self._parking, self
        self._demand = Demand(ledger, pool, self._parking, least_moved_bytes)
        room.ask(self._parking, self._demand)
        self._hooks = hooks = Hooks(
            current,
            ledger,
            pool,
            memory,
            room,
            fast,
            self._recomputer,
            self._parking,
            self._demand,
            clock,
            interrupts,
            self._tick,
            self._make_way,
            self._unpacked,
        )
        self._staying = hooks.staying
        self._compiled = CompiledCode(
            compiled, ledger, memory, fast, convolutions, room, interrupts, hooks.come_here, current.came_to
        )
        self._table = OpTable()
        self._calls = Calls(ledger.device_type, pool, memory, fast, convolutions)
        self._runner = Runner(
            current,
            ledger,
            pool,
            room,
            fast,
            self._table,
            self._calls,
            convolutions,
            self._recomputer,
            self._reuser,
            self._parking,
            self._demand,
            self._compiled,
            hooks,
            interrupts,
        )
        fast.ask_to_let_go(self._runner.let_go_of)
        self._follower = Follower(
            hooks.staying.ticks, pool, self._parking, self._recomputer, self._reuser, self._demand
        )
        self.kept: object = None
        self._stack: ExitStack | None = None
        self._last: Plan | None = None  # of the last step, if all went as it says
        self._supposed_bytes = 0  # of a batch that nobody saw
        self._reset(None)

    # --- the step ---

    def begin(
        self,
        plan: Plan | None,
        verdicts: Verdicts,
        kinds: Mapping[int, Kind],
        recorder: Recorder | None,
        *,
        watch: bool,
        fits: bool = False,
        is_foreign: bool = False,
    ) -> None:
        """Set hooks (and the dispatch mode if `watch`) and start the clock.

        `kinds` tells which storages are training state, which the pool never moves; `verdicts` which of the plan's
        recipes can be trusted, and is added to; `fits` that the plan was seen to fit; `is_foreign` that its trace is
        not this session's.
        """
        current = self._current
        self._hooks.begin_here()
        current.kinds = kinds
        # A recorded step runs the plain ops, whatever its plan counts on, and is recorded as nobody knows yet what it
        # needs; nor does anybody where there is no plan, or one that was not seen to fit. So every op is seen, views
        # too.
        on_demand = watch and self._can_park and not (recorder is None and plan is not None and fits)
        current.recording = None
        self._turned_late = False
        if recorder is not None:
            current.recording = Recording(recorder, self._ledger, self._clock, self._lost_seconds)
        current.epoch += 1
        self._reset(plan, verdicts, on_demand=on_demand, is_foreign=is_foreign)
        # Where the cache decides it keeps to what plans keep to.
        decides = recorder is not None or plan is None or plan.evicts
        self._room.begin(keeps_margin=decides, counts_always=recorder is not None)
        current.is_watched, self._is_counted_by_blocks = watch, not watch
        self._modes, self._function_modes = _len_torch_dispatch_stack(), _len_torch_function_stack()
        self._pool.reset_counters()
        self._ledger.on_death = recorder.died if recorder is not None else None
        last, self._last = self._last, None
        again = plan is not None and last is not None and last.moves_as(plan) and recorder is None
        # Where nobody watches, nobody makes room; and a search for an algorithm takes what it is not refused.
        varies = plan is not None and plan.problem.trace.varies  # then its blocks are others each time
        may_open = again and watch and not (self._convolutions.searches or varies)
        self._memory.begin_step(planned=plan is not None, again=may_open)
        if self._memory.is_counted:
            self._memory.count(self._room.budget_bytes)
            self._calls.begin(planned=plan is not None)
        if self._clock is not None:
            self._clock.begin()
        current.look()
        with ExitStack() as stack:
            stack.enter_context(self._convolutions.flags())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._staying.pack, self._staying.unpack))
            if watch:
                stack.enter_context(mode := Watch(self._runner, self._table))
                stack.enter_context(self._compiled.around(mode, current.recording))
            else:  # nobody makes room, but what is made counts
                stack.enter_context(self._fast.paused())
            self._saw_functions = self._parking.on or (watch and self._can_park and self._others.any_parks)
            current.sees_functions = self._saw_functions
            if self._saw_functions:
                stack.enter_context(Access(self._parking, recorder))
            cares_for_all = not watch or recorder is not None or self._ledger.hidden_bytes > 0
            may_pass = not on_demand
            self._fast.begin(
                None if cares_for_all else plan,
                self._modes + 1 if watch else 0,
                may_pass=may_pass,
                open_bytes=self._memory.open_bytes,
            )
            if plan is not None and recorder is None and not (on_demand or self._compiled):
                self._staying.begin(plan, kinds, watched=watch)
            self._stack = stack.pop_all()
        self._started = time.perf_counter()
        if current.recording is not None:
            current.recording.leave()

    def end(self) -> StepOutcome:
        """Take hooks and mode off and say what was measured."""
        assert self._stack is not None
        current = self._current
        self.come_here()
        self._compiled.end()
        if self._follower.on and not self._follower.done:
            _LOG.info("fallback: the step ended early, %s", self._follower.where_next())
        try:
            with torch._C.DisableTorchFunction():
                self._parking.end()
            current.look()
            knows_peak = current.is_watched
            if self._is_counted_by_blocks:
                most = self._memory.highest_bytes() if self._fast.most_bytes is None else self._fast.most_bytes
                if most is not None:
                    current.came_to(most)
                    knows_peak = True
            if self._fast.peak_bytes > current.peak_bytes:
                current.peak_bytes, current.leaving_at_peak = self._fast.peak_bytes, self._pool.most_leaving_bytes
            seconds = time.perf_counter() - self._started
            stall_seconds = self._pool.stall_seconds
            recompute_seconds = self._recomputer.seconds + self._parking.remake_seconds
            times = None if self._clock is None else self._clock.end(self._recomputer.spans)
            recording = current.recording
            if times is not None and recording is not None:
                seconds, stall_seconds, recompute_seconds = times.read()
                recording.set_times()
                times = None
            if self._memory.is_counted and recording is not None:
                self._memory.count(self._room.budget_bytes)
                recording.add_beside()
        except BaseException:
            self._close_stack()
            self._reset(None)
            raise
        unsaid = self._calls.unsaid_refusals() if self._memory.is_counted else 0
        if self._follower.done and self._follower.fit is Fit.EXACT and not (self._pool.faults or unsaid):
            self._last = self._follower.plan
        self._close_stack()
        proved = self._recomputer.proofs + self._parking.proofs > 0
        saved = self._hooks.saved_bytes + self._staying.ticks.kept_bytes
        outcome = StepOutcome(
            peak_bytes=current.peak_bytes,
            seconds=seconds,
            stall_seconds=stall_seconds,
            recompute_seconds=recompute_seconds,
            planned_bytes=self._pool.planned_bytes + self._parking.nbytes,
            evicted_bytes=self._pool.evicted_bytes,
            recomputed_bytes=self._recomputer.nbytes + self._parking.remade_nbytes,
            # Of saved values: what is parked may never have been saved, and is back before it would be missed.
            kept_bytes=max(0, saved - self._pool.planned_bytes - self._pool.evicted_bytes - self._recomputer.nbytes),
            oom_retries=self._pool.faults + unsaid,
            fault_level=self._pool.fault_level or (current.peak_bytes if unsaid else 0),
            knows_peak=knows_peak,
            blind=current.is_blind,
            followed=self._follower.done,
            fit=self._follower.fit,
            proved=proved,
            unseen=self._unseen,
            fits=self._demand.on and not (self._demand.nbytes or self._pool.faults or proved),
            packs=tuple(self._hooks.packs),
            leaving_bytes=current.leaving_at_peak,
            gave_back=self._memory.gave_back,
            turned_late=self._turned_late,
            failure=self._parking.failure,
            times=times,
        )
        self._reset(None)
        return outcome

    @property
    def _can_park(self) -> bool:
        """Whether values may be parked that no plan parks: compiled code reads and writes what nobody sees."""
        return not (self._hooks.changes_threads or self._compiled)

    def _close_stack(self) -> None:
        """Take hooks and mode off."""
        assert self._stack is not None
        self._fast.end(followed=self._follower.done and not self._pool.faults)
        self._ledger.suppose(-self._supposed_bytes)
        self._supposed_bytes = 0
        self._stack.close()
        self._stack = None
        try:
            self._staying.show_all(is_over=True)  # a graph that outlives the step
        finally:
            self._memory.end_step()
        self._current.recording = None
        self._ledger.on_death = None

    def _reset(
        self,
        plan: Plan | None,
        verdicts: Verdicts | None = None,
        *,
        on_demand: bool = False,
        is_foreign: bool = False,
    ) -> None:
        current = self._current
        current.forget()
        self._hooks.forget()
        self._is_counted_by_blocks = self._unseen = False
        self._limits: Sequence[int] | None = None  # what the plan was seen to hold, of a step of other sizes
        self._follower.begin(plan)
        self._runner.goes_by(None)
        verdicts = verdicts or Verdicts()
        self._recomputer.begin(plan, current.kinds, verdicts)
        self._reuser.begin(plan, current.kinds)
        recorded = current.recording is not None
        self._parking.begin(
            plan, current.kinds, verdicts, on_demand=on_demand, recorded=recorded, is_foreign=is_foreign
        )
        self._demand.begin(current.kinds, on=on_demand)

    def close(self) -> None:
        """The session ends: there will be no more steps."""
        self._fast.close()
        self._convolutions.close()

    # --- the clock ---

    def come_here(self) -> None:
        """The training goes on on the calling thread."""
        self._hooks.come_here()

    def arrived(self, entry: Entry) -> None:
        """The pool gave a value new memory."""
        self._compiled.arrived(entry.nbytes)
        current = self._current
        if current.recording is not None and entry.epoch == current.epoch:
            current.recording.recorder.came_back(entry.saved_index, entry.record)

    def _tick(self, event: Event, handle: Handle | Stay, entry: Entry | None) -> None:
        """One tick: what the plan puts there is started, and a step that is not the plan's leaves it."""
        if not self._follower.on:
            # It departed in a backward pass, where nobody can join.
            if self._unseen and not self._current.is_watched and event is Event.PACK:
                self._join()
            return
        if self._follower.advance(event, handle, entry) or self._turns(event, handle, entry):
            self._current.look()
            limits = self._limits
            if limits is not None and event is Event.PACK and handle.nbytes > limits[handle.number]:
                self._needs_more()
                self._fast.stop()
        else:
            self._depart()

    def _unpacked(self) -> None:
        """A saved value was handed out."""
        self._compiled.unpacked()

    def _make_way(self, handle: Handle) -> None:
        """A saved value is about to come back."""
        self._follower.make_way(handle)

    def rebuild(self, entry: Entry) -> torch.UntypedStorage:
        """Make a dropped value anew; the pool asks for it."""
        with self._demand.paused():
            return self._recomputer.rebuild(entry)

    def _fetch(self, entry: Entry) -> torch.UntypedStorage:
        """A source of a recipe."""
        storage = self._pool.request(entry, self._room.make)
        self._pool.wait_in(entry)
        return storage

    def _run_again(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op of a recipe."""
        if self._parking.busy:  # recipes read parameters
            self._parking.touch(tensors_in(args, kwargs))
        return self._run_inside(func, args, kwargs)

    def _run_inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op of ours."""
        return self._runner.run_inside(func, args, kwargs)

    def _lost_seconds(self) -> float:
        """Time that this step would not have taken in plain PyTorch."""
        return self._pool.stall_seconds + self._recomputer.seconds + self._parking.remake_seconds

    # --- leaving the plan ---

    def _turns(self, event: Event, handle: Handle | Stay, entry: Entry | None) -> bool:
        """Whether the step, which is not the one of the trace, begins like one of another kind: it goes by that plan.

        What was saved so far stays where it is, unless the cache sends it away.
        """
        ticks, hooks = self._staying.ticks, self._hooks
        if self._current.recording is not None or self._compiled:
            return False  # what is recorded tells more without
        # Where something was unpacked, much was missed of any other plan.
        other = self._others.find(hooks.packs, is_late=ticks.tick != ticks.number)
        fit = None if other is None else other.plan.problem.trace.fit_of(hooks.packs)
        if other is None or fit is None or (fit is Fit.OTHER and not self._current.is_watched):
            return False
        if other.plan is self._follower.plan:
            return self._goes_on(other, fit, event, handle, entry)
        if _lends(other.plan) and not self._saw_functions:
            return False
        if self._parking.has_planned_places:  # where the other plan may put its own
            return False
        watched = self._current.is_watched
        if not watched and other.plan.needs_watch:  # ops are numbered where they are watched
            return False
        limits = _limits_of(other, fit)
        holds = limits is not None and _is_within(hooks.packs, limits) and _begins_at(other.plan, ticks.tick - 1)
        on_demand = watched and self._can_park and not holds
        parks = on_demand or self._parking.is_for(other.plan)
        if watched and not self._join_modes(parks=parks):
            return False
        self._others.turn_to(other, fit)
        self._turned_late = ticks.tick > 1
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
        limits = _limits_of(kind, fit)
        holds = limits is not None and _is_within(self._hooks.packs, limits)
        if watched and self._can_park and not holds:
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
        if self._demand.on and not (self._demand.nbytes or self._parking.busy):
            self._parking.end_on_demand(plan)
            self._demand.begin({}, on=False)

    def _needs_more(self) -> None:
        """The step may need more than its plan provides for: park on demand from here on, if that can be."""
        self._limits = None
        if self._current.is_watched and self._can_park and not self._demand.on and self._join_modes(parks=True):
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
            self._suppose_inputs()
        self._join()
        self._parking.depart()

    def _suppose_inputs(self) -> None:
        """The step will be watched: what nothing saves of a batch was read before, as much as in steps like this."""
        packs = self._hooks.packs
        kind = self._others.find(packs)
        if kind is not None and kind.plan.problem.trace.fit_of(packs) is Fit.EXACT and not self._supposed_bytes:
            self._supposed_bytes = kind.plan.problem.trace.unsaved_input_bytes
            self._ledger.suppose(self._supposed_bytes)

    def _join(self) -> None:
        """From here on see every op, if that can be, and park on demand: nobody knows what the step will need."""
        if self._join_modes(parks=self._can_park):
            self._park_on_demand()
        self._unseen = self._unseen or not self._current.is_watched

    def _park_on_demand(self) -> None:
        """In the middle of the step: training state only if nobody can have got at its memory unseen before."""
        if self._can_park and not self._demand.on:
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


def _limits_of(kind: Known, fit: Fit) -> Sequence[int] | None:
    """Bytes of the tensors that a kind's plan was seen to hold, if a step that compares so may be held by it."""
    return kind.held if fit is not Fit.OTHER else None


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
