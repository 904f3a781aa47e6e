"""What a policy is given: a trace with costs, a device and a budget, and the readings every policy needs."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, wraps
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, TypeVar

from outgrow.cost.hardware import Hardware
from outgrow.cost.workspaces import Choice
from outgrow.tracing.ir import COMPILED_OP, Event, Kind, Phase, Trace

if TYPE_CHECKING:
    from outgrow.planning.recipes import Recipes

# Values below this stay: a copy costs its latency, and they hold next to nothing.
LEAST_MOVED_BYTES = 4096
# A budget that nothing exceeds, in bytes.
BOUNDLESS = 1 << 62

_LET_GO = frozenset({Kind.ACTIVATION, Kind.TEMPORARY})
# Training state that ops read and write; buffers are written to unseen by some.
STATE = frozenset({Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER})

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A saved value that a policy may move, with the ticks that bound it.

    `first_pack` and `last_pack` are the ticks at which it was saved, `first_unpack` the tick at which it is
    wanted back, `held` the op from which on letting go of it frees memory.
    """

    value: int
    nbytes: int
    first_pack: int
    last_pack: int
    first_unpack: int
    held: int


@dataclass(frozen=True)
class Problem:
    """A trace, a device and a budget.

    `base_bytes` is what is alive all through the step besides what the trace shows (optimizer state that the
    recorded step had not made yet), in bytes. `plain_seconds` is the time of the step with all the memory it wants,
    where that is not the sum of its ops': convolutions may have been given slower algorithms than they would take
    then. `ways` says how each op can run where that is settled as it runs (`planning/workspaces.py`): from the
    trace's own way, which needs least memory, to the fastest.
    """

    trace: Trace
    hardware: Hardware
    budget_bytes: int
    base_bytes: int = 0
    least_moved_bytes: int = LEAST_MOVED_BYTES
    plain_seconds: float | None = None
    ways: tuple[tuple[Choice, ...], ...] | None = None

    def with_budget(self, budget_bytes: int) -> Problem:
        """The same step on the same device under another budget; what was read of it so far holds for that too."""
        other = replace(self, budget_bytes=budget_bytes)
        known = vars(self).keys() - {field.name for field in fields(self)}
        vars(other).update((name, vars(self)[name]) for name in known)
        return other

    @cached_property
    def readings(self) -> dict[str, Any]:
        """What functions that are a `reading` have found, by their names."""
        return {}

    @cached_property
    def op_times(self) -> list[float]:
        """The time at which each op starts in a plain step, and the end; in seconds."""
        return list(accumulate((op.seconds for op in self.trace.ops), initial=0.0))

    @cached_property
    def tick_ops(self) -> list[int]:
        """The op of each tick."""
        return [tick.op for tick in self.trace.ticks]

    @cached_property
    def ticks_until(self) -> list[int]:
        """Of each op, how many ticks there are until it starts."""
        return [bisect_right(self.tick_ops, op) for op in range(len(self.trace.ops))]

    def tick_time(self, tick: int) -> float:
        """The time of a tick in a plain step, in seconds."""
        return self.op_times[self.tick_ops[tick]]

    def first_tick_at(self, op: int) -> int:
        """The first tick at or after op `op`; the number of ticks if there is none."""
        return bisect_right(self.tick_ops, op - 1)

    def last_tick_before(self, seconds: float) -> int:
        """The last tick whose time is at most `seconds`, -1 if there is none."""
        op = bisect_right(self.op_times, seconds) - 1
        return bisect_right(self.tick_ops, op) - 1

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Saved values that may move, in the order in which they were first saved."""
        packs: dict[int, list[int]] = {}
        unpacks: dict[int, int] = {}
        for number, tick in enumerate(self.trace.ticks):
            wanted = self.trace.saved[tick.saved].value
            if tick.event is Event.PACK:
                packs.setdefault(wanted, []).append(number)
            else:
                unpacks.setdefault(wanted, number)
        found: list[Candidate] = []
        for index, ticks in packs.items():
            value = self.trace.values[index]
            back = unpacks.get(index)
            if value.kind.lasts or value.nbytes < self.least_moved_bytes or back is None:
                continue
            # Windows on some of it may have been saved before the last write to the rest.
            since = self.first_tick_at(value.birth + 1)
            before = [max(since, tick) for tick in ticks if tick < back]
            if before and since < back:
                found.append(Candidate(index, value.nbytes, before[0], before[-1], back, value.held))
        return tuple(found)

    @cached_property
    def candidates_by_value(self) -> dict[int, Candidate]:
        """The same, by the number of the value."""
        return {item.value: item for item in self.candidates}

    @property
    def on_cpu(self) -> bool:
        """Whether the step runs on a CPU, where ops are over when they return, on the thread that asked for them."""
        return self.trace.device.startswith("cpu")

    @cached_property
    def sees_all(self) -> bool:
        """Whether everything that reads or writes a value is an op of the step: it is, but for compiled code."""
        return self.on_cpu and not any(op.name == COMPILED_OP for op in self.trace.ops)

    @cached_property
    def own_storages(self) -> frozenset[int]:
        """Storages that an op of PyTorch's own made in this step, and that never become training state."""
        values, ops = self.trace.values, self.trace.ops
        made = {
            value.storage
            for value in values
            if value.version == 0 and 0 <= value.birth < len(ops) and ops[value.birth].name.startswith("aten.")
        }
        return frozenset(made - {value.storage for value in values if value.kind not in _LET_GO})

    @cached_property
    def backward_passes(self) -> tuple[tuple[int, int], ...]:
        """The backward passes of the step: the first op of each, and the first op after it."""
        found: list[tuple[int, int]] = []
        start = 0
        for phase, ops in groupby(self.trace.ops, key=lambda op: op.phase):
            end = start + sum(1 for _ in ops)
            if phase is Phase.BACKWARD:
                found.append((start, end))
            start = end
        return tuple(found)

    def handling_seconds(self, value: int) -> float:
        """What the saved tensors of a value that leaves take of the computation's time, beside its copies."""
        return self.hardware.handling_seconds * self._saves[value]

    @cached_property
    def _saves(self) -> Counter[int]:
        return Counter(item.value for item in self.trace.saved)

    def is_state(self, value: int) -> bool:
        """Whether a value is training state that may leave in a backward pass."""
        return self.trace.values[value].kind in STATE

    @cached_property
    def recipes(self) -> Recipes:
        """How values can be made anew."""
        from outgrow.planning.recipes import Recipes  # recipes read problems

        return Recipes(self)

    def is_saved(self, value: int) -> bool:
        """Whether autograd saves the value."""
        return value in self._saved_values

    @cached_property
    def _saved_values(self) -> frozenset[int]:
        return frozenset(item.value for item in self.trace.saved)

    def is_movable(self, value: int) -> bool:
        """Whether a saved value may leave the device at all."""
        record = self.trace.values[value]
        return not record.kind.lasts and record.nbytes >= self.least_moved_bytes


def reading(function: Callable[[Problem], _Found]) -> Callable[[Problem], _Found]:
    """A function that reads a problem is called once for it; what it finds must not depend on the budget."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def read(problem: Problem) -> _Found:
        known = problem.readings
        if name not in known:
            known[name] = function(problem)
        found: _Found = known[name]
        return found

    return read
