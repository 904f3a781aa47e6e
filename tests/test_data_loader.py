"""A DataLoader whose workers are processes feeds a session's steps: forked between two steps, or inside one."""

from __future__ import annotations

import io
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import outgrow
from conftest import RunChild
from steps import digest

SHARE = 0.6
BATCH = 8
BATCHES = 3
EPOCHS = 2


class Pictures(Dataset[tuple[Tensor, int]]):
    """Made by the workers, out of tensors large enough for the arena that a session's process has."""

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        large = torch.randn(3, 128, 128, generator=generator)
        return F.avg_pool2d(large, 4), index % 10


class Training:
    """A small network, its optimizer and what its steps came to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
        head = (nn.AvgPool2d(8), nn.Flatten(), nn.Linear(8 * 16, 10))
        self.model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, *head)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.losses: list[float] = []

    def step(self, x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def result(self) -> tuple[list[float], str]:
        return self.losses, digest([self.model])


@cache
def plain() -> tuple[list[float], str]:
    training = Training()
    for _ in range(EPOCHS):
        for x, y in DataLoader(Pictures(), BATCH):
            training.step(x, y)
    return training.result()


def managed(budget: int, workers: int, fetches_inside: bool) -> tuple[list[float], str, int]:
    """The same in a session, workers forked anew in each epoch; losses, a hash of the parameters, peak in bytes."""
    training = Training()
    policy = "lru" if fetches_inside else "auto"  # such steps are seldom alike: each would be planned for
    with outgrow.Session(training.model, training.optimizer, budget=budget, policy=policy) as session:
        for _ in range(EPOCHS):
            loader = DataLoader(Pictures(), BATCH, num_workers=workers)
            if not fetches_inside:
                for x, y in loader:
                    with session.step():
                        training.step(x, y)
                continue
            batches = None
            for _ in range(BATCHES):
                with session.step():
                    batches = batches or iter(loader)
                    training.step(*next(batches))
    return *training.result(), session.peak_bytes


@pytest.mark.parametrize("fetches_inside", [False, True], ids=["between steps", "inside a step"])
def test_workers_feed_the_same_losses_within_60_percent_of_the_plain_peak(
    run_child: RunChild, one_thread: None, fetches_inside: bool
) -> None:
    *_, plain_peak = managed(1 << 40, 0, fetches_inside)
    budget = int(SHARE * plain_peak)
    # In a process of its own: only that forks with a session open, and with no other test's threads.
    losses, state, peak = run_child(managed, budget, 2, fetches_inside)
    assert (losses, state) == plain()
    assert peak <= budget


def test_the_memory_of_batches_that_come_within_steps_is_let_go(one_thread: None) -> None:
    """Workers hand over storages, which an op of the step makes tensors of."""
    model = nn.Linear(1, 1)
    with outgrow.Session(model, budget=1 << 34) as session:
        live = []
        for _ in range(6):
            with session.step():
                storage = torch.ones(1 << 18).untyped_storage()
                batch = torch.empty(0).set_(storage)
                (model.weight * batch.sum()).backward()
                del storage, batch
            live.append(session.live_bytes)
    assert max(live) < 1 << 20


@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_room_is_made_for_what_a_step_loads_from_a_file(one_thread: None, policy: str) -> None:
    """No operator made its memory: one makes a tensor of that."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(10) for layer in (nn.Linear(128, 128), nn.GELU())])
    file = io.BytesIO()
    torch.save(torch.ones(1 << 20), file)

    def peaks(budget: int) -> list[int]:
        found = []
        with outgrow.Session(model, budget=budget, policy=policy) as session:
            for k in range(9):
                with session.step():
                    loss = model(torch.ones(1024, 128)).pow(2).mean()
                    if k in (5, 7):
                        file.seek(0)
                        loss = loss * torch.load(file).mean()
                    loss.backward()
                    del loss
                model.zero_grad()
                found.append(session.summary().measured_peak_bytes)
        return found

    budget = int(0.8 * max(peaks(1 << 40)[:5]))
    assert max(peaks(budget)) <= budget
