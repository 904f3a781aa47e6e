"""Values that are dropped come back with the very same bits, or are not dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import outgrow
from outgrow.errors import BudgetTooSmall
from outgrow.planning.plan import Plan, Replay, make_plan
from outgrow.planning.policies import Policy
from outgrow.planning.prefetch import with_prefetch
from outgrow.planning.problem import Problem
from outgrow.planning.recipes import burst
from outgrow.runtime import recompute as recompute_module
from outgrow.runtime.dice import Dice
from outgrow.runtime.dropped import Readers
from outgrow.runtime.entry import Entry
from outgrow.runtime.outcome import StepOutcome
from outgrow.runtime.recipes import Recipe
from outgrow.runtime.runner import Runner
from outgrow.session.kind import StepKind
from outgrow.tracing.ledger import Ledger, StorageRecord
from outgrow.tracing.ops import OpFacts, facts_of
from outgrow.tracing.recorder import ModuleNames, Recorder
from steps import (
    RandomDecisions,
    RecomputeAll,
    Training,
    assert_equal_to_plain,
    budget_for,
    digest,
    supervised,
    train_in_session,
    train_plain,
    trained_on,
)

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 5
Forward = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]
Layer = Callable[[torch.Tensor], torch.Tensor]


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

    def replay_wrongly(recipe: Recipe, *rest: Any) -> list[torch.UntypedStorage]:
        nonlocal spoilt
        spoilt += 1
        storages = really_replay(recipe, *rest)
        storages[0][0] = storages[0][0] ^ 1
        return storages

    monkeypatch.setattr(recompute_module, "replay", replay_wrongly)
    summary = assert_same_as_plain(straight)
    assert spoilt > 0
    assert summary.recomputed_bytes == 0


def test_a_recipe_that_never_has_room_is_given_up_and_its_plan_is_timed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = 0
    proved: list[bool] = []

    def find_no_room(recipe: Recipe, *rest: Any) -> torch.UntypedStorage:
        nonlocal tries
        tries += 1
        raise outgrow.BudgetTooSmall(1, 2, {})

    monkeypatch.setattr(recompute_module, "replay", find_no_room)
    plain, ours = network(), network()
    train(plain, straight, None)
    train(plain, straight, None)
    with opened(ours) as session:
        compare = session._aftermath._planner.compare

        def compare_and_tell(kind: StepKind, outcome: StepOutcome, *rest: Any) -> bool:
            proved.append(outcome.proved)
            return compare(kind, outcome, *rest)

        monkeypatch.setattr(session._aftermath._planner, "compare", compare_and_tell)
        train(ours, straight, session)
        train(ours, straight, session)
        assert session.plan is not None
        in_all = 3 * len(session.plan.recomputes)
        assert in_all <= tries <= 2 * in_all  # tries count anew where the step was recorded once more
        assert session._kinds.expected is not None
        assert set(session._kinds.expected.verdicts.cramped.values()) == {3}
    assert digest([ours]) == digest([plain])
    assert proved
    assert not any(proved)


class Mixed(nn.Module):
    """A network with something random in its middle."""

    def __init__(self, chance: Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 256, 10)
        self.chance = chance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.chance(torch.tanh(self.first(x))).flatten(1))


GENERATOR = torch.Generator()

CHANCES: dict[str, Layer] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x * 2, 0.5, inplace=True),
    "dropout of channels": lambda x: F.dropout2d(x, 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "native dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "gumbel": lambda x: F.gumbel_softmax(x, dim=1),
    "attention with dropout": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "noise like": lambda x: x * torch.randn_like(x),
    "noise into empty": lambda x: x * torch.empty(x.shape).uniform_(0.5, 1),
    "whole numbers": lambda x: x * torch.empty(x.shape).random_(1, 5),
    "five normal numbers": lambda x: torch.cat([x[..., :5] * torch.normal(0.0, 1.0, (5,)), x[..., 5:]], -1),
    "a generator of the user's": lambda x: x * torch.rand(x.shape, generator=GENERATOR).exp(),
}


@dataclass
class ByChance:
    """What training with something random left behind: the state, what the user drew, and of a session more."""

    state: str
    drawn: list[float]
    summary: outgrow.Summary | None = None
    plan: outgrow.Plan | None = None


def train_by_chance(chance: Layer, *, in_session: bool) -> ByChance:
    model = Mixed(chance)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(7)
    GENERATOR.manual_seed(8)
    drawn: list[float] = []
    x, y = torch.randn(4, 3, 16, 16), torch.arange(4)
    with ExitStack() as stack:
        session = stack.enter_context(opened(model)) if in_session else None
        for k in range(STEPS):
            with nullcontext() if session is None else session.step():
                loss = F.cross_entropy(model(x), y)
                if k == STEPS - 1:
                    torch.manual_seed(100)  # between the forward and the backward pass
                drawn.append(float(torch.randn(1)))
                loss.backward()
                drawn += [float(torch.rand(())), float(torch.randn(1)), float(torch.rand((), generator=GENERATOR))]
                optimizer.step()
                optimizer.zero_grad()
        if session is None:
            return ByChance(digest([model]), drawn)
        return ByChance(digest([model]), drawn, session.summary(), session.plan)


def drawing_recipes(plan: outgrow.Plan) -> list[int]:
    """The values that a plan drops and whose recipes draw random numbers."""
    names = ["bernoulli", "dropout", "rrelu", "exponential", "rand", "uniform", "normal"]
    found = []
    for item in plan.recomputes:
        recipe = plan.problem.recipes.find(item.value)
        assert recipe is not None
        if any(name in plan.problem.trace.ops[op].name for op in recipe.ops for name in names):
            found.append(item.value)
    return found


@pytest.mark.parametrize("name", CHANCES)
def test_what_was_drawn_at_random_is_drawn_once_more(name: str) -> None:
    plain = train_by_chance(CHANCES[name], in_session=False)
    ours = train_by_chance(CHANCES[name], in_session=True)
    assert ours.state == plain.state
    assert ours.drawn == plain.drawn
    assert ours.plan is not None
    assert ours.summary is not None
    assert drawing_recipes(ours.plan)
    assert ours.summary.recomputed_bytes == ours.plan.simulate().recomputed_bytes > 0


def test_noise_that_autograd_saves_before_it_is_drawn_stays() -> None:
    plain = train_by_chance(lambda x: F.rrelu(x, training=True), in_session=False)
    ours = train_by_chance(lambda x: F.rrelu(x, training=True), in_session=True)
    assert ours.state == plain.state
    assert ours.drawn == plain.drawn
    assert ours.plan is not None
    assert ours.summary is not None
    assert drawing_recipes(ours.plan) == []
    assert ours.summary.recomputed_bytes == ours.plan.simulate().recomputed_bytes


def test_the_mask_of_a_dropout_is_made_anew_without_what_it_was_laid_on() -> None:
    plan = train_by_chance(CHANCES["dropout"], in_session=True).plan
    assert plan is not None
    (mask,) = drawing_recipes(plan)
    recipe = plan.problem.recipes.find(mask)
    assert recipe is not None
    names = [plan.problem.trace.ops[op].name.split(".")[1] for op in recipe.ops]
    assert names == ["empty_like", "bernoulli_", "div_"]
    assert recipe.sources == ()


@pytest.mark.parametrize("name", ["dropout", "noise like", "a generator of the user's"])
def test_a_random_op_whose_generator_is_not_put_back_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train_by_chance(CHANCES[name], in_session=False)
    monkeypatch.setattr(Dice, "cast_again", lambda dice: kept_as_they_are(dice.generator))
    ours = train_by_chance(CHANCES[name], in_session=True)
    assert ours.state == plain.state
    assert ours.drawn == plain.drawn
    assert ours.plan is not None
    assert ours.summary is not None
    by_chance = sum(ours.plan.problem.trace.values[value].nbytes for value in drawing_recipes(ours.plan))
    assert by_chance > 0
    assert ours.summary.recomputed_bytes == ours.plan.simulate().recomputed_bytes - by_chance


@contextmanager
def kept_as_they_are(generator: torch.Generator) -> Iterator[None]:
    """Draws new numbers where the old ones were wanted; the user's are as they were."""
    users = generator.get_state()
    generator.seed()
    yield
    generator.set_state(users)


