"""Long skips: values that the program still holds and that no op reads for a while, and when they may be away.

U-Net's skips between encoder and decoder, features that a later block concatenates, a gradient that waits in the
engine for its other half. What only saved tensors hold is `Offload`'s matter; a park ends where that begins.

Training state can be away too, inside a backward pass: what vDNN and its kin keep on the device (parameters and
gradients of the layers that are done, the optimizer's state) is what leaves no room for VGG-16's first layers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from outgrow.planning.plan import Park
from outgrow.planning.prefetch import CAUTION
from outgrow.planning.problem import Problem, reading
from outgrow.tracing.ir import Event, Kind

# As for other copies back (`prefetch.py`): a late one stalls the device, an early one holds memory.
_LEAD_SECONDS = 2e-3
# The op that makes the gradient of a linear layer's weight, and how much less than the gradient its sources must be.
_PRODUCT = "aten.mm.default"
_LEAST_GAIN = 0.5
# Their outputs hold what lay in memory, until an op writes to them: or code that the trace does not show.
_BLANK = ("aten.empty", "aten.new_empty", "aten._empty")
# Ops by which processes exchange tensors, and all ops that read and write nothing but what they are given.
_COLLECTIVE = "c10d."
_KNOWN = ("aten.", _COLLECTIVE)


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which the program holds a value and no op reads it.

    `after_op` is the last op before it that does, `before_op` the first after it; or, where the gap `is_last`, the
    op from which on the program holds the value no more. Training state `is_lent`: where no op reads it in the
    backward pass, its gap begins with that pass's first op and ends with the first after it.
    """

    value: int
    nbytes: int
    after_op: int
    before_op: int
    is_last: bool
    is_lent: bool = False


def may_park(problem: Problem, value: int) -> bool:
    """Whether a value may be parked at all: an op of this very step made its storage, or it is training state.

    What else came from outside of the step may share its memory with numpy arrays, other processes or a file. Parks
    are for CPUs: an autograd thread of CUDA's runs the backward pass, where nobody has shown yet that Python's own
    access to tensors is seen, and elsewhere a value is read unseen by whoever has its address.
    """
    if not problem.sees_all:
        return False
    record = problem.trace.values[value]
    if record.nbytes < problem.least_moved_bytes:
        return False
    if record.birth >= 0 and problem.trace.ops[record.birth].name.startswith(_BLANK):
        return False
    return problem.is_state(value) or record.storage in problem.own_storages


@reading
def gaps(problem: Problem) -> tuple[Gap, ...]:
    """All gaps in which a value could be parked, by value and time."""
    trace = problem.trace
    uses = _uses(problem)
    strange = _ops_before_each(problem)
    handed = _handed_to_threads(problem)
    found: list[Gap] = []
    for index, value in enumerate(trace.values):
        if value.birth >= len(trace.ops) or not may_park(problem, index):
            continue
        is_state = problem.is_state(index)
        # What saved tensors alone hold goes by way of the pool; what outlives the step is back when it ends.
        end = value.held if problem.is_saved(index) and not is_state else value.death
        end = min(end, value.death, len(trace.ops) - 1)
        used = {op for op in uses.get(index, ()) if op <= end} | {value.birth}
        spans = [
            Gap(index, value.nbytes, after, before, before not in used)
            for after, before in pairwise(sorted(used | {end}))
        ]
        found += (
            gap
            for gap in (_in_backward_passes(problem, spans) if is_state else spans)
            if gap.before_op - gap.after_op > 1
            and strange[gap.before_op + 1] == strange[gap.after_op]
            and gap.before_op <= handed.get(value.storage, gap.before_op)
        )
    return tuple(found)


def _in_backward_passes(problem: Problem, spans: Iterable[Gap]) -> Iterator[Gap]:
    """What lies of these gaps inside of one backward pass each."""
    last = len(problem.trace.ops) - 1
    for gap in spans:
        for start, end in problem.backward_passes:
            after, before = max(gap.after_op, start), min(gap.before_op, end, last)
            if after < before:
                yield replace(gap, after_op=after, before_op=before, is_last=False, is_lent=True)


