"""Several kinds of step: which of them comes next, and steps that turn out to be of another one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, cycle, islice, product
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outgrow
from outgrow.planning.plan import Plan
from outgrow.planning.problem import Problem
from outgrow.runtime.course import Course
from outgrow.session.kind import StepKind
from outgrow.session.learning import Planner
from outgrow.session.turns import Turns
from steps import (
    Make,
    ParkAll,
    RandomDecisions,
    RecomputeAll,
    Training,
    bounds_of,
    budget_for,
    momentum,
    supervised,
    train_in_session,
    train_plain,
    trained_on,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# --- turns ---


@pytest.mark.parametrize(
    ("pattern", "unforeseen"),
    [
        ("AB", 3),  # two networks that are trained in turn
        ("AAAB", 5),  # gradients of four batches
        ("AAAAAB", 7),  # a critic's five steps for one of its network's
        ("ABAC", 6),
        ("A" * 20 + "B", 22),  # a smaller last batch
    ],
)
def test_kinds_that_take_turns_are_foretold_once_each_turn_was_seen(pattern: str, unforeseen: int) -> None:
    turns, foretold, latest = Turns(), [], 0
    for name in islice(cycle(pattern), 5 * len(pattern)):
        foretold.append((turns.next or latest) == ord(name))
        latest = ord(name)
        turns.came(latest)
    assert all(foretold[unforeseen:])
    assert not foretold[0]


def test_a_long_row_of_one_kind_is_remembered_by_its_end_alone() -> None:
    turns = Turns()
    for _ in range(2):
        for kind in [1] * 5000 + [2]:
            turns.came(kind)
    for _ in range(5000):
        assert turns.next in (0, 1)
        turns.came(1)
    assert turns.next == 2


def test_after_a_step_that_nobody_knows_what_follows_it_is_foretold_too() -> None:
    turns = Turns()
    for kind in (1, 0, 1, 0):
        turns.came(kind)
    assert turns.next == 1


# --- steps of several kinds ---


class Skip(nn.Module):
    """A DenseNet's layer: what it is given is held to the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(width), nn.Conv2d(width, 12, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


def network() -> nn.Module:
    skips = [Skip(12 * (number + 1)) for number in range(4)]
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        *skips,
        nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(60, 10),
    )


def batches_of(sizes: Sequence[int]) -> Make:
    """Trains on batches of these sizes, over and over."""

    def loss_of(model: nn.Module, k: int) -> torch.Tensor:
        generator, size = torch.Generator().manual_seed(k), sizes[k % len(sizes)]
        x = torch.randn(size, 3, 16, 16, generator=generator)
        return F.cross_entropy(model(x), torch.randint(0, 10, (size,), generator=generator))

    return trained_on(network, loss_of)


def assert_equal_and_inside(make: Make, steps: int, budget: int, policy: Any = "auto") -> list[outgrow.Summary]:
    plain = train_plain(make, steps)
    ours, summaries = train_in_session(make, steps, budget=budget, policy=policy)
    assert ours == plain
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)
    return summaries


