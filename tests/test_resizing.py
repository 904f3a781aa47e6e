"""A trace that is made from those of two other sizes is the one that the step would have been recorded with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import outgrow
from outgrow.tracing.ir import Phase, Trace
from outgrow.tracing.resizing import resized
from steps import momentum

WORDS, WIDTH = 50, 32


class Reader(nn.Module):
    """Attention, whose scores grow as the square of a length, and what does not grow."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 64, 0.1, "gelu", batch_first=True) for _ in range(2)
        )

    def forward(self, size: int) -> torch.Tensor:
        x = torch.randint(0, WORDS, (3, size))
        y = self.words(x)
        for layer in self.layers:
            y = layer(y)
        return F.cross_entropy(self.out(y).flatten(0, 1), x.flatten())


class Maps(nn.Module):
    """Convolutions over images of which `size` is one side, in a batch that is as large: two things grow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, size: int) -> torch.Tensor:
        out: torch.Tensor = self.layers(torch.randn(2, 3, size, size)).pow(2).mean()
        return out


class Padded(nn.Module):
    """Lengths are filled up to a multiple of 8: how much that is depends on more than they tell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, size: int) -> torch.Tensor:
        h = torch.tanh(self.first(torch.randn(size, WIDTH)))
        padded = F.pad(h, (0, 0, 0, -size % 8))
        out: torch.Tensor = self.read(self.last(padded))[:size].pow(2).mean()
        return out

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class InHalves(Padded):
    """Of a padded value two parts are saved, and not the whole."""

    def read(self, x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, dim=1)
        return one * other


def traced(build: Callable[[], nn.Module], size: int) -> Trace:
    torch.manual_seed(0)
    model = build()
    optimizer = momentum(model.parameters())

    def run() -> torch.Tensor:
        loss: torch.Tensor = model(size)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return outgrow.trace(lambda: outgrow.TrainingStep([model], [optimizer], run), fake=True)


@pytest.mark.parametrize("build", [Reader, Maps])
@given(sizes=st.lists(st.integers(4, 70), min_size=3, max_size=3, unique=True))
@settings(max_examples=8, deadline=None)
def test_all_sizes_are_those_of_the_step_itself(build: Callable[[], nn.Module], sizes: list[int]) -> None:
    near, far, true = (traced(build, size) for size in sizes)
    found = resized(near, far, true.packs)
    assert found is not None
    assert found.packs == true.packs
    assert [value.nbytes for value in found.values] == [value.nbytes for value in true.values]
    assert [op.flops for op in found.ops] == [op.flops for op in true.ops]
    likely = [op.moved_bytes for op in found.ops]
    assert likely == pytest.approx([op.moved_bytes for op in true.ops], rel=0.25)
    assert found.op_names == true.op_names
    assert found.ticks == true.ticks


def test_times_grow_as_what_ops_have_to_do() -> None:
    near, far, true = (traced(Maps, size) for size in (16, 24, 32))
    near = near.with_ops([replace(op, seconds=1.0) for op in near.ops])
    found = resized(near, far, true.packs)
    assert found is not None
    convolution = next(index for index, op in enumerate(found.ops) if "convolution" in op.name)
    assert found.ops[convolution].seconds == pytest.approx(4.0)
    update = next(index for index, op in enumerate(found.ops) if op.phase is Phase.UPDATE)
    assert found.ops[update].seconds == pytest.approx(1.0)


@pytest.mark.parametrize("build", [Padded, InHalves])
def test_where_what_was_saved_grows_oddly_there_is_no_trace(build: Callable[[], nn.Module]) -> None:
    """Two lengths of which nothing is padded do not show how a third one is."""
    near, far, true = (traced(build, size) for size in (8, 16, 20))
    assert resized(near, far, true.packs) is None
    assert resized(near, far, traced(build, 24).packs) is not None


def test_other_steps_say_nothing() -> None:
    near, far = traced(Maps, 16), traced(Padded, 16)
    assert resized(near, far, near.packs) is None
    assert resized(near, traced(Maps, 24), near.packs[1:]) is None
    assert resized(near, traced(lambda: nn.Sequential(Maps()), 24), near.packs) is not None
