"""What is measured of one step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outgrow.runtime.clock import StepTimes
from outgrow.tracing.ir import Fit


@dataclass(frozen=True)
class StepOutcome:
    """What one step was measured to be. Times in seconds, sizes in bytes.

    `fault_level` is the fewest live bytes at which an allocator refused memory, 0 if none did. `knows_peak` says that
    `peak_bytes` was measured: ops were seen, or blocks of memory counted; `blind` that a profiler of the user's hid
    what some ops need; `followed` that every tick was the plan's, whatever the sizes, of which `fit` tells; `proved`
    that recipes were tried beside the true values, which takes time and memory that later steps will not take; `fits`
    that the step could have parked what its plan knows nothing of, and had no need to; `unseen` that it departed from
    its plan where nobody could begin to watch it. `failure` is why a parked value could not come back, or that all of
    them are more than the budget has. `kept_bytes` are of saved values that stayed. `gave_back` says that an
    allocator gave all its free blocks back to find room; `turned_late` that the step went by another plan when it had
    saved something already; `lost_count` that its ops had other numbers than the plan's, and something had to leave
    for that; `had_garbage` that a collection of garbage made room. `ops` is how many it ran, 0 if nobody counted.
    `leaving_bytes` is what copies out held at the peak: the device may have been that much fuller than foreseen only
    because the next tier was late. `times` are there where the device may still be at the step: its three times are
    not known before `timed` has waited for it.
    """

    peak_bytes: int
    seconds: float
    stall_seconds: float
    recompute_seconds: float
    planned_bytes: int
    evicted_bytes: int
    recomputed_bytes: int
    kept_bytes: int
    oom_retries: int
    fault_level: int
    knows_peak: bool
    blind: bool
    followed: bool
    proved: bool
    fits: bool
    unseen: bool
    packs: tuple[int, ...]
    ops: int = 0
    leaving_bytes: int = 0
    gave_back: bool = False
    turned_late: bool = False
    lost_count: bool = False
    had_garbage: bool = False
    failure: Exception | None = None
    times: StepTimes | None = None
    fit: Fit = Fit.EXACT

    def timed(self) -> StepOutcome:
        """The same with its times."""
        if self.times is None:
            return self
        seconds, stall, recompute = self.times.read()
        return replace(self, seconds=seconds, stall_seconds=stall, recompute_seconds=recompute, times=None)