def planned(summaries: Sequence[outgrow.Summary]) -> list[bool]:
    return [summary.predicted_peak_bytes is not None for summary in summaries]


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step that was not what it was thought to be went by another plan."""
    found: list[bool] = []
    turns = Course._turns

    def noted(self: Course, *given: Any) -> bool:
        found.append(turns(self, *given))
        return found[-1]

    monkeypatch.setattr(Course, "_turns", noted)
    return found


@pytest.mark.parametrize("policy", ["auto", "vdnn-all", RecomputeAll()], ids=str)
def test_steps_that_take_turns_follow_their_plans(policy: Any, turned: list[bool]) -> None:
    summaries = assert_equal_and_inside(batches_of([12, 8]), 14, budget_for(batches_of([12]), 0.6), policy)
    assert all(planned(summaries)[6:])
    assert not any(turned)  # they were what they were thought to be


@pytest.mark.parametrize(
    ("policy", "share"),
    [("auto", 0.45), ("auto", 1.2), (RecomputeAll(), 0.45), (ParkAll(), 0.45)],
    ids=str,
)
def test_steps_in_no_order_turn_to_the_plans_of_their_kinds(policy: Any, share: float, turned: list[bool]) -> None:
    """At the largest share the small batches need no plan, so that nobody watches their steps; or none does."""
    kinds = [12, 10, 8, 6]
    draw = Random(0)
    sizes = [*chain.from_iterable((kind, kind) for kind in kinds), *(draw.choice(kinds) for _ in range(16))]
    summaries = assert_equal_and_inside(batches_of(sizes), len(sizes), budget_for(batches_of([12]), share), policy)
    assert sum(turned) > 4
    # What departs is recorded now and then, for the sake of kinds that nobody knows.
    assert sum(planned(summaries)[8:]) > 10


@pytest.mark.parametrize(
    ("policy", "is_wanted", "begin"),
    [
        ("auto", False, 0),
        ("auto", True, 4),
        ("vdnn-all", True, 0),
        *product([ParkAll(offload=True)], [False, True], [0]),
    ],
    ids=str,
)
def test_graphs_that_are_kept_for_a_step_leave_plans_their_places(policy: Any, is_wanted: bool, begin: int) -> None:
    """What they saved lies where the next step's plan would put what that saves, or behind it."""

    def make() -> Training:
        model = network()
        aside = nn.Sequential(*(nn.Sequential(nn.Conv2d(36, 36, 1), nn.Tanh()) for _ in range(4)))
        optimizer = momentum(model.parameters())
        kept: list[torch.Tensor] = []

        def run(k: int) -> torch.Tensor:
            middle = model[:3](torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(k)))
            output = aside(middle).pow(2).sum()
            loss = model[3:](middle).pow(2).mean()
            if kept and is_wanted:
                (gradient,) = torch.autograd.grad(kept.pop(), aside[0][0].weight)
                loss = loss + gradient.pow(2).mean()
            if k >= begin:
                kept[:] = [output]
            del middle, output
            loss.backward()
            torch.ones(1 << 20)  # what was kept leaves for this, if it came back
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Training([model, aside], [optimizer], run)

    budget = int(1.4 * budget_for(make, 0.6))  # of the first step, which has no graph of an earlier one
    summaries = assert_equal_and_inside(make, 12, budget, policy)
    assert all(planned(summaries)[7:])
    assert summaries[-1].offloaded_bytes > 0


class Speaker(nn.Module):
    """Goes on with the word that it was given, or with the one that it said."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(32, width)
        self.mix = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))
        self.say = nn.Linear(width, 32)

    def forward(self, given: torch.Tensor, k: int) -> torch.Tensor:
        draw, state, word = Random(k), torch.zeros(len(given), 256), given[:, 0]
        said = []
        for position in range(1, given.shape[1]):
            state = self.mix(state + self.words(word))
            said.append(self.say(state))
            word = given[:, position] if draw.random() < 0.5 else said[-1].argmax(-1)
        return F.cross_entropy(torch.stack(said, 1).flatten(0, 1), given[:, 1:].flatten())


def speaking() -> Make:
    def loss_of(model: nn.Module, k: int) -> torch.Tensor:
        loss: torch.Tensor = model(torch.randint(0, 32, (32, 6), generator=torch.Generator().manual_seed(k)), k)
        return loss

    return trained_on(Speaker, loss_of)


def test_a_kind_that_departs_from_every_plan_is_not_planned_for_without_end() -> None:
    """An index is a window on the batch, or what the network said: both are saved as so many bytes."""
    # Room for what the same step needs with other ops in it.
    summaries = assert_equal_and_inside(speaking(), 20, int(1.1 * budget_for(speaking(), 0.8)))
    assert summaries[-1].replans == summaries[11].replans <= 6


def thawing(after: int) -> Make:
    """Trains the last layer alone for some steps, and then all."""

    def loss_of(model: nn.Module, k: int) -> torch.Tensor:
        if k in (0, after):
            for parameter in model[:-1].parameters():
                parameter.requires_grad_(k == after)
        loss: torch.Tensor = (
            model(torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(k))).pow(2).mean()
        )
        return loss

    return trained_on(network, loss_of)


def test_a_program_that_changes_for_good_soon_follows_plans_again() -> None:
    frozen = 20
    budget = budget_for(thawing(0), 0.6)
    summaries = assert_equal_and_inside(thawing(frozen), frozen + 12, budget)
    assert all(planned(summaries)[2:frozen])
    assert all(planned(summaries)[frozen + 6 :])


class Routed(nn.Module):
    """Layers that some of the rows go through, other ones in each step, and a loss over some of the results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x
        for number, layer in enumerate(self.layers):
            picked = given[:, 0].roll(number) > 0
            x = x.masked_scatter(picked[:, None], layer(x[picked])) + x.roll(1, 1)
        (rows,) = torch.nonzero(given[:, 1] > 0, as_tuple=True)
        return F.gelu(x[rows]).pow(2).mean()


