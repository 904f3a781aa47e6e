"""The trace of a step that nobody recorded, from those of two that differ from it in their sizes alone.

What is twice as large in one of the two as in the other, say, is so many times as large in the third: mostly one
length of a sequence, or one side of an image, decides all sizes. Saved tensors show how much that is, as autograd
saves some of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil

import numpy as np

from outgrow.tracing.ir import Op, Saved, Trace, Value

# What division loses, so that a whole number is not rounded up.
_ROUNDING = 1e-12


class _Growth:
    """How many times a size of one step the wanted step's is, by how many times that the other step's is."""

    def __init__(self, near: Trace, far: Trace, packs: Sequence[int]) -> None:
        found: dict[Fraction, set[Fraction]] = {Fraction(1): {Fraction(1)}}
        for one, other, nbytes in zip(near.saved, far.saved, packs, strict=True):
            if one.nbytes and other.nbytes:
                found.setdefault(Fraction(other.nbytes, one.nbytes), set()).add(Fraction(nbytes, one.nbytes))
        self._exact = {ratio: min(wanted) for ratio, wanted in found.items() if len(wanted) == 1}
        known = sorted((float(ratio), float(max(wanted))) for ratio, wanted in found.items())
        self._ratios, self._wanted = zip(*known, strict=True)
        self._likely: dict[tuple[int, int], int] = {}

    def exact(self, near: int, far: int) -> int | None:
        """What is so much in the two is this much in the wanted one; None if nothing shows that for certain."""
        if near == far == 0:
            return 0
        growth = self._exact.get(Fraction(far, near)) if near else None
        size = None if growth is None else growth * near
        return int(size) if size is not None and size.denominator == 1 else None

    def likely(self, near: int, far: int) -> int:
        """The same by what is known of ratios around theirs: right where a part is fixed and the rest is not."""
        if not near or near == far:
            return far
        size = self._likely.get((near, far))
        if size is None:
            growth = float(np.interp(far / near, self._ratios, self._wanted))
            size = self._likely[near, far] = ceil(near * growth * (1 - _ROUNDING))
        return size


def resized(near: Trace, far: Trace, packs: Sequence[int]) -> Trace | None:
    """The trace of a step that is like two others but for its sizes, by the bytes of each tensor that it saved.

    Times are those of `near` in proportion to what ops calculate, or move.

    None where the two are not alike, where sizes depend on data, and where the size of a saved value is not certain.
    """
    if len(packs) != len(near.saved) or near.varies or not _are_alike(near, far):
        return None
    growth = _Growth(near, far, packs)
    whole = _saved_whole(near, far, packs)
    saved = {item.value for item in near.saved}
    values: list[Value] = []
    for index, (one, other) in enumerate(zip(near.values, far.values, strict=True)):
        if one.kind.lasts:
            values.append(one)
            continue
        certain: set[int | None] = {*whole.get(index, ())} or {growth.exact(one.nbytes, other.nbytes)}
        nbytes = certain.pop()
        if index in saved and (nbytes is None or certain):
            return None
        if nbytes is None:
            nbytes = growth.likely(one.nbytes, other.nbytes)
        values.append(replace(one, nbytes=nbytes))
    return replace(
        near,
        ops=tuple(_resized_op(*ops, growth) for ops in zip(near.ops, far.ops, strict=True)),
        values=tuple(values),
        saved=tuple(replace(item, nbytes=nbytes) for item, nbytes in zip(near.saved, packs, strict=True)),
    )


def _saved_whole(near: Trace, far: Trace, packs: Sequence[int]) -> dict[int, set[int]]:
    """Bytes of the values that tensors were saved of which are all of them, as each of these says."""
    found: dict[int, set[int]] = {}
    for one, other, nbytes in zip(near.saved, far.saved, packs, strict=True):
        if one.nbytes == near.values[one.value].nbytes and other.nbytes == far.values[other.value].nbytes:
            found.setdefault(one.value, set()).add(nbytes)
    return found


def _resized_op(near: Op, far: Op, growth: _Growth) -> Op:
    flops = growth.likely(near.flops, far.flops)
    moved = growth.likely(near.moved_bytes, far.moved_bytes)
    work, own = (flops, near.flops) if near.flops else (moved, near.moved_bytes)
    return replace(
        near,
        flops=flops,
        moved_bytes=moved,
        workspace_bytes=growth.likely(near.workspace_bytes, far.workspace_bytes),
        seconds=near.seconds * work / own if own else near.seconds,
        shape=near.shape if near.shape == far.shape else (),
    )


def _are_alike(one: Trace, other: Trace) -> bool:
    """Whether two traces are the same but for sizes and times."""
    return (
        one.op_names == other.op_names
        and one.ticks == other.ticks
        and [(op.inputs, op.outputs) for op in one.ops] == [(op.inputs, op.outputs) for op in other.ops]
        and list(map(_without_size, one.values)) == list(map(_without_size, other.values))
        and list(map(_window_of, one.saved)) == list(map(_window_of, other.saved))
    )


def _without_size(value: Value) -> tuple[object, ...]:
    size = value.nbytes if value.kind.lasts else 0
    return value.version, value.kind, value.birth, value.held, value.death, value.varies, size


def _window_of(saved: Saved) -> tuple[object, ...]:
    return saved.value, saved.packed, saved.unpacked, saved.released
