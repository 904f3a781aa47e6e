"""What the three lanes do: the same step that the simulator's figures are of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

import outgrow
from outgrow.planning.plan import Offload, Plan, make_plan
from outgrow.planning.problem import Problem
from outgrow.planning.simulate import timeline
from outgrow.planning.timeline import Activity, Span
from outgrow.reporting.holders import held_in_plain_step, held_in_plan
from outgrow.reporting.modules import decisions_by_module
from outgrow.tracing.liveness import plain_profile
from plans import MAP_BYTES, Map, deep_plan, trace_of_maps
from steps import ParkAll, RandomDecisions, RecomputeAll
from test_auto import CPU_AND_DISK, SLOW_LINK, plans_of, skips_of, trace_of


def some_plans() -> Iterator[tuple[str, Plan]]:
    """Plans of every policy, of a network with skips and of a chain, and some that no policy would make."""
    for shape, trace in (
        ("skips", skips_of((8, 16, 16))),
        ("residual", trace_of((16, 16, 32, 16), residual=True)),
    ):
        for device, hardware in (("disk", CPU_AND_DISK), ("link", SLOW_LINK)):
            plans = plans_of(trace, hardware, 0.15)
            yield from ((f"{shape}, {device}, {name}", plan) for name, plan in plans.items())
            problem = Problem(trace, hardware, plans["auto"].budget_bytes, base_bytes=12345)
            for policy in (ParkAll(), RecomputeAll(), RandomDecisions(1), RandomDecisions(2), RandomDecisions(3)):
                yield f"{shape}, {device}, {policy}", policy.plan(problem)
    yield "deep", deep_plan(30)


PLANS = dict(some_plans())


@pytest.fixture(params=PLANS, scope="module")
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]


def seconds(spans: tuple[Span, ...], *activities: Activity) -> float:
    return sum(span.seconds for span in spans if span.activity in activities)


def test_there_is_something_to_see() -> None:
    seen = {span.activity for plan in PLANS.values() for lane in lanes(plan) for span in lane}
    assert seen == set(Activity)


def lanes(plan: Plan) -> tuple[tuple[Span, ...], ...]:
    shown = timeline(plan)
    return shown.compute, shown.out, shown.back


def test_recording_changes_nothing(plan: Plan) -> None:
    before = plan.simulate()
    timeline(plan)
    from outgrow.planning.simulate import simulate

    assert simulate(plan) == before


def test_the_compute_lane_has_no_gaps_and_ends_with_the_step(plan: Plan) -> None:
    compute, _, _ = lanes(plan)
    assert compute[0].start == 0
    assert all(before.end == after.start for before, after in pairwise(compute))
    assert compute[-1].end == plan.simulate().step_seconds


def test_copies_of_a_lane_do_not_overlap_and_start_within_the_step(plan: Plan) -> None:
    for lane in lanes(plan)[1:]:
        assert all(before.end <= after.start for before, after in pairwise(lane))
        assert all(0 <= span.start < span.end for span in lane)


def test_spans_add_up_to_what_is_predicted(plan: Plan) -> None:
    prediction, (compute, out, back) = plan.simulate(), lanes(plan)
    trace = plan.problem.trace
    assert [span.op for span in compute if span.activity is Activity.RUN] == list(range(len(trace.ops)))
    assert seconds(compute, Activity.RUN) == pytest.approx(prediction.plain_step_seconds)
    assert seconds(compute, Activity.WAIT) == pytest.approx(prediction.stall_seconds)
    assert seconds(compute, Activity.RECOMPUTE) == pytest.approx(prediction.recompute_seconds)
    assert seconds(compute, *Activity) == pytest.approx(prediction.step_seconds)
    sent = sum(trace.values[span.value].nbytes for span in out)
    assert sent <= prediction.offloaded_bytes + prediction.evicted_bytes  # one copy may serve two ends
    cost = sum(plan.problem.hardware.copying_costs(trace.values[span.value].nbytes) for span in (*out, *back))
    left = {span.value for span in (*out, *(span for span in compute if span.activity is Activity.COPYING))}
    cost += sum(map(plan.problem.handling_seconds, left))
    assert seconds(compute, Activity.COPYING) == pytest.approx(cost)
    assert max(span.live_bytes for span in compute) == prediction.peak_bytes


def test_what_is_held_adds_up_to_the_live_bytes_of_every_span(plan: Plan) -> None:
    shown = timeline(plan)
    for number in range(0, len(shown.compute), 5):
        held = held_in_plan(plan, shown, number)
        assert held.bytes == shown.compute[number].live_bytes, shown.compute[number]


def test_what_holds_the_plain_peak_adds_up_to_it(plan: Plan) -> None:
    profile = plain_profile(plan.problem.trace)
    held = held_in_plain_step(plan.problem, profile.peak_op)
    assert held.bytes == profile.peak_bytes + plan.problem.base_bytes


def test_what_modules_decide_adds_up_to_the_decisions_of_the_plan(plan: Plan) -> None:
    rows = decisions_by_module(plan, timeline(plan))
    summary, prediction = plan.decisions_summary(), plan.simulate()
    assert sum(row.values for row in rows) == sum(item["count"] for item in summary.values())
    assert sum(row.kept for row in rows) == summary["keep"]["bytes"]
    assert sum(row.offloaded for row in rows) == summary["offload"]["bytes"]
    assert sum(row.recomputed for row in rows) == summary["recompute"]["bytes"]
    assert sum(row.wait_seconds for row in rows) == pytest.approx(prediction.stall_seconds)
    assert sum(row.recompute_seconds for row in rows) == pytest.approx(prediction.recompute_seconds)
    assert sum(row.compute_seconds for row in rows) == pytest.approx(prediction.plain_step_seconds)
    assert len({row.module for row in rows}) == len(rows)


def test_an_empty_step_has_an_empty_timeline() -> None:
    trace = outgrow.Trace((), (), (), (), "cpu", True, "2.11.0")
    plan = outgrow.plan(trace, budget=100, hardware=CPU_AND_DISK)
    shown = timeline(plan)
    assert (shown.compute, shown.end, shown.peak) == ((), 0.0, 0)
    assert held_in_plan(plan, shown, 0).bytes == 0


def test_a_session_expects_the_peak_of_copies_that_end_a_little_late() -> None:
    # The first map is on the disk after 5.7 ms, and the second is made 6 ms after the first.
    maps = (Map(birth=0, held=1, wanted=4), Map(birth=2, held=3, wanted=3))
    trace = trace_of_maps(maps, [1e-3, 6e-3, 1e-3, 1e-3, 50e-3], {})
    copied = (Offload(value=0, out_tick=0, release_tick=-1, in_tick=-1, offset=0),)

    def peaks(budget_bytes: int, *offloads: Offload, evicts: bool = False) -> tuple[int, int]:
        problem = Problem(trace, CPU_AND_DISK, budget_bytes)
        plan = make_plan("lru", problem, offloads, evicts=evicts)
        return plan.simulate().peak_bytes, plan.expected_peak_bytes

    assert peaks(8 * MAP_BYTES, *copied) == (MAP_BYTES, 2 * MAP_BYTES)
    # Where there is no room for that, the step waits for the copy.
    assert peaks(MAP_BYTES, *copied, evicts=True) == (MAP_BYTES, MAP_BYTES)
    assert peaks(8 * MAP_BYTES) == (2 * MAP_BYTES, 2 * MAP_BYTES)
