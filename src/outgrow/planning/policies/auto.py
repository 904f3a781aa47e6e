"""The default policy: plain PyTorch when it fits, else the fastest plan that the simulator finds.

A linear program says which share of each value to keep, offload and make anew (`planning/relaxation.py`). Hardly any
share comes out broken. Its answer is rounded, simulated, and where the plan holds more than the program thought (a
copy is late, a burst of recompute needs room) the budget of those ops is made smaller and the program solved again.
The plans of the other policies are tried too, so that none of them is ever faster. Where the device would still wait,
a local search (`planning/refine.py`) looks for small changes that help.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random

from outgrow.planning.absences import before_first_uses
from outgrow.planning.floor import least_budget
from outgrow.planning.parks import parks_for
from outgrow.planning.plan import Plan, make_plan
from outgrow.planning.policies.accudnn import AccUDNN
from outgrow.planning.policies.cache import Keep, Lru
from outgrow.planning.policies.checkpoint import Checkpoint
from outgrow.planning.policies.layrub import Layrub
from outgrow.planning.policies.superneurons import SuperNeurons
from outgrow.planning.policies.vdnn import VdnnAll, VdnnConv, VdnnDyn
from outgrow.planning.prefetch import CAUTION, dropped_early, with_prefetch
from outgrow.planning.problem import Candidate, Problem
from outgrow.planning.refine import refined
from outgrow.planning.relaxation import Relaxation, Shares
from outgrow.planning.reuse import reusable_ops

_CORRECTIONS = 3
# Shares of the budget that programs are solved for, until a plan is as near as this to the first one's optimum.
_BUDGET_SHARES = (1.0, 0.97, 0.94)
_NEAR = 1.003
# Parks are costly: only what would not fit into such a share of the budget otherwise is parked. Where there are any,
# the other shares are tried as well: more parks leave copies more room.
_PARKED_SHARES = (0.97, 0.94, 0.9)
# Rounds of moving copies back behind the ops that have no room for them.
_DELAYS = 3
_BOUNDLESS = 1 << 62  # bytes
# Where the device waits for more than this share of the step, copies back are planned without caution as well.
_LEAST_STALL = 0.002
# From this share of the step on the local search has a try, with so many simulations in all: fewer for long traces,
# by their ops.
_REFINED_STALL = 0.01
_SIMULATIONS, _SIMULATED_ALL = 3_000, 4_000_000
# Of the plans that it has improved, one in so many is improved further.
_REFINED_FURTHER = 4
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

    def plan(self, problem: Problem) -> Plan:
        keep = Keep().plan(problem)
        if keep.simulate().feasible:
            return _own(keep)
        if least_budget(problem).bytes > problem.budget_bytes:  # no plan fits: nothing to search for
            return _own(Lru().plan(problem))
        frame, *roomier = _frames(problem)
        if not frame.parks and frame.simulate().feasible:  # reuse is enough, and costs nothing
            return _own(frame)
        others = (Lru(), VdnnConv(), VdnnAll(), VdnnDyn(), SuperNeurons(), Layrub(), AccUDNN(), Checkpoint())
        programmed = list(chain.from_iterable(map(_programmed, (frame, *roomier))))
        best = min([*programmed, *(policy.plan(problem) for policy in others)], key=_rank)
        prediction = best.simulate()
        if not prediction.feasible or prediction.stall_seconds < _REFINED_STALL * prediction.step_seconds:
            return _own(best)
        return _refined([best, *(plan for plan in programmed if plan is not best)])


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


def _refined(starts: Sequence[Plan]) -> Plan:
    """The best plan near any of these: which start is the best shows only on the way.

    By successive halving, with the best quarter in place of the best half: Jamieson and Talwalkar, "Non-stochastic
    best arm identification and hyperparameter optimization" (2016).
    """
    plans = sorted((_own(plan) for plan in starts if plan.simulate().feasible), key=_rank)
    left = [len(plans)]
    while left[-1] > 1:
        left.append(max(1, left[-1] // _REFINED_FURTHER))
    simulations = min(_SIMULATIONS, _SIMULATED_ALL // max(1, len(plans[0].problem.trace.ops))) // len(left)
    shuffled = None
    for count in left:
        tries = max(1, simulations // count)
        plans = sorted((refined(plan, _rank, tries, shuffled) for plan in plans[:count]), key=_rank)
        shuffled = Random(0)
    return plans[0]


def _programmed(frame: Plan) -> list[Plan]:
    """Plans that the linear program gives.

    Where whole values and late copies keep it far from the program's optimum, programs without chains of recipes and
    with a little less memory are tried: what fits them fits the problem.
    """
    problem = frame.problem
    curve = _boundless(frame).simulate().curve
    absences = before_first_uses(problem)
    free, chainless = (Relaxation(problem, curve, absences, chains=chains) for chains in (True, False))
    goal = problem.op_times[-1] + free.solve().seconds
    trials = [(free, 1.0), *((chainless, share) for share in _BUDGET_SHARES)]
    plans: list[Plan] = []
    for relaxation, share in trials[: max(1, _TRIED_OPS // max(1, len(problem.trace.ops)))]:
        plan = _corrected(frame, relaxation, share)
        plans.append(plan)
        if plan.simulate().feasible and plan.simulate().step_seconds <= goal * _NEAR:
            break
    return plans


def _corrected(frame: Plan, relaxation: Relaxation, share: float) -> Plan:
    """Solve, round, simulate, and solve again with less room where the plan held too much."""
    problem = frame.problem
    budgets = [share * problem.budget_bytes] * max(1, len(problem.trace.ops))
    tried: list[tuple[_Choice, Plan]] = []
    for _ in range(1 + _CORRECTIONS):
        choice = _rounded(problem, relaxation.solve(budgets))
        plan = choice.plan(frame)
        excess = _excess(plan)
        tried += [(choice, plan), (choice, _late_enough(plan, excess))]
        if plan.simulate().stall_seconds > _LEAST_STALL * problem.op_times[-1]:
            hasty = replace(choice, caution=1.0)
            plan = hasty.plan(frame)
            excess = _excess(plan)
            tried += [(hasty, plan), (hasty, _late_enough(plan, excess))]
        if not any(excess):
            break
        budgets = [limit - over for limit, over in zip(budgets, excess, strict=True)]
    return _with_less(frame, *min(tried, key=lambda pair: _rank(pair[1])))


def _late_enough(plan: Plan, excess: Sequence[int]) -> Plan:
    """The plan with copies back that start only after the ops that have no room for them."""
    problem = plan.problem
    for _ in range(_DELAYS):
        if not any(excess):
            break
        wanted = {item.value: problem.tick_ops[item.first_unpack] for item in problem.candidates}
        starts = {item.value: item.in_tick for item in plan.offloads if item.in_tick >= 0}
        for op, over in enumerate(excess):
            if over <= 0:
                continue
            # Those that are wanted last have the most time left to come later.
            for value in sorted(starts, key=lambda value: -wanted[value]):
                if over > 0 and problem.tick_ops[starts[value]] <= op < wanted[value]:
                    starts[value] = problem.first_tick_at(op + 1)
                    over -= problem.trace.values[value].nbytes
        last = len(problem.trace.ticks) - 1
        plan = replace(
            plan,
            offloads=tuple(
                replace(item, in_tick=min(starts[item.value], last)) if item.value in starts else item
                for item in plan.offloads
            ),
        )
        excess = _excess(plan)
    return plan


def _excess(plan: Plan) -> list[int]:
    """Bytes over the budget at each op if every copy started when the plan says, whether there is room or not."""
    return [max(0, level - plan.budget_bytes) for level in _boundless(plan).simulate().curve]


def _boundless(plan: Plan) -> Plan:
    return replace(plan, problem=plan.problem.with_budget(_BOUNDLESS), evicts=False)


@dataclass(frozen=True)
class _Choice:
    """What moves: values that are offloaded, and that are dropped; and those of both that move in part so far.

    `caution` is how much slower copies back are taken to be than the device's profile says.
    """

    offloaded: tuple[Candidate, ...]
    dropped: tuple[Candidate, ...]
    in_part: tuple[Candidate, ...]
    caution: float = CAUTION

    def plan(self, frame: Plan) -> Plan:
        problem = frame.problem
        copies = with_prefetch(problem, self.offloaded, self.dropped, caution=self.caution)
        drops = dropped_early(problem, self.dropped)
        return make_plan("auto", problem, copies, drops, parks=frame.parks, reuses=frame.reuses)

    def without(self, item: Candidate) -> _Choice:
        return _Choice(
            tuple(other for other in self.offloaded if other is not item),
            tuple(other for other in self.dropped if other is not item),
            self.in_part,
            self.caution,
        )


def _rounded(problem: Problem, shares: Shares) -> _Choice:
    """What the program moves in part moves as a whole."""
    offloaded: list[Candidate] = []
    dropped: list[Candidate] = []
    in_part: list[Candidate] = []
    for item in problem.candidates:
        out, anew = shares.offloaded.get(item.value, 0.0), shares.recomputed.get(item.value, 0.0)
        if out + anew < _LEAST_SHARE:
            continue
        (offloaded if out >= anew else dropped).append(item)
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


def _own(plan: Plan) -> Plan:
    return replace(plan, policy="auto", evicts=True)
