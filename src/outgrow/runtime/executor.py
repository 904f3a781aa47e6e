"""Carries a plan out in a live step.

Saved-tensor hooks are the clock (`hooks.py`): each pack and unpack is a tick, and a tick starts the copies that the
plan puts there (`follower.py`). A dispatch mode sees each op before it runs, and room is made for it (`runner.py`).
Whatever the plan says, a value that is asked for is there, and an op that does not fit sends the least recently used
away: a plan is advice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack

from outgrow.errors import BudgetTooSmall
from outgrow.planning.plan import Plan
from outgrow.runtime.access import Access
from outgrow.runtime.backend import Backend
from outgrow.runtime.calls import Calls
from outgrow.runtime.compiled import CompiledCode
from outgrow.runtime.convolutions import Convolutions
from outgrow.runtime.course import Course, Others
from outgrow.runtime.current import CurrentStep
from outgrow.runtime.demand import Demand
from outgrow.runtime.entry import Entry
from outgrow.runtime.follower import Follower
from outgrow.runtime.forwards import Forward
from outgrow.runtime.handles import Handle
from outgrow.runtime.hooks import Hooks
from outgrow.runtime.interrupts import Interrupts
from outgrow.runtime.outcome import StepOutcome
from outgrow.runtime.parked import ParkedStorages
from outgrow.runtime.parking import Parking
from outgrow.runtime.pool import Pool
from outgrow.runtime.recompute import Recomputer, Verdicts
from outgrow.runtime.recording import Recording
from outgrow.runtime.reuse import Reuser
from outgrow.runtime.room import Room
from outgrow.runtime.runner import Runner
from outgrow.runtime.staying import Stay
from outgrow.runtime.watch import Watch
from outgrow.tracing.ir import Event, Fit, Kind
from outgrow.tracing.ledger import Ledger
from outgrow.tracing.ops import OpTable, tensors_in
from outgrow.tracing.recorder import Recorder

_LOG = logging.getLogger(__name__)

# What is parked to make room for a recipe may be what it starts from.
_TRIES_OF_A_RECIPE = 4
_AT_END = "the end of the step, where all that the program still holds comes back"


class Executor:
    """Sets the hooks and the mode of a session's steps, follows their plans, and says what was measured.

    Attributes:
        kept: what has to live while a step is open, and as long as a graph wants saved values: the session.
    """

    def __init__(
        self,
        ledger: Ledger,
        pool: Pool,
        backend: Backend,
        budget_bytes: int,
        least_moved_bytes: int,
        too_small: Callable[[int, str], Exception],
        gradients: Callable[[], Iterable[torch.Tensor]],
        may_lend: Callable[[], bool],
        others: Others[Any],
        convolutions: Convolutions,
        compiled: Sequence[torch.nn.Module],
        interrupts: Interrupts,
    ) -> None:
        """`too_small` makes the error for an op at which so many bytes are needed at least.

        `gradients` are those that the parameters have now, and `may_lend` says whether training state may leave in a
        step, as everybody is seen who reads it. `others` are asked where a step departs from its plan.
        `convolutions` says how their algorithms are chosen, where there are several. `compiled` are the modules that
        stay compiled. `interrupts` wait until ops, packs and unpacks are booked.
        """
        memory, copies, clock, strays = backend.memory, backend.copies, backend.clock, backend.strays
        self._others = others
        self._ledger = ledger
        self._pool = pool
        self._memory = memory
        self._clock = clock
        self._convolutions = convolutions
        self._fast = fast = backend.fast_path
        self._current = current = CurrentStep(ledger, pool)
        self._room = room = Room(budget_bytes, ledger, pool, memory, fast, too_small)
        self._recomputer = Recomputer(ledger, pool, self._fetch, self._run_again, strays, clock)
        self._reuser = Reuser(ledger, pool)
        parked = ParkedStorages(ledger, pool, copies, memory, room.make, self._run_inside)
        pool.parked, pool.arrived, pool.dropped.rebuild = parked, self._arrived, self._rebuild
        self._parking = Parking(ledger, pool, copies, parked, gradients, may_lend)
        self._demand = Demand(ledger, pool, self._parking, least_moved_bytes)
        room.ask(parked, self._demand)
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
            strays,
            interrupts,
            self._tick,
            self._make_way,
            self._unpacked,
        )
        self._staying = hooks.staying
        self._compiled = CompiledCode(
            compiled,
            ledger,
            pool,
            memory,
            fast,
            convolutions,
            room,
            self._recomputer,
            interrupts,
            strays,
            hooks.come_here,
            current.came_to,
        )
        self._table = OpTable()
        self._calls = Calls(ledger.device_type, pool, memory, fast, convolutions, strays)
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
        self._course = Course(
            current,
            ledger,
            memory,
            fast,
            self._table,
            hooks,
            self._follower,
            self._runner,
            self._recomputer,
            self._reuser,
            self._parking,
            self._demand,
            self._compiled,
            others,
        )
        self._parking.lose_count = self._course.lose_count
        self._stack: ExitStack | None = None
        self._last: Plan | None = None  # of the last step, if all went as it says
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
        limits: Sequence[int] | None = None,
        is_foreign: bool = False,
    ) -> None:
        """Set hooks (and the dispatch mode if `watch`) and start the clock.

        `kinds` tells which storages are training state, which the pool never moves; `verdicts` which of the plan's
        recipes can be trusted, and is added to; `fits` that the plan was seen to fit, and `limits` the bytes that
        saved tensors may have where it is known to hold them; `is_foreign` that its trace is not this session's.
        """
        current = self._current
        self._hooks.begin_here()
        current.kinds = kinds
        # A recorded step runs the plain ops, whatever its plan counts on, and is recorded as nobody knows yet what it
        # needs; nor does anybody where there is no plan, or one that was not seen to fit. So every op is seen, views
        # too.
        is_held = recorder is None and plan is not None and (fits or limits is not None)
        on_demand = watch and self._course.can_park and not is_held
        current.recording = None
        if recorder is not None:
            current.recording = Recording(recorder, self._ledger, self._clock, self._lost_seconds)
        current.epoch += 1
        self._reset(plan, verdicts, on_demand=on_demand, is_foreign=is_foreign)
        limits = limits if is_held and watch and not fits else None  # what fits was seen at the plan's own sizes
        self._course.keep_within(limits)
        # Where the cache decides it keeps to what plans keep to.
        decides = recorder is not None or plan is None or plan.evicts
        self._room.begin(keeps_margin=decides, counts_always=recorder is not None)
        current.is_watched, self._is_counted_by_blocks = watch, not watch
        modes, function_modes = _len_torch_dispatch_stack(), _len_torch_function_stack()
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
            parks = self._parking.on or (watch and self._course.can_park and self._others.any_parks)
            current.sees_functions = parks
            if parks:
                stack.enter_context(Access(self._parking, recorder))
            cares_for_all = not watch or recorder is not None or self._ledger.hidden_bytes > 0
            may_pass = not on_demand
            self._fast.begin(
                None if cares_for_all else plan,
                modes + 1 if watch else 0,
                may_pass=may_pass,
                open_bytes=self._memory.open_bytes,
                is_ragged=self._others.are_ragged,
            )
            self._hooks.are_trusted()
            if plan is not None and recorder is None and not (on_demand or self._compiled):
                self._staying.begin(plan, kinds, watched=watch, limits=limits)
            self._stack = stack.pop_all()
        self._course.open(self._stack, modes, function_modes, saw_functions=parks)
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
            if self._ledger.live_bytes + self._parking.parked.away_bytes > self._room.budget_bytes:
                self._room.collect()
            before = self._ledger.live_bytes
            with torch._C.DisableTorchFunction():
                self._parking.end()
            failure = self._parking.parked.failure or self._overrun_from(before)
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
            recompute_seconds = self._recomputer.seconds + self._parking.parked.remake_seconds
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
        ops = self._fast.number if current.is_watched else 0
        if self._follower.done and self._follower.fit is Fit.EXACT and not (self._pool.page_faults.count or unsaid):
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
            recomputed_bytes=self._recomputer.nbytes + self._parking.parked.remade_nbytes,
            # Of saved values: what is parked may never have been saved, and is back before it would be missed.
            kept_bytes=max(0, saved - self._pool.planned_bytes - self._pool.evicted_bytes - self._recomputer.nbytes),
            oom_retries=self._pool.page_faults.count + unsaid,
            fault_level=self._pool.page_faults.level or (current.peak_bytes if unsaid else 0),
            knows_peak=knows_peak,
            blind=current.is_blind,
            followed=self._follower.done,
            fit=self._follower.fit,
            proved=proved,
            unseen=self._course.unseen,
            fits=self._demand.on and not (self._demand.nbytes or self._pool.page_faults.count or proved),
            packs=tuple(self._hooks.packs),
            ops=ops,
            leaving_bytes=current.leaving_at_peak,
            gave_back=self._memory.gave_back,
            turned_late=self._course.turned_late,
            lost_count=self._course.lost_count and self._demand.nbytes > 0,
            had_garbage=self._room.had_garbage,
            failure=failure,
            times=times,
        )
        self._reset(None)
        return outcome

    def _overrun_from(self, before_bytes: int) -> BudgetTooSmall | None:
        """The error if what came back as the step ended has lifted live bytes above the budget."""
        if before_bytes <= self._room.budget_bytes:
            try:
                self._room.check(self._ledger.live_bytes, _AT_END)
            except BudgetTooSmall as error:
                return error.with_traceback(None)
        return None

    def _close_stack(self) -> None:
        """Take hooks and mode off."""
        assert self._stack is not None
        self._fast.end(followed=self._follower.done and not self._pool.page_faults.count)
        self._course.end()
        self._stack.close()
        self._stack = None
        try:
            self._staying.show_all()  # a graph that outlives the step
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
        self._is_counted_by_blocks = False
        self._course.begin()
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

    def watch(self) -> None:
        """What the program does next wants care, whatever the plan says."""
        self._course.watch()

    def _arrived(self, entry: Entry) -> None:
        """The pool gave a value new memory."""
        self._compiled.arrived(entry.nbytes)
        current = self._current
        if current.recording is not None and entry.epoch == current.epoch:
            current.recording.recorder.came_back(entry.saved_index, entry.record)

    def _tick(self, event: Event, handle: Handle | Stay, entry: Entry | None) -> None:
        """One tick: what the plan puts there is started, and a step that is not the plan's leaves it."""
        if event is Event.PACK and entry is not None and isinstance(handle, Handle):
            self._compiled.packed(handle)
        self._course.advance(event, handle, entry)

    def _unpacked(self) -> None:
        """A saved value was handed out."""
        self._compiled.unpacked()

    def _make_way(self, handle: Handle) -> None:
        """A saved value is about to come back."""
        self._follower.make_way(handle)

    def _rebuild(self, entry: Entry, mates: Sequence[Entry]) -> Sequence[torch.UntypedStorage]:
        """Make a dropped value anew, and what its recipe makes as well; the pool asks for it.

        Nothing is parked on demand meanwhile: where the recipe finds no room, that is made before it is tried again.
        """
        for _ in range(_TRIES_OF_A_RECIPE if self._demand.on else 0):
            try:
                with self._demand.paused():
                    return self._recomputer.rebuild(entry, mates)
            except BudgetTooSmall as short:  # its frames hold what was made so far, and go before room is made
                least_bytes = short.least_bytes
            before = self._ledger.live_bytes
            self._demand.make_room(least_bytes - before)
            if self._ledger.live_bytes >= before:
                break
        with self._demand.paused():
            return self._recomputer.rebuild(entry, mates)

    def _fetch(self, entry: Entry) -> torch.UntypedStorage:
        """A source of a recipe."""
        storage = self._pool.request(entry, self._room.make)
        self._pool.wait_in(entry)
        return storage

    def _run_again(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Hashable) -> Any:
        """Run one op of a recipe, or compiled code."""
        if isinstance(func, Forward):
            return self._compiled.run_again(func, args)
        if self._parking.parked.busy:  # recipes read parameters
            self._parking.parked.touch(tensors_in(args, kwargs))
        return self._runner.run_inside(func, args, kwargs, signature)

    def _run_inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op of ours."""
        return self._runner.run_inside(func, args, kwargs)

    def _lost_seconds(self) -> float:
        """Time that this step would not have taken in plain PyTorch."""
        return self._pool.stall_seconds + self._recomputer.seconds + self._parking.parked.remake_seconds
