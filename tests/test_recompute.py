"""Values that are dropped come back with the very same bits, or are not dropped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outgrow
from outgrow.planning.plan import Replay
from outgrow.planning.problem import Problem
from outgrow.runtime import recompute as recompute_module
from outgrow.runtime.recipes import Recipe
from steps import RecomputeAll, digest

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 5
Forward = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Flatten(), nn.Linear(8 * 256, 10))


def straight(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
    return model(x)


def train(model: nn.Module, forward: Forward, session: outgrow.Session | None, first: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for k in range(first, STEPS):
        generator = torch.Generator().manual_seed(k)
        torch.manual_seed(k)
        x, y = torch.randn(4, 3, 16, 16, generator=generator), torch.randint(0, 10, (4,), generator=generator)

        def step() -> None:
            F.cross_entropy(forward(model, x, k), y).backward()  # noqa: B023 - runs at once
            optimizer.step()
            optimizer.zero_grad()

        if session is None:
            step()
        else:
            with session.step():
                step()


def opened(model: nn.Module) -> outgrow.Session:
    return outgrow.Session(model, budget="1GiB", policy=RecomputeAll(), least_moved_bytes=1)


def assert_same_as_plain(forward: Forward) -> outgrow.Summary:
    plain, ours = network(), network()
    train(plain, forward, None)
    with opened(ours) as session:
        train(ours, forward, session)
        summary = session.summary()
    assert digest([ours]) == digest([plain])
    return summary


def test_what_has_a_recipe_is_dropped_and_made_anew() -> None:
    summary = assert_same_as_plain(straight)
    assert summary.recomputed_bytes > 0
    assert summary.recompute_seconds > 0
    assert summary.offloaded_bytes == 0


def test_the_predicted_peak_and_bytes_of_a_recomputing_step_are_those_measured() -> None:
    model = network()
    with opened(model) as session:
        train(model, straight, session)
        summary, plan = session.summary(), session.plan
    assert plan is not None
    prediction = plan.simulate()
    assert prediction.recomputed_bytes == summary.recomputed_bytes
    assert summary.predicted_peak_bytes is not None
    assert abs(summary.measured_peak_bytes / summary.predicted_peak_bytes - 1) < 0.02


def test_a_recipe_that_gives_other_bits_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    really_replay = recompute_module.replay
    spoilt = 0

    def replay_wrongly(recipe: Recipe, *rest: Any) -> torch.UntypedStorage:
        nonlocal spoilt
        spoilt += 1
        storage = really_replay(recipe, *rest)
        storage[0] = storage[0] ^ 1
        return storage

    monkeypatch.setattr(recompute_module, "replay", replay_wrongly)
    summary = assert_same_as_plain(straight)
    assert spoilt > 0
    assert summary.recomputed_bytes == 0


def test_random_ops_have_no_recipe() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        return model(x) * F.dropout(torch.ones(4, 10), 0.5) + F.dropout(model(x), 0.5)

    assert_same_as_plain(forward)
    model = network()

    def dropped_out() -> None:
        F.dropout(model(torch.ones(4, 3, 16, 16)), 0.5).sum().backward()

    trace = outgrow.trace(lambda: outgrow.TrainingStep(model, None, dropped_out), fake=False)
    problem = Problem(trace, outgrow.Hardware("any", 1 << 40, 1e11, 1e10, 1e9, 1e9), 1 << 40, least_moved_bytes=1)
    made_by_chance = [
        index
        for index, value in enumerate(trace.values)
        if value.birth >= 0
        and ("bernoulli" in trace.ops[value.birth].name or "dropout" in trace.ops[value.birth].name)
    ]
    assert made_by_chance
    assert all(problem.recipes.find(index) is None for index in made_by_chance)


def test_a_write_behind_the_dispatcher_is_noticed() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        for layer in model:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                x.detach().numpy()[:, 0] += 1.0  # PyTorch does not see it, and a plain backward pass reads it
        return x

    assert_same_as_plain(forward)


def test_a_number_that_changes_from_step_to_step_is_that_of_the_step() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        return model(torch.sigmoid(x * (1.0 + k)) * x)

    summary = assert_same_as_plain(forward)
    assert summary.recomputed_bytes > 0


def test_a_parameter_that_changes_before_the_backward_pass_does_not_change_what_was_saved() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        out = model(x)
        with torch.no_grad():
            model[2].weight.data.mul_(0.5)  # batch norm's weight, which the recipes of what follows it read
        return out

    summary = assert_same_as_plain(forward)
    assert summary.recomputed_bytes > 0


@pytest.mark.parametrize("early", [True, False])
def test_what_a_recipe_starts_from_may_be_written_to_from_some_step_on(early: bool) -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        for number, layer in enumerate(model):
            before, x = x, layer(x)
            if number == 2:
                source = before  # saved by batch norm; the recipe of what follows starts from it
            if k >= 3 and number == (3 if early else 9):
                source.data.mul_(0.5)
        return x

    summary = assert_same_as_plain(forward)
    assert summary.recomputed_bytes > 0


def test_a_batch_norm_in_training_updates_its_statistics_once() -> None:
    plain, ours = network(), network()
    train(plain, straight, None)
    with opened(ours) as session:
        train(ours, straight, session)
    assert torch.equal(plain[2].running_var, ours[2].running_var)
    assert int(ours[2].num_batches_tracked) == STEPS


def test_a_chain_of_dropped_values_may_be_longer_than_pythons_stack() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1200, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for row in self.scale:
                x = torch.tanh(x + row)
            return x

    found = []
    for session_wanted in (False, True):
        model = Deep()
        x = torch.linspace(-1, 1, 64)
        if session_wanted:
            with opened(model) as session:
                for _ in range(3):
                    model.zero_grad()
                    with session.step():
                        model(x).sum().backward()
                assert session.summary().recomputed_bytes > 0
        else:
            model(x).sum().backward()
        assert model.scale.grad is not None
        found.append(model.scale.grad.clone())
    assert torch.equal(*found)


def chain(x: torch.Tensor, length: int = 12) -> torch.Tensor:
    """Cheap ops on a large map, each of which saves its result."""
    for number in range(length):
        x = torch.sigmoid(x) if number % 2 else torch.tanh(x)
    return x


def chain_step(session: outgrow.Session | None, scale: nn.Linear, forward: Any = chain) -> torch.Tensor:
    """One step of a chain, within a session or plain; its gradient."""
    x = torch.linspace(-2, 2, 1 << 17).view(-1, 16)
    with nullcontext() if session is None else session.step():
        forward(scale(x)).sum().backward()
        assert scale.weight.grad is not None
        gradient = scale.weight.grad.clone()
        scale.zero_grad()
    return gradient


def replayed_chain(replay: Replay) -> tuple[outgrow.Summary, outgrow.Plan]:
    """What the last of some steps of a chain measured, and its plan. Gradients are compared with plain PyTorch's."""
    torch.manual_seed(0)
    scale = nn.Linear(16, 16)
    wanted = chain_step(None, scale)
    with outgrow.Session(scale, budget="1GiB", policy=RecomputeAll(replay), least_moved_bytes=1) as session:
        for _ in range(STEPS):
            assert torch.equal(chain_step(session, scale), wanted)
        plan, summary = session.plan, session.summary()
    assert plan is not None
    assert {item.replay for item in plan.recomputes} == {replay}
    return summary, plan


