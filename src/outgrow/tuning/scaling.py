"""A step as a function of its batch: from the traces of a few batches to that of any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from outgrow.tracing.ir import Op, Saved, Trace, Value

# Between the first and the last of these a line is drawn, and the one in the middle must lie on it.
_TRACED = (2, 4, 8)
_Sized = TypeVar("_Sized", Value, Saved)

# FLOPs of some formulas are rounded.
_TOLERANCE = 0.01


class StepFamily:
    """Fake traces of one step with any number of samples.

    Where sizes and FLOPs are straight lines in the batch, as they are in nearly every network, all traces come from
    two; else, and for the least batches, whose single rows some layers treat in a way of their own, each is made.
    """

    def __init__(self, trace_of: Callable[[int], Trace]) -> None:
        """`trace_of` gives the fake trace of a step with so many samples."""
        self._trace_of = trace_of
        self._made: dict[int, Trace] = {}
        self._is_straight: bool | None = None

    def at(self, batch: int) -> Trace:
        """The trace of a step with `batch` samples, without times."""
        if batch in self._made:
            return self._made[batch]
        if batch > _TRACED[0] and self.is_straight:
            return between(self._made[_TRACED[0]], self._made[_TRACED[-1]], (_TRACED[0], _TRACED[-1]), batch)
        trace = self._trace_of(batch)
        if batch <= _TRACED[-1]:  # few are kept: those of deep networks are large
            self._made[batch] = trace
        return trace

    @property
    def is_straight(self) -> bool:
        """Whether two traces tell all others."""
        if self._is_straight is None:
            low, middle, high = (self._made.setdefault(batch, self._trace_of(batch)) for batch in _TRACED)
            self._is_straight = (
                alike(low, middle)
                and alike(low, high)
                and _agree(between(low, high, (_TRACED[0], _TRACED[-1]), _TRACED[1]), middle)
            )
        return self._is_straight


def alike(one: Trace, other: Trace) -> bool:
    """Whether two traces are the same ops on the same values, whatever their sizes."""
    return (
        len(one.ops) == len(other.ops)
        and len(one.values) == len(other.values)
        and len(one.saved) == len(other.saved)
        and one.ticks == other.ticks
        and all(_wiring(a) == _wiring(b) for a, b in zip(one.ops, other.ops, strict=True))
        and all(a.value == b.value for a, b in zip(one.saved, other.saved, strict=True))
    )


def _wiring(op: Op) -> tuple[object, ...]:
    return op.name, op.phase, op.inputs, op.outputs


def between(low: Trace, high: Trace, batches: tuple[int, int], batch: int) -> Trace:
    """The trace on the straight line through two that are alike, at `batch`; it may lie beyond both."""
    first, last = batches
    share = (batch - first) / (last - first)

    def on_line(a: int, b: int) -> int:
        return a if a == b else max(0, round(a + (b - a) * share))

    def op(a: Op, b: Op) -> Op:
        return replace(
            a,
            flops=on_line(a.flops, b.flops),
            moved_bytes=on_line(a.moved_bytes, b.moved_bytes),
            workspace_bytes=on_line(a.workspace_bytes, b.workspace_bytes),
            shape=tuple(map(on_line, a.shape, b.shape)),
        )

    def sized(a: _Sized, b: _Sized) -> _Sized:
        return a if a.nbytes == b.nbytes else replace(a, nbytes=on_line(a.nbytes, b.nbytes))

    return replace(
        low,
        ops=tuple(map(op, low.ops, high.ops)),
        values=tuple(map(sized, low.values, high.values)),
        saved=tuple(map(sized, low.saved, high.saved)),
    )


def _agree(one: Trace, other: Trace) -> bool:
    """Whether two traces that are alike have the same sizes, and near enough the same work."""
    return (
        all(a.nbytes == b.nbytes for a, b in zip(one.values, other.values, strict=True))
        and all(a.nbytes == b.nbytes for a, b in zip(one.saved, other.saved, strict=True))
        and all(
            abs(a.flops - b.flops) <= _TOLERANCE * b.flops
            and abs(a.moved_bytes - b.moved_bytes) <= _TOLERANCE * b.moved_bytes
            for a, b in zip(one.ops, other.ops, strict=True)
        )
    )
