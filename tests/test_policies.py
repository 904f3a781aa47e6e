"""What makes each policy the one that it is called after."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import outgrow
from outgrow.cost.estimate import estimate
from outgrow.networks import find as find_network
from outgrow.planning.plan import Plan, Replay
from outgrow.planning.policies import find, policies
from outgrow.planning.policies.accudnn import choose
from outgrow.planning.policies.layers import backward_layers
from outgrow.planning.policies.superneurons import is_expensive, largest_layer_bytes
from outgrow.planning.problem import Problem
from outgrow.planning.reuse import reusable_ops
from outgrow.tracing.ir import Event, Phase, Trace
from outgrow.tracing.liveness import plain_profile

SYSTEMS = ("superneurons", "layrub", "accudnn")
SHARES = (0.8, 0.6, 0.45, 0.36, 0.3)
# A processor with a disk, and a graphics card with a slow and a fast link.
DEVICES = {
    "disk": outgrow.Hardware("disk", 1 << 40, 1e11, 2e10, 1e9, 8e8),
    "slow link": outgrow.Hardware("slow link", 1 << 40, 1e13, 5e11, 6e9, 6e9, 1e-5, 1e-6),
    "fast link": outgrow.Hardware("fast link", 1 << 40, 4e12, 3e11, 2e10, 2e10, 1e-5, 1e-6),
}


@cache
def resnet() -> Trace:
    """A step of ResNet-50 at batch 32, without memory."""
    network = find_network("resnet-50")

    def make_step() -> outgrow.TrainingStep:
        model = network.build(224, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        x, y = network.sample(32, 224, 10, torch.Generator())

        def step() -> None:
            network.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        return outgrow.TrainingStep(model, optimizer, step)

    return outgrow.trace(make_step)


def problem_of(trace: Trace, share: float, device: str = "disk") -> Problem:
    """The step at a share of its plain peak."""
    hardware = DEVICES[device]
    trace = estimate(trace, hardware)
    return Problem(trace, hardware, int(plain_profile(trace).peak_bytes * share))


def traced(build: Callable[[], nn.Module], shape: tuple[int, ...] = (4, 8, 16, 16)) -> Trace:
    def make_step() -> outgrow.TrainingStep:
        model, x = build(), torch.ones(shape)
        return outgrow.TrainingStep(model, None, lambda: model(x).sum().backward())

    return outgrow.trace(make_step)


def made_by(problem: Problem, value: int) -> str:
    birth = problem.trace.values[value].birth
    return "" if birth < 0 else problem.trace.ops[birth].name


def conv(stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(8, 8, 3, padding=1, stride=stride)


def moved(plan: Plan) -> set[int]:
    return {item.value for item in plan.offloads}


def dropped(plan: Plan) -> set[int]:
    return {item.value for item in plan.recomputes}


# --- all of them ---


def test_every_system_has_a_policy() -> None:
    assert set(SYSTEMS) < set(policies())


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_step_of_no_ops_has_a_plan(name: str) -> None:
    empty = Trace((), (), (), (), "cpu", False, "")
    plan = find(name).plan(Problem(empty, DEVICES["disk"], 1))
    assert not plan.offloads
    assert not plan.recomputes


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_step_without_a_backward_pass_has_a_plan(name: str) -> None:
    def make_step() -> outgrow.TrainingStep:
        model = nn.Sequential(conv(), nn.ReLU())
        return outgrow.TrainingStep(model, None, lambda: model(torch.ones(4, 8, 16, 16)))

    assert find(name).plan(problem_of(outgrow.trace(make_step), 0.1)).offloads == ()


@cache
def deep() -> Trace:
    def build() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(500) for layer in (nn.Linear(16, 16), nn.Tanh())))

    return traced(build, (64, 16))


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_network_of_a_thousand_layers_is_planned_in_seconds(name: str) -> None:
    problem = problem_of(deep(), 0.5)
    started = time.process_time()
    plan = find(name).plan(problem)
    assert plan.offloads
    assert plan.simulate().peak_bytes < plain_profile(problem.trace).peak_bytes
    assert time.process_time() - started < 5


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("share", SHARES)
def test_ticks_are_in_order(name: str, share: float) -> None:
    problem = problem_of(resnet(), share)
    candidates = {item.value: item for item in problem.candidates}
    plan = find(name).plan(problem)
    for item in plan.offloads:
        first, last = candidates[item.value].first_pack, candidates[item.value].first_unpack
        assert first <= item.out_tick < last
        assert item.in_tick == -1 or item.out_tick <= item.in_tick < last
        assert item.release_tick == -1 or item.out_tick <= item.release_tick < last
    assert not moved(plan) & dropped(plan)


# --- SuperNeurons ---


def test_superneurons_moves_nothing_where_the_cache_has_room() -> None:
    plan = find("superneurons").plan(problem_of(resnet(), 1.0))
    assert plan.evicts
    assert not plan.offloads
    assert not plan.recomputes


@pytest.mark.parametrize("share", SHARES)
def test_superneurons_makes_cheap_values_anew_and_no_convolution(share: float) -> None:
    problem = problem_of(resnet(), share)
    plan = find("superneurons").plan(problem)
    for item in plan.recomputes:
        recipe = problem.recipes.find(item.value)
        assert recipe is not None
        assert not any(is_expensive(problem.trace.ops[number]) for number in recipe.ops)
    convolved = {item.value for item in problem.candidates if "convolution" in made_by(problem, item.value)}
    assert len(convolved) == 53
    assert convolved <= moved(plan)
    # Activations that one layer reads: before the pool, two in each of 16 blocks, and the last.
    assert sum("relu" in made_by(problem, value) for value in dropped(plan)) == 34


def test_superneurons_moves_inputs_joins_and_forks() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.left, self.right, self.last = conv(), conv(), conv(), nn.Conv2d(16, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.first(x))  # a fork: both branches read it
            joined = torch.cat([torch.tanh(self.left(x)), torch.tanh(self.right(x))], 1)
            return torch.tanh(torch.tanh(torch.tanh(self.last(joined))))

    problem = problem_of(traced(Branches), 0.3)
    plan = find("superneurons").plan(problem)
    names = sorted(made_by(problem, value) for value in moved(plan))
    assert names.count("") == 1  # the input
    assert names.count("aten.cat.default") == 1
    assert names.count("aten.tanh.default") == 4  # what stands for the outputs of the four convolutions
    assert [made_by(problem, value) for value in dropped(plan)] == ["aten.tanh.default"]


def test_superneurons_prefetches_at_the_expensive_layer_before() -> None:
    problem = problem_of(resnet(), 0.5)
    trace = problem.trace
    plan = find("superneurons").plan(problem)
    nodes = [trace.saved[tick.saved].node if tick.event is Event.UNPACK else "" for tick in trace.ticks]
    expensive = [number for number, node in enumerate(nodes) if "Convolution" in node or "mmBackward" in node]
    ahead = [item for item in plan.offloads if item.in_tick >= 0]
    assert len(ahead) > 50
    wanted = {item.value: item.first_unpack for item in problem.candidates}
    for item in ahead:
        assert item.in_tick in expensive
    # It asks for what the next expensive layer wants, and what lies between the two, and for nothing beyond.
    wanted = _first_wanted(problem, plan)
    for item in ahead:
        assert item.in_tick < wanted[item.value]
        assert sum(item.in_tick < number < wanted[item.value] for number in _starts(problem, expensive)) == 0


def _starts(problem: Problem, ticks: list[int]) -> list[int]:
    """The first of the ticks of each layer."""
    trace = problem.trace
    layers = [(trace.ticks[number].op, trace.saved[trace.ticks[number].saved].node) for number in ticks]
    return [number for place, number in enumerate(ticks) if place == 0 or layers[place] != layers[place - 1]]


def _first_wanted(problem: Problem, plan: Plan) -> dict[int, int]:
    """The tick at which a value is asked for, be it by a recipe, or by a recipe for one of a recipe's sources."""
    unpacks = {item.value: item.first_unpack for item in problem.candidates}
    wanted = dict(unpacks)
    for value in dropped(plan):
        waiting = [value]
        while waiting:
            recipe = problem.recipes.find(waiting.pop())
            assert recipe is not None
            for source in recipe.sources:
                if source in wanted:
                    wanted[source] = min(wanted[source], unpacks[value])
                if source in dropped(plan):
                    waiting.append(source)
    return wanted


