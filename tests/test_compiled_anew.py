"""What compiled code made is dropped and made anew by all of it: the same bits, one run for all that it made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from outgrow.planning.policies.auto import Auto
from outgrow.planning.problem import Problem
from outgrow.runtime.compiled import CompiledCode
from outgrow.runtime.forwards import Forward
from outgrow.tracing.ir import Phase
from steps import Make, RandomDecisions, RecomputeAll, budget_for, train_in_session, train_plain
from test_compiled import BLOCKS, WIDTH, Block, Breaking, Checkpointed, compiled, compiler, training

__all__ = ["compiler"]  # a fixture
pytestmark = pytest.mark.usefixtures("one_thread")


class Counting(Block):
    """One that reads a buffer, and changes it with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return super().forward(x * self.steps)


class Passing(Block):
    """One that gives back a view of what it was given, and saves it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x).sigmoid(), x.unflatten(1, (2, -1))


class Taking(nn.Module):
    """Goes on with the first of what `Passing` gives, and the second as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = compiled(Passing(), "aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, same = self.inner(x)
        return y + same.flatten(1).sin()


class Hoarding(Block):
    """One that writes to a large buffer: no copy of that is kept for it to run again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1 << 19))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(x) + self.seen[:WIDTH]


class Overwriting(nn.Module):
    """One that writes to what it is given, which the program has made for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = compiled(_Overwriting(), "aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, torch.full((WIDTH,), 0.5)) + self.inner(x, x.sin())  # type: ignore[no-any-return]


class _Overwriting(Block):
    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        given.mul_(0.5).add_(0.25)
        return super().forward(x * given) * given


BLOCKS_OF: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "layer norm": (Block, "aot_eager"),
    "dropout": (partial(Block, 0.2), "aot_eager"),
    "batch norm": (partial(Block, 0.2, True), "aot_eager"),
    "by inductor": (partial(Block, 0.2, True), "inductor"),
    "reads what it changes": (Counting, "aot_eager"),
}


def training_of(kind: str) -> Make:
    make, backend = BLOCKS_OF[kind]
    return training(make, compile=partial(compiled, backend=backend))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Forward]:
    """The calls of compiled code that are run again."""
    seen: list[Forward] = []
    really = CompiledCode.run_again

    def run_again(code: CompiledCode, forward: Forward, args: Sequence[Any]) -> Any:
        seen.append(forward)
        return really(code, forward, args)

    monkeypatch.setattr(CompiledCode, "run_again", run_again)
    return seen


@pytest.mark.parametrize("kind", BLOCKS_OF)
def test_training_is_the_same_to_the_bit_within_the_budget(kind: str) -> None:
    make = training_of(kind)
    plain = train_plain(make, 6)
    budget = budget_for(make, 0.65)
    ours, summaries = train_in_session(make, 6, budget=budget, policy=RecomputeAll())
    assert ours == plain
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)
    # Of what a block makes alone the hidden features before and after their activation: four times its input, each.
    assert summaries[-1].recomputed_bytes > BLOCKS * 4 * 512 * WIDTH * 4
    assert summaries[-1].recompute_seconds > 0


@pytest.mark.parametrize("seed", range(2))
def test_random_plans_change_no_bit(seed: int) -> None:
    make = training_of("batch norm")
    plain = train_plain(make, 5)
    budget = budget_for(make, 0.65 + 0.15 * seed)
    ours, summaries = train_in_session(make, 5, budget=budget, policy=RandomDecisions(seed))
    assert ours == plain
    assert max(summary.measured_peak_bytes for summary in summaries) <= budget
    assert sum(summary.recomputed_bytes for summary in summaries) > 0


def test_one_run_makes_all_that_a_call_made(replays: list[Forward]) -> None:
    """Every block runs once for what it saved for itself; the plan's prediction says what was made."""
    built = training_of("dropout")()
    with outgrow.Session(built.models, built.optimizers, budget="1GiB", policy=OwnOfBlocks()) as session:
        for k in range(5):
            replays.clear()
            with session.step():
                built.run(k)
        summary, plan = session.summary(), session.plan
    assert len(replays) == BLOCKS
    assert plan is not None
    assert len(plan.recomputes) > 2 * BLOCKS
    assert plan.simulate().recomputed_bytes == summary.recomputed_bytes > 0
    assert summary.predicted_peak_bytes is not None
    assert abs(summary.measured_peak_bytes / summary.predicted_peak_bytes - 1) < 0.03


