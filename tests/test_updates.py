"""Optimizers that first step late make their state in steps that nobody watched: they are watched from there on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import outgrow
from outgrow import BudgetTooSmall
from outgrow.runtime.updates import FirstUpdates

pytestmark = pytest.mark.usefixtures("one_thread")

_WIDTH, _DEPTH, _PASSES = 256, 6, 5  # backward passes until the optimizer steps

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Accumulating:
    """A training that steps its optimizer in each fifth step of its session only."""

    def __init__(self, make: Make = torch.optim.Adam, *, is_shown: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(_DEPTH)))
        self.optimizer = make(list(self.model.parameters()))
        self._shown = self.optimizer if is_shown else None

    def session(self, budget: int) -> outgrow.Session:
        return outgrow.Session(self.model, self._shown, budget=budget)

    def step(self, number: int) -> None:
        self.model(torch.ones(32, _WIDTH)).square().mean().backward()
        if number % _PASSES == _PASSES - 1:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def peaks(self, budget: int, steps: int = 2 * _PASSES) -> list[int]:
        """Peaks of the steps until one is refused."""
        peaks = []
        with self.session(budget) as session:
            for number in range(steps):
                try:
                    with session.step():
                        self.step(number)
                except BudgetTooSmall:
                    break
                peaks.append(session.summary().measured_peak_bytes)
        return peaks

    def parameters(self) -> list[torch.Tensor]:
        return [item.detach().clone() for item in self.model.parameters()]


@pytest.fixture(scope="module")
def plain_peak() -> int:
    return max(Accumulating().peaks(1 << 40))


@pytest.mark.parametrize("share", [0.72, 0.9])
@pytest.mark.parametrize("is_shown", [True, False], ids=["the session's", "the program's own"])
def test_the_step_in_which_state_appears_is_refused_where_it_would_pass_the_budget(
    share: float, plain_peak: int, *, is_shown: bool
) -> None:
    budget = int(share * plain_peak)
    peaks = Accumulating(is_shown=is_shown).peaks(budget)
    assert len(peaks) == _PASSES - 1  # until then all goes well, in steps that nobody watches
    assert max(peaks) <= budget


def test_where_there_is_room_for_the_state_all_is_as_without_a_session(plain_peak: int) -> None:
    plain, ours = Accumulating(), Accumulating()
    for number in range(2 * _PASSES):
        plain.step(number)
    peaks = ours.peaks(int(1.05 * plain_peak))
    assert len(peaks) == 2 * _PASSES
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))


def test_an_update_on_another_thread_is_none_of_the_steps(parameter: nn.Parameter) -> None:
    training = Accumulating()
    other = torch.optim.Adam([parameter])
    with training.session(1 << 40) as session:
        for number in range(3):
            with session.step():
                training.step(number)
                if number == 2:
                    thread = threading.Thread(target=other.step)
                    thread.start()
                    thread.join()
                    assert not session._executor._current.is_watched
                    other.step()  # the first on that thread was the first of all
                    assert not session._executor._current.is_watched
                    torch.optim.Adam([parameter]).step()
                    assert session._executor._current.is_watched


class Counted:
    def __init__(self) -> None:
        self.times = 0

    def begins(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        self.times += 1


@pytest.fixture
def parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    return parameter


def test_an_optimizer_without_state_is_looked_out_for_once(parameter: nn.Parameter) -> None:
    counted = Counted()
    updates = FirstUpdates(counted.begins)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(3):
        optimizer.step()
    updates.close()
    torch.optim.SGD([parameter], lr=1.0).step()
    assert counted.times == 1


def test_parameters_that_come_later_have_a_first_update_of_their_own(parameter: nn.Parameter) -> None:
    counted = Counted()
    updates = FirstUpdates(counted.begins)
    unfrozen = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.Adam([parameter, unfrozen])
    optimizer.step()
    unfrozen.grad = torch.ones(4)
    optimizer.step()
    optimizer.step()
    updates.close()
    assert counted.times == 2


def test_an_update_that_failed_is_the_first_once_more(parameter: nn.Parameter) -> None:
    counted = Counted()
    updates = FirstUpdates(counted.begins)
    optimizer = torch.optim.LBFGS([parameter])

    def fail() -> torch.Tensor:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            optimizer.step(fail)
    updates.close()
    assert counted.times == 2


def test_an_optimizer_that_makes_its_gradients_itself_is_seen(parameter: nn.Parameter) -> None:
    counted = Counted()
    updates = FirstUpdates(counted.begins)
    parameter.grad = None
    optimizer = torch.optim.LBFGS([parameter])

    def closure() -> torch.Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    updates.close()
    assert counted.times == 1


def test_whoever_lets_go_of_it_is_not_held(parameter: nn.Parameter) -> None:
    counted = Counted()
    updates = FirstUpdates(counted.begins)
    del counted
    torch.optim.SGD([parameter], lr=1.0).step()  # nobody is told, and nothing fails
    updates.close()