def routed(rows: Sequence[int] = (256,)) -> Make:
    def loss_of(model: nn.Module, k: int) -> torch.Tensor:
        loss: torch.Tensor = model(torch.randn(rows[k % len(rows)], 64, generator=torch.Generator().manual_seed(k)))
        return loss

    return trained_on(Routed, loss_of)


@pytest.mark.parametrize(
    ("policy", "share"),
    [("auto", 0.6), ("auto", 1.5), ("superneurons", 0.6), (RecomputeAll(), 0.8), (ParkAll(), 0.6)],
    ids=str,
)
def test_steps_in_which_data_decides_on_sizes_follow_one_plan(policy: Any, share: float) -> None:
    """What is saved is larger in some steps than the places that the plan has for it."""
    summaries = assert_equal_and_inside(routed(), 16, budget_for(routed(), share), policy)
    assert all(planned(summaries)[2:])


@pytest.mark.parametrize("policy", ["auto", "superneurons", ParkAll()], ids=str)
def test_a_step_in_which_data_asks_for_more_than_ever_before_fits_what_holds_it(policy: Any) -> None:
    """A tenth of the rows are picked for some steps, and there is room to keep everything; then all of them."""

    def loss_of(model: nn.Module, k: int, few: int = 8) -> torch.Tensor:
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(k))
        x[:, :2].copy_((torch.arange(256)[:, None] % 10 < (1 if k < few else 10)) * 2.0 - 1)
        loss: torch.Tensor = model(x)
        return loss

    (plain_peak, _), (_, least) = (bounds_of(trained_on(Routed, partial(loss_of, few=few))) for few in (8, 0))
    budget = int(1.05 * max(plain_peak, least))
    assert all(planned(assert_equal_and_inside(trained_on(Routed, loss_of), 14, budget, policy))[2:])


def test_of_batches_of_two_sizes_in_which_data_decides_too_each_has_its_plan() -> None:
    make = routed([256, 256, 192])
    summaries = assert_equal_and_inside(make, 18, budget_for(routed(), 0.7))
    assert sum(planned(summaries)[6:]) >= 9


def test_the_budget_that_holds_a_batch_holds_a_smaller_one_the_first_time_that_it_comes() -> None:
    """The last batch of an epoch departs from the plan, and nobody knows what it needs."""
    budget = budget_for(batches_of([16]), 0)
    for sizes in ([16] * 5 + [15], [16] * 4 + [3]):
        assert_equal_and_inside(batches_of(sizes), 14, budget)


