"""Sets estimates right by what real steps took."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
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

    def of_ops(self) -> Iterator[tuple[float, float]]:
        """Of each op the seconds that were estimated, and those that were measured."""
        pairs = zip(self.estimated.ops, self.measured.ops, strict=True)
        return ((guess.seconds, true.seconds) for guess, true in pairs)

    def of_step(self) -> tuple[float, float]:
        """The same of the step."""
        return self.estimated.seconds, self.measured.seconds


class Calibration:
    """What real steps at a few batches say of all others.

    An op's time lies on the line through what was measured over what was estimated, at the two batches around or,
    beyond all of them, at the two nearest: kernels take some time however few samples there are, and then so much a
    sample. Its workspace lies on such a line between two batches, and beyond them it is no less than the nearest's.
    Where the ops of a real step are not the estimated ones, all this holds for the step as a whole. Of times, steps
    whose plans move something tell of such steps, and others of others, as far as there are both. `hardware` is the
    machine with the copying speeds that they saw.
    """

    def __init__(self, hardware: Hardware, samples: Iterable[Sample] = ()) -> None:
        self.hardware = hardware
        self._samples = sorted(samples, key=lambda item: item.batch)

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
        low, high = _nearest(such, batch)
        if low.is_of(estimated) and high.is_of(estimated):
            pairs = zip(estimated.ops, low.of_ops(), high.of_ops(), strict=True)
            seconds = [
                _took(batch, op.seconds, (low.batch, *first), (high.batch, *last)) for op, first, last in pairs
            ]
        else:  # of the whole step
            first, last = low.of_step(), high.of_step()
            whole = estimated.seconds
            pace = _took(batch, whole, (low.batch, *first), (high.batch, *last)) / whole
            seconds = [op.seconds * pace for op in estimated.ops]
        # Its numbers are as good as measured ones: nobody shall estimate them anew.
        ops = tuple(replace(op, seconds=own) for op, own in zip(estimated.ops, seconds, strict=True))
        return replace(estimated, ops=ops, measured=True)


def _neighbours(samples: Sequence[Sample], batch: int) -> tuple[Sample, Sample]:
    """The measured batches on both sides; beyond them all the last one, twice."""
    place = bisect_left([item.batch for item in samples], batch)
    return samples[max(0, place - 1)], samples[min(place, len(samples) - 1)]


def _nearest(samples: Sequence[Sample], batch: int) -> tuple[Sample, Sample]:
    """The measured batches on both sides; beyond them all the two nearest; of a single one that, twice."""
    place = bisect_left([item.batch for item in samples], batch)
    first = max(0, min(place - 1, len(samples) - 2))
    return samples[first], samples[min(first + 1, len(samples) - 1)]


def _took(batch: int, estimated: float, low: tuple[int, float, float], high: tuple[int, float, float]) -> float:
    """Seconds to expect of what is `estimated` to take some, from two batches: each with estimate and measurement."""
    (first, low_guess, low_seconds), (last, high_guess, high_seconds) = low, high
    is_inside = first <= batch <= last
    if low_guess < high_guess and (is_inside or low_seconds <= high_seconds):
        return max(0.0, _on_line(estimated, (low_guess, low_seconds), (high_guess, high_seconds)))
    if is_inside:
        return _on_line(batch, (first, low_seconds), (last, high_seconds))
    near_guess, near = (low_guess, low_seconds) if batch < first else (high_guess, high_seconds)
    return near * estimated / near_guess if near_guess > 0 else near


def _on_line(where: float, low: tuple[float, float], high: tuple[float, float]) -> float:
    """The height of the line through two points."""
    (start, first), (end, last) = low, high
    return first if start == end else first + (last - first) * (where - start) / (end - start)


def _calls(trace: Trace) -> list[tuple[str, str]]:
    return [(op.name, op.phase) for op in trace.ops]
