"""When each value may be away: what the linear program decides about, and what its lower bound must allow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from outgrow.planning.floor import needed_spans
from outgrow.planning.parks import Gap, away, gap_of, gaps, sources_of_gradient
from outgrow.planning.plan import Park
from outgrow.planning.prefetch import may_be_dropped
from outgrow.planning.problem import Candidate, Problem


@dataclass(frozen=True, slots=True)
class Absence:
    """A time in which a value may be away, after which it is back.

    Attributes:
        value, nbytes: its number, and its size in bytes.
        saved: the op from which on it can be copied.
        leaves: the first op at which it can be away by a copy.
        dropped: the first op at which it can be away without one.
        wanted: the op at which it is back.
        anew_seconds: what it takes to make it anew; None where that cannot be.
        candidate: the saved value whose time before its first use this is.
        shares_copy: whether a copy out serves all such absences of the value.
        is_one_way: whether it is only ever copied out: a saved value that the program holds, but uses no more, and
            that is made anew when autograd wants it; or one that nobody wants any more.
        is_certain: whether it is away, come what may; of one that is copied out only, where its value is made anew.
    """

    value: int
    nbytes: int
    saved: int
    leaves: int
    dropped: int
    wanted: int
    anew_seconds: float | None
    candidate: Candidate | None = None
    shares_copy: bool = False
    is_one_way: bool = False
    is_certain: bool = False


def before_first_uses(problem: Problem) -> list[Absence]:
    """Of each saved value the time in which nothing but autograd holds it, until it is first wanted."""
    ops = problem.tick_ops
    return [_before_first_use(problem, item, ops[item.first_pack]) for item in problem.candidates]


def beside_parks(problem: Problem, parks: Iterable[Park]) -> list[Absence]:
    """The absences of what is parked, and besides those of saved values until they are first wanted."""
    found: list[Absence] = []
    unused: dict[int, Absence] = {}
    for item in parks:
        gap = gap_of(problem, item)
        if gap is None or item.remade:
            continue
        parked = replace(_parked(problem, gap, problem.tick_ops[item.out_tick]), anew_seconds=None, is_certain=True)
        if gap.is_last:
            unused[gap.value] = replace(parked, is_one_way=True)
        else:
            found.append(parked)
    for absence in before_first_uses(problem):
        last = unused.pop(absence.value, None)
        if last is not None:  # what is parked when the program uses it no more stays away until autograd wants it
            first = last.leaves
            absence = replace(absence, leaves=first, dropped=first, anew_seconds=None, is_certain=True)
        found.append(absence)
    return [*found, *unused.values()]


def all_absences(problem: Problem) -> list[Absence]:
    """All absences that a plan can have, but for those after which nobody wants the value."""
    parks: dict[int, list[tuple[int, Gap]]] = {}
    for gap in gaps(problem):
        span = away(problem, gap)
        if span is not None:
            parks.setdefault(gap.value, []).append((span[0], gap))
    needed: dict[int, list[tuple[int, int]]] = {}
    for start, end, _, value in needed_spans(problem):
        needed.setdefault(value, []).append((start, end))
    found: list[Absence] = []
    for item in problem.candidates:
        found += _of_saved(problem, item, parks.pop(item.value, []), needed[item.value])
    for own in parks.values():
        found += (_parked(problem, gap, first) for first, gap in own if not gap.is_last)
    return found


def _of_saved(
    problem: Problem, item: Candidate, parks: list[tuple[int, Gap]], needed: list[tuple[int, int]]
) -> Iterator[Absence]:
    """All absences of a saved value, from where it can be parked, and when it is needed: (first op, end)."""
    saved = min([problem.tick_ops[item.first_pack], *(first for first, _ in parks)])
    yield from (_parked(problem, gap, first, saved) for first, gap in parks if not gap.is_last)
    # What is parked when the program uses it no more stays away until autograd wants it.
    unused = next((first for first, gap in parks if gap.is_last), None)
    main = _before_first_use(problem, item, saved)
    if unused is not None and unused < main.leaves:
        if main.anew_seconds is not None and unused < main.wanted:
            yield _copied_and_made_anew(main, unused)
        main = replace(main, leaves=unused)
    yield main
    anew_seconds = problem.recipes.own_seconds(item.value)
    for (start, end), (again, _) in pairwise(needed):
        if again > main.wanted:  # the cache sends away what is wanted once more
            yield Absence(
                value=item.value,
                nbytes=item.nbytes,
                saved=saved,
                leaves=end if unused is None else min(end, max(start, unused)),
                dropped=end,
                wanted=again,
                anew_seconds=anew_seconds,
                shares_copy=True,
            )


def _before_first_use(problem: Problem, item: Candidate, saved: int) -> Absence:
    let_go = max(item.held, problem.tick_ops[item.last_pack])
    return Absence(
        value=item.value,
        nbytes=item.nbytes,
        saved=saved,
        leaves=let_go,
        dropped=let_go,
        wanted=problem.tick_ops[item.first_unpack],
        anew_seconds=problem.recipes.own_seconds(item.value) if may_be_dropped(problem, item) else None,
        candidate=item,
        shares_copy=True,
    )


def _copied_and_made_anew(main: Absence, unused: int) -> Absence:
    """The program holds a value that it uses no more: a copy makes it leave, and when it lets go it is dropped."""
    return replace(
        main,
        leaves=unused,
        dropped=unused,
        wanted=min(main.dropped, main.wanted),
        anew_seconds=None,
        candidate=None,
        is_one_way=True,
    )


def _parked(problem: Problem, gap: Gap, first: int, saved: int | None = None) -> Absence:
    """A value that is parked; `saved` where it is one that autograd saves."""
    anew_seconds = None
    if sources_of_gradient(problem, gap.value) is not None:
        birth = problem.trace.values[gap.value].birth
        anew_seconds = problem.trace.ops[birth].seconds + problem.hardware.replaying_costs(1)
    return Absence(
        value=gap.value,
        nbytes=gap.nbytes,
        saved=first if saved is None else saved,
        leaves=first,
        dropped=first,
        wanted=gap.before_op,
        anew_seconds=anew_seconds,
        shares_copy=saved is not None,
    )
