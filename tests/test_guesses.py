"""What operators that nobody saw yet are guessed to take is more than what they do, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from outgrow.runtime.guesses import guess
from outgrow.tracing.ops import facts_of
from outgrow.tracing.probe import measured_call

FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}

pytestmark = pytest.mark.usefixtures("one_thread")


class Case(NamedTuple):
    """A convolution of `images` images with `inputs` channels of `side` pixels each way."""

    images: int
    inputs: int
    outputs: int
    side: int
    window: int
    stride: int = 1
    groups: int = 1
    dims: int = 2
    channels_last: bool = False
    transposed: bool = False
    dtype: torch.dtype = torch.float32

    def made(self, *shape: int) -> torch.Tensor:
        tensor = torch.randn(shape, dtype=self.dtype)
        return tensor.contiguous(memory_format=FORMATS[self.dims]) if self.channels_last else tensor

    def calls(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Forward, and backward for all gradients and for the weight's alone."""
        window = (self.window,) * self.dims
        ends = (self.inputs, self.outputs) if self.transposed else (self.outputs, self.inputs)
        x = self.made(self.images, self.inputs, *(self.side,) * self.dims)
        weight = self.made(ends[0], ends[1] // self.groups, *window)
        stride, padding, ones = (
            [number] * self.dims for number in (self.stride, self.window // 2 if self.stride == 1 else 0, 1)
        )
        how = (stride, padding, ones, self.transposed, [0] * self.dims, self.groups)
        gradient = self.made(*FORWARD(x, weight, None, *how).shape)
        forward = (x, weight, None, *how)
        wishes = ([True, True, False], [False, True, False])
        return [(FORWARD, forward), *((BACKWARD, (gradient, *forward, wants)) for wants in wishes)]


CASES = {
    "few channels in": Case(4, 3, 16, 32, 3),
    "few channels out": Case(4, 16, 3, 32, 3),
    "all of few channels": Case(2, 3, 3, 16, 3, dims=3),
    "patches": Case(4, 3, 96, 64, 16, stride=16),
    "patches, channels last": Case(4, 96, 128, 4, 2, stride=2, channels_last=True),
    "many channels on small maps": Case(1, 96, 96, 8, 3, channels_last=True),
    "transposed": Case(2, 48, 8, 4, 3, dims=3, stride=2, transposed=True),
    "transposed, channels last": Case(1, 96, 96, 8, 3, channels_last=True, transposed=True),
    "one channel each": Case(4, 64, 64, 4, 7, groups=64),
    "one channel each, channels last": Case(4, 64, 64, 4, 7, groups=64, channels_last=True),
    "small windows of one channel": Case(4, 64, 64, 8, 3, groups=64, channels_last=True),
    "windows of one channel larger than maps": Case(4, 64, 64, 2, 3, groups=64, channels_last=True),
    "volumes of one channel each": Case(2, 64, 64, 8, 3, groups=64, dims=3, channels_last=True),
    "groups": Case(2, 128, 128, 8, 3, groups=32),
    "groups, channels last": Case(2, 128, 128, 8, 3, groups=32, channels_last=True),
    "a single image": Case(1, 12, 12, 24, 3),
    "a single volume": Case(1, 12, 12, 16, 3, dims=3),
    "float64": Case(4, 16, 16, 16, 3, dtype=torch.float64),
    "bfloat16": Case(4, 16, 32, 16, 3, dtype=torch.bfloat16),
    "bfloat16, groups": Case(2, 128, 128, 8, 3, groups=16, dtype=torch.bfloat16),
    "bfloat16, one channel each, channels last": Case(
        2, 64, 64, 8, 5, groups=64, channels_last=True, dtype=torch.bfloat16
    ),
}


def assert_enough(func: Any, args: tuple[Any, ...]) -> None:
    need = guess(func, facts_of(func), args, {}, 0)
    measured_call(func, args, {})  # a library remembers what it has built
    _, rise = measured_call(func, args, {})
    assert rise is not None
    assert need.certain_bytes <= rise <= need.likely_bytes


@pytest.mark.parametrize("name", CASES)
def test_convolutions(name: str) -> None:
    for func, args in CASES[name].calls():
        assert_enough(func, args)


@pytest.mark.parametrize("values", [torch.zeros(()), torch.zeros(1000)], ids=["one for all", "each its own"])
@pytest.mark.parametrize("func", [torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default])
def test_writes_where_a_mask_says(func: Callable[..., Any], values: torch.Tensor) -> None:
    mask = torch.zeros(200, 100, dtype=torch.bool)
    mask.view(-1)[::20] = True
    assert_enough(func, (torch.zeros(200, 100), [mask], values))
