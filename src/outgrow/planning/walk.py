"""An event-driven walk over the trace with three lanes, compute, copy out and copy in: the simulator's heart.

It does what the runtime does, in the same order: plan actions at ticks, copies first in first out on their lane,
bursts of recompute, parked values that come back for the op that wants them, eviction of the least recently used
when an op does not fit.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from outgrow.cost.workspaces import Choice
from outgrow.planning.agenda import (
    BACK,
    actions_of,
    births_and_deaths,
    ends_of,
    resident_bytes,
    saved_values,
    shown_values,
    ticks_of,
    wanted,
)
from outgrow.planning.parks import may_park, sources_of_gradient
from outgrow.planning.plan import Plan, Replay
from outgrow.planning.recipes import Recipe, burst
from outgrow.planning.timeline import Activity, Recording, Span
from outgrow.tracing.ir import Op, Phase

# Sums of times in another order differ by as much, as a share of the step.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Wait:
    """Time for which the device waits at op `op`, in seconds: for `value` to arrive, or for others to leave (-1)."""

    op: int
    seconds: float
    value: int


@dataclass(slots=True)
class _Entry:
    """A value that may be away: a saved one as the pool sees it, or one that the plan parks.

    `leaving` says that a copy out is under way, `offloading` or `parking` (or both) what for. `parked` is what left
    although the program holds it.
    """

    nbytes: int
    held: int
    movable: bool
    in_use: int = 0
    dead: bool = False
    resident: bool = True
    copied: bool = False
    dropped: bool = False
    leaving: bool = False
    offloading: bool = False
    parking: bool = False
    parked: bool = False
    arrives: float = 0.0


class Walk:
    """One walk under a plan; what it found is in its public attributes when `run` is over.

    Times in seconds, sizes in bytes. With a recording it also tells each span of the lanes.
    """

    def __init__(self, plan: Plan, recording: Recording | None = None, *, late_seconds: float = 0.0) -> None:
        """Each copy takes `late_seconds` longer than the device's profile says."""
        problem = plan.problem
        self._recording = recording
        self._late_seconds = late_seconds
        self.problem = problem
        self.time = self.stall = self.recompute = 0.0
        self.curve: list[int] = []
        self.waits: list[Wait] = []
        self.offloaded_bytes = self.evicted_bytes = self.recomputed_bytes = 0
        self.evicted: set[int] = set()
        self._evicts = plan.evicts
        self.landed_at: dict[int, int] = {}  # by value, the tick at which its copy out was first seen to be done
        self._next_tick = 0
        self._burst_peak = 0  # the highest level of recompute bursts since the last op
        self._budget = problem.budget_bytes
        self._live = problem.base_bytes
        self._op = 0
        self.taken: list[Choice] = []
        self._out_free = self._in_free = 0.0
        self._leaving: deque[tuple[float, int]] = deque()
        self._let_go_at: dict[int, list[int]] = {}
        self._deferred: deque[int] = deque()
        self._early: list[int] = []  # parked values that came back and that no op wanted yet
        trace = problem.trace
        self._parks = {item.value for item in plan.parks if may_park(problem, item.value)}
        # Where nothing is evicted, nothing happens to what the plan does not touch.
        saved = saved_values(problem)
        moved = saved if plan.evicts or recording is not None else _touched(plan) & saved.keys()
        self._entries: dict[int, _Entry] = {index: _Entry(*saved[index]) for index in moved}
        for index in self._parks - self._entries.keys():
            self._entries[index] = _Entry(trace.values[index].nbytes, trace.values[index].death, movable=False)
        self._lent: list[int] = []  # training state that left in this backward pass
        self._remade = {item.value for item in plan.parks if item.remade}
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._handled: set[int] = set()  # what has left, once at least
        self._replay_seconds = problem.hardware.replaying_costs(1)
        # Values that go again at once when they were made anew for another's sake.
        self._brief = {item.value for item in plan.recomputes if item.replay is Replay.MEMORY}
        self._actions = actions_of(plan)
        self._births, self._deaths, self._late_deaths = births_and_deaths(plan, self._entries.keys())
        self._early_ends, self._late_ends = ends_of(problem, self._entries)
        self._busy_ticks = ticks_of(problem, self._entries, self._actions, all_shown=plan.evicts)
        self._wanted = wanted(plan, self._parks)
        self._shown = shown_values(problem)
        self._eventful = self._ops_with_events()

    def _ops_with_events(self) -> bytearray:
        """Of each op whether anything but itself happens there, as far as it is known beforehand."""
        found = bytearray(len(self.problem.trace.ops) + 1)
        tick_ops, busy = self.problem.tick_ops, self._busy_ticks
        number = busy.find(1)
        while number >= 0:
            found[tick_ops[number]] = 1
            number = busy.find(1, number + 1)
        for op in chain(self._early_ends, self._late_ends, self._wanted):
            found[op] = 1
        return found

    def run(self, seconds: float = float("inf"), *, must_fit: bool = False) -> bool:
        """Walk to the end of the step.

        Given up, and False, where the step takes longer than `seconds`, or does not fit the budget and `must_fit`.
        """
        # Plans are searched for by a thousand walks and more, most ops of which have nothing to do but take time:
        # nothing is called for nothing here, and time and level are written down only where somebody reads them.
        times, ways, ops = self.problem.op_times, self.problem.ways, self.problem.trace.ops
        # Ops with several ways to run may take less than the trace says.
        most_extra = seconds - times[-1] * (1 - _ROUNDING) if ways is None else float("inf")
        most_live = self._budget if must_fit else float("inf")
        births, deaths, late_deaths = self._births, self._deaths, self._late_deaths
        eventful, budget = self._eventful, self._budget
        leaving, deferred, lent, note = self._leaving, self._deferred, self._lent, self.curve.append
        makes_room = self._evicts or bool(self._parks)
        time, live = self.time, self._live + resident_bytes(self.problem)
        is_watched = ways is not None or self._recording is not None
        fits = True
        for now, op in enumerate(ops):
            live -= deaths[now]
            if eventful[now] or deferred or (lent and op.phase is not Phase.BACKWARD):
                self._op, self.time, self._live = now, time, live
                self._before(now, op)
                time, live = self.time, self._live
            else:
                live -= late_deaths[now]
                if leaving and leaving[0][0] <= time:
                    self._op, self.time, self._live = now, time, live
                    self._next_tick = self.problem.ticks_until[now]
                    self._land()
                    live = self._live
            born = births[now]
            rise = born + op.workspace_bytes
            if makes_room and live + rise > budget:
                self._op, self.time, self._live = now, time, live
                self._next_tick = self.problem.ticks_until[now]
                self._make_room(rise)
                time, live = self.time, self._live
            level, took = live + rise, op.seconds
            if is_watched:
                self.time, self._live = time, live
                level, took = self._watched(now, op, born)
            if self._burst_peak:
                level = max(level, self._burst_peak)
                self._burst_peak = 0
            note(level)
            live += born
            time += took
            if level > most_live or time - times[now + 1] > most_extra:
                fits = False
                break
        self.time, self._live = time, live
        if fits:
            self._op = len(ops)
            self._tick_until(len(self.problem.tick_ops))
            self._return_state()
        return fits

    def _watched(self, number: int, op: Op, born: int) -> tuple[int, float]:
        """The level and the time of an op that is recorded, or may run in several ways."""
        way = self._way(number, op, born)
        if self.problem.ways is not None:
            self.taken.append(way)
        level = self._live + born + way.nbytes
        if self._recording is not None:
            self._computed(Activity.RUN, self.time, self.time + way.seconds, number, live=level)
        return level, way.seconds

    def _before(self, now: int, op: Op) -> None:
        """What happens between the op before and this one."""
        if now in self._early_ends:
            self._end(self._early_ends[now])
        if now in self._let_go_at:
            self._let_go(now)
        self._tick_until(self.problem.ticks_until[now])
        if now in self._late_ends:
            self._end(self._late_ends[now])
        self._live -= self._late_deaths[now]
        if self._leaving and self._leaving[0][0] <= self.time:
            self._land()
        if self._lent and op.phase is not Phase.BACKWARD:
            self._return_state()
        if now in self._wanted:
            for used in self._wanted[now]:
                self._unpark(used)

    def _tick_until(self, end: int) -> None:
        """The ticks up to number `end`, as far as anything happens there."""
        busy, deferred = self._busy_ticks, self._deferred
        for number in range(self._next_tick, end):
            if busy[number]:
                self._tick(number)
            elif deferred:
                self._next_tick = number
                self._start_deferred()
        self._next_tick = end

    def _way(self, number: int, op: Op, born: int) -> Choice:
        """How an op runs: as the trace says, or the fastest way that the free bytes allow (SuperNeurons, 3.5).

        Workspaces make nothing leave: room was made for the trace's own way.
        """
        usual = Choice(op.workspace_bytes, op.seconds)
        ways = self.problem.ways
        if ways is None:
            return usual
        free = self._budget - self._live - born
        return next((way for way in reversed(ways[number]) if way.nbytes <= free), usual)

    def _let_go(self, now: int) -> None:
        """What nobody but autograd holds from here on, and is copied or can be made anew, goes."""
        for value in self._let_go_at.pop(now):
            entry = self._entries[value]
            if entry.resident and (entry.copied or entry.dropped) and not entry.in_use:
                self._free(value)

    def _end(self, ends: Sequence[tuple[int, int]]) -> None:
        """Autograd lets go of what it used so many times, and values die (0)."""
        for uses, index in ends:
            entry = self._entries[index]
            if uses:
                entry.in_use -= uses
                continue
            entry.dead = True
            if entry.resident and not entry.leaving:  # a copy in flight holds the memory until it is done
                self._free(index)

    def _free(self, value: int) -> None:
        entry = self._entries[value]
        entry.resident = False
        if self._recording is not None:
            self._recording.moved(value, arrives=False)
        if self._evicts:
            self._recent.pop(value, None)
        self._live -= entry.nbytes

    def _tick(self, number: int) -> None:
        self._next_tick = number
        value, is_unpack = self._shown[number]
        is_wanted = is_unpack and value in self._entries
        actions = self._actions.get(number, ())
        makes_way = is_wanted and not self._entries[value].resident
        if makes_way:
            for action, target, _ in actions:
                if target != value:
                    self._leave(action, target)
        if is_wanted:
            self._request(value)
        elif self._evicts:
            self._touch(value)
        for action, target, _ in actions:
            if action in BACK:
                self._deferred.append(target)
            elif not makes_way or target == value:
                self._leave(action, target)
        if self._deferred:
            self._start_deferred()
        if is_wanted:
            self._wait_for(value)

    def _leave(self, action: str, target: int) -> None:
        if action == "out":
            self._start_out(target, planned=True)
        elif action == "release":
            self._wait_out(target)
        elif action == "drop":
            self._drop(target)
        elif action == "park":
            self._park(target)

    def _start_deferred(self) -> None:
        """Planned copies back, in their order, until there is no room for one."""
        deferred = self._deferred
        while deferred and self._start_in(deferred[0]):
            deferred.popleft()

    def _touch(self, value: int) -> None:
        if self._entries[value].movable:
            self._recent[value] = None
            self._recent.move_to_end(value)

    def _start_out(self, value: int, *, planned: bool) -> None:
        entry = self._entries[value]
        if not entry.resident or entry.offloading or entry.copied:
            return
        entry.offloading = True
        if not entry.leaving:
            self._copy_out(value, Activity.OFFLOAD if planned else Activity.EVICT)
        if planned:
            self.offloaded_bytes += entry.nbytes
        else:
            self.evicted_bytes += entry.nbytes
            self.evicted.add(value)

    def _copy_out(self, value: int, activity: Activity) -> None:
        entry = self._entries[value]
        start = max(self._out_free, self.time)
        self._out_free = start + self.problem.hardware.copy_out_seconds(entry.nbytes) + self._late_seconds
        cost = self.problem.hardware.copying_costs(entry.nbytes) + self._handling_seconds(value)
        if self._recording is not None:
            self._recording.out.append(Span(activity, start, self._out_free, self._op, value))
        self._spend(cost, value)
        self._leaving.append((self._out_free, value))
        entry.leaving = True

    def _handling_seconds(self, value: int) -> float:
        """What a value's saved tensors take of the computation's time, as it leaves for the first time."""
        if value in self._handled:
            return 0.0
        self._handled.add(value)
        return self.problem.handling_seconds(value)

    def _spend(self, seconds: float, value: int) -> None:
        """Copies, and what leaves, take so much time from the computation."""
        if seconds and self._recording is not None:
            self._computed(Activity.COPYING, self.time, self.time + seconds, self._op, value)
        self.time += seconds

    def _computed(
        self, activity: Activity, start: float, end: float, op: int, value: int = -1, live: int | None = None
    ) -> None:
        """Record what the compute lane does; live bytes are those of now where nothing else is said."""
        assert self._recording is not None
        level = self._live if live is None else live
        self._recording.compute.append(Span(activity, start, end, op, value, level))

    def _park(self, value: int) -> None:
        """Send away a value that the program still holds; a copy that is there already will do."""
        if value not in self._parks or self.problem.trace.values[value].birth >= self._op:
            return
        entry = self._entries[value]
        if not entry.resident or entry.dead or entry.parking:
            return
        if self.problem.is_state(value):
            if not self._in_backward_pass:
                return
            self._lent.append(value)
        if value in self._remade:
            entry.parked = True
            self._free(value)
            self._live += self._source_bytes(value)
            return
        if entry.copied:
            entry.parked = True
            self._free(value)
            return
        entry.parking = True
        if not entry.leaving:
            self._copy_out(value, Activity.PARK)
            self.offloaded_bytes += entry.nbytes

    @property
    def _in_backward_pass(self) -> bool:
        ops = self.problem.trace.ops
        return 0 < self._op < len(ops) and ops[self._op - 1].phase is ops[self._op].phase is Phase.BACKWARD

    def _return_state(self) -> None:
        """A backward pass is over: all of the training state comes back, what is made anew beside the copies."""
        lent = list(dict.fromkeys(self._lent))
        self._lent.clear()
        for value in sorted(lent, key=self._remade.__contains__):
            self._unpark(value, waits=False)
        for value in lent:
            self._unpark(value)

    def _unpark(self, value: int, *, waits: bool = True) -> None:
        """An op wants a value that may be parked: it stays if it has not left, else it comes back."""
        entry = self._entries[value]
        entry.parking = False
        if self._early and value in self._early:
            self._early.remove(value)
        if entry.parked and not entry.resident and not entry.dead:
            if self._live + entry.nbytes > self._budget:
                self._make_room(entry.nbytes)
            if value in self._remade:
                self._remake(value)
            else:
                self._read(value)
        if entry.resident and waits:
            self._wait_for(value)

    def _remake(self, value: int) -> None:
        """Make a gradient anew from what the op that made it had read."""
        birth = self.problem.trace.values[value].birth
        entry, op = self._entries[value], self.problem.trace.ops[birth]
        self._live += entry.nbytes
        entry.resident, entry.parked = True, False
        self._burst_peak = max(self._burst_peak, self._live + op.workspace_bytes)
        seconds = op.seconds + self._replay_seconds
        if self._recording is not None:
            self._recording.moved(value, arrives=True)
            level = self._live + op.workspace_bytes
            self._computed(Activity.RECOMPUTE, self.time, self.time + seconds, birth, value, level)
        self._live -= self._source_bytes(value)
        self.time += seconds
        self.recompute += seconds
        self.recomputed_bytes += entry.nbytes

    def _source_bytes(self, value: int) -> int:
        sources = sources_of_gradient(self.problem, value) or ()
        return sum(self.problem.trace.values[source].nbytes for source in sources)

    def _land(self) -> None:
        """Memory of values whose copy out is finished goes."""
        while self._leaving and self._leaving[0][0] <= self.time:
            _, value = self._leaving.popleft()
            self.landed_at.setdefault(value, self._next_tick)
            entry = self._entries[value]
            goes, entry.copied = entry.parking, entry.offloading
            entry.leaving = entry.parking = entry.offloading = False
            if goes and entry.resident and not entry.dead:
                entry.parked = True
                self._free(value)
                if entry.copied and entry.held > self._op:  # once it is back, it goes when the program lets go
                    self._let_go_later(value, entry.held)
                continue
            if not entry.dead and not entry.copied:  # it was to be parked, but was wanted first
                continue
            if not entry.resident or (entry.in_use and not entry.dead):
                continue
            if entry.dead or entry.held <= self._op:
                self._free(value)
            else:
                self._let_go_later(value, entry.held)

    def _drop(self, value: int) -> None:
        """Let go of a value that a recipe can make anew."""
        entry = self._entries[value]
        if not entry.resident or entry.in_use or entry.leaving or entry.copied or entry.dead:
            return
        self._spend(self._handling_seconds(value), value)
        entry.dropped = True
        if entry.held <= self._op:
            self._free(value)
        else:
            self._let_go_later(value, entry.held)

    def _let_go_later(self, value: int, op: int) -> None:
        self._let_go_at.setdefault(op, []).append(value)
        self._eventful[op] = 1

    def _rebuild(self, value: int) -> None:
        """Make a dropped value anew, after those of its sources that were dropped too, and theirs."""
        sources, unread = burst(value, self._missing)
        for source, no_longer_read in sources:
            self._rebuild_one(source)
            self._entries[source].dropped = source in self._brief
            self._free_brief(no_longer_read)
        self._rebuild_one(value)
        for mate in self.problem.recipes.together(value):
            if mate in self._entries and self._entries[mate].dropped and not self._entries[mate].resident:
                self._is_back(mate)
        self._free_brief(unread)

    def _missing(self, value: int) -> list[int]:
        entries = self._entries
        return [
            source
            for source in self._recipe(value).sources
            if source in entries and not entries[source].resident and entries[source].dropped
        ]

    def _free_brief(self, values: Sequence[int]) -> None:
        for value in values:
            if value in self._brief and self._entries[value].resident:
                self._free(value)

    def _recipe(self, value: int) -> Recipe:
        recipe = self.problem.recipes.find(value)
        assert recipe is not None, "only what has a recipe is dropped"
        return recipe

    def _rebuild_one(self, value: int) -> None:
        recipe = self._recipe(value)
        sources = [source for source in recipe.sources if source in self._entries]  # the others never leave
        for source in sources:
            self._request(source)
            self._wait_for(source)
        for number, held, born in zip(recipe.ops, recipe.held, recipe.born, strict=True):
            op = self.problem.trace.ops[number]
            if self._lent:
                for index in op.inputs:
                    if index in self._lent:
                        self._unpark(index)
            rise = held + born + op.workspace_bytes
            if self._evicts and self._live + rise > self._budget:
                self._make_room(rise)
            way = self._way(number, op, held + born)
            level = self._live + held + born + way.nbytes
            self._burst_peak = max(self._burst_peak, level)
            seconds = way.seconds + self._replay_seconds
            if self._recording is not None:
                self._computed(Activity.RECOMPUTE, self.time, self.time + seconds, number, value, level)
            self.time += seconds
            self.recompute += seconds
        for source in sources:
            self._entries[source].in_use -= 1
        self._is_back(value)

    def _is_back(self, value: int) -> None:
        """A value was made anew."""
        entry = self._entries[value]
        entry.resident, entry.dropped = True, False
        if self._recording is not None:
            self._recording.moved(value, arrives=True)
        self._live += entry.nbytes
        self.recomputed_bytes += entry.nbytes

    def _wait_for(self, value: int) -> None:
        arrives = self._entries[value].arrives
        if arrives > self.time:
            self._wait_until(arrives, value)

    def _wait_until(self, moment: float, value: int = -1) -> None:
        if moment > self.time:
            self.waits.append(Wait(self._op, moment - self.time, value))
            if self._recording is not None:
                self._computed(Activity.WAIT, self.time, moment, self._op, value)
            self.stall += moment - self.time
            self.time = moment

    def _wait_out(self, value: int) -> None:
        if self._entries[value].leaving:
            self._wait_until(next(done for done, leaving in self._leaving if leaving == value))
            self._land()

    def _start_in(self, value: int) -> bool:
        """Start a planned copy back; False while there is no room for it."""
        entry = self._entries[value]
        if entry.resident or entry.dead or not (entry.copied or entry.parked):
            return True
        if self._leaving:
            self._land()
        if self._live + entry.nbytes + self._rise_ahead() > self._budget:
            return False
        if entry.parked:
            self._early.append(value)
        self._read(value)
        return True

    def _rise_ahead(self) -> int:
        ops = self.problem.trace.ops
        if self._op >= len(ops):
            return 0
        return self._births[self._op] + ops[self._op].workspace_bytes

    def _read(self, value: int) -> None:
        entry = self._entries[value]
        self._live += entry.nbytes
        entry.resident, entry.parked = True, False
        start = max(self._in_free, self.time)
        self._in_free = start + self.problem.hardware.copy_in_seconds(entry.nbytes) + self._late_seconds
        if self._recording is not None:
            self._recording.moved(value, arrives=True)
            self._recording.back.append(Span(Activity.FETCH, start, self._in_free, self._op, value))
        self._spend(self.problem.hardware.copying_costs(entry.nbytes), value)
        entry.arrives = self._in_free
        if self._evicts:
            self._touch(value)

    def _request(self, value: int) -> None:
        entry = self._entries[value]
        entry.in_use += 1
        if self._early and value in self._early:
            self._early.remove(value)
        if not entry.resident and entry.dropped:
            self._rebuild(value)
        elif not entry.resident:
            if (self._evicts or self._parks) and self._live + entry.nbytes > self._budget:
                self._make_room(entry.nbytes)
            self._read(value)
        if self._evicts:
            self._touch(value)

    def _make_room(self, need: int) -> None:
        """Send away the least recently used until `need` bytes fit, or nothing is left to send.

        Parked values on their way out go first: they are going anyway. Those that came back early go last.
        """
        self._land()
        while self._live + need > self._budget:
            parking = next((done for done, value in self._leaving if self._entries[value].parking), None)
            if parking is None:
                break
            self._wait_until(parking)
            self._land()
        if self._evicts:
            self._evict(need)
        while self._early and self._live + need > self._budget:
            value = self._early.pop()
            entry = self._entries[value]
            if entry.resident and not entry.dead:
                self._wait_until(entry.arrives)
                entry.parked = True
                self._free(value)

    def _idle(self, nbytes: int) -> list[int]:
        """The least recently used that may leave, until they are `nbytes`."""
        found: list[int] = []
        for value in self._recent:
            if nbytes <= 0:
                break
            entry = self._entries[value]
            if entry.resident and not entry.in_use and entry.held <= self._op:
                found.append(value)
                nbytes -= entry.nbytes
        return found

    def _evict(self, need: int) -> None:
        while self._live + need > self._budget:
            for value in self._idle(self._live + need - self._budget):
                entry = self._entries[value]
                self._wait_until(entry.arrives)  # fetched ahead of need, and now the room is needed more
                if entry.copied:
                    self._free(value)
                else:
                    self._start_out(value, planned=False)
            if self._live + need <= self._budget:
                return
            releasable = [
                done
                for done, value in self._leaving
                if self._entries[value].resident and self._entries[value].held <= self._op
            ]
            if not releasable:
                return
            self._wait_until(releasable[0])
            self._land()


def _touched(plan: Plan) -> set[int]:
    """The values that a plan moves; and what it makes others from, where that may be gone by then.

    It is there until the value is wanted first. What is dropped later than that is not planned here, but read.
    """
    moved = {item.value for items in (plan.offloads, plan.recomputes, plan.parks) for item in items}
    known = plan.problem.candidates_by_value
    late = (
        item.value
        for item in plan.recomputes
        if item.value not in known or item.drop_tick >= known[item.value].first_unpack
    )
    recipes = map(plan.problem.recipes.find, late)
    return moved.union(*(recipe.sources for recipe in recipes if recipe is not None))
