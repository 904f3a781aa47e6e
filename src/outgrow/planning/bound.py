"""What no plan can beat: the least time of a step under a budget, whatever is kept, moved or made anew."""

from __future__ import annotations

from itertools import accumulate

from outgrow.planning.absences import all_absences
from outgrow.planning.floor import needed_spans
from outgrow.planning.levels import levels_where_nothing_moves
from outgrow.planning.parks import away, gaps
from outgrow.planning.plan import make_plan
from outgrow.planning.problem import Problem
from outgrow.planning.relaxation import Relaxation
from outgrow.planning.reuse import reusable_ops


def least_step_seconds(problem: Problem, search_seconds: float = 0.0) -> float:
    """A lower bound of the step time of any plan under the problem's budget, in seconds.

    With `search_seconds` a higher one: time is cut more finely, and a branch and bound takes that long at most over
    the largest values, which move as a whole or not.

    The linear program with every rounding in the plan's favour: values are divisible but where `tightening.py` knows
    better, copies have no latency, and go on while something is made anew. What nobody wants any more leaves for
    nothing. Infinite where even that does not fit.
    """
    kept = levels_where_nothing_moves(make_plan("keep", problem, (), reuses=reusable_ops(problem))).tolist()
    absences = all_absences(problem)
    unpriced = zip(_parked_for_good(problem), _unwanted(problem), strict=True)
    least = [level - parked - unwanted for level, (parked, unwanted) in zip(kept, unpriced, strict=True)]
    relaxation = Relaxation(problem, least, absences, optimistic=True, fine=search_seconds > 0)
    extra = relaxation.least_seconds(search_seconds) if search_seconds else relaxation.solve().seconds
    return problem.op_times[-1] + extra


def _unwanted(problem: Problem) -> list[int]:
    """Bytes at each op of saved values that may be away after their last use, or that have none.

    The cache may send them away; their copies count for nothing.
    """
    candidates = {item.value for item in problem.candidates}
    change = [0] * (len(problem.trace.ops) + 1)
    needed_until: dict[int, int] = {}
    for _, end, _, value in needed_spans(problem):
        needed_until[value] = end if value in candidates else min(end, needed_until.get(value, end))
    for value, end in needed_until.items():
        if problem.is_saved(value) and problem.is_movable(value):
            change[end] += problem.trace.values[value].nbytes
            change[max(end, problem.trace.values[value].death)] -= problem.trace.values[value].nbytes
    return list(accumulate(change[:-1]))


def _parked_for_good(problem: Problem) -> list[int]:
    """Bytes at each op of what may be parked and need not come back, as it is not used any more.

    Its copy out counts for nothing.
    """
    last_used = {item.value: max(_unpacked(problem, item.value)) for item in problem.candidates}
    change = [0] * (len(problem.trace.ops) + 1)
    for gap in gaps(problem):
        span = away(problem, gap)
        if gap.is_last and span is not None and last_used.get(gap.value, -1) < span[0]:
            change[span[0]] += gap.nbytes
            change[span[1]] -= gap.nbytes
    return list(accumulate(change[:-1]))


def _unpacked(problem: Problem, value: int) -> list[int]:
    """The ops at which autograd wants a saved value."""
    return [op for saved in problem.trace.saved if saved.value == value for op in saved.unpacked]
