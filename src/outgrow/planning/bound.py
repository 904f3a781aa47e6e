"""What no plan can beat: the least time of a step under a budget, whatever is kept, offloaded or made anew."""

from __future__ import annotations

from outgrow.planning.problem import Problem
from outgrow.planning.relaxation import Relaxation


def least_step_seconds(problem: Problem) -> float:
    """A lower bound of the step time of any plan under the problem's budget, in seconds.

    The linear program with every rounding in the plan's favour: values are divisible, copies have no latency and are
    fluid, recipes have their sources for nothing. Infinite where even that does not fit.
    """
    return problem.op_times[-1] + Relaxation(problem, optimistic=True).solve().seconds