def wide() -> nn.Module:
    """What the program holds, a weight and its gradient, is more than what it saves."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 12 * 12, 64),
        nn.Linear(64, 10),
    )


@pytest.mark.parametrize("policy", ["auto", "lru", "vdnn-all", "vdnn-conv", "superneurons", "layrub", "checkpoint"])
@pytest.mark.parametrize("above", [1.0, 1.1])
def test_what_fits_in_the_first_steps_fits_in_all(policy: str, above: float) -> None:
    """Plans of most policies park nothing: where they do not fit, values are parked on demand."""
    make = supervised(wide, shape=(16, 3, 24, 24))
    _, least = bounds_of(make)
    assert_equal_and_inside(make, 6, int(least * above), policy)


def test_where_a_step_was_refused_that_was_not_what_was_expected_the_next_is_recorded() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    recorded: list[bool] = []
    with outgrow.Session(model, budget="12MiB") as session:

        def step(batch: int) -> None:
            with session.step():
                recorded.append(session._recorder is not None)
                model(torch.randn(batch, 256)).sum().backward()
            model.zero_grad()

        for _ in range(4):
            step(64)
        with pytest.raises(outgrow.BudgetTooSmall):
            step(40_000)
        step(64)
        step(64)
    assert recorded == [True, True, False, False, False, True, False]


@pytest.mark.parametrize("policy", ["auto", "vdnn-all", RecomputeAll()], ids=str)
def test_a_value_that_is_saved_anew_after_its_graph_has_ended_is_the_plans(policy: Any, turned: list[bool]) -> None:
    """As in adversarial training, or where an optimizer asks for gradients twice: one batch, two passes."""

    def make() -> Training:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4)))
        optimizer = momentum(model.parameters())

        def run(k: int) -> torch.Tensor:
            x = torch.randn(256, 128, generator=torch.Generator().manual_seed(k))
            for _ in range(2):
                loss = model(x).pow(2).mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Training([model], [optimizer], run)

    summaries = assert_equal_and_inside(make, 8, budget_for(make, 0.7), policy)
    assert all(planned(summaries)[2:])
    assert not turned


def two_networks() -> Make:
    def make() -> Training:
        nets = [
            nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), act()) for _ in range(4))) for act in (nn.GELU, nn.SiLU)
        ]
        optimizer = momentum([*nets[0].parameters(), *nets[1].parameters()])

        def run(k: int) -> torch.Tensor:
            loss = nets[k % 2](torch.randn(256, 96, generator=torch.Generator().manual_seed(k))).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Training(nets, [optimizer], run)

    return make


def test_two_networks_that_are_trained_in_turn_follow_their_plans(turned: list[bool]) -> None:
    make = two_networks()
    summaries = assert_equal_and_inside(make, 12, budget_for(make, 0.9))
    assert all(planned(summaries)[6:])


@pytest.mark.parametrize("mode", [torch.utils._python_dispatch.TorchDispatchMode, torch.overrides.TorchFunctionMode])
@pytest.mark.parametrize("policy", ["auto", ParkAll()], ids=str)
def test_inside_a_mode_of_the_programs_a_step_that_departs_is_the_caches(
    policy: Any, mode: Any, turned: list[bool]
) -> None:
    """Contexts have to end in the order in which they began.

    Where nobody watched such a step, it may pass the budget; those that follow are watched from their begin.
    """

    class Passing(mode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    sizes = [12, 12, 12, 8, 8, 8, 12, 8, 12, 12, 8, 12, 8, 8, 12, 8]

    def inside(make: Make) -> Make:
        def made() -> Training:
            training = make()

            def run(k: int) -> Any:
                with Passing():
                    return training.run(k)

            return Training(training.models, training.optimizers, run)

        return made

    make, budget = inside(batches_of(sizes)), budget_for(batches_of([12]), 0.8)
    ours, summaries = train_in_session(make, len(sizes), budget=budget, policy=policy)
    assert ours == train_plain(make, len(sizes))
    assert sum(summary.measured_peak_bytes > budget for summary in summaries) <= 1
    assert turned


@pytest.mark.parametrize("policy", ["auto", "vdnn-all", RecomputeAll()], ids=str)
def test_a_value_that_graphs_of_gradients_save_again_is_the_same_wherever_it_came_back(
    policy: Any, turned: list[bool]
) -> None:
    def make() -> Training:
        layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(5))
        model = nn.Sequential(*layers, nn.Linear(64, 1))
        optimizer = momentum(model.parameters())

        def run(k: int) -> torch.Tensor:
            x = torch.randn(256, 64, generator=torch.Generator().manual_seed(k), requires_grad=True)
            out = model(x).sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            loss = out / 256 + (slope.norm(dim=1) - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Training([model], [optimizer], run)

    summaries = assert_equal_and_inside(make, 8, budget_for(make, 0.7), policy)
    assert all(planned(summaries)[2:])
    assert not turned


class Heads(nn.Module):
    """A trunk whose results are held to the end, and a head for each of three tasks: kinds that part late."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.trunk = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.heads = nn.ModuleList(nn.Conv2d(8, width, 3, padding=1) for width in (8, 12, 16))
        self.back = nn.ModuleList(nn.Conv2d(width, 8, 1) for width in (8, 12, 16))
        self.leave = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        x = self.enter(x)
        skips = [x * 1.5]
        for conv, norm in zip(self.trunk, self.norms, strict=True):
            x = F.relu_(norm(conv(x)).mul_(1.1))
            skips.append(x + 0.5)
        x = self.back[task](F.gelu(self.heads[task](F.dropout(x, 0.1))).add_(0.01))
        for conv, norm in zip(self.trunk, self.norms, strict=True):
            x = F.relu(norm(conv(x)), inplace=True)
        return self.leave((x + sum(skips)).mean((2, 3)))


