"""What no plan can beat: the least time of a step under a budget, whatever is kept, moved or made anew."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from outgrow.planning.floor import needed_curve
from outgrow.planning.parks import Gap, gaps
from outgrow.planning.plan import make_plan
from outgrow.planning.problem import Problem
from outgrow.planning.relaxation import Relaxation
from outgrow.planning.reuse import reusable_ops

_BOUNDLESS = 1 << 62  # bytes


def least_step_seconds(problem: Problem, search_seconds: float = 0.0) -> float:
    """A lower bound of the step time of any plan under the problem's budget, in seconds.

    A higher one, with `search_seconds` for a branch and bound over the largest values: they move as a whole or not.

    The linear program with every rounding in the plan's favour: values are divisible, copies have no latency, and go
    on while something is made anew. Parks cost their copies where an op would not fit otherwise, and nothing
    elsewhere. Infinite where even that does not fit.
    """
    kept = _kept(problem, reusable_ops(problem))
    free, priced = _by_price(problem)
    unpriced = zip(_parked_at_most(problem, free), _away_again(problem), strict=True)
    least = [level - parked - again for level, (parked, again) in zip(kept, unpriced, strict=True)]
    relaxation = Relaxation(problem, least, priced, optimistic=True)
    extra = relaxation.least_seconds(search_seconds) if search_seconds else relaxation.solve().seconds
    return problem.op_times[-1] + extra


def _kept(problem: Problem, reuses: tuple[int, ...]) -> tuple[int, ...]:
    """Live bytes at each op where nothing moves."""
    boundless = problem.with_budget(_BOUNDLESS)
    return make_plan("keep", boundless, (), reuses=reuses, evicts=False).simulate().curve


def _away_again(problem: Problem) -> list[int]:
    """Bytes at each op of saved values that may be away at a time that the program knows nothing of.

    It takes a value to be away once, before it is first wanted. The cache also sends away what is wanted a second
    time, and what nobody wants.
    """
    change = [0] * (len(problem.trace.ops) + 1)
    for item in problem.candidates:
        leaves = max(item.held, problem.tick_ops[item.last_pack])
        if leaves < problem.tick_ops[item.first_unpack]:
            change[leaves] += item.nbytes
            change[problem.tick_ops[item.first_unpack]] -= item.nbytes
    known = accumulate(change[:-1])
    levels = zip(_kept(problem, ()), known, needed_curve(problem), strict=True)
    return [max(0, level - away - needed) for level, away, needed in levels]


def _by_price(problem: Problem) -> tuple[list[Gap], list[Gap]]:
    """Gaps whose parks count as free, and those that count with their copies.

    What is parked where it need not be would only make the program larger. What is parked to the end of its use need
    not come back for it.
    """
    crowded = [level > problem.budget_bytes for level in needed_curve(problem)]
    before = list(accumulate(crowded, initial=0))
    free: list[Gap] = []
    priced: list[Gap] = []
    for gap in gaps(problem):
        is_needed = before[gap.before_op] > before[gap.after_op + 1]
        (priced if is_needed and not gap.is_last else free).append(gap)
    return free, priced


def _parked_at_most(problem: Problem, free: Iterable[Gap]) -> list[int]:
    """Bytes at each op that parks could have away."""
    change = [0] * (len(problem.trace.ops) + 1)
    for gap in free:
        change[gap.after_op + 1] += gap.nbytes
        change[gap.before_op] -= gap.nbytes
    return list(accumulate(change[:-1]))
