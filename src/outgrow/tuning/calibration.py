"""Sets estimates right by what real steps took."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outgrow.cost.hardware import Hardware
from outgrow.tracing.ir import Trace


@dataclass(frozen=True)
class Sample:
    """A real step: its batch, how its ops were estimated, and how they were measured.

    `moves` says that its plan moved something. Every op is then watched, which takes its time, too.
    """

    batch: int
    moves: bool
    estimated: Trace
    measured: Trace

    def is_of(self, estimated: Trace) -> bool:
        """Whether the real step was made of the ops of this trace, and of the one that was estimated for it."""
        return _calls(self.estimated) == _calls(self.measured) == _calls(estimated)


class Calibration:
    """What real steps at a few batches say of all others.

    Between two measured batches an op's time and workspace lie on the line through what was measured, over what was
    estimated: kernels take some time however few samples there are, and then so much a sample. Beyond them an op
    takes as many times its estimate as at the nearest; where the ops of a real step are not the estimated ones, all
    this holds for the step as a whole. Of times, steps whose plans move something tell of such steps, and others of
    others, as far as there are both.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._samples: list[Sample] = []

    def learn(self, sample: Sample, hardware: Hardware) -> None:
        """Add a real step, or what is known of it now; `hardware` is the machine with the copying speeds it saw."""
        self.hardware = hardware
        others = [item for item in self._samples if item.batch != sample.batch]
        self._samples = sorted([*others, sample], key=lambda item: item.batch)

    def sized(self, batch: int, estimated: Trace) -> Trace:
        """An estimated trace with the workspaces to expect."""
        such = [item for item in self._samples if item.is_of(estimated)]
        if not such:
            return estimated
        below, above = _neighbours(such, batch)

        def held(index: int) -> int:
            low, high = (item.measured.ops[index].workspace_bytes for item in (below, above))
            if below is above:  # nobody was on the other side: more samples may need more, and fewer as much
                return int(low * max(1.0, batch / below.batch))
            return round(_on_line(batch, (below.batch, low), (above.batch, high)))

        return estimated.with_ops(
            [replace(op, workspace_bytes=held(index)) for index, op in enumerate(estimated.ops)]
        )

    def timed(self, batch: int, estimated: Trace, *, moves: bool) -> Trace:
        """An estimated trace with the times to expect, of a plan that moves something or does not."""
        such = [item for item in self._samples if item.moves == moves] or self._samples
        if not such:
            return estimated
        below, above = _neighbours(such, batch)
        fits = below.is_of(estimated) and above.is_of(estimated)

        def took(index: int, seconds: float) -> float:
            (low_guess, low), (high_guess, high) = (_times(item, index if fits else None) for item in (below, above))
            if not fits:  # of the whole step
                return seconds * _on_line(batch, (below.batch, low / low_guess), (above.batch, high / high_guess))
            if below.batch <= batch <= above.batch:
                if low_guess < high_guess:
                    return _on_line(seconds, (low_guess, low), (high_guess, high))
                return _on_line(batch, (below.batch, low), (above.batch, high))
            near_guess, near = (low_guess, low) if batch < below.batch else (high_guess, high)
            return near * seconds / near_guess if near_guess > 0 else near

        # Its numbers are as good as measured ones: nobody shall estimate them anew.
        ops = tuple(replace(op, seconds=took(index, op.seconds)) for index, op in enumerate(estimated.ops))
        return replace(estimated, ops=ops, measured=True)


def _neighbours(samples: Sequence[Sample], batch: int) -> tuple[Sample, Sample]:
    """The measured batches on both sides; beyond them all the last one, twice."""
    place = bisect_left([item.batch for item in samples], batch)
    return samples[max(0, place - 1)], samples[min(place, len(samples) - 1)]


def _times(sample: Sample, index: int | None) -> tuple[float, float]:
    """Of an op, or of the step: the time that was estimated, and the one that was measured; in seconds."""
    if index is None:
        return sample.estimated.seconds, sample.measured.seconds
    return sample.estimated.ops[index].seconds, sample.measured.ops[index].seconds


def _on_line(where: float, low: tuple[float, float], high: tuple[float, float]) -> float:
    """The height of the line through two points."""
    (start, first), (end, last) = low, high
    return first if start == end else first + (last - first) * (where - start) / (end - start)


def _calls(trace: Trace) -> list[tuple[str, str]]:
    return [(op.name, op.phase) for op in trace.ops]