def tasks(order: Sequence[int], sizes: Sequence[int]) -> Make:
    def make() -> Training:
        model = Heads()
        optimizer = momentum(model.parameters())

        def run(k: int) -> torch.Tensor:
            generator, size = torch.Generator().manual_seed(k), sizes[k]
            x = torch.randn(size, 3, 16, 16, generator=generator)
            y = torch.randint(0, 5, (size,), generator=generator)
            loss = F.cross_entropy(model(x, order[k]), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Training([model], [optimizer], run)

    return make


@pytest.mark.parametrize("seed", range(3))
def test_kinds_that_part_late_under_random_plans(seed: int, turned: list[bool]) -> None:
    """What the plan before put into places of the next tier is not lost where another plan has its own there."""
    draw = Random(seed)
    order = [0, 0, 0, 1, 1, 1, 2, 2, 2, *(draw.randrange(3) for _ in range(12))]
    sizes = [draw.choice([8, 8, 8, 6]) for _ in order]
    make = tasks(order, sizes)
    peak, least = bounds_of(tasks([2], [8]))
    budget = int(max(least * 1.15, peak * draw.choice([0.5, 0.7, 0.9])))
    ours, summaries = train_in_session(make, len(order), budget=budget, policy=RandomDecisions(seed, parks=True))
    assert ours == train_plain(make, len(order))
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)
    assert turned


def test_a_session_remembers_no_more_kinds_than_it_has_use_for() -> None:
    def kinds() -> set[int]:
        gc.collect()
        return {id(item) for item in gc.get_objects() if type(item) is StepKind}

    model, others = nn.Linear(8, 8), kinds()
    with outgrow.Session(model, budget="1GiB") as session:
        for width in range(1, 60):
            with session.step():
                model(torch.randn(width, 8)).sum().backward()
            model.zero_grad()
        assert len(kinds() - others) <= 34  # the list, what is expected, and what was followed
        assert session.plan is not None


# --- kinds that save the same, and kinds that never come again ---