def test_a_chain_replayed_for_memory_holds_fewer_values_than_one_replayed_for_speed() -> None:
    values = 1 << 19  # bytes of each
    speed, speed_plan = replayed_chain(Replay.SPEED)
    memory, memory_plan = replayed_chain(Replay.MEMORY)
    for summary, plan in ((speed, speed_plan), (memory, memory_plan)):
        prediction = plan.simulate()
        assert len(plan.recomputes) == 11  # the start has no recipe: nothing saved the linear layer's result
        assert summary.recomputed_bytes == prediction.recomputed_bytes
        assert abs(summary.measured_peak_bytes / prediction.peak_bytes - 1) < 0.02
    # The first to be made anew is the end of the chain. For speed all values are there then, as in a plain step; for
    # memory the start and two more, and what the forward pass holds is as much.
    assert speed.recomputed_bytes == 11 * values
    assert memory.recomputed_bytes == sum(range(1, 12)) * values
    assert speed.measured_peak_bytes - memory.measured_peak_bytes > 7 * values


def test_a_plan_that_recomputes_can_be_saved_and_read(tmp_path: Any) -> None:
    model = network()
    with opened(model) as session:
        train(model, straight, session)
        plan = session.plan
    assert plan is not None
    assert plan.recomputes
    plan.save(tmp_path / "plan.json")
    assert outgrow.Plan.load(tmp_path / "plan.json").recomputes == plan.recomputes