def test_superneurons_keeps_a_segment_that_fits_under_the_largest_layer() -> None:
    def build() -> nn.Module:
        short = [nn.Tanh() for _ in range(2)]
        long = [nn.Tanh() for _ in range(30)]
        return nn.Sequential(conv(), nn.BatchNorm2d(8), *short, conv(), nn.BatchNorm2d(8), *long, conv())

    problem = problem_of(traced(build), 0.3)
    plan = find("superneurons").plan(problem)
    one = 4 * 8 * 16 * 16 * 4
    assert 3 * one < largest_layer_bytes(problem) < 20 * one
    replays = [item.replay for item in sorted(plan.recomputes, key=lambda item: item.value)]
    in_short = sum(replay is Replay.SPEED for replay in replays)
    assert in_short in (2, 3)
    assert replays == [Replay.SPEED] * in_short + [Replay.MEMORY] * (len(replays) - in_short)
    assert len(replays) - in_short >= 29


def test_superneurons_l_peak_is_that_of_layers_and_not_of_the_optimizer() -> None:
    problem = problem_of(resnet(), 0.5)
    ops = list(problem.trace.ops)
    largest = largest_layer_bytes(problem)
    for phase, expected in ((Phase.UPDATE, largest), (Phase.BACKWARD, 10 * largest)):
        number = max(number for number, op in enumerate(ops) if op.phase is phase)
        touched = {*ops[number].inputs, *ops[number].outputs}
        workspace = 10 * largest - sum(problem.trace.values[index].nbytes for index in touched)
        changed = [*ops[:number], replace(ops[number], workspace_bytes=workspace), *ops[number + 1 :]]
        assert largest_layer_bytes(replace(problem, trace=problem.trace.with_ops(changed))) == expected


