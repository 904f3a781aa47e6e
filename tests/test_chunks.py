"""Windows on one storage that are saved one by one while the rest is written to: the gates of recurrent cells."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outgrow
from outgrow.planning.problem import Problem
from outgrow.tracing.ir import Trace
from sized import traced
from steps import (
    Make,
    ParkAll,
    RandomDecisions,
    RecomputeAll,
    assert_equal_to_plain,
    budget_for,
    train_in_session,
    trained_on,
)

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, STEPS, WIDTH = 8, 6, 32
HARDWARE = outgrow.Hardware("any", 1 << 40, 1e11, 1e10, 1e9, 1e9)


class Reader(nn.Module):
    """PyTorch runs a `GRU` op by op on a CPU: it chunks each step's gates, and applies them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.GRU(WIDTH, WIDTH, num_layers=2), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cells(x)[0][-1])


class Halves(nn.Module):
    """Halves of one tensor that change one after the other, after the first was saved; and one past autograd."""

    def __init__(self, peeks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(4))
        self.peeks = peeks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[0]
        for layer in self.layers:
            first, second = torch.unsafe_chunk(layer(x), 2, 1)
            x = first.sigmoid_() * second.tanh_()
            if self.peeks:
                second.data.mul_(0.5)  # plain PyTorch's backward pass finds it so
        return x[:, :4]


def training(build: Any) -> Make:
    def loss_of(model: nn.Module, k: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(k)
        x = torch.randn(STEPS, BATCH, WIDTH, generator=generator)
        return F.cross_entropy(model(x), torch.randint(0, 4, (BATCH,), generator=generator))

    return trained_on(build, loss_of)


NETWORKS = {
    "gru": training(Reader),
    "halves": training(lambda: Halves(False)),
    "peeks": training(lambda: Halves(True)),
}


def wanted_values(trace: Trace) -> dict[int, set[int]]:
    """By storage, the values of it that somebody unpacks."""
    found: dict[int, set[int]] = {}
    for saved in trace.saved:
        if saved.unpacked:
            found.setdefault(trace.values[saved.value].storage, set()).add(saved.value)
    return found


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_what_is_saved_of_a_storage_is_one_value_which_is_there_until_it_is_wanted(make: Make, fake: bool) -> None:
    trace = traced(make, fake=fake)
    assert all(len(values) == 1 for values in wanted_values(trace).values())
    for saved in trace.saved:
        value = trace.values[saved.value]
        assert all(value.birth < op < value.death for op in saved.unpacked)
    written = Counter(value.storage for value in trace.values)
    assert any(written[trace.values[saved.value].storage] > 2 for saved in trace.saved)


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_it_may_leave_after_the_last_write_to_it(make: Make) -> None:
    problem = Problem(traced(make), HARDWARE, 1 << 40, least_moved_bytes=1)
    assert problem.candidates
    for item in problem.candidates:
        assert problem.tick_ops[item.first_pack] > problem.trace.values[item.value].birth
        assert item.first_pack <= item.last_pack < item.first_unpack
    # That frees memory: while the program holds a storage, it would not.
    changed = [item for item in problem.candidates if problem.trace.values[item.value].version > 0]
    assert changed
    assert all(item.held < problem.tick_ops[item.first_unpack] for item in changed)


def test_it_is_copied_once() -> None:
    make = NETWORKS["gru"]
    problem = Problem(traced(make), HARDWARE, 1 << 40, least_moved_bytes=1)
    _, summaries = train_in_session(make, 4, budget=budget_for(make, 2), policy="vdnn-all")
    assert [summary.offloaded_bytes for summary in summaries[1:]] == [sum(c.nbytes for c in problem.candidates)] * 3


@pytest.mark.parametrize(
    "policy",
    [
        "auto",
        "lru",
        "superneurons",
        RecomputeAll(),
        ParkAll(offload=True),
        *(RandomDecisions(k, parks=True) for k in (0, 1)),
    ],
    ids=lambda policy: getattr(policy, "name", policy) + str(getattr(policy, "seed", "")),
)
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_training_is_plain_training(make: Make, policy: Any) -> None:
    assert_equal_to_plain(make, policy=policy, share=0.7, steps=6)


@pytest.mark.parametrize("make", [NETWORKS["gru"], NETWORKS["halves"]], ids=["gru", "halves"])
def test_what_a_plan_makes_anew_it_does_in_every_step(make: Make) -> None:
    """What is saved again after a write is known to who makes it anew, also where native code packs it."""
    _, summaries = train_in_session(make, 8, budget=budget_for(make, 0.7), policy=RecomputeAll())
    assert len({summary.recomputed_bytes for summary in summaries[2:]}) == 1
    assert summaries[-1].recomputed_bytes > 0
