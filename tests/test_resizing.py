"""A trace that is made from those of two other sizes is the one that the step would have been recorded with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from outgrow.tracing.ir import Phase, Trace
from outgrow.tracing.resizing import resized
from sized import images, on_batches, sequences, traced
from steps import Make

WIDTH = 32


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


class Pair(nn.Module):
    """Two lengths that differ on their own: 100 and 1 in 101 are 1 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, sizes: int) -> torch.Tensor:
        one, other = divmod(sizes, 100)
        h = self.one(torch.randn(one, WIDTH))
        h = F.linear(h, self.one.weight[: WIDTH // 2])  # saves a part of it
        parts = torch.tanh(h), torch.tanh(self.other(torch.randn(other, WIDTH)))
        return parts[0].pow(2).mean() + parts[1].pow(2).mean()


def lines(build: Callable[[], nn.Module]) -> Callable[[Sequence[int]], Make]:
    """Makes the training of a network that is told how long its batch is."""
    return lambda sizes: on_batches(build, lambda k, generator: sizes[k % len(sizes)])


def traced_at(make: Callable[[Sequence[int]], Make], size: int) -> Trace:
    return traced(make([size]), fake=True)


@pytest.mark.parametrize("make", [sequences, images])
@given(sizes=st.lists(st.integers(4, 70), min_size=3, max_size=3, unique=True))
@settings(max_examples=3, deadline=None)
def test_all_sizes_are_those_of_the_step_itself(make: Callable[[Sequence[int]], Make], sizes: list[int]) -> None:
    near, far, true = (traced_at(make, size) for size in sizes)
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
    near, far, true = (traced_at(images, size) for size in (16, 24, 32))
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
    near, far, true, other = (traced_at(lines(build), size) for size in (8, 16, 20, 24))
    assert resized(near, far, true.packs) is None
    assert resized(near, far, other.packs) is not None


def test_training_state_does_not_grow_whatever_does() -> None:
    """The one length that the two have in common is twice as large here."""
    near, far, true = (traced(lines(Pair)([sizes])) for sizes in (816, 824, 1624))
    found = resized(near, far, true.packs)
    assert found is not None
    for one, other in zip(found.values, true.values, strict=True):
        assert one.nbytes == other.nbytes or not other.kind.lasts
    assert found.state_bytes == true.state_bytes


def test_other_steps_say_nothing() -> None:
    near, other, far = traced_at(images, 16), traced_at(lines(Padded), 16), traced_at(images, 24)
    assert resized(near, other, near.packs) is None
    assert resized(near, far, near.packs[1:]) is None
    assert resized(near, far, near.packs) is not None
