"""Lifetimes and the live-bytes curve of a plain step, and what holds its peak. Pure; called by planners."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from outgrow.tracing.ir import Kind, Trace


@dataclass(frozen=True)
class PlainProfile:
    """Memory of the step without any plan.

    `curve` has an entry for each op: the live bytes at the op's worst moment. `average_bytes` weighs it by
    the ops' seconds (evenly where no time is known). `holders` says, in bytes, what is alive at the peak.
    """

    curve: tuple[int, ...]
    peak_bytes: int
    peak_op: int
    average_bytes: float
    holders: dict[str, int]


def resident_curve(trace: Trace) -> list[int]:
    """Bytes of the values alive while each op runs, outputs included, workspaces left out."""
    change = [0] * (len(trace.ops) + 1)
    for value in trace.values:
        first, last = max(value.birth, 0), value.death
        if first < last:
            change[first] += value.nbytes
            change[last] -= value.nbytes
    return list(accumulate(change[:-1]))


def plain_profile(trace: Trace) -> PlainProfile:
    """The live-bytes curve of a plain step, its peak, and what holds it (SuperNeurons, section 3.1)."""
    curve = [bytes_ + op.workspace_bytes for bytes_, op in zip(resident_curve(trace), trace.ops, strict=True)]
    if not curve:
        return PlainProfile((), 0, 0, 0.0, {})
    peak_op = max(range(len(curve)), key=curve.__getitem__)
    return PlainProfile(
        curve=tuple(curve),
        peak_bytes=curve[peak_op],
        peak_op=peak_op,
        average_bytes=average(curve, trace),
        holders=holders_at(trace, peak_op),
    )


def with_lasting_state(trace: Trace) -> Trace:
    """The trace of the step after one that made optimizer state: what it made to last is there from the start."""
    end = len(trace.ops)
    # Of a storage that was written to since, what is in it last tells what it is for.
    lasting = {value.storage for value in trace.values if value.kind is Kind.OPTIMIZER and value.death == end}
    lasting -= {trace.values[item.value].storage for item in trace.saved}  # an activation that an optimizer keeps
    values = tuple(
        replace(value, birth=-1, kind=Kind.OPTIMIZER) if value.storage in lasting and value.version == 0 else value
        for value in trace.values
    )
    return replace(trace, values=values)


def average(curve: list[int], trace: Trace) -> float:
    """Mean of a curve over the step's time, in bytes."""
    weights = [op.seconds for op in trace.ops]
    total = sum(weights)
    if total <= 0:
        return sum(curve) / len(curve)
    return sum(size * weight for size, weight in zip(curve, weights, strict=True)) / total


def holders_at(trace: Trace, at: int) -> dict[str, int]:
    """Bytes alive at op `at` by kind of value, with the op's workspace."""
    sizes = dict.fromkeys((kind.value for kind in Kind), 0)
    for value in trace.values:
        if value.birth <= at < value.death:
            sizes[value.kind.value] += value.nbytes
    sizes["workspace"] = trace.ops[at].workspace_bytes
    return {name: size for name, size in sizes.items() if size}
