"""Refusals name what is to come: an optimizer's state, and what its first update takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

import outgrow
from outgrow import BudgetTooSmall
from outgrow.tracing.optimizers import update_of
from steps import rise_of

pytestmark = pytest.mark.usefixtures("one_thread")

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1),
    "SGD with momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "Nesterov over lists": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "Adam": torch.optim.Adam,
    "Adam over lists": lambda given: torch.optim.Adam(given, foreach=True),
    "AdamW fused": lambda given: torch.optim.AdamW(given, fused=True),
    "AMSGrad": lambda given: torch.optim.AdamW(given, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda given: torch.optim.RMSprop(given, centered=True, momentum=0.9),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
}


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256, bias=False))


def held_by(optimizer: torch.optim.Optimizer) -> int:
    items = [item for state in optimizer.state.values() for item in state.values()]
    return sum(item.nbytes for item in items if isinstance(item, torch.Tensor))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_known_before_it_is_made(name: str) -> None:
    model = layers()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    update = update_of(optimizer, of_all=True)
    assert update is not None
    assert not optimizer.state
    model(torch.randn(4, 256)).square().mean().backward()
    optimizer.step()
    assert update.state_bytes == held_by(optimizer)
    assert abs(rise_of(optimizer.step) - update.beside_bytes) < 4096


def test_of_parameters_without_gradients_nothing_is_kept() -> None:
    model = layers()
    optimizer = torch.optim.Adam(model.parameters())
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    update = update_of(optimizer, of_all=False)
    assert update is not None
    assert update.state_bytes == 2 * first.nbytes + 4


class OfSomebodys(torch.optim.SGD):
    """It may do anything where it steps."""


class Tagged(nn.Parameter):
    """A parameter that runs code of its own."""


def test_other_peoples_code_does_not_run_once_more() -> None:
    model = layers()
    assert update_of(OfSomebodys(model.parameters(), lr=0.1, momentum=0.9), of_all=True) is None
    assert update_of(torch.optim.Adam([Tagged(torch.ones(4))]), of_all=True) is None


def test_an_update_that_is_foreseen_calls_no_hooks_and_changes_nothing() -> None:
    model = layers()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 256)).square().mean().backward()
    before = [item.detach().clone() for item in model.parameters()]
    called: list[object] = []
    optimizer.register_step_pre_hook(lambda *given: called.append(given))
    every = register_optimizer_step_pre_hook(lambda *given: called.append(given))
    try:
        assert update_of(optimizer, of_all=True) is not None
    finally:
        every.remove()
    assert called == []
    assert not optimizer.state
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("ask", ["sparse gradients", "a closure"])
def test_what_cannot_be_foreseen_is_not(ask: str) -> None:
    embedding = nn.Embedding(8, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    make: Make = torch.optim.SparseAdam if ask.startswith("sparse") else torch.optim.LBFGS
    assert update_of(make(list(embedding.parameters())), of_all=True) is None


# --- what a session says ---


class Reader(nn.Module):
    """Layers of a transformer over random numbers; most of what it holds is for its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 512, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def train(budget: int, make: Make, steps: int = 3) -> tuple[nn.Module, int]:
    torch.manual_seed(0)
    model = Reader()
    optimizer = make(list(model.parameters()))
    with outgrow.Session(model, optimizer, budget=budget) as session:
        for k in range(steps):
            generator = torch.Generator().manual_seed(k)
            x = torch.randn(4, 32, 64, generator=generator)
            y = torch.randint(0, 10, (4, 32), generator=generator)
            with session.step():
                F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
        return model, session.peak_bytes


def refusal_of(budget: int, make: Make) -> BudgetTooSmall | None:
    try:
        train(budget, make)
    except BudgetTooSmall as error:
        return error
    return None


@pytest.mark.parametrize(("name", "begin"), [("SGD with momentum", 0.5), ("Adam", 0.3), ("Adam", 0.8)])
def test_whoever_follows_the_advice_has_a_budget_that_works_in_a_few_tries(name: str, begin: float) -> None:
    _, peak = train(1 << 40, OPTIMIZERS[name])
    budget, tries = int(begin * peak), 0
    while (error := refusal_of(budget, OPTIMIZERS[name])) is not None:
        assert error.least_bytes > budget
        assert sum(error.holders.values()) == error.least_bytes
        budget, tries = error.least_bytes, tries + 1
        assert tries < 6
    assert tries > 0
    assert budget <= peak


