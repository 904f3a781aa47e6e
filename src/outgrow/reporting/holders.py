"""What holds live bytes at one moment of a plain or of a planned step: kinds, and values by size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from outgrow.planning.parks import may_park
from outgrow.planning.plan import Plan
from outgrow.planning.problem import Problem
from outgrow.planning.reuse import overwritten
from outgrow.planning.timeline import Activity, Timeline
from outgrow.tracing.ir import Kind, Trace

_NAMES: Mapping[Kind, str] = {
    Kind.PARAMETER: "parameters",
    Kind.BUFFER: "buffers",
    Kind.GRADIENT: "gradients",
    Kind.OPTIMIZER: "optimizer state",
    Kind.SHARED: "shared state",
    Kind.INPUT: "inputs",
    Kind.ACTIVATION: "saved values",
    Kind.TEMPORARY: "temporaries",
}
WORKSPACE = "workspace of the op"
ANEW = "for making values anew"
OUTSIDE = "outside of the trace"
# The order in which the parts of a peak are shown: what stays for good first.
ORDER = (*_NAMES.values(), WORKSPACE, ANEW, OUTSIDE)


@dataclass(frozen=True)
class Holding:
    """What holds live bytes: bytes by kind, which add up to all of them, and the values, largest first."""

    kinds: dict[str, int]
    values: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(self.kinds.values())


def held_in_plain_step(problem: Problem, op: int) -> Holding:
    """What is alive while an op of the plain step runs."""
    trace = problem.trace
    present = [index for index, value in enumerate(trace.values) if value.birth <= op < value.death]
    workspace = trace.ops[op].workspace_bytes if trace.ops else 0
    return _holding(trace, present, {WORKSPACE: workspace, OUTSIDE: problem.base_bytes})


def held_in_plan(plan: Plan, timeline: Timeline, number: int) -> Holding:
    """What is alive during one span of the compute lane of a plan's timeline."""
    problem, trace = plan.problem, plan.problem.trace
    if not timeline.compute:
        return _holding(trace, range(len(trace.values)), {OUTSIDE: problem.base_bytes})
    span = timeline.compute[number]
    runs = span.activity is Activity.RUN
    away = timeline.away_at(number)
    # A step may come back to an op that is long over, to run it again: what was born since then is there too.
    now = _op_in_line(timeline, number)
    born = now if runs else now - 1
    # These go when the simulator says, which may be after they died: a copy in flight holds memory.
    tracked = {saved.value for saved in trace.saved}
    tracked |= {item.value for item in plan.parks if may_park(problem, item.value)}
    written_over = overwritten(problem, now) if runs and now in plan.reuses else None
    if written_over in tracked:
        written_over = None
    present = [
        index
        for index, value in enumerate(trace.values)
        if value.birth <= born
        and index != written_over
        and (index not in away if index in tracked else now < value.death)
    ]
    rest = {WORKSPACE: trace.ops[now].workspace_bytes if runs else 0, OUTSIDE: problem.base_bytes}
    holding = _holding(trace, present, rest)
    anew = span.live_bytes - holding.bytes
    return Holding(_in_order(holding.kinds | {ANEW: anew}), holding.values) if anew > 0 else holding


def _op_in_line(timeline: Timeline, number: int) -> int:
    """The op that runs or would run next if it were not for a burst of recompute."""
    for span in timeline.compute[number:]:
        if span.activity is not Activity.RECOMPUTE:
            return span.op
    return timeline.compute[-1].op + 1


def _holding(trace: Trace, present: Iterable[int], rest: Mapping[str, int]) -> Holding:
    kinds: dict[str, int] = dict(rest)
    values = list(present)
    for index in values:
        name = _NAMES[trace.values[index].kind]
        kinds[name] = kinds.get(name, 0) + trace.values[index].nbytes
    values.sort(key=lambda index: -trace.values[index].nbytes)
    return Holding(_in_order(kinds), tuple(values))


def _in_order(kinds: Mapping[str, int]) -> dict[str, int]:
    return {name: kinds[name] for name in ORDER if kinds.get(name)}
