"""Walks along the ticks of a plan in a live step, and starts what the plan puts at each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from outgrow.planning.agenda import BACK, actions_of
from outgrow.planning.plan import Plan
from outgrow.runtime.demand import Demand
from outgrow.runtime.entry import Entry
from outgrow.runtime.handles import Handle
from outgrow.runtime.parking import Parking
from outgrow.runtime.pool import Pool
from outgrow.runtime.recompute import Recomputer
from outgrow.runtime.reuse import Reuser
from outgrow.runtime.staying import Stay, Ticks
from outgrow.tracing.ir import Event, Fit, Value


class Follower:
    """The place that a step has reached in its plan, if it has one.

    Attributes:
        fit: how the step's sizes compare with those that the plan was made for, as far as they were seen.
    """

    def __init__(
        self, ticks: Ticks, pool: Pool, parking: Parking, recomputer: Recomputer, reuser: Reuser, demand: Demand
    ) -> None:
        """`ticks` counts those of the step; native code counts on, too (`staying.py`)."""
        self._ticks = ticks
        self._pool = pool
        self._parking = parking
        self._recomputer = recomputer
        self._reuser = reuser
        self._demand = demand
        self.begin(None)

    def begin(self, plan: Plan | None, tick: int = 0) -> None:
        """Start at a tick; without a plan, there is none."""
        self._plan = plan
        self.fit = Fit.EXACT
        self._ticks.tick, self._ticks.waits = tick, 0
        self._actions = {} if plan is None else actions_of(plan)
        drops = () if plan is None else (item.drop_tick for item in plan.recomputes)
        self._last_drop = max(drops, default=-1)
        self._entry_of: dict[int, Entry] = {}
        self._deferred: deque[Callable[[int], bool]] = deque()  # copies back that wait for room
        self._cleared = -1  # the last tick for which what leaves was seen to before

    @property
    def plan(self) -> Plan | None:
        """The plan that the step goes by."""
        return self._plan

    @property
    def on(self) -> bool:
        """Whether there is a plan."""
        return self._plan is not None

    @property
    def done(self) -> bool:
        """Whether every tick of the plan has come."""
        return self._plan is not None and self._ticks.tick == len(self._plan.problem.trace.ticks)

    def where(self) -> str:
        """The last tick that came, in words."""
        return self._described(self._ticks.tick - 1)

    def where_next(self) -> str:
        """The tick that would be next, in words."""
        return self._described(self._ticks.tick)

    def make_way(self, handle: Handle) -> None:
        """A saved value is about to come back: have what leaves at that tick leave before, if it is the plan's."""
        plan, number = self._plan, self._ticks.tick
        actions = self._actions.get(number)
        if plan is None or not actions:
            return
        trace = plan.problem.trace
        tick = trace.ticks[number]
        if tick.event is not Event.UNPACK or tick.saved != handle.number:
            return
        self._cleared = number
        for action, value, offset in actions:
            if action not in BACK and value != trace.saved[tick.saved].value:
                self._act(action, value, offset)

    def advance(self, event: Event, handle: Handle | Stay, entry: Entry | None) -> bool:
        """One tick of a step that has a plan: start what the plan puts there. False, if it is not the plan's tick."""
        assert self._plan is not None
        ticks = self._ticks
        number, ticks.tick = ticks.tick, ticks.tick + 1
        trace = self._plan.problem.trace
        if number >= len(trace.ticks):
            return False
        tick = trace.ticks[number]
        saved = trace.saved[tick.saved]
        value = trace.values[saved.value]
        if tick.event is not event or tick.saved != handle.number:
            return False
        if saved.nbytes != handle.nbytes and not (
            self._suits(handle.nbytes, saved.nbytes, value) and not trace.saves_whole_state[tick.saved]
        ):
            return False
        if entry is not None and (
            # A window may be as large as before, on a larger storage.
            (entry.nbytes != value.nbytes and not self._suits(entry.nbytes, value.nbytes, value))
            or self._entry_for(saved.value, entry) is not entry
            or not self._parking.agrees(saved.value, entry)
        ):
            return False
        try:
            for action, moved, offset in self._actions.get(number, ()):
                if number != self._cleared or action in BACK or moved == saved.value:
                    self._act(action, moved, offset)
            if number == self._last_drop:
                self._recomputer.rest()
            if self._deferred:
                rise = self._rise_ahead(tick.op)
                while self._deferred and self._deferred[0](rise):
                    self._deferred.popleft()
        finally:
            ticks.waits = bool(self._deferred)
        return True

    def _suits(self, nbytes: int, foreseen: int, value: Value) -> bool:
        """Whether what is saved of a value, or is in memory of it, may be another size than was foreseen."""
        return value.varies or self.fit is Fit.OTHER or (self.fit is Fit.SMALLER and nbytes < foreseen)

    def _entry_for(self, value: int, entry: Entry) -> Entry:
        """The entry of a value of the trace: the one that was seen first, while autograd wants it, else this one."""
        known = self._entry_of.get(value)
        if known is None or known.handles == 0:  # saved again after its graph had ended
            known = self._entry_of[value] = entry
        return known

    def _act(self, action: str, value: int, offset: int) -> None:
        if action == "park":
            self._parking.start_out(value, offset)
            return
        if action == "unpark":
            self._deferred.append(partial(self._parking.start_in, value))
            return
        target = self._entry_of.get(value)
        if target is None or target.handles == 0:
            return
        if action == "out":
            assert self._plan is not None
            # What data made larger than its place goes where there is room.
            has_room = target.nbytes <= self._plan.problem.trace.values[value].nbytes
            self._pool.start_out(target, offset if has_room else None)
        elif action == "drop":
            with self._demand.paused(), self._parking.peeking():  # its recipe is tried beside the true value
                self._recomputer.drop(target, value)
        elif action == "release":
            self._pool.wait_out(target)
        else:
            self._deferred.append(partial(self._pool.start_in, target))

    def _rise_ahead(self, op: int) -> int:
        """Bytes that the next op of the trace adds."""
        assert self._plan is not None
        trace = self._plan.problem.trace
        if op >= len(trace.ops):
            return 0
        following = trace.ops[op]
        if self._reuser.expects(op):
            return following.workspace_bytes
        born = sum(trace.values[index].nbytes for index in following.outputs if trace.values[index].version == 0)
        return born + following.workspace_bytes

    def _described(self, tick: int) -> str:
        assert self._plan is not None
        trace = self._plan.problem.trace
        if tick >= len(trace.ticks):
            return f"after tick {len(trace.ticks)}, its last"
        op = trace.ticks[tick].op
        place = trace.describe_op(op) if op < len(trace.ops) else "its end"
        return f"at tick {tick} of {len(trace.ticks)}, op {op}: {place}"
