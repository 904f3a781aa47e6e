"""What no plan can beat: the least time of a step under a budget, whatever is kept, moved or made anew."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from outgrow.planning.parks import gaps
from outgrow.planning.plan import make_plan
from outgrow.planning.problem import Problem
from outgrow.planning.relaxation import Relaxation
from outgrow.planning.reuse import reusable_ops

_BOUNDLESS = 1 << 62  # bytes


def least_step_seconds(problem: Problem) -> float:
    """A lower bound of the step time of any plan under the problem's budget, in seconds.

    The linear program with every rounding in the plan's favour: values are divisible, copies have no latency and are
    fluid, recipes have their sources for nothing, parks cost nothing. Infinite where even that does not fit.
    """
    boundless = replace(problem, budget_bytes=_BOUNDLESS)
    kept = make_plan("keep", boundless, (), reuses=reusable_ops(problem), evicts=False).simulate().curve
    least = [level - parked for level, parked in zip(kept, _parked_at_most(problem), strict=True)]
    return problem.op_times[-1] + Relaxation(problem, least, optimistic=True).solve().seconds


def _parked_at_most(problem: Problem) -> list[int]:
    """Bytes at each op that parks could have away."""
    change = [0] * (len(problem.trace.ops) + 1)
    for gap in gaps(problem):
        change[gap.after_op + 1] += gap.nbytes
        change[gap.before_op] -= gap.nbytes
    return list(accumulate(change[:-1]))
