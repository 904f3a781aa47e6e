"""What `auto` promises in the simulator, and what the lower bound does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import outgrow
from outgrow.networks import find
from outgrow.planning.absences import Absence, before_first_uses, beside_parks
from outgrow.planning.agenda import actions_of
from outgrow.planning.bound import least_step_seconds
from outgrow.planning.levels import landed_ops, levels_on_demand
from outgrow.planning.moments import Moments
from outgrow.planning.parks import gaps, park, parks_for
from outgrow.planning.plan import Offload, make_plan
from outgrow.planning.prefetch import dropped_early, wanted_first, with_prefetch
from outgrow.planning.problem import Problem
from outgrow.planning.refine import Refusals, refined
from outgrow.planning.relaxation import Relaxation
from outgrow.planning.returns import in_turn
from outgrow.planning.timeline import Recording
from outgrow.planning.walk import Walk
from plans import MAP_BYTES, Map, trace_of_maps
from random_networks import INPUT_CHANNELS, build, traceable_descriptions
from steps import RandomDecisions

GPU = outgrow.Hardware("GPU", 12 << 30, 4e12, 2.4e11, 1e10, 1e10, 1e-5, 1e-6)
SLOW_LINK = outgrow.Hardware("GPU on a slow link", 12 << 30, 4e12, 2.4e11, 1e9, 1e9, 1e-5, 1e-6)
NO_LINK = outgrow.Hardware("GPU with hardly a link", 12 << 30, 4e12, 2.4e11, 1e6, 1e6, 1e-5, 1e-6)
SLOW_WAY_OUT = outgrow.Hardware("GPU that writes slowly", 12 << 30, 4e12, 2.4e11, 3e9, 2e10, 1e-5, 1e-6)
SLOW_WAY_BACK = outgrow.Hardware("GPU that reads slowly", 12 << 30, 4e12, 2.4e11, 2e10, 3e9, 1e-5, 1e-6)
NO_LATENCY = outgrow.Hardware("GPU without latencies", 12 << 30, 4e12, 2.4e11, 1e9, 2e9, 0.0, 0.0)
SLOW_THREAD = outgrow.Hardware("CPU of slow threads", 24 << 30, 2e11, 2e10, 1.5e9, 1e9, 1e-4, 1e-5, 5e-11, 1e-3)
CPU_AND_DISK = outgrow.Hardware("CPU", 24 << 30, 2e11, 2e10, 1.5e9, 1e9, 1e-4, 1e-5, 5e-11, 6e-5)


def trace_of(widths: tuple[int, ...], *, residual: bool, batch: int = 64) -> outgrow.Trace:
    """A convolutional network with batch norm and ReLU, one block for each width."""

    def make() -> outgrow.TrainingStep:
        blocks: list[torch.nn.Module] = []
        before = 3
        for width in widths:
            blocks.append(
                torch.nn.Sequential(
                    torch.nn.Conv2d(before, width, 3, padding=1),
                    torch.nn.BatchNorm2d(width),
                    torch.nn.ReLU(inplace=True),
                )
            )
            before = width
        model = torch.nn.ModuleList(blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.randn(batch, 3, 16, 16)

        def step() -> None:
            x = data
            for block in model:
                y = block(x)
                x = x + y if residual and x.shape == y.shape else y
            x.mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return outgrow.TrainingStep(model, optimizer, step)

    return outgrow.trace(make, fake=True)


def skips_of(widths: tuple[int, ...], batch: int = 64) -> outgrow.Trace:
    """A U-Net without its pooling: what each layer makes waits for a layer on the way back, so that plans park."""

    def make() -> outgrow.TrainingStep:
        down, up, before = torch.nn.ModuleList(), torch.nn.ModuleList(), 3
        for width in widths:
            down.append(torch.nn.Conv2d(before, width, 3, padding=1))
            before = width
        for width in reversed(widths):
            up.append(torch.nn.Conv2d(before + width, width, 3, padding=1))
            before = width
        model = torch.nn.ModuleList([down, up])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = torch.randn(batch, 3, 16, 16)

        def step() -> None:
            x, skips = data, []
            for layer in down:
                x = layer(x).relu()
                skips.append(x)
            for layer in up:
                x = layer(torch.cat([x, skips.pop()], 1)).relu()
            x.mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return outgrow.TrainingStep(model, optimizer, step)

    return outgrow.trace(make, fake=True)


def plans_of(
    trace: outgrow.Trace, hardware: outgrow.Hardware, share: float, policies: Sequence[str] = outgrow.policies()
) -> dict[str, outgrow.Plan]:
    """The plan of each policy, at a share of the way from the least feasible budget to the plain peak."""
    keep = outgrow.plan(trace, budget=1 << 60, policy="keep", hardware=hardware)
    least, plain = keep.least_budget_bytes, keep.simulate().peak_bytes
    budget = int(least + share * (plain - least))
    return {name: outgrow.plan(trace, budget=budget, policy=name, hardware=hardware) for name in policies}


def by_time(plan: outgrow.Plan) -> tuple[bool, float, int]:
    """What a local search makes small."""
    prediction = plan.simulate()
    return (not prediction.feasible, prediction.step_seconds, 0)


SHAPES: dict[str, Callable[[tuple[int, ...]], outgrow.Trace]] = {
    "chain": lambda widths: trace_of(widths, residual=False),
    "residual": lambda widths: trace_of(widths, residual=True),
    "skips": skips_of,
}


@settings(max_examples=12, deadline=None)
@given(
    widths=st.lists(st.sampled_from([4, 8, 16, 32]), min_size=1, max_size=6),
    shape=st.sampled_from(list(SHAPES)),
    hardware=st.sampled_from([GPU, SLOW_LINK, NO_LINK, CPU_AND_DISK, SLOW_THREAD]),
    share=st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.02, 0.1])),  # parks decide just above the least
)
@example(widths=[16, 32], shape="chain", hardware=SLOW_WAY_BACK, share=0.4)
@example(widths=[16, 16, 16], shape="residual", hardware=SLOW_WAY_BACK, share=0.02)
@example(widths=[32, 4, 4, 16, 8, 8, 8], shape="residual", hardware=SLOW_WAY_BACK, share=0.02)
def test_no_policy_is_faster_than_auto_and_none_beats_the_bound(
    widths: list[int], shape: str, hardware: outgrow.Hardware, share: float
) -> None:
    plans = plans_of(SHAPES[shape](tuple(widths)), hardware, share)
    auto = plans["auto"].simulate()
    problem = plans["auto"].problem
    bound = max(least_step_seconds(problem), least_step_seconds(problem, 0.5))
    for plan in plans.values():
        prediction = plan.simulate()
        if prediction.feasible:
            assert auto.feasible
            assert auto.step_seconds <= prediction.step_seconds * (1 + 1e-9)
            assert bound <= prediction.step_seconds * (1 + 1e-6)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    description=traceable_descriptions,
    seed=st.integers(0, 2**32 - 1),
    hardware=st.sampled_from([GPU, SLOW_LINK, NO_LINK, SLOW_WAY_BACK, CPU_AND_DISK, SLOW_THREAD]),
    share=st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.02, 0.1])),
)
def test_no_random_plan_of_a_random_network_beats_the_bound(
    description: tuple, seed: int, hardware: outgrow.Hardware, share: float
) -> None:
    def make() -> outgrow.TrainingStep:
        model = torch.nn.Sequential(torch.nn.Conv2d(INPUT_CHANNELS, INPUT_CHANNELS, 1), build(description))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            for _ in range(1 + seed % 2):  # gradients are accumulated
                model(torch.randn(32, INPUT_CHANNELS, 32, 32)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return outgrow.TrainingStep(model, optimizer, step)

    auto = plans_of(outgrow.trace(make, fake=True), hardware, share, policies=["auto"])["auto"]
    problem, draw = auto.problem, Random(seed)
    bound = max(least_step_seconds(problem), least_step_seconds(problem, 0.5))
    for plan in (auto, *(RandomDecisions(draw.randrange(1 << 30)).plan(problem) for _ in range(4))):
        for other in (plan, refined(plan, 40, draw)):
            prediction = other.simulate()
            assert not prediction.feasible or bound <= prediction.step_seconds * (1 + 1e-6)


def test_the_bound_knows_that_one_of_two_values_has_to_leave_as_a_whole() -> None:
    """Half of one would do for the op between."""
    trace = trace_of_maps([Map(0, 2, 6), Map(1, 2, 5)], seconds=[1e-6] * 7, workspaces={3: 4 * MAP_BYTES})
    problem = Problem(trace, NO_LATENCY, int(5.5 * MAP_BYTES))
    seconds = 7e-6 + NO_LATENCY.copy_out_seconds(MAP_BYTES) + NO_LATENCY.copy_in_seconds(MAP_BYTES)
    assert least_step_seconds(problem, 1.0) == pytest.approx(seconds, rel=0.001)
    plan = outgrow.plan(trace, budget=problem.budget_bytes, hardware=NO_LATENCY)
    assert plan.simulate().step_seconds == pytest.approx(seconds, rel=0.001)


def saved_often(trace: outgrow.Trace, value: int, times: int) -> outgrow.Trace:
    """A trace in which autograd saves so many more tensors on a value."""
    first = next(number for number, saved in enumerate(trace.saved) if saved.value == value)
    own = [tick for tick in trace.ticks if tick.saved == first]
    more = [replace(tick, saved=len(trace.saved) + number) for number in range(times) for tick in own]
    ticks = tuple(sorted((*trace.ticks, *more), key=lambda tick: tick.op))
    return replace(trace, saved=(*trace.saved, *[trace.saved[first]] * times), ticks=ticks)


@pytest.mark.parametrize(("often", "seldom"), [(0, 1), (1, 0)])
def test_of_two_values_the_one_leaves_that_has_fewer_saved_tensors(often: int, seldom: int) -> None:
    """Each takes its time of the thread that trains, on its way out and back."""
    maps = [Map(0, 2, 9), Map(1, 2, 8), Map(2, 3, 6)]
    trace = trace_of_maps(maps, seconds=[0.02] * 10, workspaces={4: 4 * MAP_BYTES})
    hardware = replace(NO_LATENCY, handling_seconds=1e-3)
    plan = outgrow.plan(saved_often(trace, often, 40), budget=int(6.5 * MAP_BYTES), hardware=hardware)
    assert [item.value for item in plan.offloads] == [seldom]
    at_once = replace(hardware, copy_out_bandwidth=1e18, copy_in_bandwidth=1e18)
    handled, free = (
        replace(plan, problem=replace(plan.problem, hardware=other)).simulate().step_seconds
        for other in (at_once, replace(at_once, handling_seconds=0.0))
    )
    assert handled - free == pytest.approx(3e-3)  # two copies, and one saved tensor
    assert least_step_seconds(plan.problem, 1.0) <= plan.simulate().step_seconds * (1 + 1e-6)


def test_the_bound_knows_that_what_was_just_saved_has_to_be_copied_since() -> None:
    """Both leave, one after the other, for the op between, and come back after it."""
    trace = trace_of_maps([Map(0, 2, 6), Map(1, 2, 5)], seconds=[1e-6] * 7, workspaces={3: 4 * MAP_BYTES})
    problem = Problem(trace, NO_LATENCY, int(4.5 * MAP_BYTES))
    seconds = 2 * (NO_LATENCY.copy_out_seconds(MAP_BYTES) + NO_LATENCY.copy_in_seconds(MAP_BYTES))
    assert least_step_seconds(problem, 1.0) == pytest.approx(seconds, rel=0.001)


@pytest.mark.parametrize(
    "maps",
    [
        pytest.param([Map(0, 1, 2, again=6)], id="between two uses of autograd's"),
        pytest.param([Map(0, 5, 6), Map(1, 2, 2)], id="where the program holds what it uses no more"),
    ],
)
def test_the_bound_allows_what_leaves_before_an_op_without_room(maps: list[Map]) -> None:
    trace = trace_of_maps(maps, seconds=[1e-6] * 7, workspaces={4: 4 * MAP_BYTES})
    plan = outgrow.plan(trace, budget=int(4.5 * MAP_BYTES), hardware=NO_LATENCY)
    assert plan.simulate().feasible
    assert least_step_seconds(plan.problem, 1.0) <= plan.simulate().step_seconds * (1 + 1e-6)


@pytest.mark.parametrize("share", [0.8, 0.66, 0.5])
def test_auto_is_near_the_bound(share: float) -> None:
    network = find("resnet-50")

    def make() -> outgrow.TrainingStep:
        model = network.build(128, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data, target = network.sample(16, 128, 100)

        def step() -> None:
            network.loss(model(data), target).backward()
            optimizer.step()
            optimizer.zero_grad()

        return outgrow.TrainingStep(model, optimizer, step)

    trace = outgrow.trace(make, fake=True)
    keep = outgrow.plan(trace, budget=1 << 60, policy="keep", hardware=CPU_AND_DISK)
    budget = int(share * keep.simulate().peak_bytes)
    plan = outgrow.plan(trace, budget=budget, hardware=CPU_AND_DISK)
    assert plan.simulate().feasible
    assert plan.simulate().step_seconds <= 1.03 * least_step_seconds(plan.problem)


def test_the_bound_is_infinite_where_nothing_fits() -> None:
    trace = trace_of((8, 8), residual=False)
    hardware = GPU
    plan = outgrow.plan(trace, budget=1 << 60, policy="keep", hardware=hardware)
    problem = Problem(plan.problem.trace, hardware, plan.least_budget_bytes // 2)
    assert least_step_seconds(problem) == float("inf")


def test_auto_offloads_over_a_fast_link_and_recomputes_without_one() -> None:
    trace = trace_of((16,) * 12, residual=False)
    fast, none = (plans_of(trace, hardware, 0.5)["auto"].decisions_summary() for hardware in (GPU, NO_LINK))
    assert fast["offload"]["bytes"] > 0
    assert none["recompute"]["bytes"] > 0
    assert none["offload"]["bytes"] == 0


def test_waits_are_what_a_stall_is_made_of() -> None:
    plan = plans_of(skips_of((8, 16, 16)), SLOW_LINK, 0.05)["vdnn-all"]
    prediction = plan.simulate()
    assert prediction.stall_seconds > 0
    assert sum(wait.seconds for wait in prediction.waits) == pytest.approx(prediction.stall_seconds)


@pytest.mark.parametrize("policy", ["vdnn-all", "layrub", "lru"])
def test_a_local_search_shortens_the_step_of_a_plan_that_waits(policy: str) -> None:
    plan = plans_of(trace_of((16, 32, 32, 16), residual=True), SLOW_LINK, 0.35)[policy]
    better = refined(plan, tries=200)
    assert by_time(better) < by_time(plan)
    assert better.simulate().peak_bytes <= max(plan.budget_bytes, plan.simulate().peak_bytes)
    assert refined(plan, tries=0) is plan


def test_a_local_search_copies_out_later_what_is_held_for_long() -> None:
    """Its copy keeps the lane busy while another has to be gone."""
    maps = [Map(0, 5, 9), Map(1, 2, 8), Map(3, 4, 7)]
    seconds = [1.0 if op == 4 else 1e-6 for op in range(10)]
    trace = trace_of_maps(maps, seconds, workspaces={2: int(2.5 * MAP_BYTES), 6: 4 * MAP_BYTES})
    plan = outgrow.plan(trace, budget=int(4.25 * MAP_BYTES), policy="vdnn-all", hardware=NO_LATENCY)
    assert {item.value: item.out_tick for item in plan.offloads}[0] == 0
    better = refined(plan, tries=100)
    assert {item.value: item.out_tick for item in better.offloads}[0] == 2
    assert better.simulate().step_seconds == pytest.approx(least_step_seconds(plan.problem), rel=0.001)


def test_a_local_search_exchanges_what_is_copied_for_what_is_made_anew() -> None:
    maps = [Map(0, 9, 9), Map(1, 3, 8, made_from=(0,)), Map(2, 3, 7, made_from=(1,))]
    seconds = [0.02 if op == 1 else 1e-6 for op in range(10)]
    trace = trace_of_maps(maps, seconds, workspaces={4: int(3.5 * MAP_BYTES)})
    problem = Problem(trace, NO_LATENCY, int(4.75 * MAP_BYTES))
    dear, cheap = (item for item in problem.candidates if item.value > 0)
    plan = make_plan("by hand", problem, with_prefetch(problem, [cheap], [dear]), dropped_early(problem, [dear]))

    exchanged = refined(plan, tries=200)
    copied, dropped = ([item.value for item in moved] for moved in (exchanged.offloads, exchanged.recomputes))
    assert (copied, dropped) == ([dear.value], [cheap.value])
    assert exchanged.simulate().step_seconds < plan.simulate().step_seconds


def test_copies_back_come_one_after_the_other_before_any_of_them_is_wanted() -> None:
    maps = [Map(0, 1, 9), Map(1, 2, 8), Map(2, 3, 7)]
    copy = NO_LATENCY.copy_in_seconds(MAP_BYTES)
    trace = trace_of_maps(maps, [9 * copy] * 7 + [1e-6] * 3, {5: 3 * MAP_BYTES})
    problem = Problem(trace, NO_LATENCY, 4 * MAP_BYTES)
    late = make_plan("late", problem, tuple(Offload(value, value, -1, -1, 0) for value in range(3)), evicts=False)
    assert late.simulate().stall_seconds > 0
    plan = in_turn(late)
    assert plan.simulate().feasible
    # The one that is wanted first has no room before: no tick lies between the workspace and its use.
    assert [item.in_tick for item in plan.offloads] == [2, 3, -1]
    assert plan.simulate().stall_seconds < late.simulate().stall_seconds


@pytest.mark.parametrize("wanted", [(8, 9), (9, 8)])
def test_of_copies_back_at_one_tick_what_is_wanted_first_comes_first(wanted: tuple[int, int]) -> None:
    maps = [Map(0, 1, wanted[0]), Map(1, 2, wanted[1])]
    copy = NO_LATENCY.copy_in_seconds(MAP_BYTES)
    trace = trace_of_maps([*maps, Map(2, 3, 6)], [copy] * 6 + [0.5 * copy] * 4, {4: 2 * MAP_BYTES})
    problem = Problem(trace, NO_LATENCY, 4 * MAP_BYTES)
    plan = make_plan("by hand", problem, tuple(Offload(value, value, -1, 3, 0) for value in (0, 1)), evicts=False)
    waits = plan.simulate().waits
    assert [wait.op for wait in waits] == [9]
    assert sum(wait.seconds for wait in waits) == pytest.approx(0.5 * copy)


def test_copies_back_may_follow_each_other_while_one_op_runs() -> None:
    """Their lane is not idle because the clock has no tick meanwhile."""
    copy = NO_LATENCY.copy_in_seconds(MAP_BYTES)
    maps = [Map(0, 1, 9), Map(1, 2, 8), Map(2, 3, 4)]
    trace = trace_of_maps(maps, [10 * copy] * 7 + [1e-6] * 3, {})
    problem = Problem(trace, NO_LATENCY, 6 * MAP_BYTES)
    plan = in_turn(make_plan("some", problem, with_prefetch(problem, problem.candidates[:2]), evicts=False))
    assert {item.in_tick for item in plan.offloads} == {3}  # the last one before both are wanted
    assert plan.simulate().stall_seconds == 0


def test_what_has_no_room_before_the_last_moment_comes_last() -> None:
    """Two are wanted at the end; one of them finds room at any time, and leaves the lane to the other then."""
    copy = NO_LATENCY.copy_in_seconds(MAP_BYTES)
    trace = trace_of_maps([Map(0, 1, 7), Map(1, 2, 6)], [2 * copy] * 8, {3: 2 * MAP_BYTES, 5: int(0.5 * MAP_BYTES)})
    problem = Problem(trace, NO_LATENCY, 3 * MAP_BYTES)
    plan = in_turn(make_plan("some", problem, with_prefetch(problem, problem.candidates), evicts=False))
    assert plan.simulate().feasible
    assert [item.in_tick for item in plan.offloads] == [2, -1]
    assert [(wait.op, wait.value) for wait in plan.simulate().waits] == [(6, 1)]
    assert plan.simulate().stall_seconds == pytest.approx(copy)


@settings(max_examples=30, deadline=None)
@given(
    widths=st.lists(st.sampled_from([4, 8, 16, 32]), min_size=1, max_size=5),
    shape=st.sampled_from(list(SHAPES)),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_walk_that_looks_at_what_moves_alone_finds_the_same(
    widths: list[int], shape: str, share: float, seed: int
) -> None:
    problem = plans_of(SHAPES[shape](tuple(widths)), CPU_AND_DISK, share, policies=["keep"])["keep"].problem
    plan = replace(RandomDecisions(seed).plan(problem), evicts=False)
    alone, whole = Walk(plan), Walk(plan, Recording())  # a recording shows every value
    assert alone.run()
    assert whole.run()
    assert (alone.time, alone.curve, alone.waits) == (whole.time, whole.curve, whole.waits)


@settings(max_examples=30, deadline=None)
@given(
    widths=st.lists(st.sampled_from([4, 8, 16, 32]), min_size=1, max_size=5),
    shape=st.sampled_from(list(SHAPES)),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32 - 1),
    times=st.one_of(st.just(1.0), st.floats(0.5, 1.5)),
)
def test_a_simulation_within_a_time_tells_whether_the_step_fits_and_is_in_time(
    widths: list[int], shape: str, share: float, seed: int, times: float
) -> None:
    problem = plans_of(SHAPES[shape](tuple(widths)), SLOW_LINK, share, policies=["keep"])["keep"].problem
    plan = RandomDecisions(seed).plan(problem)
    whole = replace(plan).simulate()
    seconds = times * whole.step_seconds
    found = plan.simulate_within(seconds)
    assert (found is not None) == (whole.feasible and whole.step_seconds <= seconds)
    assert found is None or found == whole


@pytest.mark.parametrize("shape", SHAPES)
def test_levels_on_demand_are_those_of_a_walk_where_copies_take_no_time(shape: str) -> None:
    link = outgrow.Hardware("CPU on a fast link", 12 << 30, 4e12, 2.4e11, 1e18, 1e18, 0.0, 1e-6)
    problem = plans_of(SHAPES[shape]((8, 16, 16, 8)), link, 1.0, policies=["keep"])["keep"].problem
    problem = problem.with_budget(1 << 60)
    plan = make_plan("some", problem, with_prefetch(problem, problem.candidates[::2]), evicts=False)
    on_demand = replace(plan, offloads=tuple(replace(item, in_tick=-1) for item in plan.offloads))
    assert levels_on_demand(plan).tolist() == list(on_demand.simulate().curve)


def test_levels_on_demand_know_when_copies_out_are_done() -> None:
    copy = NO_LATENCY.copy_out_seconds(MAP_BYTES)
    trace = trace_of_maps([Map(0, 1, 9), Map(1, 2, 8), Map(2, 3, 7)], [0.6 * copy] * 10, {})
    problem = Problem(trace, NO_LATENCY, 1 << 60)
    plan = make_plan("some", problem, with_prefetch(problem, problem.candidates), evicts=False)
    on_demand = replace(plan, offloads=tuple(replace(item, in_tick=-1) for item in plan.offloads))
    assert levels_on_demand(plan).tolist()[:7] == list(on_demand.simulate().curve)[:7]


def test_the_program_knows_that_parked_values_need_the_lane() -> None:
    trace = skips_of((16, 16, 16))
    plan = plans_of(trace, CPU_AND_DISK, 0.1, policies=["auto"])["auto"]
    problem = plan.problem
    parks = parks_for(problem, problem.budget_bytes)
    assert parks
    certain = [item for item in beside_parks(problem, parks) if item.is_certain]
    assert {item.value for item in certain} == {item.value for item in parks if not item.remade}
    roomy = problem.with_budget(1 << 60)  # nothing else has to move
    levels = make_plan("keep", roomy, (), evicts=False).simulate().curve
    shares = Relaxation(roomy, levels, beside_parks(problem, parks)).solve()
    assert shares.seconds >= problem.hardware.copying_costs(2 * min(item.nbytes for item in certain))


def test_the_program_knows_that_what_has_no_room_until_it_is_wanted_is_waited_for() -> None:
    copy = NO_LATENCY.copy_in_seconds(MAP_BYTES)
    trace = trace_of_maps([Map(0, 1, 6), Map(2, 3, 4)], [10 * copy] * 7, {5: 4 * MAP_BYTES})
    problem = Problem(trace, NO_LATENCY, int(4.5 * MAP_BYTES))
    levels = make_plan("keep", problem.with_budget(1 << 60), (), evicts=False).simulate().curve
    shares = Relaxation(problem, levels, before_first_uses(problem)).solve()
    assert shares.offloaded[0] == pytest.approx(1.0)
    assert shares.seconds == pytest.approx(copy)


def test_what_a_park_sends_away_comes_back_by_its_copy() -> None:
    """Nobody can prove a recipe against memory that is gone."""
    copy = CPU_AND_DISK.copy_in_seconds(MAP_BYTES)
    maps = [Map(0, 9, 9), Map(1, 5, 7, made_from=(0,)), Map(4, 5, 6, made_from=(0,))]
    trace = trace_of_maps(maps, [10 * copy] * 10, {4: 4 * MAP_BYTES})
    problem = Problem(trace, CPU_AND_DISK, int(6.5 * MAP_BYTES))
    parks = parks_for(problem, problem.budget_bytes)
    assert [item.value for item in parks] == [1]
    (absence,) = (item for item in beside_parks(problem, parks) if item.value == 1)
    assert absence.anew_seconds is None
    drops = dropped_early(problem, [problem.candidates_by_value[1]])
    plan = in_turn(make_plan("some", problem, (), drops, parks=parks, evicts=False))
    assert [item.in_tick >= 0 for item in plan.parks] == [True]
    assert plan.simulate().stall_seconds == 0
    assert plan.simulate().recomputed_bytes == 0


def test_what_left_for_a_park_and_for_good_goes_again_when_the_program_lets_go() -> None:
    """One copy serves both."""
    copy = CPU_AND_DISK.copy_out_seconds(MAP_BYTES)
    maps = [Map(0, 6, 9), Map(5, 6, 8, made_from=(0,))]
    trace = trace_of_maps(maps, [10 * copy] * 10, {})
    problem = Problem(trace, CPU_AND_DISK, 8 * MAP_BYTES)
    (gap,) = (gap for gap in gaps(problem) if gap.value == 0 and not gap.is_last)
    parked = park(problem, gap)
    assert parked is not None
    plan = make_plan("by hand", problem, (Offload(0, 0, -1, -1, 0),), parks=(parked,), evicts=False)
    curve, kept = plan.simulate().curve, make_plan("keep", problem, (), evicts=False).simulate().curve
    assert [(there - now) // MAP_BYTES for there, now in zip(kept, curve, strict=True)][2:9] == [1, 1, 1, 0, 1, 1, 1]


def test_the_program_knows_that_what_nobody_wants_any_more_is_away() -> None:
    trace = trace_of_maps([Map(0, 1, 4)], [1.0] * 6, {})
    problem = Problem(trace, CPU_AND_DISK, MAP_BYTES)
    unwanted = Absence(7, MAP_BYTES, 1, 1, 1, 4, None, is_one_way=True, is_certain=True)
    curve = [2.0 * MAP_BYTES] * 6
    assert (Moments(problem, [unwanted], curve, optimistic=False, fine=False).least / MAP_BYTES).tolist() == [
        *(2.0, 1.0, 1.0, 1.0, 2.0, 2.0)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=10, deadline=None)
@given(share=st.floats(0.0, 0.5), seed=st.integers(0, 2**32 - 1))
def test_a_local_search_never_makes_a_plan_slower(shape: str, share: float, seed: int) -> None:
    problem = plans_of(SHAPES[shape]((8, 16, 16, 8)), SLOW_LINK, share, policies=["keep"])["keep"].problem
    plan = RandomDecisions(seed).plan(problem)
    found = refined(plan, 30)
    assert not plan.simulate().feasible or found.simulate().feasible
    assert not plan.simulate().feasible or found.simulate().step_seconds <= plan.simulate().step_seconds


@settings(max_examples=10, deadline=None)
@given(shape=st.sampled_from(list(SHAPES)), share=st.floats(0.0, 0.5), seed=st.integers(0, 2**32 - 1))
def test_a_local_search_that_knows_what_others_refused_finds_the_same(shape: str, share: float, seed: int) -> None:
    problem = plans_of(SHAPES[shape]((8, 16, 16, 8)), SLOW_LINK, share, policies=["keep"])["keep"].problem
    plan = RandomDecisions(seed).plan(problem)
    better, refusals = refined(plan, 30), Refusals()
    # What is no better than the one plan may be better than the other.
    for number, start in enumerate((plan, better, plan)):
        alone, beside = (refined(start, 30, Random(number), known) for known in (None, refusals))
        assert actions_of(alone) == actions_of(beside)


@settings(max_examples=20, deadline=None)
@given(
    shape=st.sampled_from(list(SHAPES)),
    share=st.floats(0.0, 1.0),
    hardware=st.sampled_from([SLOW_LINK, NO_LINK, CPU_AND_DISK]),
)
def test_the_program_without_chains_costs_no_more_where_the_other_has_none(
    shape: str, share: float, hardware: outgrow.Hardware
) -> None:
    problem = plans_of(SHAPES[shape]((8, 16, 16, 8)), hardware, share, policies=["keep"])["keep"].problem
    levels = make_plan("keep", problem.with_budget(1 << 60), (), evicts=False).simulate().curve
    absences = list(before_first_uses(problem))
    free, bound = (Relaxation(problem, levels, absences, chains=chains).solve() for chains in (True, False))
    assert bound.seconds >= free.seconds - 1e-5 * problem.op_times[-1]
    assert not bound.has_chains
    if not free.has_chains:
        assert bound.seconds == pytest.approx(free.seconds, rel=1e-6, abs=1e-5 * problem.op_times[-1])


def test_the_program_says_where_it_makes_things_anew_from_others_that_it_makes_anew() -> None:
    maps = [Map(0, 1, 9), Map(1, 2, 8, made_from=(0,)), Map(2, 3, 7, made_from=(1,))]
    problem = Problem(trace_of_maps(maps, [1.0] * 10, {4: 3 * MAP_BYTES}), NO_LINK, int(4.5 * MAP_BYTES))
    levels = make_plan("keep", problem.with_budget(1 << 60), (), evicts=False).simulate().curve
    shares = Relaxation(problem, levels, before_first_uses(problem)).solve()
    assert shares.has_chains


@settings(max_examples=20, deadline=None)
@given(shape=st.sampled_from(list(SHAPES)), share=st.floats(0.0, 1.0), seed=st.integers(0, 2**32 - 1))
def test_no_copy_back_is_planned_before_its_value_is_gone(shape: str, share: float, seed: int) -> None:
    """It would be passed over."""
    problem = plans_of(SHAPES[shape]((8, 16, 16, 8)), SLOW_WAY_OUT, share, policies=["keep"])["keep"].problem
    plan = in_turn(RandomDecisions(seed).plan(problem))
    landed = landed_ops(plan)
    for item in plan.offloads:
        gone = max(landed[item.value, item.out_tick], problem.candidates_by_value[item.value].held)
        assert item.in_tick < 0 or problem.tick_ops[item.in_tick] >= gone


def test_what_is_parked_twice_comes_back_each_time_in_the_order_in_which_it_is_wanted() -> None:
    maps = [
        Map(0, 9, 13),
        Map(1, 7, 12),
        Map(4, 5, 11, made_from=(0,)),
        Map(6, 7, 10, made_from=(1,)),
        Map(8, 9, 10, made_from=(0,)),
    ]
    problem = Problem(trace_of_maps(maps, [1.0] * 14, {}), CPU_AND_DISK, 9 * MAP_BYTES)
    known = {(gap.value, gap.before_op): park(problem, gap) for gap in gaps(problem)}
    chosen = [known[0, 4], known[0, 8], known[1, 6]]
    tick = problem.first_tick_at(3)
    parks = tuple(replace(item, in_tick=tick) for item in chosen if item is not None)
    assert len(parks) == 3
    actions = actions_of(make_plan("by hand", problem, (), parks=(parks[0], replace(parks[1], in_tick=-1), parks[2])))
    assert [value for kind, value, _ in actions[tick] if kind == "unpark"] == [0, 1]


def test_a_plan_may_move_what_no_policy_would() -> None:
    """A plan file may name any saved value."""
    trace = trace_of_maps([Map(0, 1, 7), Map(1, 2, 6)], [1.0] * 8, {})
    problem = Problem(trace, CPU_AND_DISK, 8 * MAP_BYTES, least_moved_bytes=2 * MAP_BYTES)
    assert not problem.candidates
    plan = make_plan("by hand", problem, tuple(Offload(value, value, -1, 2, 0) for value in (0, 1)), evicts=False)
    assert plan.simulate().offloaded_bytes == 2 * MAP_BYTES


def test_the_start_of_a_chain_is_wanted_when_its_end_is() -> None:
    maps = [
        Map(0, 1, 13),
        Map(1, 2, 9, made_from=(0,), again=12),
        Map(2, 3, 11, made_from=(1,)),
        Map(3, 4, 8, made_from=(2,)),
    ]
    problem = Problem(trace_of_maps(maps, [1.0] * 14, {}), CPU_AND_DISK, 9 * MAP_BYTES)
    start, *chain = problem.candidates
    wanted = wanted_first(problem, [start], chain)
    assert set(wanted.values()) == {chain[-1].first_unpack}