def test_what_lay_in_memory_by_chance_has_no_recipe() -> None:
    def partly_written(x: torch.Tensor) -> torch.Tensor:
        factor = torch.empty(x.shape)
        factor[:2].fill_(2)
        factor[2:].copy_(x[2:].detach())
        return x * factor

    def read_first(x: torch.Tensor) -> torch.Tensor:
        factor = torch.empty(x.shape)
        return x * torch.where(factor == factor, 2.0, 2.0) * factor.fill_(3)

    for chance in (partly_written, read_first):
        plain = train_by_chance(chance, in_session=False)
        ours = train_by_chance(chance, in_session=True)
        assert ours.state == plain.state
        assert ours.plan is not None
        trace = ours.plan.problem.trace
        empties = {number for number, op in enumerate(trace.ops) if op.name.startswith("aten.empty")}
        assert empties
        for item in ours.plan.recomputes:
            recipe = ours.plan.problem.recipes.find(item.value)
            assert recipe is not None
            assert not empties & set(recipe.ops)


def test_a_write_behind_the_dispatcher_is_noticed() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        for layer in model.children():
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


def test_once_the_last_value_is_dropped_optimizers_write_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    run = Runner.run

    def shown(self: Runner, func: Any, facts: OpFacts, *given: Any) -> Any:
        seen.append(facts.name)
        return run(self, func, facts, *given)

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        seen.clear()
        return model(x)

    monkeypatch.setattr(Runner, "run", shown)
    model = network()
    with opened(model) as session:
        for _ in range(2):
            train(model, forward, session)
        assert session.summary().recomputed_bytes > 0
    assert "aten.native_batch_norm.default" in seen  # recipes run it again
    assert not any(name.startswith("aten.add_") for name in seen)


