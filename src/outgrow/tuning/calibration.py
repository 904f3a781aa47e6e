"""Sets estimates right by what real steps took."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2

from outgrow.cost.hardware import Hardware
from outgrow.tracing.ir import Op, Trace


@dataclass(frozen=True)
class Sample:
    """A real step: its batch, how its ops were estimated, and how they were measured.

    `moves` says that its plan moved something. Every op is then watched, which takes its time, too.
    """

    batch: int
    moves: bool
    estimated: Trace
    measured: Trace


class Calibration:
    """What real steps at a few batches say of all others.

    An op takes as many times its estimate as it did at the measured batches next to it, in between by the logarithm
    of the batch; where the ops of a real step are not the estimated ones, that holds for the step as a whole. Steps
    whose plans move something tell of such steps, and others of others, as far as there are both. What an op held
    beyond its outputs grows with the batch.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._samples: list[Sample] = []

    def learn(self, sample: Sample, hardware: Hardware) -> None:
        """Add a real step; `hardware` is the machine with the copying speeds that it saw."""
        self.hardware = hardware
        self._samples = sorted([*self._samples, sample], key=lambda item: item.batch)

    def corrected(self, batch: int, estimated: Trace, *, moves: bool) -> Trace:
        """An estimated trace with the times and workspaces to expect, of a plan that moves something or does not."""
        if not self._samples:
            return estimated
        such = [item for item in self._samples if item.moves == moves]
        below, above, share = _neighbours(such or self._samples, batch)
        low, high = _pace(below), _pace(above)
        fits = len(low) == len(high) == len(estimated.ops)
        if not fits:
            low, high = ([_overall(item)] * len(estimated.ops) for item in (below, above))
        near = below if share < 0.5 else above
        held = [op.workspace_bytes for op in near.measured.ops] if fits and len(_pace(near)) else None
        growth = max(1.0, batch / near.batch)

        def op(index: int, each: Op) -> Op:
            seconds = each.seconds * (low[index] ** (1 - share) * high[index] ** share)
            workspace = each.workspace_bytes if held is None else int(held[index] * growth)
            return replace(each, seconds=seconds, workspace_bytes=workspace)

        # Its numbers are as good as measured ones: nobody shall estimate them anew.
        ops = tuple(op(index, each) for index, each in enumerate(estimated.ops))
        return replace(estimated, ops=ops, measured=True)


def _neighbours(samples: Sequence[Sample], batch: int) -> tuple[Sample, Sample, float]:
    """The measured batches on both sides, and how far from the first to the second this one lies."""
    place = bisect_left([item.batch for item in samples], batch)
    if place == 0:
        return samples[0], samples[0], 0.0
    if place == len(samples):
        return samples[-1], samples[-1], 0.0
    low, high = samples[place - 1], samples[place]
    return low, high, log2(batch / low.batch) / log2(high.batch / low.batch)


def _pace(sample: Sample) -> Sequence[float]:
    """For each op what it took over what it was estimated to take; nothing if they are not the same ops."""
    if _calls(sample.estimated) != _calls(sample.measured):
        return []
    overall = _overall(sample)
    return [
        measured.seconds / estimated.seconds if measured.seconds > 0 and estimated.seconds > 0 else overall
        for measured, estimated in zip(sample.measured.ops, sample.estimated.ops, strict=True)
    ]


def _calls(trace: Trace) -> list[tuple[str, str]]:
    return [(op.name, op.phase) for op in trace.ops]


def _overall(sample: Sample) -> float:
    return sample.measured.seconds / sample.estimated.seconds
