"""What a plan will cost: peak, time, what the device waits for. Every policy and the session rely on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from outgrow.cost.workspaces import Choice
from outgrow.planning.plan import Plan
from outgrow.planning.timeline import Recording, Timeline
from outgrow.planning.walk import Wait, Walk
from outgrow.tracing.liveness import average

# On a CPU a thread makes the copies. It needs the interpreter's lock to begin one and to say that it is done, and
# gets it between ops, or after 5 ms: where ops are short, memory was seen to be held for 1 ms longer.
_LOCK_SECONDS = 1e-3


@dataclass(frozen=True)
class Prediction:
    """What a step under a plan is predicted to be. Times in seconds, sizes in bytes.

    `feasible` says that live bytes stay within the budget at every op; `evicted_bytes` is what the cache had to
    send away beyond the plan, and `evicted` the numbers of those values; `curve` has the live bytes at the worst
    moment of each op, and `waits` what `stall_seconds` is made of.
    """

    peak_bytes: int
    peak_op: int
    step_seconds: float
    plain_step_seconds: float
    stall_seconds: float
    recompute_seconds: float
    average_bytes: float
    offloaded_bytes: int
    recomputed_bytes: int
    evicted_bytes: int
    feasible: bool
    evicted: tuple[int, ...] = field(repr=False)
    curve: tuple[int, ...] = field(repr=False)
    waits: tuple[Wait, ...] = field(repr=False)


def simulate(plan: Plan) -> Prediction:
    """Predict a step under `plan` on the plan's device."""
    walk = Walk(plan)
    walk.run()
    return _prediction(plan, walk)


def simulate_within(plan: Plan, seconds: float) -> Prediction | None:
    """The same; None, and that sooner, where the step does not fit the budget or takes longer than `seconds`."""
    walk = Walk(plan)
    return _prediction(plan, walk) if walk.run(seconds, must_fit=True) and walk.time <= seconds else None


def _prediction(plan: Plan, walk: Walk) -> Prediction:
    peak_op = walk.curve.index(max(walk.curve)) if walk.curve else 0
    peak = walk.curve[peak_op] if walk.curve else plan.problem.base_bytes
    return Prediction(
        peak_bytes=peak,
        peak_op=peak_op,
        step_seconds=walk.time,
        plain_step_seconds=(
            plan.problem.op_times[-1] if plan.problem.plain_seconds is None else plan.problem.plain_seconds
        ),
        stall_seconds=walk.stall,
        recompute_seconds=walk.recompute,
        average_bytes=average(walk.curve, plan.problem.trace) if walk.curve else float(peak),
        offloaded_bytes=walk.offloaded_bytes,
        recomputed_bytes=walk.recomputed_bytes,
        evicted_bytes=walk.evicted_bytes,
        feasible=peak <= plan.problem.budget_bytes,
        evicted=tuple(sorted(walk.evicted)),
        curve=tuple(walk.curve),
        waits=tuple(walk.waits),
    )


def peak_if_late(plan: Plan) -> int:
    """The highest live bytes of a step, in bytes, even where each copy waits for the interpreter's lock.

    Never less than the prediction's own peak, and hardly ever more: only where hardly any op runs between a copy and
    the moment with the least room. Waits for room keep such a step within the budget, too.
    """
    peak = plan.simulate().peak_bytes
    if not plan.problem.on_cpu or not (plan.offloads or plan.parks):
        return peak
    late = Walk(plan, late_seconds=_LOCK_SECONDS)
    late.run()
    return max(peak, *late.curve)


def landings(plan: Plan) -> dict[int, int]:
    """For each value that leaves, the first tick at which its copy out is predicted to be done.

    That is the number of ticks where it is done after all of them.
    """
    walk = Walk(plan)
    walk.run()
    return walk.landed_at


def taken_ways(plan: Plan) -> tuple[Choice, ...]:
    """How each op runs where the problem has `ways`: the fastest whose workspace is free at that moment."""
    walk = Walk(plan)
    walk.run()
    return tuple(walk.taken)


def timeline(plan: Plan) -> Timeline:
    """The same step as `simulate`'s, span by span."""
    recording = Recording()
    Walk(plan, recording).run()
    return recording.finish()
