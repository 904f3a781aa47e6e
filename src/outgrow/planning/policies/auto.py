"""The default policy: plain PyTorch when it fits, else the fastest plan that the simulator finds.

A linear program says which share of each value to keep, offload and make anew (`planning/relaxation.py`). Hardly any
share comes out broken. Its answer is rounded, and copies back are put in turn, where there is room for them
(`planning/returns.py`). The plans of the other policies are tried too, so that none of them is ever faster. Where the
device would still wait, a local search (`planning/refine.py`) looks for small changes that help.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random

from outgrow.planning.absences import beside_parks
from outgrow.planning.floor import least_budget
from outgrow.planning.levels import levels_where_nothing_moves
from outgrow.planning.parks import parks_for
from outgrow.planning.plan import Plan, make_plan
from outgrow.planning.policies.accudnn import AccUDNN
from outgrow.planning.policies.cache import Keep, Lru
from outgrow.planning.policies.checkpoint import Checkpoint
from outgrow.planning.policies.layrub import Layrub
from outgrow.planning.policies.superneurons import SuperNeurons
from outgrow.planning.policies.vdnn import VdnnAll, VdnnConv, VdnnDyn
from outgrow.planning.prefetch import CAUTION, dropped_early, may_be_dropped, with_prefetch
from outgrow.planning.problem import Candidate, Problem
from outgrow.planning.refine import Refusals, refined
from outgrow.planning.relaxation import Relaxation, Shares
from outgrow.planning.returns import in_turn
from outgrow.planning.reuse import reusable_ops

# A plan as near as this to the optimum of its program is good enough: no other program is tried.
_NEAR = 1.003
# Parks are costly: only what would not fit into such a share of the budget otherwise is parked. Where there are any,
# the other shares are tried as well: more parks leave copies more room.
_PARKED_SHARES = (0.97, 0.94, 0.9)
# Where the device waits for more than this share of the step, other orders of copies back are tried.
_LEAST_STALL = 0.002
# Where the device waits for more than this share of the step, or the step is further than that from the optimum of
# any program, the local search has a try: so many changes in a round, or fewer for long traces, by their ops. It goes
# on with the last plan while a round makes the step shorter by such a share.
_REFINED_STALL, _GOOD = 0.01, 1.01
_CHANGES, _CHANGES_ALL = 240, 400_000
_REFINED_GAIN = 1e-3
# A share below this is a rounding error of the solver's.
_LEAST_SHARE = 0.01
# How long a trace may be, for one more program, one more choice of parks, and one more simulation of a plan that
# moves less: ops in all.
_TRIED_OPS = 8_000
_FRAMED_OPS = 4_000
_SIMULATED_OPS = 40_000


class Auto:
    """Keep when it fits, else the best plan found."""

    name = "auto"

    def __init__(self, *, refines: bool = True) -> None:
        """Whether it `refines` what it found by the local search, which may take most of the time."""
        self._refines = refines

    def plan(self, problem: Problem) -> Plan:
        return _without_idle_reuses(self._found(problem))

    def _found(self, problem: Problem) -> Plan:
        keep = Keep().plan(problem)
        if keep.simulate().feasible:
            return _own(keep)
        if least_budget(problem).bytes > problem.budget_bytes:  # no plan fits: nothing to search for
            return _own(Lru().plan(problem))
        frame, *roomier = _frames(problem)
        if not frame.parks and frame.simulate().feasible:  # reuse is enough
            return _own(frame)
        others = (Lru(), VdnnConv(), VdnnAll(), VdnnDyn(), SuperNeurons(), Layrub(), AccUDNN(), Checkpoint())
        programs = list(chain.from_iterable(map(_programs, (frame, *roomier))))
        programmed = [program.plan for program in programs]
        best = min([*programmed, *(policy.plan(problem) for policy in others)], key=_rank)
        if not self._refines:
            return _own(best)
        starts = [best, *(plan for plan in programmed if plan is not best)]
        return _refined([_own(plan) for plan in starts], min(program.optimum_seconds for program in programs))


def _frames(problem: Problem) -> list[Plan]:
    """What plans of the program have in common: gradients reuse memory, and what must be parked is parked.

    The first parks least, and is the only one where there are no parks or the trace is long.
    """
    reuses = reusable_ops(problem)
    frames: list[Plan] = []
    for share in _PARKED_SHARES:
        parks = parks_for(problem, int(problem.budget_bytes * share))
        frames.append(make_plan("auto", problem, (), parks=parks, reuses=reuses, evicts=False))
        if not parks or len(problem.trace.ops) * len(frames) > _FRAMED_OPS:
            break
    return frames


def _refined(starts: Sequence[Plan], optimum_seconds: float) -> Plan:
    """The best plan near any of these, the first of which is the best so far: which one is shows only on the way.

    By successive halving: Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter
    optimization" (2016).
    """
    plans = [plan for plan in starts if plan.simulate().feasible] or list(starts[:1])
    changes = min(_CHANGES, _CHANGES_ALL // max(1, len(plans[0].problem.trace.ops)))
    shuffled, refusals = None, Refusals()
    while plans[0].simulate().feasible and not _is_good(plans[0], optimum_seconds):
        before = plans[0].simulate().step_seconds
        tries = max(1, changes // len(plans))
        was_last = len(plans) == 1
        plans = sorted((refined(plan, tries, shuffled, refusals) for plan in plans), key=_rank)
        if was_last and plans[0].simulate().step_seconds > (1 - _REFINED_GAIN) * before:
            break
        plans = plans[: (len(plans) + 1) // 2]
        shuffled = Random(0)
    return plans[0]


def _is_good(plan: Plan, optimum_seconds: float) -> bool:
    prediction = plan.simulate()
    is_near = prediction.step_seconds <= _GOOD * optimum_seconds
    return is_near and prediction.stall_seconds < _REFINED_STALL * prediction.step_seconds


@dataclass(frozen=True)
class _Program:
    """A plan that the linear program gives, and the step's time at the program's own optimum, in seconds."""

    plan: Plan
    optimum_seconds: float


def _programs(frame: Plan) -> Iterator[_Program]:
    """With chains of recipes, which help as a whole only, and without."""
    problem = frame.problem
    levels = levels_where_nothing_moves(frame).tolist()
    absences = beside_parks(problem, frame.parks)
    known: dict[_Choice, Plan] = {}
    shares: Shares | None = None
    for chains in (True, False)[: max(1, _TRIED_OPS // max(1, len(problem.trace.ops)))]:
        if shares is None or shares.has_chains:  # else the second program has the same answer
            shares = Relaxation(problem, levels, absences, chains=chains).solve()
        choice = _rounded(problem, shares)
        if choice not in known:
            known[choice] = _with_less(frame, choice, choice.plan(frame))
        # A plan of its own, which counts as one more to start from, as it would without the other program.
        found = _Program(known[choice].renamed("auto"), problem.op_times[-1] + shares.seconds)
        yield found
        prediction = found.plan.simulate()
        if not frame.parks and prediction.feasible and prediction.step_seconds <= _NEAR * found.optimum_seconds:
            break


@dataclass(frozen=True)
class _Choice:
    """What moves: values that are offloaded, and that are dropped; and those of both that move in part so far."""

    offloaded: tuple[Candidate, ...]
    dropped: tuple[Candidate, ...]
    in_part: tuple[Candidate, ...]

    def plan(self, frame: Plan) -> Plan:
        """Copies back in turn; or in the order in which they are wanted, where the device would wait less."""
        usual, hasty = (self._in_order(frame, caution) for caution in (CAUTION, 1.0))
        plan = in_turn(usual)
        prediction = plan.simulate()
        if prediction.feasible and prediction.stall_seconds <= _LEAST_STALL * prediction.step_seconds:
            return plan
        return min((plan, usual, hasty), key=_rank)

    def _in_order(self, frame: Plan, caution: float) -> Plan:
        problem = frame.problem
        copies = with_prefetch(problem, self.offloaded, self.dropped, caution=caution)
        drops = dropped_early(problem, self.dropped)
        return make_plan("auto", problem, copies, drops, parks=frame.parks, reuses=frame.reuses)

    def without(self, item: Candidate) -> _Choice:
        return _Choice(
            tuple(other for other in self.offloaded if other is not item),
            tuple(other for other in self.dropped if other is not item),
            self.in_part,
        )


def _rounded(problem: Problem, shares: Shares) -> _Choice:
    """What the program moves in part moves as a whole, and what comes back together moves in one way."""
    offloaded: list[Candidate] = []
    dropped: list[Candidate] = []
    in_part: list[Candidate] = []
    anew_bytes: dict[tuple[int, ...], float] = {}  # less those that are copied
    for item in problem.candidates:
        out, anew = shares.offloaded.get(item.value, 0.0), shares.recomputed.get(item.value, 0.0)
        together = problem.recipes.together(item.value)
        anew_bytes[together] = anew_bytes.get(together, 0.0) + (anew - out) * item.nbytes
    for item in problem.candidates:
        out, anew = shares.offloaded.get(item.value, 0.0), shares.recomputed.get(item.value, 0.0)
        if out + anew < _LEAST_SHARE:
            continue
        is_dropped = anew_bytes[problem.recipes.together(item.value)] > 0 and may_be_dropped(problem, item)
        (dropped if is_dropped else offloaded).append(item)
        if out + anew < 1 - _LEAST_SHARE:
            in_part.append(item)
    return _Choice(tuple(offloaded), tuple(dropped), tuple(sorted(in_part, key=lambda item: -item.nbytes)))


def _with_less(frame: Plan, choice: _Choice, plan: Plan) -> Plan:
    """Values that the program moved in part may stay, where the rest still fits and the step is faster."""
    for item in choice.in_part[: _SIMULATED_OPS // max(1, len(frame.problem.trace.ops))]:
        less = choice.without(item)
        candidate = less.plan(frame)
        if _rank(candidate) < _rank(plan):
            choice, plan = less, candidate
    return plan


def _rank(plan: Plan) -> tuple[bool, float, int]:
    """Plans that fit come first, then fast ones, then those that copy least."""
    prediction = plan.simulate()
    time = prediction.step_seconds if prediction.feasible else float(prediction.peak_bytes)
    return (not prediction.feasible, time, prediction.offloaded_bytes + prediction.evicted_bytes)


def _without_idle_reuses(plan: Plan) -> Plan:
    """The same but for ops that write over their input where there is room for both, and little is saved by it.

    Each is handled by itself, which takes the thread that trains longer than to fill a small result.
    """
    problem = plan.problem
    hardware, curve = problem.hardware, plan.simulate().curve
    worth_bytes = hardware.handling_seconds * hardware.memory_bandwidth

    def is_idle(op: int) -> bool:
        nbytes = problem.trace.values[problem.trace.ops[op].outputs[0]].nbytes
        return nbytes < worth_bytes and curve[op] + nbytes <= problem.budget_bytes

    reuses = tuple(op for op in plan.reuses if not is_idle(op))
    if reuses == plan.reuses:
        return plan
    leaner = replace(plan, reuses=reuses)
    return leaner if _rank(leaner) <= _rank(plan) else plan


def _own(plan: Plan) -> Plan:
    return plan.renamed("auto") if plan.evicts else replace(plan, policy="auto", evicts=True)
