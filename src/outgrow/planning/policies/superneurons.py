"""SuperNeurons (Wang et al., PPoPP 2018): liveness, a tensor pool with prefetch, and cost-aware recomputation.

Liveness analysis (section 3.2) is what every plan here starts from: a value that nobody wants any more is gone. What
expensive layers make, and what joins and forks of the network need, are *checkpoints*: they leave in the forward pass
and are fetched ahead in the backward pass (section 3.3). The cheap values between two checkpoints are a *segment*:
they are dropped, and made anew from the checkpoint before them (section 3.4).

Where the whole step fits, the tensor cache (section 3.3.2) moves nothing, and nothing needs to be made anew.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace

from outgrow.planning.plan import Offload, Plan, Recompute, Replay, make_plan
from outgrow.planning.prefetch import dropped_early, may_be_dropped
from outgrow.planning.problem import Candidate, Problem
from outgrow.tracing.ir import Event, Kind, Op, Phase

# Parts of the names of what computes for long: convolutions, fully connected layers, attention, recurrence.
_EXPENSIVE_OPS = ("convolution", "mm.", "matmul.", "linear.", "attention", "lstm", "gru", "rnn")
_EXPENSIVE_NODES = ("Convolution", "mmBackward", "MmBackward", "LinearBackward", "Attention", "Lstm", "Gru", "Rnn")
_JOINS = ("aten.add.", "aten.add_.", "aten.sub.", "aten.sub_.", "aten.cat.", "aten.stack.")
_STATE = frozenset({Kind.PARAMETER, Kind.BUFFER, Kind.OPTIMIZER, Kind.GRADIENT, Kind.SHARED})


class SuperNeurons:
    """Checkpoints leave and are prefetched; the cheap values between them are made anew."""

    name = "superneurons"

    def plan(self, problem: Problem) -> Plan:
        cached = make_plan(self.name, problem, ())
        prediction = cached.simulate()
        if prediction.feasible and prediction.evicted_bytes == 0:
            return cached
        kept_whole = checkpoints(problem)
        dropped = [
            item
            for item in problem.candidates
            if item.value not in kept_whole
            and problem.recipes.find(item.value) is not None
            and may_be_dropped(problem, item)
        ]
        leaving = [item for item in problem.candidates if item.value in kept_whole]
        recomputes = _with_replay(problem, dropped_early(problem, dropped), kept_whole)
        return make_plan(self.name, problem, _prefetched(problem, leaving, dropped), recomputes)


def checkpoints(problem: Problem) -> frozenset[int]:
    """The values that are not made anew (section 3.4): inputs, what expensive ops made, joins and forks.

    An expensive op's own output may never be saved: what a cheap op made straight from it (an activation in place)
    stands for it, as making that anew would run the expensive op again.
    """
    trace = problem.trace
    readers: dict[int, int] = {}
    for op in trace.ops:
        if op.phase is Phase.FORWARD and op.outputs:  # a view reads nothing
            for index in op.inputs:
                readers[index] = readers.get(index, 0) + 1
    found: set[int] = set()
    for item in problem.candidates:
        birth = trace.values[item.value].birth
        is_fork = readers.get(item.value, 0) > 1
        if birth < 0 or is_fork or _is_join(problem, trace.ops[birth]) or _costs_much(problem, item.value):
            found.add(item.value)
    return frozenset(found)


def is_expensive(op: Op) -> bool:
    """Whether an op is one of a layer that computes for long."""
    return any(part in op.name for part in _EXPENSIVE_OPS)


def largest_layer_bytes(problem: Problem) -> int:
    """l_peak (section 3.4): the most that one layer has in hand, in bytes; what it reads, makes and works in."""
    trace = problem.trace
    return max(
        (
            sum(trace.values[index].nbytes for index in {*op.inputs, *op.outputs}) + op.workspace_bytes
            for op in trace.ops
            if op.phase is not Phase.UPDATE
        ),
        default=0,
    )


def _costs_much(problem: Problem, value: int) -> bool:
    """Whether making a value, or making it anew, runs an expensive op."""
    recipe = problem.recipes.find(value)
    numbers = (problem.trace.values[value].birth,) if recipe is None else recipe.ops
    return any(is_expensive(problem.trace.ops[number]) for number in numbers)


def _is_join(problem: Problem, op: Op) -> bool:
    made = [index for index in op.inputs if problem.trace.values[index].kind not in _STATE]
    return len(made) > 1 and op.name.startswith(_JOINS)


def _with_replay(problem: Problem, dropped: Sequence[Recompute], kept_whole: Iterable[int]) -> tuple[Recompute, ...]:
    """Cost-aware recomputation (section 3.4): keep a segment that was made anew if all of it fits under l_peak.

    Such a segment costs each of its ops once (speed-centric) and does not lift the peak, which is l_peak at best.
    A larger one is made anew value by value (memory-centric).
    """
    most = largest_layer_bytes(problem)
    values = problem.trace.values
    births = sorted(values[value].birth for value in kept_whole)
    segments: dict[int, list[Recompute]] = {}
    for item in dropped:
        # Values between the same two checkpoints, in the order in which they were made.
        segments.setdefault(bisect_left(births, values[item.value].birth), []).append(item)
    found: list[Recompute] = []
    for segment in segments.values():
        fits = sum(values[item.value].nbytes for item in segment) <= most
        found += [replace(item, replay=Replay.SPEED if fits else Replay.MEMORY) for item in segment]
    return tuple(found)


def _prefetched(problem: Problem, leaving: Sequence[Candidate], dropped: Sequence[Candidate]) -> tuple[Offload, ...]:
    """Copies out start when a value was saved; copies back when the expensive layer before their use starts.

    Section 3.3.1: at each convolution the pool fetches what the next one (the one before it in the network) and the
    layers between the two will need, so that the copy has an expensive layer to hide behind.
    """
    wanted = _wanted_at(problem, leaving, dropped)
    starts = _expensive_layers(problem)
    found: list[Offload] = []
    for item in leaving:
        position = bisect_left(starts, wanted[item.value]) - 1
        start = starts[position] if position >= 0 else -1
        in_tick = start if start > item.last_pack else -1
        found.append(Offload(item.value, out_tick=item.last_pack, release_tick=-1, in_tick=in_tick, offset=0))
    return tuple(found)


def _wanted_at(problem: Problem, leaving: Sequence[Candidate], dropped: Sequence[Candidate]) -> dict[int, int]:
    """The tick at which each value is first wanted: by a backward op, or by a recipe for one."""
    values = problem.trace.values
    wanted = {item.value: item.first_unpack for item in (*leaving, *dropped)}
    # Recipes start from what was made before: going back in time, a value's own readers come before it.
    for item in sorted(dropped, key=lambda item: -values[item.value].birth):
        recipe = problem.recipes.find(item.value)
        for source in () if recipe is None else recipe.sources:
            if source in wanted:
                wanted[source] = min(wanted[source], wanted[item.value])
    return wanted


def _expensive_layers(problem: Problem) -> list[int]:
    """The ticks at which the backward passes of expensive layers start, in order."""
    trace = problem.trace
    found: list[int] = []
    last: tuple[int, str] | None = None
    for number, tick in enumerate(trace.ticks):
        if tick.event is not Event.UNPACK:
            continue
        node = trace.saved[tick.saved].node
        if (tick.op, node) != last and any(part in node for part in _EXPENSIVE_NODES):
            found.append(number)
        last = (tick.op, node)
    return found
