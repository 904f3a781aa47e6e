"""The deepest network and the largest batch that fit a budget on some device: found with fake traces alone."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

from outgrow.api import plan
from outgrow.cost.hardware import Hardware
from outgrow.cost.workspaces import Workspace
from outgrow.planning.floor import least_budget
from outgrow.planning.problem import Problem
from outgrow.planning.simulate import Prediction
from outgrow.planning.workspaces import costed
from outgrow.tracing.ir import Trace
from outgrow.tracing.liveness import plain_profile

# Below this share of a size the next one is not looked for: sizes are answers to "how far", not to "exactly where".
_RESOLUTION = 0.01
_LARGEST_SIZE = 1 << 20
# Plans just above the least feasible budget may miss it: what is given up at a time until one holds.
_STEP_BACK = 0.99


@dataclass(frozen=True)
class Limit:
    """The largest size that fits, and how it runs. `size` is what `trace_of` was called with."""

    size: int
    prediction: Prediction


def largest(
    trace_of: Callable[[int], Trace],
    *,
    budget_bytes: int,
    hardware: Hardware,
    policy: str,
    floors: MutableMapping[int, int] | None = None,
    least: int = 1,
    workspace: Workspace | None = None,
    on_try: Callable[[int], None] = lambda size: None,
) -> Limit | None:
    """The largest size whose step `policy` keeps inside the budget; None if not even the least does.

    Args:
        trace_of: the fake trace of a step of some size (samples in a batch, blocks in a network): what it takes
            must grow with the size.
        budget_bytes: the budget, in bytes.
        hardware: the device.
        policy: the name of a policy. "keep" is a plain step.
        floors: least budgets by size, in bytes, that another policy's search on this device found; more are added.
        least: the smallest size that there is.
        workspace: what convolutions may hold for their work, on a GPU.
        on_try: called with each size before it is traced.
    """
    floors = {} if floors is None else floors
    traces: dict[int, Trace] = {}

    def traced(size: int) -> Trace:
        if size not in traces:
            on_try(size)
            while len(traces) > 1:  # those of deep networks are large; of two that were tried last one is the answer
                del traces[next(iter(traces))]
            traces[size] = costed(trace_of(size), hardware, workspace)
        return traces[size]

    def need(size: int) -> int:
        """Bytes that no plan of this kind gets below."""
        if policy == "keep":
            return plain_profile(traced(size)).peak_bytes
        if size not in floors:
            floors[size] = least_budget(Problem(traced(size), hardware, budget_bytes)).bytes
        return floors[size]

    def run(size: int) -> Prediction:
        made = plan(traced(size), budget=budget_bytes, policy=policy, hardware=hardware, workspace=workspace)
        return made.simulate()

    bound = largest_within(need, budget_bytes, least)
    if bound is None:
        return None
    if policy in ("keep", "auto"):  # they get as far as anything does
        return _step_back(run, bound, least)
    return _narrowed(run, bound, budget_bytes, least)


def largest_within(need: Callable[[int], int], budget_bytes: int, least: int) -> int | None:
    """The largest size with `need(size)` within the budget, for a need that grows almost in proportion to size.

    Regula falsi between a size that fits and one that does not, so that few sizes are tried.
    """
    low, high = least, least + 1
    at_low = need(low)
    if at_low > budget_bytes:
        return None
    while (at_high := need(high)) <= budget_bytes:
        if high >= _LARGEST_SIZE:
            return high
        slope = max((at_high - at_low) / (high - low), 1.0)
        ahead = int(high + 1.1 * (budget_bytes - at_high) / slope) + 1
        low, at_low, high = high, at_high, min(max(ahead, high + 1), 16 * high, _LARGEST_SIZE)
    while high - low > max(1, _RESOLUTION * low):
        guess = low + int((high - low) * (budget_bytes - at_low) / (at_high - at_low))
        guess = min(max(guess, low + 1), high - 1)
        at_guess = need(guess)
        if at_guess <= budget_bytes:
            low, at_low = guess, at_guess
            probe = min(high - 1, low + max(1, int(_RESOLUTION * low)))
            if probe > low:  # from the other side, else the far end never comes nearer
                at_probe = need(probe)
                if at_probe > budget_bytes:
                    high, at_high = probe, at_probe
                else:
                    low, at_low = probe, at_probe
        else:
            high, at_high = guess, at_guess
    return low


def _step_back(run: Callable[[int], Prediction], size: int, least: int) -> Limit | None:
    while size >= least:
        prediction = run(size)
        if prediction.feasible:
            return Limit(size, prediction)
        size = min(size - 1, int(size * _STEP_BACK))
    return None


def _narrowed(run: Callable[[int], Prediction], most: int, budget_bytes: int, least: int) -> Limit | None:
    """The largest size that fits, between nothing and `most`: first where a peak in proportion to size would be."""
    low, high, best = least - 1, most + 1, None
    size = most
    while high - low > max(1, _RESOLUTION * low):
        prediction = run(size)
        if prediction.feasible:
            low, best = size, Limit(size, prediction)
            size = (low + high) // 2
        else:
            high = size
            in_proportion = int(size * budget_bytes / prediction.peak_bytes)
            size = in_proportion if low < in_proportion < high else (low + high) // 2
        size = min(max(size, low + 1), high - 1)
    return best


def least_budget_of(trace: Trace, hardware: Hardware, policy: str, workspace: Workspace | None = None) -> Prediction:
    """The step under the least budget, to 1%, that `policy` holds, for a policy that takes what it is given."""
    with_costs = costed(trace, hardware, workspace)

    def at(budget_bytes: int) -> Prediction:
        made = plan(with_costs, budget=budget_bytes, policy=policy, hardware=hardware, workspace=workspace)
        return made.simulate()

    high = plain_profile(with_costs).peak_bytes
    best = at(high)
    low = least_budget(Problem(with_costs, hardware, high)).bytes - 1
    while high - low > _RESOLUTION * low:
        middle = (low + high) // 2
        prediction = at(middle)
        if prediction.feasible:
            high, best = middle, prediction
        else:
            low = middle
    return best