def looked_at(looks: Callable[[int], int]) -> Make:
    """In step `k` somebody looks at the gradients of `looks(k)` parameters before the backward pass.

    What is saved is the same.
    """

    def loss_of(model: nn.Module, k: int) -> torch.Tensor:
        loss: torch.Tensor = model(torch.randn(64, 64, generator=torch.Generator().manual_seed(k))).pow(2).mean()
        for weight in list(model.parameters())[: looks(k)]:
            torch.autograd.grad(loss, weight, retain_graph=True)
        return loss

    return trained_on(
        lambda: nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]), loss_of
    )


@pytest.mark.parametrize("every", [2, 4])
@pytest.mark.parametrize("policy", ["auto", "vdnn-all"])
def test_kinds_that_save_the_same_and_go_back_otherwise_each_have_a_plan(policy: str, every: int) -> None:
    make = looked_at(lambda k: k % every == 1)
    summaries = assert_equal_and_inside(make, 6 * every, budget_for(make, 0.75), policy)
    assert all(planned(summaries)[3 * every :])


class Deep(nn.Module):
    """As many of its layers as one asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12))

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        for layer in self.layers[:depth]:
            x = layer(x)
        return x.pow(2).mean()


def of_depths(depths: Sequence[int]) -> Make:
    def loss_of(model: nn.Module, k: int) -> torch.Tensor:
        loss: torch.Tensor = model(torch.randn(64, 64, generator=torch.Generator().manual_seed(k)), depths[k])
        return loss

    return trained_on(Deep, loss_of)


def test_a_kind_that_comes_where_none_came_again_is_planned_for_when_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    plan = Planner.plan

    def counted(self: Planner, problem: Problem, **options: Any) -> Plan:
        searches.append(len(problem.trace.saved))
        return plan(self, problem, **options)

    monkeypatch.setattr(Planner, "plan", counted)
    ragged = [12, 11, 10, 9, 8, 7]
    depths = [*ragged, *[7] * 8, 3, *[7] * 4]
    summaries = assert_equal_and_inside(of_depths(depths), len(depths), budget_for(of_depths([12] * 8), 0.8))
    assert len(set(searches)) == 4  # the first three, and the one that came again
    assert all(planned(summaries)[len(ragged) + 3 : len(ragged) + 8])


def test_a_third_way_back_for_the_same_saved_tensors_gets_a_plan_too() -> None:
    """What a step saved does not tell which of two others it is."""
    make = looked_at(lambda k: k % 2 if k < 16 else 2)
    summaries = assert_equal_and_inside(make, 32, budget_for(make, 0.75), "vdnn-all")
    assert all(planned(summaries)[6:16])
    assert all(planned(summaries)[24:])


def test_windows_of_the_same_sizes_on_larger_storages_get_a_plan_too() -> None:
    """What is saved, and the way back, do not show them."""
    changed = 12

    def loss_of(model: nn.Module, k: int) -> torch.Tensor:
        x = torch.randn(64 if k < changed else 128, 64, generator=torch.Generator().manual_seed(k))
        loss: torch.Tensor = model(x[:64]).pow(2).mean()
        return loss

    make = trained_on(
        lambda: nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]), loss_of
    )
    summaries = assert_equal_and_inside(make, changed + 12, budget_for(make, 0.9), "vdnn-all")
    assert all(planned(summaries)[4:changed])
    assert all(planned(summaries)[changed + 6 :])


def test_a_policy_that_keeps_all_refuses_what_does_not_fit_whatever_came_before() -> None:
    small, large = budget_for(of_depths([3] * 2), 1.0), budget_for(of_depths([12] * 2), 1.0)
    training = of_depths([1, 2, 3, 12])()
    with outgrow.Session(training.models, training.optimizers, budget=(small + large) // 2, policy="keep") as session:
        for k in range(3):
            with session.step():
                training.run(k)
        with pytest.raises(outgrow.BudgetTooSmall), session.step():
            training.run(3)
        with session.step():
            training.run(0)
