"""What the three lanes of a simulated step do and when, for whoever wants to see a plan rather than its cost.

The simulator fills it in when it is asked for (`simulate.timeline`); reports, pictures and trace viewers read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Activity(StrEnum):
    """What a lane does. The first four are the compute lane's, `FETCH` the lane's back, the others the lane's out.

    `WAIT` is time in which the device stands still, `COPYING` processor time that copies take from the computation.
    """

    RUN = "run"
    RECOMPUTE = "recompute"
    WAIT = "wait"
    COPYING = "copying"
    OFFLOAD = "offload"
    EVICT = "evict"
    PARK = "park"
    FETCH = "fetch"


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that one lane does, from `start` to `end` seconds after the step began.

    Attributes:
        activity: what it is.
        start: when it begins, in seconds.
        end: when it is over, in seconds.
        op: the op that runs, is run again, or stands next in line; the number of ops at the end of the step.
        value: the value that is copied or waited for; -1 where there is none.
        live_bytes: live bytes at its worst moment; 0 for copies, whose memory the compute lane counts.
    """

    activity: Activity
    start: float
    end: float
    op: int
    value: int
    live_bytes: int = 0

    @property
    def seconds(self) -> float:
        """How long it takes, in seconds."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Move:
    """A value left the device or is on it again: before `span`, a number of a span of the compute lane."""

    span: int
    value: int
    arrives: bool


@dataclass(frozen=True)
class Timeline:
    """A simulated step: three lanes, each in order and without overlap, and the moves of values.

    The compute lane has no gaps: its last span ends with the step. A copy may outlast it.
    """

    compute: tuple[Span, ...]
    out: tuple[Span, ...]
    back: tuple[Span, ...]
    moves: tuple[Move, ...]

    @property
    def end(self) -> float:
        """When the last lane is done, in seconds."""
        return max((lane[-1].end for lane in (self.compute, self.out, self.back) if lane), default=0.0)

    @property
    def peak(self) -> int:
        """The number of the compute span with the most live bytes; 0 in an empty step."""
        return max(range(len(self.compute)), key=lambda number: self.compute[number].live_bytes, default=0)

    def away_at(self, span: int) -> frozenset[int]:
        """The values that were on the device and are not while a span of the compute lane lasts."""
        away: set[int] = set()
        for move in self.moves:
            if move.span > span:
                break
            if move.arrives:
                away.discard(move.value)
            else:
                away.add(move.value)
        return frozenset(away)


@dataclass(slots=True)
class Recording:
    """A timeline in the making."""

    compute: list[Span] = field(default_factory=list)
    out: list[Span] = field(default_factory=list)
    back: list[Span] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    def moved(self, value: int, *, arrives: bool) -> None:
        """A value left the device, or is on it again, before whatever the compute lane does next."""
        self.moves.append(Move(len(self.compute), value, arrives))

    def finish(self) -> Timeline:
        """What was recorded."""
        return Timeline(tuple(self.compute), tuple(self.out), tuple(self.back), tuple(self.moves))
