"""When values leave and when copies back should start. Shared by policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outgrow.planning.plan import Offload, Recompute
from outgrow.planning.problem import Candidate, Problem

# Copies are planned to take this much longer than the device's profile says: a late copy stalls the device for
# all of its lateness, an early one holds memory a little longer.
CAUTION = 1.3
# And to be wanted this share of the step earlier: the clock that starts them ticks only so often.
LEAD_SHARE = 5e-4


def with_prefetch(
    problem: Problem, chosen: Sequence[Candidate], dropped: Sequence[Candidate] = (), *, caution: float = CAUTION
) -> tuple[Offload, ...]:
    """Offload `chosen` as soon as they are saved; copy them back one after the other, each just in time.

    As late as possible, as early as needed: by the backward pass, or by the recipes of what is `dropped`. Copies are
    taken to be slower than the device's profile says by the factor `caution`. Where the lane is hardly ever idle,
    that would have them start before there is room, or before the value has left.
    """
    wanted = wanted_first(problem, chosen, dropped)
    starts: dict[int, int] = {}
    lane_free, lead = float("inf"), LEAD_SHARE * problem.op_times[-1]
    for item in sorted(chosen, key=lambda item: -wanted[item.value]):
        unpack = wanted[item.value]
        finish = min(problem.tick_time(unpack) - lead, lane_free)
        lane_free = finish - caution * problem.hardware.copy_in_seconds(item.nbytes)
        starts[item.value] = max(min(problem.last_tick_before(lane_free), unpack - 1), item.last_pack)
    return tuple(
        Offload(
            value=item.value,
            out_tick=item.first_pack,
            release_tick=-1,
            in_tick=starts[item.value],
            offset=0,
        )
        for item in chosen
    )


def wanted_first(problem: Problem, copied: Iterable[Candidate], dropped: Iterable[Candidate]) -> dict[int, int]:
    """The tick at which each is wanted first: for itself, or for a recipe of what is `dropped` and wanted before."""
    readers = list(dropped)
    wanted = {item.value: item.first_unpack for item in (*copied, *readers)}
    # Each before its own sources, which were made before it.
    for item in sorted(readers, key=lambda item: -problem.trace.values[item.value].birth):
        recipe = problem.recipes.find(item.value)
        for source in () if recipe is None else recipe.sources:
            if source in wanted:
                wanted[source] = min(wanted[source], wanted[item.value])
    return wanted


def may_be_dropped(problem: Problem, item: Candidate) -> bool:
    """Whether a recipe makes the value anew, and dropping it frees memory before it is wanted back."""
    return problem.recipes.find(item.value) is not None and problem.first_tick_at(item.held) < item.first_unpack


def dropped_early(problem: Problem, chosen: Sequence[Candidate]) -> tuple[Recompute, ...]:
    """Drop each of `chosen` as soon as nothing but autograd holds it."""
    last = len(problem.trace.ticks) - 1
    return tuple(
        Recompute(item.value, min(max(problem.first_tick_at(item.held), item.last_pack), item.first_unpack - 1, last))
        for item in chosen
    )
