"""AccUDNN (2019): a performance model chooses what to swap; first so that it can be trained, then so that it hides.

The equations here are our own. With budget B, plain live bytes m(i) at op i (workspace included) and op i starting
at t(i), the step fits at i if the bytes that are away then are at least the excess e(i) = m(i) - B. The device's
profile gives copy times c_out(v), c_in(v). A value v that is saved at s(v), held by autograd alone from h(v) on and
wanted back at u(v) can be away

- at best from h(v) to u(v): the device waits for both copies (*trainable*);
- without a wait from max(h(v), out(v)) to back(v), where the lanes are shared by all that move (*hidden*):
  out(v) = max(s(v), out of the one saved before) + c_out(v), in the order in which values are saved, and
  back(v) = min(u(v), back of the one wanted after) - c_in(v), in the order in which they are wanted.

The set of values grows by sweeping over the ops: where e(i) is not covered, the value that is wanted last joins. It
was saved early, so that its copy is done by then, and it is away the longest, so that the fewest values move. The
sweep runs on hidden windows until they cover everything or have nothing left to offer, and on windows at best for
what is uncovered then. A value whose bytes are missed nowhere stays after all, the ones wanted soonest first. The
ticks are those of the lanes: a copy out starts when the value is saved; a copy back just before back(v), delayed past
the last op between back(v) and u(v) at which its bytes would not fit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from outgrow.planning.plan import Offload, Plan, make_plan
from outgrow.planning.policies.vdnn import VdnnAll
from outgrow.planning.prefetch import with_prefetch
from outgrow.planning.problem import Candidate, Problem
from outgrow.tracing.liveness import resident_curve

_Bytes = npt.NDArray[np.int64]

# Each round schedules the lanes anew and adds what their windows leave uncovered.
_MOST_ROUNDS = 8
# A plan that waits for less than this share of its step hides its copies.
_HIDDEN_SHARE = 0.002


@dataclass(frozen=True, slots=True)
class _Window:
    """The ops during which a value is away: from `first` up to `end`."""

    first: int
    end: int


class AccUDNN:
    """The smallest set of values whose absence makes every op fit, its copies behind compute where they can be."""

    name = "accudnn"

    def plan(self, problem: Problem) -> Plan:
        best: Plan | None = None
        for offloads in _proposals(problem):
            plan = make_plan(self.name, problem, offloads)
            if best is None or _rank(plan) < _rank(best):
                best = plan
            prediction = plan.simulate()
            if _is_trainable(plan) and prediction.stall_seconds <= _HIDDEN_SHARE * prediction.step_seconds:
                break
        assert best is not None
        return best


def _proposals(problem: Problem) -> Iterable[tuple[Offload, ...]]:
    """Plans to put before the simulator, the smallest first: it knows what the model leaves out."""
    excess = _excess(problem)
    if int(excess.max(initial=0)) <= 0:
        yield ()
        return
    chosen = choose(problem, excess)
    yield _delayed(problem, excess, chosen)
    # The model takes the step's times for what they are. A twentieth more of the budget is a margin for them.
    yield _delayed(problem, excess, choose(problem, excess + problem.budget_bytes // 20))
    yield _delayed(problem, excess, problem.candidates)
    # No lane is fast enough: copies that meet at the layers wait least in all.
    yield VdnnAll().plan(problem).offloads
    yield ()  # nothing planned: the cache decides


def choose(problem: Problem, excess: _Bytes) -> list[Candidate]:
    """The values to swap, so that at each op at least `excess` bytes are away; in the order of the candidates."""
    chosen: dict[int, Candidate] = {}
    windows: dict[int, _Window] = {}
    for _ in range(_MOST_ROUNDS):
        windows = _hidden_windows(problem, chosen.values())
        left = _left(excess, chosen, windows)
        if int(left.max(initial=0)) <= 0:
            break
        added = _sweep(problem, left, chosen, lambda item: _window_alone(problem, item))
        if not added:
            break
        chosen |= {item.value: item for item in added}
    else:
        windows = _hidden_windows(problem, chosen.values())
    for item in _sweep(problem, _left(excess, chosen, windows), chosen, lambda item: _best_window(problem, item)):
        chosen[item.value] = item
        windows[item.value] = _best_window(problem, item)
    _prune(excess, chosen, windows)
    return [item for item in problem.candidates if item.value in chosen]


def _excess(problem: Problem) -> _Bytes:
    """e(i): live bytes of the plain step beyond the budget at each op, negative where there is room."""
    resident = np.array(resident_curve(problem.trace), dtype=np.int64)
    workspace = np.array([op.workspace_bytes for op in problem.trace.ops], dtype=np.int64)
    return resident + workspace + (problem.base_bytes - problem.budget_bytes)


def _best_window(problem: Problem, item: Candidate) -> _Window:
    """Away as long as it can be, at the price of a wait."""
    return _Window(max(item.held, problem.tick_ops[item.first_pack]), problem.tick_ops[item.first_unpack])


def _window_alone(problem: Problem, item: Candidate) -> _Window:
    """Away without a wait, if the lanes were its own."""
    out = problem.tick_time(item.first_pack) + problem.hardware.copy_out_seconds(item.nbytes)
    back = problem.tick_time(item.first_unpack) - problem.hardware.copy_in_seconds(item.nbytes)
    return _between(problem, item, out, back)


def _hidden_windows(problem: Problem, items: Iterable[Candidate]) -> dict[int, _Window]:
    """Away without a wait, with lanes that all of `items` share."""
    chosen = list(items)
    out: dict[int, float] = {}
    free = 0.0
    for item in sorted(chosen, key=lambda item: item.first_pack):
        free = max(problem.tick_time(item.first_pack), free) + problem.hardware.copy_out_seconds(item.nbytes)
        out[item.value] = free
    windows: dict[int, _Window] = {}
    free = float("inf")
    for item in sorted(chosen, key=lambda item: -item.first_unpack):
        free = min(problem.tick_time(item.first_unpack), free) - problem.hardware.copy_in_seconds(item.nbytes)
        windows[item.value] = _between(problem, item, out[item.value], free)
    return windows


def _between(problem: Problem, item: Candidate, out: float, back: float) -> _Window:
    """The ops that start after `out` and end before `back`, both in seconds."""
    first = max(bisect_left(problem.op_times, out), item.held)
    end = min(bisect_right(problem.op_times, back) - 1, problem.tick_ops[item.first_unpack])
    return _Window(first, max(first, end))


def _left(excess: _Bytes, chosen: Mapping[int, Candidate], windows: Mapping[int, _Window]) -> _Bytes:
    """Excess that `chosen` leave uncovered, negative where bytes are to spare."""
    change = np.zeros(len(excess) + 1, dtype=np.int64)
    for value, window in windows.items():
        if window.first < window.end:
            change[window.first] += chosen[value].nbytes
            change[window.end] -= chosen[value].nbytes
    return excess - np.cumsum(change[:-1])


def _sweep(
    problem: Problem,
    left: _Bytes,
    taken: Mapping[int, Candidate],
    window_of: Callable[[Candidate], _Window],
) -> list[Candidate]:
    """More values, so that their windows cover what is left: wherever bytes lack, the one that is away longest."""
    opening: list[tuple[int, int, Candidate]] = []
    for item in problem.candidates:
        if item.value not in taken:
            window = window_of(item)
            if window.first < window.end:
                opening.append((window.first, window.end, item))
    opening.sort(key=lambda entry: entry[0])
    ready: list[tuple[int, int, int, Candidate]] = []  # the one that is wanted last is first
    added: list[Candidate] = []
    away = cursor = 0
    lacking = np.flatnonzero(left > 0).tolist()
    closing: list[tuple[int, int]] = []
    for now in lacking:
        while cursor < len(opening) and opening[cursor][0] <= now:
            _, end, item = opening[cursor]
            heappush(ready, (-end, -item.nbytes, item.value, item))
            cursor += 1
        while closing and closing[0][0] <= now:
            away -= heappop(closing)[1]
        while ready and away < left[now]:
            negative_end, _, _, item = heappop(ready)
            if -negative_end <= now:  # all that are left are back by now
                ready.clear()
                break
            added.append(item)
            heappush(closing, (-negative_end, item.nbytes))
            away += item.nbytes
    return added


def _prune(excess: _Bytes, chosen: dict[int, Candidate], windows: dict[int, _Window]) -> None:
    """Let values stay whose bytes are missed nowhere; those that are wanted soonest are asked first."""
    spare = -_left(excess, chosen, windows)
    for value in sorted(chosen, key=lambda value: chosen[value].first_unpack):
        window, nbytes = windows[value], chosen[value].nbytes
        during = spare[window.first : window.end]
        # Where the excess is not covered anyway, no byte is one too many.
        if len(during) == 0 or int(during.min()) >= nbytes:
            during -= nbytes
            del chosen[value], windows[value]


def _delayed(problem: Problem, excess: _Bytes, chosen: Sequence[Candidate]) -> tuple[Offload, ...]:
    """Copies as with prefetch, but none comes back before an op that needs its room.

    A late copy stalls the device for its own length; one that came too early has others sent away and back again.
    """
    items = {item.value: item for item in chosen}
    spare = -_left(excess, items, {value: _best_window(problem, item) for value, item in items.items()})
    found: list[Offload] = []
    for offload in sorted(with_prefetch(problem, chosen), key=lambda offload: items[offload.value].first_unpack):
        item = items[offload.value]
        wanted = problem.tick_ops[item.first_unpack]
        start = problem.tick_ops[offload.in_tick]
        too_full = np.flatnonzero(spare[start:wanted] < item.nbytes)
        if len(too_full):
            start += int(too_full[-1]) + 1
        spare[start:wanted] -= item.nbytes
        tick = max(offload.in_tick, problem.first_tick_at(start))
        found.append(replace(offload, in_tick=tick if tick < item.first_unpack else -1))
    return tuple(found)


def _is_trainable(plan: Plan) -> bool:
    prediction = plan.simulate()
    return prediction.feasible and prediction.evicted_bytes == 0


def _rank(plan: Plan) -> tuple[bool, int, int]:
    """Trainable first, then fast; of equals, to a thousandth of the step, the one that moves least."""
    prediction = plan.simulate()
    thousandths = round(1000 * prediction.step_seconds / max(prediction.plain_step_seconds, 1e-9))
    return (not prediction.feasible, thousandths, prediction.offloaded_bytes + prediction.evicted_bytes)