def test_what_one_call_made_is_tried_together(replays: list[Forward]) -> None:
    """In the first step that drops it, once for all; every later step runs each call once."""
    built = training_of("layer norm")()
    ran: list[int] = []
    with outgrow.Session(built.models, built.optimizers, budget="1GiB", policy=OwnOfBlocks()) as session:
        for k in range(5):
            replays.clear()
            with session.step():
                built.run(k)
            ran.append(len(replays))
    assert sorted(set(ran)) == [0, BLOCKS, 2 * BLOCKS]
    assert ran.index(2 * BLOCKS) < ran.index(BLOCKS)
    assert ran[-1] == BLOCKS


def test_a_run_that_gives_other_bits_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    make = training_of("layer norm")
    plain = train_plain(make, 6)
    spoilt = 0
    really = Forward.__call__

    def wrongly(forward: Forward, args: Sequence[Any]) -> Any:
        nonlocal spoilt
        spoilt += 1
        made = really(forward, args)
        return [item + 1 if isinstance(item, torch.Tensor) and item.is_floating_point() else item for item in made]

    monkeypatch.setattr(Forward, "__call__", wrongly)
    ours, summaries = train_in_session(make, 6, budget=budget_for(make, 0.7), policy=OwnOfBlocks())
    assert ours == plain
    assert spoilt > 0
    assert summaries[-1].recomputed_bytes == 0


@pytest.mark.parametrize("block", [Breaking, Hoarding, Taking, Overwriting, partial(Checkpointed, 0.2)])
def test_what_cannot_be_run_again_or_in_part_alone_spoils_nothing(block: Callable[[], nn.Module]) -> None:
    """Two functions with an op between them, too large buffers, results that are views of what was given, writes,
    and what makes most of it anew by itself.
    """

    def compile(made: nn.Module) -> nn.Module:
        return made if isinstance(made, Taking | Overwriting) else compiled(made, "aot_eager")

    make = training(block, compile=compile)
    plain = train_plain(make, 5)
    budget = max(budget_for(make, 0.9), 5 << 20)
    ours, summaries = train_in_session(make, 5, budget=budget, policy=RecomputeAll())
    assert ours == plain
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)


def test_a_graph_that_outlives_its_step_gets_back_what_was_dropped() -> None:
    built = training_of("batch norm")()
    model = built.models[0]
    assert isinstance(model, nn.ModuleList)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        for block in model.children():
            x = block(x).sin()
        return x.square().mean()

    x = torch.randn(512, WIDTH)
    grads = []
    for budget in (None, "1GiB"):
        torch._dynamo.reset()
        built = training_of("batch norm")()
        model = built.models[0]
        assert isinstance(model, nn.ModuleList)
        torch.manual_seed(1)
        if budget is None:
            for _ in range(5):
                loss_of(x).backward()
            grads.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
            continue
        with outgrow.Session(model, budget=budget, policy=RecomputeAll()) as session:
            for _ in range(4):
                with session.step():
                    loss_of(x).backward()
            assert session.summary().recomputed_bytes > 0
            with session.step():
                kept = loss_of(x)
            kept.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(map(torch.equal, *grads))


def test_where_copies_are_slow_auto_has_blocks_run_again() -> None:
    """Of what a call saves for itself nothing is copied where something is dropped."""
    built = training_of("layer norm")()
    with outgrow.Session(built.models, built.optimizers, budget="1GiB") as session:
        for k in range(3):
            with session.step():
                built.run(k)
        assert session.plan is not None
        problem = session.plan.problem
    peak = session.summary().measured_peak_bytes
    slow = replace(problem.hardware, copy_out_bandwidth=2e7, copy_in_bandwidth=2e7)
    plan = Auto().plan(replace(problem, hardware=slow, budget_bytes=int(0.65 * peak)))
    dropped = {item.value for item in plan.recomputes}
    groups = {together for value in own_of_blocks(problem) if len(together := problem.recipes.together(value)) > 1}
    copied = {item.value for item in plan.offloads}
    assert any(dropped & set(together) for together in groups)
    assert not any(dropped & set(together) and copied & set(together) for together in groups)
    prediction = plan.simulate()
    assert prediction.feasible
    forward = sum(op.seconds for op in problem.trace.ops if op.phase is Phase.FORWARD)
    assert prediction.recompute_seconds < 1.2 * forward


def own_of_blocks(problem: Problem) -> list[int]:
    """Values that blocks make and save for themselves alone."""
    return [item.value for item in problem.candidates if len(problem.recipes.together(item.value)) > 1]


class OwnOfBlocks(RecomputeAll):
    """Drops what blocks save for themselves; their results stay."""

    def plan(self, problem: Problem) -> Any:
        own = set(own_of_blocks(problem))
        plan = super().plan(problem)
        return replace(plan, recomputes=tuple(item for item in plan.recomputes if item.value in own)).laid_out()
