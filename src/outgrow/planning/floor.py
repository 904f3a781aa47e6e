"""The least budget that keeping, offloading and parking can hold: what no copy can take off the device at an op."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from outgrow.planning.agenda import spans_of_uses
from outgrow.planning.parks import away, gaps
from outgrow.planning.problem import Problem, reading

_Span = tuple[int, int, int, int]  # (first op, end op, bytes, value)


@dataclass(frozen=True)
class Floor:
    """The least feasible budget in bytes, the op that needs it, and what takes it by name."""

    bytes: int
    op: int
    holders: dict[str, int]


@reading
def least_budget(problem: Problem) -> Floor:
    """Live bytes at each op when whatever can be away is away.

    That is every saved value whenever nothing but autograd holds it, and every value in the gaps between its uses.
    """
    trace = problem.trace
    if not trace.ops:
        return Floor(problem.base_bytes, 0, {"other": problem.base_bytes})
    needed = list(_without_gaps(problem, needed_spans(problem)))
    curve = _curve(problem, needed)
    worst_op = max(range(len(curve)), key=curve.__getitem__)
    holders: dict[str, int] = {}
    for first, last, nbytes, index in needed:
        if first <= worst_op < last:
            kind = trace.values[index].kind.value
            holders[kind] = holders.get(kind, 0) + nbytes
    holders |= {"workspace": trace.ops[worst_op].workspace_bytes, "other": problem.base_bytes}
    return Floor(curve[worst_op], worst_op, {name: nbytes for name, nbytes in holders.items() if nbytes})


@reading
def least_for_cache(problem: Problem) -> int:
    """Bytes that a cache of saved values cannot do without: all that could leave has left, and nothing is parked."""
    return max(needed_curve(problem), default=problem.base_bytes)


def needed_curve(problem: Problem) -> list[int]:
    """Live bytes at each op when saved values are away whenever they can be, and nothing is parked."""
    return _curve(problem, needed_spans(problem))


def _curve(problem: Problem, needed: Sequence[_Span]) -> list[int]:
    change = [0] * (len(problem.trace.ops) + 1)
    for first, last, nbytes, _ in needed:
        change[first] += nbytes
        change[last] -= nbytes
    levels = accumulate(change[:-1], initial=problem.base_bytes)
    next(levels)
    return [level + op.workspace_bytes for level, op in zip(levels, problem.trace.ops, strict=True)]


def _without_gaps(problem: Problem, needed: Iterable[_Span]) -> Iterator[_Span]:
    """What is left of the spans when every value is parked in all of its gaps."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for gap in gaps(problem):
        span = away(problem, gap)
        if span is not None:
            spans.setdefault(gap.value, []).append(span)
    for first, last, nbytes, index in needed:
        begin = first
        for start, stop in spans.get(index, ()):
            start, stop = max(start, begin), min(stop, last)
            if start < stop:
                if begin < start:
                    yield begin, start, nbytes, index
                begin = stop
        if begin < last:
            yield begin, last, nbytes, index


def needed_spans(problem: Problem) -> list[_Span]:
    """The spans for which each value must be on the device; spans of one do not overlap."""
    trace = problem.trace
    end = len(trace.ops)
    uses: dict[int, list[tuple[int, int]]] = {}
    for saved, spans in zip(trace.saved, spans_of_uses(problem), strict=True):
        if problem.is_movable(saved.value):
            uses.setdefault(saved.value, []).extend(spans)
    found: list[_Span] = []
    for index, value in enumerate(trace.values):
        first = max(value.birth, 0)
        if index not in uses:
            found.append((first, max(first, value.death), value.nbytes, index))
            continue
        covered = first
        for start, stop in sorted([(first, value.held), *uses[index]]):
            start, stop = max(start, covered), min(stop, end)
            if start < stop:
                found.append((start, stop, value.nbytes, index))
                covered = stop
    return found
