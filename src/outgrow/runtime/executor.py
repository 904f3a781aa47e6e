"""Carries a plan out in a live step.

Saved-tensor hooks are the clock: each pack and unpack is a tick, and a tick starts the copies that the plan puts
there (`follower.py`). A dispatch mode sees each op before it runs and makes room for it. Whatever the plan
says, a value that is asked for is there, and an op that does not fit sends the least recently used away: a plan is
advice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo

from outgrow.planning.plan import Plan
from outgrow.runtime.access import Access
from outgrow.runtime.calls import Calls
from outgrow.runtime.care import NOTHING, Need, OpNeeds
from outgrow.runtime.clock import DeviceClock
from outgrow.runtime.compiled import CompiledCode
from outgrow.runtime.convolutions import Convolutions
from outgrow.runtime.copies.copy import Copies
from outgrow.runtime.demand import Demand
from outgrow.runtime.entry import Entry
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.follower import Follower
from outgrow.runtime.handles import Handle
from outgrow.runtime.interrupts import Interrupts
from outgrow.runtime.outcome import StepOutcome
from outgrow.runtime.parking import Parking
from outgrow.runtime.pool import Pool
from outgrow.runtime.recompute import Recomputer, Verdicts
from outgrow.runtime.recording import Recording
from outgrow.runtime.reuse import Reuser
from outgrow.runtime.room import Room
from outgrow.runtime.staying import Stay, Staying
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.runtime.watch import Watch
from outgrow.tracing.ir import Event, Kind
from outgrow.tracing.ledger import Ledger, StorageRecord
from outgrow.tracing.ops import OpFacts, OpTable, is_opaque, outputs_of, tensors_in, written_tensors
from outgrow.tracing.recorder import Recorder, accumulates_gradient

_LOG = logging.getLogger(__name__)

# Where ops are not watched, the resident set is looked at every so many saved tensors.
_PACKS_PER_LOOK = 8


class Executor:
    """The hooks and the mode of a session, and the state of the step that runs."""

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
        clock: DeviceClock | None = None,
        convolutions: Convolutions | None = None,
        fast_path: FastPath | None = None,
        compiled: Sequence[torch.nn.Module] = (),
        interrupts: Interrupts | None = None,
    ) -> None:
        """`too_small` makes the error for an op at which so many bytes are needed at least.

        `gradients` are those that the parameters have now. `clock` is the device's, where that runs beside the host;
        on a CPU what was asked for is over when the call returns, and the host's clock is right. `convolutions` says
        how their algorithms are chosen, where there are several. `fast_path` is for ops that need no care, `compiled`
        are the modules that stay compiled, `interrupts` wait until ops, packs and unpacks are booked.
        """
        self._ledger = ledger
        self._interrupts = interrupts or Interrupts()
        self._fast = fast_path or FastPath(ledger, budget_bytes, None)
        self._clock = clock
        # The backward pass of a GPU runs on a thread of autograd's own, while the one that asked for it waits.
        self._changes_threads = ledger.device_type != "cpu"
        self._is_counted = memory.is_counted
        self._pool = pool
        self._memory = memory
        self._room = room = Room(budget_bytes, ledger, pool, memory, self._fast, too_small)
        self._convolutions = Convolutions() if convolutions is None else convolutions
        self._needs = OpNeeds(
            ledger.device_type,
            searched_convolutions=self._convolutions.searches,
            open_convolutions=self._convolutions.take_what_is_free,
        )
        self._calls = Calls(ledger.device_type, pool, memory, self._convolutions)
        self._table = OpTable()
        self._nothing = torch.empty(0, device=ledger.device)
        self._kinds: Mapping[int, Kind] = {}
        self._recomputer = Recomputer(ledger, pool, self._fetch, self._run_again, clock)
        self._reuser = Reuser(ledger, pool)
        self._parking = Parking(ledger, pool, copies, memory, room.make, self._run_inside, gradients)
        pool.parked = self._parking
        self._demand = Demand(ledger, pool, self._parking, least_moved_bytes)
        room.ask(self._parking, self._demand)
        self._compiled = CompiledCode(
            compiled, ledger, memory, self._fast, self._convolutions, room, self._interrupts, self
        )
        # A compiler looks at all that compiled code calls. Imported here, as an optimizer has done that already.
        from torch._dynamo.decorators import skip

        skip(Executor.pack)
        self._staying = Staying(
            self,
            (self.pack, self.unpack),
            ledger,
            pool,
            self._fast,
            look=self._look,
            strays=None if clock is None else clock.strays,
            nothing=self._nothing,
        )
        pool.unknown = self._staying
        self._ticks = self._staying.ticks
        self._follower = Follower(self._ticks, pool, self._parking, self._recomputer, self._reuser, self._demand)
        self._recording: Recording | None = None
        self._stack: ExitStack | None = None
        self._thread = threading.get_ident()
        self._released_elsewhere: deque[Handle] = deque()
        self._last: Plan | None = None  # of the last step, if all went as it says
        self._epoch = 0  # counts steps: a graph may live on into later ones
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
        is_foreign: bool = False,
    ) -> None:
        """Set hooks (and the dispatch mode if `watch`) and start the clock.

        `kinds` tells which storages are training state, which the pool never moves; `verdicts` which of the plan's
        recipes can be trusted, and is added to; `is_foreign` that the plan's trace is not this session's.
        """
        self._thread = threading.get_ident()
        self._ledger.work_here()
        self._kinds = kinds
        # A recorded step runs the plain ops, whatever its plan counts on, and is recorded as nobody knows yet what it
        # needs. But every op of it is seen, views too; compiled code reads and writes what nobody sees.
        on_demand = watch and recorder is not None and not self._changes_threads and not self._compiled
        self._recording = None
        if recorder is not None:
            self._recording = Recording(recorder, self._ledger, self._clock, self._lost_seconds)
        self._epoch += 1
        self._reset(plan, verdicts, on_demand=on_demand, is_foreign=is_foreign)
        # Where the cache decides it keeps to what plans keep to.
        decides = recorder is not None or plan is None or plan.evicts
        self._room.begin(keeps_margin=decides, counts_always=recorder is not None)
        self._watched, self._is_counted_by_blocks = watch, not watch
        self._modes = _len_torch_dispatch_stack()
        self._pool.reset_counters()
        self._ledger.on_death = recorder.died if recorder is not None else None
        last, self._last = self._last, None
        again = plan is not None and last is not None and last.moves_as(plan) and recorder is None
        # Where nobody watches, nobody makes room; and a search for an algorithm takes what it is not refused.
        may_open = again and watch and not self._convolutions.searches
        self._memory.begin_step(planned=plan is not None, again=may_open)
        if self._is_counted:
            self._memory.count(self._room.budget_bytes)
            self._calls.begin()
        if self._clock is not None:
            self._clock.begin()
        self._peak = self._ledger.live_bytes
        with ExitStack() as stack:
            stack.enter_context(self._convolutions.flags())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._staying.pack, self._staying.unpack))
            if watch:
                stack.enter_context(mode := Watch(self, self._table))
                stack.enter_context(self._compiled.around(mode, self._recording))
            else:  # nobody makes room, but what is made counts
                stack.enter_context(self._fast.paused())
            if self._parking.on:
                stack.enter_context(Access(self._parking))
            cares_for_all = not watch or recorder is not None or self._ledger.hidden_bytes > 0
            self._fast.begin(None if cares_for_all else plan, self._modes + 1, is_open=self._memory.is_open)
            self._fast.passes_writes = not (self._recomputer.on or self._pool.dropped or self._parking.on)
            if plan is not None and recorder is None and not self._compiled:
                self._staying.begin(plan, kinds, watched=watch)
            self._stack = stack.pop_all()
        self._started = time.perf_counter()
        if self._recording is not None:
            self._recording.leave()

    def end(self) -> StepOutcome:
        """Take hooks and mode off and say what was measured."""
        assert self._stack is not None
        self.come_here()
        self._compiled.end()
        if self._follower.on and not self._follower.done:
            _LOG.info("fallback: the step ended early, %s", self._follower.where_next())
        try:
            with torch._C.DisableTorchFunction():
                self._parking.end()
            self.came_to(self._ledger.live_bytes)
            knows_peak = self._watched
            if self._is_counted_by_blocks and self._fast.most_bytes is not None:
                self.came_to(self._fast.most_bytes)
                knows_peak = True
            if self._fast.peak_bytes > self._peak:
                self._peak, self._leaving_at_peak = self._fast.peak_bytes, self._pool.most_leaving_bytes
            seconds = time.perf_counter() - self._started
            stall_seconds = self._pool.stall_seconds
            recompute_seconds = self._recomputer.seconds + self._parking.remake_seconds
            times = None if self._clock is None else self._clock.end(self._recomputer.spans)
            recording = self._recording
            if times is not None and recording is not None:
                seconds, stall_seconds, recompute_seconds = times.read()
                recording.set_times()
                times = None
            if self._is_counted and recording is not None:
                self._memory.count(self._room.budget_bytes)
                recording.add_beside()
        except BaseException:
            self._close_stack()
            self._reset(None)
            raise
        unsaid = self._calls.unsaid_refusals() if self._is_counted else 0
        if self._follower.done and not (self._pool.faults or unsaid):
            self._last = self._follower.plan
        self._close_stack()
        saved = self._saved_bytes + self._ticks.kept_bytes
        outcome = StepOutcome(
            peak_bytes=self._peak,
            seconds=seconds,
            stall_seconds=stall_seconds,
            recompute_seconds=recompute_seconds,
            planned_bytes=self._pool.planned_bytes + self._parking.nbytes,
            evicted_bytes=self._pool.evicted_bytes,
            recomputed_bytes=self._recomputer.nbytes + self._parking.remade_nbytes,
            # Of saved values: what is parked may never have been saved, and is back before it would be missed.
            kept_bytes=max(0, saved - self._pool.planned_bytes - self._pool.evicted_bytes - self._recomputer.nbytes),
            oom_retries=self._pool.faults + unsaid,
            fault_level=self._pool.fault_level or (self._peak if unsaid else 0),
            knows_peak=knows_peak,
            blind=self._blind,
            followed=self._follower.done,
            proved=self._recomputer.proofs + self._parking.proofs > 0,
            packs=tuple(self._packs),
            leaving_bytes=self._leaving_at_peak,
            failure=self._parking.failure,
            times=times,
        )
        self._reset(None)
        return outcome

    def _close_stack(self) -> None:
        """Take hooks and mode off."""
        assert self._stack is not None
        self._fast.end(followed=self._follower.done and not self._pool.faults)
        self._stack.close()
        self._stack = None
        try:
            self._staying.show_all(is_over=True)  # a graph that outlives the step
        finally:
            self._memory.end_step()
        self._recording = None
        self._ledger.on_death = None

    def _reset(
        self,
        plan: Plan | None,
        verdicts: Verdicts | None = None,
        *,
        on_demand: bool = False,
        is_foreign: bool = False,
    ) -> None:
        self._packs: list[int] = []
        self._staying.reset(self._epoch, self._packs)
        self._saved_bytes = 0
        self._blind = False
        self._peak = self._leaving_at_peak = 0
        self._watched = self._is_counted_by_blocks = False
        self._beside_compiler = False  # compiled code calls
        self._follower.begin(plan)
        verdicts = verdicts or Verdicts()
        self._recomputer.begin(plan, self._kinds, verdicts)
        self._reuser.begin(plan, self._kinds)
        recorded = self._recording is not None
        self._parking.begin(
            plan, self._kinds, verdicts, on_demand=on_demand, recorded=recorded, is_foreign=is_foreign
        )
        self._demand.begin(self._kinds, on=on_demand)

    def close(self) -> None:
        """The session ends: there will be no more steps."""
        self._fast.close()
        self._convolutions.close()

    # --- the clock ---

    def come_here(self) -> None:
        """The training goes on on the calling thread, which has to see what was freed on the other one."""
        here = threading.get_ident()
        if here != self._thread:
            self._thread = here
            self._ledger.work_here()
        self._catch_up()

    def _catch_up(self) -> None:
        """Book what other threads let go of."""
        while self._released_elsewhere:
            self.released(self._released_elsewhere.popleft())

    def _look(self) -> None:
        """Now and then in a step that nobody watches: let in who waits, and look at the resident set."""
        if self._interrupts.waiting:
            self._interrupts.check()
        self._memory.make_room(0)

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Autograd saves a tensor."""
        return self._pack_beside_compiler(tensor) if get_eval_frame_callback() else self._pack(tensor)

    @_disable_dynamo
    def _pack_beside_compiler(self, tensor: torch.Tensor) -> Handle:
        self._beside_compiler = True
        try:
            return self._pack(tensor)
        finally:
            self._beside_compiler = False

    def _pack(self, tensor: torch.Tensor) -> Handle:
        if self._interrupts.waiting:
            self._interrupts.check()
        if self._changes_threads:
            self.come_here()
        if self._released_elsewhere:
            self._catch_up()
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            handle = Handle(self, tensor, self._epoch, self._ticks.number)
            self._ticks.number += 1
            record = self._ledger.see(tensor) if _is_plain(tensor) else None
            if self._recording is not None:
                handle.recorded = self._recording.recorder.packed(record, handle.nbytes)
            entry: Entry | None = None
            strays = self._clock is not None and self._clock.strays()
            if strays or record is None or record.serial in self._kinds or (tensor.is_leaf and tensor.requires_grad):
                if record is not None and not strays:
                    self._staying.saw_state(handle.number, record)
                if record is not None and tensor.is_leaf:
                    handle.keep(tensor, self._nothing)
                elif record is not None:
                    record.aliases += 1
                    handle.record = record
            else:
                entry = self._pool.adopt(tensor, record)
                if entry.epoch != self._epoch:
                    entry.epoch, entry.saved_index = self._epoch, handle.recorded
                    self._saved_bytes += entry.nbytes
                handle.enter(entry, self._nothing)
                self._recomputer.packed(record, entry)
            self._packs.append(handle.nbytes)
            if not self._watched and handle.number % _PACKS_PER_LOOK == 0:
                self._memory.make_room(0)
            self._advance(Event.PACK, handle, entry)
        return handle

    def unpack(self, handle: Handle | Stay) -> torch.Tensor:
        """Autograd wants a saved tensor back."""
        with torch._C.DisableTorchFunction():
            if isinstance(handle, Handle):
                return self._unpack(handle)
            return self._unpack_stay(handle) if handle.handle is None else self._unpack(handle.handle)

    def _unpack_stay(self, stay: Stay) -> torch.Tensor:
        if self._interrupts.waiting:
            self._interrupts.check()
        if self._changes_threads:
            self.come_here()
        tensor = self._staying.unpacked(stay)
        if self._parking.busy:
            with torch._C._DisableTorchDispatch():
                self._parking.touch((tensor,))
        if stay.epoch == self._epoch:
            self._advance(Event.UNPACK, stay, None)
        return tensor

    def _unpack(self, handle: Handle) -> torch.Tensor:
        if self._interrupts.waiting:
            self._interrupts.check()
        if self._changes_threads:
            self.come_here()
        handle.check_version()
        this_step = handle.epoch == self._epoch
        if self._recording is not None and this_step:
            self._recording.recorder.unpacked(handle.recorded)
        with torch._C._DisableTorchDispatch():
            entry = handle.entry
            if entry is None:
                assert handle.tensor is not None
                if self._parking.busy:
                    self._parking.touch((handle.tensor,))
                if this_step:
                    self._advance(Event.UNPACK, handle, None)
                return handle.tensor
            self._room.where = ""  # names of nodes take time: asked for where somebody reads them
            storage = self._pool.request(entry, self._room.make)
            if self._demand.on:
                self._demand.touched(entry.record)
            self.came_to(self._ledger.live_bytes)
            if this_step:
                self._advance(Event.UNPACK, handle, entry)
            self._pool.wait_in(entry)
            tensor = handle.rebuild(storage)
            self._room.fill_up()
            return tensor

    def released(self, handle: Handle) -> None:
        """Autograd let go of a saved tensor."""
        if threading.get_ident() != self._thread:  # garbage collection runs on any thread
            self._released_elsewhere.append(handle)
            return
        if self._recording is not None and handle.epoch == self._epoch and handle.recorded >= 0:
            self._recording.recorder.released(handle.recorded)
        if handle.entry is not None:
            self._pool.drop(handle.entry)
        elif handle.record is not None:
            handle.record.aliases -= 1

    def arrived(self, entry: Entry) -> None:
        """The pool gave a value new memory."""
        self._compiled.arrived(entry.nbytes)
        if self._recording is not None and entry.epoch == self._epoch:
            self._recording.recorder.came_back(entry.saved_index, entry.record)

    def _advance(self, event: Event, handle: Handle | Stay, entry: Entry | None) -> None:
        """One tick: what the plan puts there is started, and a step that is not the plan's leaves it."""
        if not self._follower.on:
            return
        if self._follower.advance(event, handle, entry):
            self.came_to(self._ledger.live_bytes)
            if self._follower.done:
                self._free_writes()
        else:
            self._depart()

    def _free_writes(self) -> None:
        """Let ops that write pass from where nothing will be made anew, or leave, as the plan says."""
        if self._follower.done and not self._pool.dropped and not self._parking.busy:
            self._fast.passes_writes = True

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
        """Run one op of ours inside the pool's care."""
        facts = self._table[func]
        signature, need = self._needs.before(func, facts, args, kwargs)
        self._room.prepare(need, facts.name)
        before = self._ledger.live_bytes
        result, rise = self._calls.call(func, facts, args, kwargs, need)
        rise = self._rise_of(signature, need, rise)
        for tensor in outputs_of(result):
            self._ledger.see(tensor)
        self.came_to(max(before + rise, self._ledger.live_bytes))
        return result

    def came_to(self, live_bytes: int) -> None:
        """There are, or were, so many live bytes."""
        if live_bytes > self._peak:
            self._peak, self._leaving_at_peak = live_bytes, self._pool.leaving_bytes

    def _rise_of(self, signature: Hashable, need: Need, measured: int | None) -> int:
        """How far an op that has run lifted live bytes; remembered where it was measured."""
        if measured is None:
            if not need.seen:
                self._needs.ran(signature)
            self._blind = self._blind or not need.measured
            return need.likely_bytes
        if self._needs.measured(signature, measured):
            self._fast.was_measured()
        return measured

    # --- leaving the plan ---

    def _depart(self) -> None:
        """The step is not the one of the trace: leave the plan and let the cache decide from here on."""
        where = self._follower.where()
        _LOG.info("fallback: the step departs from its trace %s; the cache decides from here on", where)
        self._follower.begin(None)
        self._reuser.begin(None, {})
        self._parking.depart()
        self._memory.go_astray()
        self._fast.stop()
        self._staying.stop()
        # The mode can join a step that began without it, but only where contexts end in the order in which they
        # began: not inside the backward pass, whose thread state is put back, and not inside a mode of the user's.
        in_backward = torch._C._current_graph_task_id() != -1
        is_nested = in_backward or self._beside_compiler
        if self._watched or self._stack is None or is_nested or _len_torch_dispatch_stack() != self._modes:
            return
        self._watched = True
        self._stack.enter_context(mode := Watch(self, self._table))
        self._stack.enter_context(self._compiled.around(mode, None))

    # --- the ops ---

    def run(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op inside the pool's care."""
        if self._interrupts.waiting:
            self._interrupts.check()
        if self._changes_threads:
            self.come_here()
        if self._released_elsewhere:
            self._catch_up()
        fast, recording = self._fast, self._recording
        if recording is not None:
            recording.reach()
        # Before anything of ours holds the arguments: it counts who refers to them.
        number = fast.number
        is_free = self._reuser.on and self._reuser.may_write_over(number, facts.name, args)
        inputs = tensors_in(args, kwargs)
        ledger, parking, recomputer = self._ledger, self._parking, self._recomputer
        see, known = ledger.see, ledger.newest
        for tensor in inputs:
            see(tensor)
        if ledger.hidden_bytes and ledger.newest > known and _is_of_reducer():
            ledger.show_hidden(known)
        self._room.where = facts.name
        if self._demand.on:
            self._demand.before(facts, inputs)
        if parking.busy:
            parking.touch(inputs)
            if facts.writes:
                for tensor in written_tensors(facts, args, kwargs):
                    changed = see(tensor)
                    if changed is not None:
                        parking.before_change(changed)
        contents = recomputer.contents_before(number, facts, args, kwargs, inputs) if recomputer.on else None
        newest = ledger.newest
        fast.number = number + 1
        signature, need = self._needs.before(func, facts, args, kwargs)
        is_free = is_free and contents is None
        # A recorded step runs the plain ops: their trace is that of the plain step.
        reuses = is_free and recording is None and self._reuser.is_proved(signature)
        if reuses:
            need = NOTHING
        self._room.prepare(need, facts.name)
        written: list[StorageRecord] = []
        if facts.writes and not fast.passes_writes:
            self._free_writes()
        if facts.writes or is_free:
            places = written_tensors(facts, args, kwargs) if facts.writes else args[:1]
            records = (see(tensor) for tensor in places)
            written = [record for record in records if record is not None]
            recomputer.before_write(written)
            for record in written:
                if parking.busy:
                    parking.before_write(record)
                self._pool.written(record)
        before = ledger.live_bytes
        if recording is not None:
            recording.begin(is_timed=not facts.is_view)
        if reuses:
            result, rise = self._reuser.write_over(func, args, kwargs), 0
        else:
            result, measured = self._calls.call(func, facts, args, kwargs, need)
            rise = self._rise_of(signature, need, measured)
            if recording is not None:
                recording.begin_anew(self._convolutions.settled(facts))
            if measured is not None and self._calls.wants_gate(facts):  # a library was given what it wanted
                self._room.check(before + rise, facts.name)
        if recording is not None:
            recording.end()
        if is_free and not reuses:
            self._reuser.prove(signature, func, args, kwargs, result)
        outputs = outputs_of(result)
        for tensor in outputs:
            see(tensor)
        if parking.on:
            parking.ran(number, func, facts, args, inputs, written, outputs, newest)
        if self._demand.on:
            self._demand.ran(facts, inputs, written, outputs, newest)
        for record in written:
            record.writes += 1
        if contents is not None:
            recomputer.take_down(func, facts, args, kwargs, contents, result)
        elif (
            fast.learns
            and need.measured
            and not (is_free or parking.looks_out_for(number) or self._wants_care(facts, inputs, outputs))
        ):
            self._let_pass(number, facts, rise, written)
        self.came_to(max(before + rise, ledger.live_bytes))
        if recording is not None:
            recording.tell(func, facts, args, kwargs, inputs, outputs, result, rise_bytes=rise)
        return result

    def _wants_care(self, facts: OpFacts, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
        """Whether ops like this one are never let past the mode."""
        is_special = facts.draws or facts.over_lists or facts.sized_by_floats or self._convolutions.seen(facts)
        return is_special or any(map(is_opaque, (*inputs, *outputs)))

    def _let_pass(self, number: int, facts: OpFacts, rise_bytes: int, written: Sequence[StorageRecord]) -> None:
        """Op `number` may pass from the next step on, if it writes to nothing that matters."""
        fast = self._fast
        if not facts.writes:
            fast.needs_no_care(number, rise_bytes, gated=self._calls.wants_gate(facts))
        elif fast.passes_writes and not any(map(self._pool.has_place_in, written)):
            fast.needs_no_care(number, rise_bytes, writes=True)

    def _lost_seconds(self) -> float:
        """Time that this step would not have taken in plain PyTorch."""
        return self._pool.stall_seconds + self._recomputer.seconds + self._parking.remake_seconds

    def pass_view(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A view will be made: an op of the trace, which needs no care."""
        self._fast.pass_view()
        if self._parking.busy:  # bounds are checked against the storage
            self._parking.touch(tensors_in(args, kwargs))

    def pass_detached(self) -> bool:
        """The same for `detach`, which looks at nothing, if nobody wants to see it."""
        if self._compiled.is_inside:
            return True
        if self._recording is not None or self.parks:
            return False
        self._fast.pass_view()
        return True

    @property
    def is_inside_compiled(self) -> bool:
        """Whether what runs now is compiled code, whose ops are not the step's."""
        return self._compiled.is_inside

    @property
    def parks(self) -> bool:
        """Whether Python functions are watched, ours too if nobody looks away."""
        return self._parking.on or self._parking.busy

    @property
    def records(self) -> bool:
        """Whether a recorder wants to see every op, views too."""
        return self._recording is not None


def _is_of_reducer() -> bool:
    """Whether memory that an op is given here, and that nobody saw being made, is where gradients are collected.

    `DistributedDataParallel` collects them in hooks of the nodes that add to them, or at the end of the pass.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    return accumulates_gradient() or torch._C._current_autograd_node() is None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a window on ordinary memory: no subclass, no sparse layout, no lazy conjugate."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and not tensor._is_zerotensor()
    )