def test_what_is_still_dropped_when_an_optimizer_steps_is_made_anew_before() -> None:
    def train_twice(model: nn.Module, session: outgrow.Session | None) -> None:
        """Two graphs over the same parameters, of which the second's backward pass comes after an update."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for k in range(2 * STEPS):  # from some step on ops pass unseen, if they may
            torch.manual_seed(k)
            one, other = torch.randn(2, 4, 3, 16, 16)
            with nullcontext() if session is None else session.step():
                losses = [model(x).tanh().mean() for x in (one, other)]
                losses[0].backward()
                with torch.no_grad():
                    for parameter in model.parameters():  # as an optimizer in C++ does it
                        assert parameter.grad is not None
                        parameter.data.add_(parameter.grad, alpha=-0.1)
                losses[1].backward()
                optimizer.step()
                optimizer.zero_grad()

    plain, ours = network(), network()
    train_twice(plain, None)
    with opened(ours) as session:
        train_twice(ours, session)
        assert session.summary().recomputed_bytes > 0
    assert all(parameter.isfinite().all() for parameter in plain.parameters())
    assert digest([ours]) == digest([plain])


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


class Scaled(torch.autograd.Function):
    """Its backward pass writes to what it saved."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return y * z

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (y,) = ctx.saved_tensors
        y.data.mul_(0.5)
        return gradient * y, gradient * 0.7