def test_an_update_that_has_no_room_names_all_that_it_will_make() -> None:
    """Not what the first of its tensors would have needed."""
    parameters = sum(item.nbytes for item in Reader().parameters())
    budget = int(3.3 * parameters)  # Adam comes to four times
    with pytest.raises(BudgetTooSmall, match="at the first update by Adam") as caught:
        train(budget, torch.optim.Adam)
    assert caught.value.holders["optimizer state"] >= 2 * parameters
    assert 4 * parameters < caught.value.least_bytes < 4.5 * parameters
    with pytest.raises(BudgetTooSmall) as again:
        train(budget - parameters // 4, torch.optim.Adam)
    assert again.value.least_bytes >= 4 * parameters


def test_an_update_under_way_needs_room_beside_what_cannot_leave() -> None:
    """Nor is its momentum, which SGD shows only when all is done, counted twice."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parameters = sum(item.nbytes for item in model.parameters())

    def step() -> None:
        shared = torch.ones(parameters // 4).numpy()
        model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        assert shared.all()

    session = outgrow.Session(model, optimizer, budget=int(3.5 * parameters))
    with session, pytest.raises(BudgetTooSmall, match="at the first update by SGD,") as caught, session.step():
        step()
    assert 4 * parameters <= caught.value.least_bytes < 4.1 * parameters


class Greedy(torch.autograd.Function):
    """Takes much on its way back."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 + torch.ones(1 << 20).sum() * 0


def test_what_a_backward_pass_needs_is_named_without_state_which_may_be_away_then() -> None:
    model = nn.Linear(256, 256)
    optimizer = torch.optim.Adam(model.parameters())
    session = outgrow.Session(model, optimizer, budget="4MiB")
    with session, pytest.raises(BudgetTooSmall, match=r"at aten\.ones\.default") as caught, session.step():
        Greedy.apply(model(torch.ones(2, 256))).sum().backward()
    assert "optimizer state" not in caught.value.holders


def test_before_the_first_step_state_is_named_too() -> None:
    parameters = sum(item.nbytes for item in Reader().parameters())
    with pytest.raises(BudgetTooSmall, match="before the first step") as caught:
        train(parameters, torch.optim.Adam)
    assert caught.value.holders["optimizer state"] >= 2 * parameters
    assert caught.value.least_bytes >= 4 * parameters
    # An optimizer that nobody here knows may keep nothing.
    with pytest.raises(BudgetTooSmall, match="before the first step") as caught:
        train(parameters, lambda given: OfSomebodys(given, lr=0.1, momentum=0.9))
    assert caught.value.least_bytes == 2 * parameters


# --- whose update it is ---


def test_a_closure_computes_before_the_update_does() -> None:
    def refusal(uses_closure: bool) -> BudgetTooSmall:
        model = Reader()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def closure() -> torch.Tensor:
            loss: torch.Tensor = model(torch.ones(32, 32, 64)).square().mean()
            loss.backward()
            return loss

        def step() -> None:
            if uses_closure:
                optimizer.step(closure)  # type: ignore[call-overload]
            else:
                closure()
                optimizer.step()

        session = outgrow.Session(model, optimizer, budget="4.5MB")
        with session, pytest.raises(BudgetTooSmall) as caught, session.step():
            step()
        return caught.value

    assert refusal(True).least_bytes == refusal(False).least_bytes


def test_what_is_made_anew_near_the_least_budget_finds_what_it_is_made_from() -> None:
    """Gradients that are dropped are products; what they are made from was parked on demand for room to make them."""

    def train_layers(budget: int) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        with outgrow.Session(model, optimizer, budget=budget) as session:
            for k in range(3):
                with session.step():
                    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(k))
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return [item.detach().clone() for item in model.parameters()], session.peak_bytes

    plain, peak = train_layers(1 << 40)
    for missing in (0, 4, 8192):
        with suppress(BudgetTooSmall):
            ours, _ = train_layers(peak - missing)
            assert all(map(torch.equal, ours, plain))
