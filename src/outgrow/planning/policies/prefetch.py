"""When copies back should start: as late as possible, as early as needed. Shared by policies that offload."""

from __future__ import annotations

from collections.abc import Sequence

from outgrow.planning.plan import Offload
from outgrow.planning.problem import Candidate, Problem

# Copies are planned to take this much longer than the device's profile says: a late copy stalls the device for
# all of its lateness, an early one holds memory a little longer.
_CAUTION = 1.3
_LEAD_SECONDS = 2e-3


def with_prefetch(problem: Problem, chosen: Sequence[Candidate]) -> tuple[Offload, ...]:
    """Offload `chosen` as soon as they are saved; copy them back one after the other, each just in time."""
    starts: dict[int, int] = {}
    lane_free = float("inf")
    for item in sorted(chosen, key=lambda item: -item.first_unpack):
        finish = min(problem.tick_time(item.first_unpack) - _LEAD_SECONDS, lane_free)
        lane_free = finish - _CAUTION * problem.hardware.copy_in_seconds(item.nbytes)
        tick = min(problem.last_tick_before(lane_free), item.first_unpack - 1)
        starts[item.value] = max(tick, item.last_pack)
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