@pytest.mark.parametrize(
    "policy", [RecomputeAll(), RecomputeAll(Replay.MEMORY), RandomDecisions(0), RandomDecisions(3)]
)
@pytest.mark.parametrize("share", [0.65, 0.76, 0.9])
def test_a_write_to_a_source_that_came_back_is_seen_by_what_is_made_anew_from_it(
    policy: Policy, share: float
) -> None:
    """It lies in other memory than when it was saved."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                y = layer(x) * 1.5
                aside = torch.sin(y)
                x = Scaled.apply(y, torch.tanh(y)) + aside
            return self.head(x)

    def loss_of(model: nn.Module, k: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(k)
        x = torch.randn(64, 64, generator=generator)
        return F.cross_entropy(model(x), torch.randint(0, 4, (64,), generator=generator))

    assert_equal_to_plain(trained_on(Chain, loss_of), policy=policy, share=share, steps=7)


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


@pytest.mark.parametrize("replay", Replay)
def test_values_that_many_recipes_share_are_made_once_in_a_burst(replay: Replay) -> None:
    def residual(x: torch.Tensor) -> torch.Tensor:
        for _ in range(16):
            x = torch.sigmoid(x + torch.tanh(x) * x)
        return x

    torch.manual_seed(0)
    scale = nn.Linear(16, 16)
    wanted = chain_step(None, scale, residual)
    with outgrow.Session(scale, budget="1GiB", policy=RecomputeAll(replay), least_moved_bytes=1) as session:
        for _ in range(STEPS):
            assert torch.equal(chain_step(session, scale, residual), wanted)
        plan, summary = session.plan, session.summary()
    assert plan is not None
    prediction = plan.simulate()
    assert summary.recomputed_bytes == prediction.recomputed_bytes
    assert abs(summary.measured_peak_bytes / prediction.peak_bytes - 1) < 0.02
    # Each burst makes a value once at most. Twice for each reader would be 2^16 times in all.
    assert summary.recomputed_bytes <= len(plan.recomputes) ** 2 * (1 << 19)


@pytest.mark.parametrize("replay", Replay)
def test_what_a_burst_starts_from_may_come_from_the_disk(replay: Replay) -> None:
    plain, ours = network(), network()
    train(plain, straight, None)
    with outgrow.Session(ours, budget="1GiB", policy=DropBetweenOffloads(replay), least_moved_bytes=1) as session:
        train(ours, straight, session)
        summary = session.summary()
    assert digest([ours]) == digest([plain])
    assert summary.recomputed_bytes > 0
    assert summary.offloaded_bytes > 0


@dataclass(frozen=True)
class DropBetweenOffloads:
    """Every third value goes to the disk, the others are dropped."""

    replay: Replay
    name: str = "drop between offloads"

    def plan(self, problem: Problem) -> Plan:
        everything = RecomputeAll(self.replay).plan(problem).recomputes
        offloaded = {item.value for item in problem.candidates[::3]}
        dropped = tuple(item for item in everything if item.value not in offloaded)
        return make_plan(self.name, problem, with_prefetch(problem, problem.candidates[::3]), dropped)


def test_a_burst_makes_each_value_once_and_says_when_nobody_reads_it_any_more() -> None:
    missing = {"end": ["c", "b"], "c": ["b", "a"], "b": ["a"], "a": []}
    assert burst("end", missing.__getitem__) == ([("a", []), ("b", []), ("c", ["a"])], ["b", "c"])
    chain = [*range(5000)]
    sources, unread = burst(5000, lambda number: [number - 1] if number else [])
    assert sources == [(number, [number - 1] if number else []) for number in chain]
    assert unread == [4999]


def test_a_replay_that_fails_leaves_what_it_borrowed_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    scale = nn.Linear(16, 16)
    wanted = chain_step(None, scale)
    really_replay = recompute_module.replay
    calls_left = -1

    def replay_or_fail(recipe: Recipe, *rest: Any) -> torch.UntypedStorage:
        nonlocal calls_left
        calls_left -= 1
        if calls_left == 0:
            raise outgrow.OutgrowError("the replay was told to fail")
        return really_replay(recipe, *rest)

    monkeypatch.setattr(recompute_module, "replay", replay_or_fail)
    policy = RecomputeAll(Replay.MEMORY)
    with outgrow.Session(scale, budget="1GiB", policy=policy, least_moved_bytes=1) as session:
        for _ in range(STEPS):
            chain_step(session, scale)
        with session.step():
            loss = chain(scale(torch.linspace(-2, 2, 1 << 17).view(-1, 16))).sum()
            calls_left = 5
            with pytest.raises(outgrow.OutgrowError, match="told to fail"):
                loss.backward(retain_graph=True)
            assert calls_left == 0
            assert all(entry.storage is None for entry in session._pool.dropped)
            loss.backward()
        assert scale.weight.grad is not None
        assert torch.equal(scale.weight.grad, wanted)


def test_a_plan_that_recomputes_can_be_saved_and_read(tmp_path: Any) -> None:
    model = network()
    with opened(model) as session:
        train(model, straight, session)
        plan = session.plan
    assert plan is not None
    assert plan.recomputes
    plan.save(tmp_path / "plan.json")
    assert outgrow.Plan.load(tmp_path / "plan.json").recomputes == plan.recomputes


class Renormalized(nn.Module):
    """Reads the running statistics before batch norm updates them, as quantization-aware training does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 256), nn.BatchNorm1d(256), nn.Linear(256, 10)
        self.gain = nn.Parameter(torch.ones(256))

    def forward(self, x: torch.Tensor, statistics: Sequence[torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor | float = 0.0
        for part in x.split(16, dim=1):
            scale = torch.sqrt(statistics[1] + 1e-3) * self.gain
            mean, variance = statistics
            h = F.batch_norm(self.first(part), mean, variance, self.norm.weight, self.norm.bias, training=True)
            out = out + self.last(torch.tanh(h) * torch.sin(scale) * torch.sigmoid(statistics[1]))
        assert isinstance(out, torch.Tensor)
        return out


@pytest.mark.parametrize("whose", ["the model's", "the program's", "the step's"])
@pytest.mark.parametrize("policy", [RecomputeAll(), "checkpoint", "superneurons"], ids=str)
def test_batch_norm_writes_to_its_running_statistics_though_it_does_not_say_so(whose: str, policy: Any) -> None:
    """Once a step, and not again where its output is made anew. What was read before is not what is read later."""

    def make() -> Training:
        torch.manual_seed(0)
        model = Renormalized()
        kept = (torch.zeros(256), torch.ones(256))

        def loss_of(model: nn.Module, k: int) -> torch.Tensor:
            statistics = {
                "the model's": (model.norm.running_mean, model.norm.running_var),
                "the program's": kept,
                "the step's": (torch.zeros(256), torch.ones(256)),
            }[whose]
            x = torch.randn(512, 32, generator=torch.Generator().manual_seed(k))
            loss: torch.Tensor = model(x, statistics).pow(2).mean()
            mean, variance = statistics
            return loss + (mean.sum() + variance.sum()).detach()

        return trained_on(lambda: model, loss_of)()

    share = 1.0 if isinstance(policy, RecomputeAll) else 0.75
    ours, summaries = train_in_session(make, 6, budget=budget_for(make, share), policy=policy, least_moved_bytes=1)
    assert ours == train_plain(make, 6)
    assert summaries[-1].recomputed_bytes > 0


def test_an_error_in_a_step_is_not_hidden_by_what_cannot_be_made_anew_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def no_room(entry: object, mates: object) -> list[torch.UntypedStorage]:
        asked.append(entry)
        raise BudgetTooSmall(1, 2, {}, "a recipe", exact=False)

    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())])
    x = torch.randn(64, 32)

    def train() -> None:
        with outgrow.Session(model, budget="1GiB", policy=RecomputeAll(), least_moved_bytes=1) as session:
            for _ in range(4):
                with session.step():
                    model(x).sum().backward()
            assert session.summary().recomputed_bytes > 0
            with session.step():
                loss = model(x).sum()
                monkeypatch.setattr(session._pool.dropped, "rebuild", no_room)
                raise ValueError(f"the program's own, whose frames hold {loss}")

    with pytest.raises(ValueError, match="the program's own"):
        train()
    assert asked