def gap_of(problem: Problem, item: Park) -> Gap | None:
    """The gap in which a plan parks a value, None if there is none that begins then."""
    return _gaps_by_tick(problem).get((item.value, item.out_tick))


@reading
def _gaps_by_tick(problem: Problem) -> dict[tuple[int, int], Gap]:
    """All gaps by value and the first tick in them."""
    return {(gap.value, problem.first_tick_at(gap.after_op + 1)): gap for gap in gaps(problem)}


def away(problem: Problem, gap: Gap) -> tuple[int, int] | None:
    """The ops (first, end) during which a parked value can be away; None where the clock has no tick for it."""
    tick = problem.first_tick_at(gap.after_op + 1)
    if tick >= len(problem.trace.ticks):
        return None
    first = problem.tick_ops[tick]
    return (first, gap.before_op) if first < gap.before_op else None


def sources_of_gradient(problem: Problem, value: int) -> tuple[int, ...] | None:
    """What the product read that made a gradient, if it can be made anew from that when the backward pass is over."""
    trace = problem.trace
    record = trace.values[value]
    if record.kind is not Kind.GRADIENT or record.birth < 0 or trace.ops[record.birth].name != _PRODUCT:
        return None
    sources = trace.ops[record.birth].inputs
    written = _last_writes(problem)
    if any(written[trace.values[source].storage] > record.birth for source in sources):
        return None  # one is written over
    return sources


@reading
def _last_writes(problem: Problem) -> dict[int, int]:
    """The last op that writes to each storage."""
    last: dict[int, int] = {}
    for value in problem.trace.values:
        last[value.storage] = max(value.birth, last.get(value.storage, value.birth))
    return last


def _is_remade(problem: Problem, gap: Gap) -> bool:
    """Whether the value of a gap is better made anew than copied: that takes less time, and its sources less room."""
    sources = sources_of_gradient(problem, gap.value)
    if sources is None:
        return False
    trace = problem.trace
    nbytes = sum(trace.values[source].nbytes for source in sources)
    # The measured time has the cost of fresh memory in it.
    seconds = trace.ops[trace.values[gap.value].birth].flops / problem.hardware.flops_per_second
    return nbytes <= _LEAST_GAIN * gap.nbytes and seconds <= problem.hardware.copy_in_seconds(gap.nbytes)


def park(problem: Problem, gap: Gap) -> Park | None:
    """Park a value over a gap: it leaves at once and comes back just in time. None if the clock has no tick there."""
    if away(problem, gap) is None:
        return None
    out = problem.first_tick_at(gap.after_op + 1)
    back = -1
    if not gap.is_last:
        wanted = problem.op_times[gap.before_op] - _LEAD_SECONDS
        back = problem.last_tick_before(wanted - CAUTION * problem.hardware.copy_in_seconds(gap.nbytes))
        back = max(back, out + 1)
        if back >= len(problem.trace.ticks) or problem.tick_ops[back] >= gap.before_op:
            back = -1
    return Park(gap.value, out, back, 0)


def parks_for(problem: Problem, budget_bytes: int) -> tuple[Park, ...]:
    """What must be parked so that each op fits the budget; saved values are taken to be away.

    Training state is parked only where the rest is not enough, but first then: it can be away for longer.
    """
    from outgrow.planning.floor import needed_curve  # the floor reads gaps

    curve = needed_curve(problem)
    if max(curve, default=0) <= budget_bytes:
        return ()
    found = gaps(problem)
    lent = [gap for gap in found if gap.is_lent]
    other = [gap for gap in found if not gap.is_lent]
    chosen = _chosen(problem, curve, other, budget_bytes)
    remade: list[Gap] = []
    if lent and max(_without(problem, curve, chosen)) > budget_bytes:
        dropped = {gap for gap in lent if _is_remade(problem, gap)}
        remade = _chosen(problem, curve, [gap for gap in lent if gap in dropped], budget_bytes)
        curve = _without(problem, curve, remade)
        chosen = _chosen(problem, curve, [gap for gap in lent if gap not in dropped], budget_bytes)
        chosen += _chosen(problem, _without(problem, curve, chosen), other, budget_bytes)
    drops = (replace(item, in_tick=-1, remade=True) for gap in remade if (item := park(problem, gap)) is not None)
    return (*drops, *(item for gap in chosen if (item := park(problem, gap)) is not None))


