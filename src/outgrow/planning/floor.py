"""The least budget that keeping and offloading can hold: what no copy can take off the device at an op."""

from __future__ import annotations

from dataclasses import dataclass

from outgrow.planning.problem import Problem


@dataclass(frozen=True)
class Floor:
    """The least feasible budget in bytes, the op that needs it, and what takes it by name."""

    bytes: int
    op: int
    holders: dict[str, int]


def least_budget(problem: Problem) -> Floor:
    """Live bytes at each op when every saved value is away whenever nothing but autograd holds it."""
    trace = problem.trace
    end = len(trace.ops)
    if end == 0:
        return Floor(problem.base_bytes, 0, {"other": problem.base_bytes})
    change = [0] * (end + 1)
    needed = _needed_spans(problem)
    for first, last, nbytes, _ in needed:
        change[first] += nbytes
        change[last] -= nbytes
    level = problem.base_bytes
    worst, worst_op = -1, 0
    for now, op in enumerate(trace.ops):
        level += change[now]
        if level + op.workspace_bytes > worst:
            worst, worst_op = level + op.workspace_bytes, now
    holders: dict[str, int] = {}
    for first, last, nbytes, index in needed:
        if first <= worst_op < last:
            kind = trace.values[index].kind.value
            holders[kind] = holders.get(kind, 0) + nbytes
    holders |= {"workspace": trace.ops[worst_op].workspace_bytes, "other": problem.base_bytes}
    return Floor(worst, worst_op, {name: nbytes for name, nbytes in holders.items() if nbytes})


def _needed_spans(problem: Problem) -> list[tuple[int, int, int, int]]:
    """(first op, end op, bytes, value) for which each value must be on the device; spans of one do not overlap."""
    trace = problem.trace
    end = len(trace.ops)
    uses: dict[int, list[tuple[int, int]]] = {}
    for saved in trace.saved:
        if not problem.is_movable(saved.value):
            continue
        spans = uses.setdefault(saved.value, [])
        for number, start in enumerate(saved.unpacked):
            last = number == len(saved.unpacked) - 1
            spans.append((start, saved.released if last else start + 1))
    found: list[tuple[int, int, int, int]] = []
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