@pytest.mark.usefixtures("no_collection")
def test_memory_that_a_recipe_read_goes_with_whoever_had_it() -> None:
    """No garbage for a collector: a program may exchange the memory of its parameters after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())])
    x = torch.randn(256, 64)
    with outgrow.Session(model, budget=1 << 30, policy=RecomputeAll(), least_moved_bytes=1) as session:
        for _ in range(6):
            with session.step():
                model(x).square().mean().backward()
            model.zero_grad()
            old = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            assert all(memory.expired() for memory in old)
        assert session.summary().recomputed_bytes > 0


def test_what_draws_from_a_generator_that_it_is_given_is_not_run_again() -> None:
    """A GPU's recurrent layers with dropout: another run would put the generator on."""
    draws = facts_of(torch.ops.aten._cudnn_rnn.default)
    assert draws.draws
    recorder = Recorder(Ledger("cuda", 0), ModuleNames([]), {})
    generator, places = torch.zeros(8, dtype=torch.uint8), len(torch.ops.aten._cudnn_rnn.default._schema.arguments)
    assert not recorder._is_repeatable(draws, [None] * (places - 1) + [generator])
    assert recorder._is_repeatable(draws, [None] * places)


def test_who_is_made_from_what_is_written_is_found_and_nothing_is_held_of_who_was_made_anew() -> None:
    readers = Readers()
    source, one, other = (Entry(StorageRecord(serial, 0, 64), torch.UntypedStorage(64)) for serial in (1, 2, 3))
    of_one = Recipe((2, 0), (), {(1, 0): source, (1, 1): source}, (), frozenset({1}))
    of_other = Recipe((3, 0), (), {(2, 0): one}, (), frozenset({2, 4}))
    readers.add(one, of_one)
    readers.add(other, of_other)
    assert readers.of(1, []) == readers.of(9, [source]) == [one]
    assert readers.of(2, [source]) == [other, one]
    assert readers.of(4, [one]) == [other]
    assert readers.of(3, []) == []
    readers.discard(one, of_one)
    assert readers.of(1, [source]) == []
    readers.discard(other, of_other)
    assert [readers._by_leaf, readers._by_source] == [{}, {}]


@pytest.mark.filterwarnings("ignore:.*deprecat")
def test_an_op_whose_results_nobody_foresees_has_its_room_when_it_runs_again() -> None:
    """PyTorch has no rule for what it gives, so that nothing was certain of it, however often it had run."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    def quantized() -> nn.Module:
        widths = [64, 512, 256, 512, 256, 16]
        layers: list[nn.Module] = []
        for inner, outer in pairwise(widths):
            quantize = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
            layers += [nn.Linear(inner, outer), quantize, nn.ReLU6(inplace=True)]
        return nn.Sequential(*layers)

    make = supervised(quantized, lambda model, x, k: model(x).square().mean(), shape=(1024, 64))
    _, free = train_in_session(make, 2, budget=1 << 40)
    budget = max(summary.measured_peak_bytes for summary in free) // 2
    ours, summaries = train_in_session(make, STEPS, budget=budget, policy="checkpoint", least_moved_bytes=1)
    assert ours == train_plain(make, STEPS)
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)