# --- Layrub ---


def test_layrub_moves_every_layers_data_one_layer_ahead() -> None:
    problem = problem_of(resnet(), 0.5)
    plan = find("layrub").plan(problem)
    candidates = {item.value: item for item in problem.candidates}
    assert moved(plan) == set(candidates)
    asked = {item.value: item.in_tick for item in plan.offloads}
    layers = backward_layers(problem)
    seen: set[int] = set()
    for before, layer in pairwise(layers):
        seen.update(before.values)
        for value in set(layer.values) & candidates.keys() - seen:
            assert asked[value] == max(before.tick, candidates[value].last_pack)
    assert all(item.release_tick >= 0 for item in plan.offloads)


def test_layrub_lets_gradients_share_their_memory_wherever_that_is_possible() -> None:
    problem = problem_of(resnet(), 0.5)
    plan = find("layrub").plan(problem)
    assert plan.reuses == reusable_ops(problem)
    assert [problem.trace.ops[op].name for op in plan.reuses] == ["aten.threshold_backward.default"] * 49
    assert find("vdnn-all").plan(problem).reuses == ()


def test_layrubs_footprint_follows_the_widest_layer_and_not_the_depth() -> None:
    def peaks(depth: int) -> tuple[int, int]:
        def build() -> nn.Module:
            return nn.Sequential(*(layer for _ in range(depth) for layer in (conv(), nn.ReLU())))

        problem = problem_of(traced(build, (4, 8, 64, 64)), 0.1, "fast link")
        return plain_profile(problem.trace).peak_bytes, find("layrub").plan(problem).simulate().peak_bytes

    (plain_short, short), (plain_long, long) = peaks(8), peaks(32)
    assert plain_long > 3 * plain_short
    assert long < 1.05 * short


# --- AccUDNN ---


def test_accudnn_moves_nothing_where_everything_fits() -> None:
    plan = find("accudnn").plan(problem_of(resnet(), 1.0))
    assert plan.offloads == ()
    assert plan.simulate().feasible


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", SHARES)
def test_accudnn_fits_whatever_others_fit_and_waits_no_longer(share: float, device: str) -> None:
    problem = problem_of(resnet(), share, device)
    ours = find("accudnn").plan(problem).simulate()
    for name in ("lru", "vdnn-all"):
        theirs = find(name).plan(problem).simulate()
        assert ours.feasible or not theirs.feasible
        if theirs.feasible:
            assert ours.stall_seconds <= theirs.stall_seconds + 1e-3 * theirs.step_seconds
    assert ours.recomputed_bytes == 0


def test_accudnn_hides_its_copies_where_the_link_allows_it() -> None:
    problem = problem_of(resnet(), 0.6, "fast link")
    ours, vdnn = find("accudnn").plan(problem).simulate(), find("vdnn-all").plan(problem).simulate()
    assert ours.stall_seconds < 0.01 * ours.step_seconds
    assert vdnn.stall_seconds > 0.05 * vdnn.step_seconds


def test_accudnn_copies_back_no_earlier_than_there_is_room() -> None:
    problem = problem_of(resnet(), 0.36)
    plan = find("accudnn").plan(problem)
    assert plan.simulate().feasible
    assert plan.simulate().evicted_bytes == 0


def test_accudnn_moves_less_the_more_fits() -> None:
    sizes = [
        find("accudnn").plan(problem_of(resnet(), share, "fast link")).simulate().offloaded_bytes for share in SHARES
    ]
    assert sizes == sorted(sizes)
    problem = problem_of(resnet(), SHARES[0], "fast link")
    excess = plain_profile(problem.trace).peak_bytes - problem.budget_bytes
    assert excess <= sizes[0] < 1.2 * excess


@pytest.mark.parametrize("share", SHARES)
def test_accudnn_moves_no_value_too_many(share: float) -> None:
    problem = problem_of(resnet(), share, "fast link")
    excess = np.array(plain_profile(problem.trace).curve) - problem.budget_bytes
    chosen = choose(problem, excess)
    # Once more, with all of them away for as long as can be: what is left for each op that needs it.
    away = np.zeros_like(excess)
    for item in chosen:
        away[item.held : problem.tick_ops[item.first_unpack]] += item.nbytes
    for item in chosen:
        during = slice(item.held, problem.tick_ops[item.first_unpack])
        # The windows of the lanes are shorter than these: two values' worth of bytes may be to spare.
        assert (away - excess)[during].min() < 3 * max(item.nbytes for item in chosen)
