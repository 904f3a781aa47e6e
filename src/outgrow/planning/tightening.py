"""Rows by which the program knows that a value's memory is there as a whole or not at all.

The program is a relaxation: without these, halves of large values would leave and come back in time where a whole one
cannot. None of those for the lower bound forbids anything that a plan can do; `add_returns` is for plans, and takes
times as they are rounded for those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outgrow.planning.columns import UNIT, Columns, Rows, Terms
from outgrow.planning.moments import Moments

# Rows that span more moments than this cost more time than they are worth.
_MOST_MOMENTS = 25
# Rows are written for sets of values of which none, one, ... fit beside an op, up to so many; and not for sets so
# large that one of them more or less hardly counts.
_COVERS, _LARGEST_COVER = 4, 80


def add_whole_copies(rows: Rows, columns: Columns, moments: Moments) -> None:
    """A copy holds all of its memory while it lasts, and starts between two ops.

    So what is gone at the worst op of a moment was copied before that op, and what is loaded when the next moment
    begins was inside at that op, but for what the lane did after it. The same for what has no room at some op.
    """
    times, (out, into) = moments.problem.op_times, _speeds(moments)
    for now, start in enumerate(moments.starts):
        copied = [(columns.copied[now - 1], -1.0)] if now else []
        by_then = [*copied, (columns.given[now], -1.0), *columns.extra(now, -out)]
        for level, op in ((columns.gone, moments.worst[now]), (columns.ousted, moments.crowded[now])):
            rows.at_most(out * (times[op] - times[start]), [(level[now], 1.0), *by_then])
        if now:
            for level, op in ((columns.inside, moments.worst[now - 1]), (columns.welcome, moments.crowded[now - 1])):
                since = into * (times[start] - times[op + 1])
                rows.at_most(since, [(columns.back[now], 1.0), (level[now - 1], -1.0), *columns.extra(now, -into)])


def add_own_copies(rows: Rows, columns: Columns, moments: Moments) -> None:
    """What is gone soon after it could first be copied was copied since then, and nothing else meanwhile."""
    items, times, (out, _) = moments.items, moments.problem.op_times, _speeds(moments)
    youngest_first = sorted(range(len(items)), key=lambda index: -items[index].saved)
    for now, worst in enumerate(moments.worst):
        young: Terms = []
        total = 0.0
        since, extra = now, list(columns.extra(now, -out))
        for position, index in enumerate(youngest_first):
            item = items[index]
            if item.saved > worst or moments.begin(item.leaves) > now:
                continue
            first = moments.begin(item.saved)
            if now - first > _MOST_MOMENTS:
                break
            size = item.nbytes / UNIT
            young.append((columns.offloaded[index], size))
            if index in columns.served:
                young.append((columns.served[index], -size))
            total += size
            seconds = times[worst] - times[item.saved]
            is_last = position + 1 == len(youngest_first) or items[youngest_first[position + 1]].saved < item.saved
            if is_last and total > out * seconds:
                extra += [term for moment in range(first, since) for term in columns.extra(moment, -out)]
                since = min(since, first)
                gone = [(columns.gone[now], 1.0), (columns.held[now], -1.0)]
                rows.at_most(out * seconds, [*gone, *young, *extra])


def add_returns(rows: Rows, columns: Columns, moments: Moments) -> None:
    """What has no room at some op comes back after it, one after the other."""
    items, times, (_, into) = moments.items, moments.problem.op_times, _speeds(moments)
    for now in sorted({last for _, last in moments.ousted.values()}):
        gone = [index for index, (_, last) in moments.ousted.items() if last >= now]
        for until in sorted({moments.end(items[index].wanted) for index in gone}):
            soon = [index for index in gone if moments.end(items[index].wanted) <= until]
            copies = [(columns.offloaded[index], items[index].nbytes / UNIT) for index in soon]
            capacity = into * (max(times[items[index].wanted] for index in soon) - times[moments.crowded[now] + 1])
            if until - now <= _MOST_MOMENTS and sum(size for _, size in copies) > capacity:
                waits = [term for moment in range(now + 1, until + 1) for term in columns.extra(moment, -into)]
                rows.at_most(capacity, [*copies, *waits])


def add_covers(rows: Rows, columns: Columns, moments: Moments) -> None:
    """Of values so large that no more than a few of them fit beside an op, all but those few are away, whole."""
    times, (out, into) = moments.problem.op_times, _speeds(moments)
    known: set[tuple[int, ...]] = set()
    for now, op in enumerate(moments.crowded):
        for cover in _covers(columns, moments, op):
            away = [column for value in cover.values for column in (*value.copied, *value.anew)]
            key = (cover.few, *sorted(away))
            if key not in known:
                known.add(key)
                rows.at_least(len(cover.values) - cover.few, [(column, 1.0) for column in away])
            for since in sorted({value.saved for value in cover.values}):
                young = [value.saved >= since for value in cover.values]
                lane = _Lane(out, times[op] - times[since], moments.begin(since), now)
                _add_whole_values(rows, columns, cover, young, [value.copied for value in cover.values], lane)
            for until in sorted({value.wanted for value in cover.values}):
                soon = [value.wanted <= until for value in cover.values]
                first, last = moments.after(now, op), min(len(moments) - 1, moments.begin(until))
                lane = _Lane(into, times[until] - times[op + 1], first, last)
                _add_whole_values(rows, columns, cover, soon, [value.copied_back for value in cover.values], lane)


@dataclass(frozen=True, slots=True)
class _Large:
    """A large value of a cover: which shares have it away at an op, and which of these copy it back."""

    nbytes: int
    saved: int
    wanted: int
    copied: tuple[int, ...]
    copied_back: tuple[int, ...]
    anew: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Cover:
    """Values of which no more than `few` are there at an op."""

    few: int
    values: tuple[_Large, ...]


@dataclass(frozen=True, slots=True)
class _Lane:
    """What a lane can do from moment `first` to `last`: `UNIT`s a second, for seconds of a plain step."""

    speed: float
    seconds: float
    first: int
    last: int


def _covers(columns: Columns, moments: Moments, op: int) -> Iterator[_Cover]:
    items = moments.items
    slack = moments.problem.budget_bytes - moments.least[op]
    here: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        if item.leaves <= op < item.wanted:
            here.setdefault(item.value, []).append(index)
    large = [
        _Large(
            nbytes=items[own[0]].nbytes,
            saved=items[own[0]].saved,
            wanted=max(items[index].wanted for index in own),
            copied=tuple(columns.offloaded[index] for index in own),
            copied_back=tuple(columns.offloaded[index] for index in own if not items[index].is_one_way),
            anew=tuple(columns.recomputed[index] for index in own if items[index].dropped <= op),
        )
        for own in here.values()
    ]
    for few in range(_COVERS):
        chosen = tuple(value for value in large if value.nbytes * (few + 1) > slack)
        if few < len(chosen) <= _LARGEST_COVER:
            yield _Cover(few, chosen)


def _add_whole_values(
    rows: Rows, columns: Columns, cover: _Cover, chosen: Sequence[bool], copies: Sequence[Sequence[int]], lane: _Lane
) -> None:
    """Of the chosen values of a cover, what is away and is not there by other means goes by the lane, whole."""
    least = min(value.nbytes for value, is_chosen in zip(cover.values, chosen, strict=True) if is_chosen) / UNIT
    capacity = lane.speed * lane.seconds
    away = len(cover.values) - cover.few
    if lane.last - lane.first > _MOST_MOMENTS or capacity >= least * min(sum(chosen), away):
        return
    terms: Terms = []
    for value, is_chosen, copied in zip(cover.values, chosen, copies, strict=True):
        others = {*value.copied, *value.anew} - (set(copied) if is_chosen else set())
        terms += [(column, -least) for column in sorted(others)]
    for moment in range(lane.first, lane.last + 1):
        terms += columns.extra(moment, -lane.speed)
    rows.at_most(capacity - least * away, terms)


def _speeds(moments: Moments) -> tuple[float, float]:
    """Of the lane out, and of the lane back, in `UNIT`s a second."""
    hardware = moments.problem.hardware
    return hardware.copy_out_bandwidth / UNIT, hardware.copy_in_bandwidth / UNIT
