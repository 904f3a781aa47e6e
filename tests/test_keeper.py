"""A step whose two ends are two calls: what callbacks of other libraries are made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from outgrow import BudgetTooSmall, SessionError
from outgrow.integrations.keeper import StepKeeper


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))


def test_a_step_needs_a_training_and_does_not_nest(model: nn.Module) -> None:
    keeper = StepKeeper("1GiB", {})
    with pytest.raises(SessionError, match="before its training"):
        keeper.begin()
    keeper.open(model, [])
    keeper.begin()
    with pytest.raises(SessionError, match="do not nest"):
        keeper.begin()
    assert keeper.in_step
    keeper.end()
    assert not keeper.in_step
    keeper.end()
    keeper.close()
    keeper.close()
    assert _get_current_dispatch_mode_stack() == []


def test_options_reach_the_session(model: nn.Module) -> None:
    keeper = StepKeeper(1 << 30, {"policy": "lru"})
    keeper.open(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    keeper.begin()
    model(torch.randn(4, 8)).sum().backward()
    keeper.end()
    keeper.close()
    assert keeper.session is not None
    assert keeper.session.summary().policy == "lru"


def test_closing_ends_the_step_that_is_open(model: nn.Module) -> None:
    keeper = StepKeeper("1GiB", {})
    keeper.open(model, [])
    keeper.begin()
    model(torch.randn(4, 8))
    keeper.close(ValueError("broken on purpose"))
    assert not keeper.in_step
    assert _get_current_dispatch_mode_stack() == []
    assert keeper.session is not None
    with pytest.raises(SessionError, match="no step was finished"):  # nothing is learned of a broken one
        keeper.session.summary()


def test_a_training_ends_the_one_before(model: nn.Module) -> None:
    keeper = StepKeeper("1GiB", {})
    keeper.open(model, [])
    keeper.begin()
    first = keeper.session
    keeper.open(model, [])
    assert keeper.session is not first
    assert _get_current_dispatch_mode_stack() == []
    keeper.close()


def test_a_session_that_cannot_be_opened_leaves_the_last_one_closed(model: nn.Module) -> None:
    keeper = StepKeeper(100, {})
    with pytest.raises(BudgetTooSmall):
        keeper.open(model, [])
    with pytest.raises(SessionError, match="before its training"):
        keeper.begin()
    keeper.close()