def _chosen(problem: Problem, curve: Sequence[int], found: Iterable[Gap], budget_bytes: int) -> list[Gap]:
    """Where an op does not fit: the least open gap that makes it fit, but rather several than twice what it takes."""
    starting: dict[int, list[Gap]] = {}
    for gap in found:
        span = away(problem, gap)
        if span is not None:
            starting.setdefault(span[0], []).append(gap)
    chosen: list[Gap] = []
    idle: list[Gap] = []  # gaps that are open, by size
    change = [0] * (len(curve) + 1)
    gone = 0
    for now, level in enumerate(curve):
        gone += change[now]
        for gap in starting.get(now, ()):
            insort(idle, gap, key=_size)
        if level - gone <= budget_bytes:
            continue
        idle = [gap for gap in idle if gap.before_op > now]
        while level - gone > budget_bytes and idle:
            excess = level - gone - budget_bytes
            enough = bisect_left(idle, excess, key=_size)
            fits = enough == 0 or (enough < len(idle) and idle[enough].nbytes <= 2 * excess)
            gap = idle.pop(enough if fits else enough - 1)
            chosen.append(gap)
            gone += gap.nbytes
            change[gap.before_op] -= gap.nbytes
    return chosen


def _size(gap: Gap) -> int:
    return gap.nbytes


def _without(problem: Problem, curve: Sequence[int], chosen: Iterable[Gap]) -> list[int]:
    """The curve when these are parked."""
    change = [0] * (len(curve) + 1)
    for gap in chosen:
        span = away(problem, gap)
        assert span is not None, "only what can be away is chosen"
        change[span[0]] -= gap.nbytes
        change[span[1]] += gap.nbytes
    return [level + less for level, less in zip(curve, accumulate(change[:-1]), strict=True)]


def _uses(problem: Problem) -> dict[int, list[int]]:
    """The ops at which each value must be there: those that read or write it, or that run in functions which may, and
    the ticks that show its memory."""
    trace = problem.trace
    uses: dict[int, list[int]] = {}
    for now, op in enumerate(trace.ops):
        for index in (*op.inputs, *op.outputs, *op.given):
            uses.setdefault(index, []).append(now)
    touched = {index: set(ops) for index, ops in uses.items()}
    for tick in trace.ticks:
        index = trace.saved[tick.saved].value
        # An op's result is saved when the op is over: the tick is the next op's, the use is this one's.
        if tick.event is Event.UNPACK or tick.op - 1 not in touched.get(index, ()):
            uses.setdefault(index, []).append(tick.op)
    return uses


def _handed_to_threads(problem: Problem) -> dict[int, int]:
    """The first op that hands each storage to threads which send it elsewhere, and may write to it unseen later."""
    trace = problem.trace
    first: dict[int, int] = {}
    for now, op in enumerate(trace.ops):
        if op.name.startswith(_COLLECTIVE):
            for index in (*op.inputs, *op.outputs):
                first.setdefault(trace.values[index].storage, now)
    return first


def _ops_before_each(problem: Problem) -> list[int]:
    """How many ops before each one are strange: code runs there that the dispatcher does not see, or might.

    Ops of other libraries; those on tensors that do not show all of their memory; and those whose blank memory no op
    is seen to fill, so that somebody else does.
    """
    trace = problem.trace
    filled = {value.storage for value in trace.values if value.version > 0}
    strange = [op.opaque or not op.name.startswith(_KNOWN) for op in trace.ops]
    for value in trace.values:
        if value.birth >= 0 and value.version == 0 and value.nbytes > 0 and value.storage not in filled:
            name = trace.ops[value.birth].name if value.birth < len(trace.ops) else ""
            if name.startswith(_BLANK):
                strange[value.birth] = True
    return list(accumulate(strange, initial=0))
