"""What operators that nobody saw yet are guessed to take is more than what they do, on a CPU."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import pytest
import torch

from outgrow.runtime.care import OpNeeds
from outgrow.runtime.guesses import guess
from outgrow.tracing.ops import facts_of, nbytes_of
from outgrow.tracing.probe import measured_call

aten = torch.ops.aten
FORWARD, BACKWARD = aten.convolution.default, aten.convolution_backward.default
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
@pytest.mark.parametrize("func", [aten.index_put_.default, aten.index_put.default])
def test_writes_where_a_mask_says(func: Any, values: torch.Tensor) -> None:
    mask = torch.zeros(200, 100, dtype=torch.bool)
    mask.view(-1)[::20] = True
    assert_enough(func, (torch.zeros(200, 100), [mask], values))


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape).to(dtype)


def positions(*shape: int) -> torch.Tensor:
    return torch.randint(0, 100, shape)


X, HALF, DOUBLE, MASK = (200, 300), torch.bfloat16, torch.float64, numbers(200, 300) > 0.1
OTHERS = {
    "trues counted": (aten.sum.default, MASK),
    "trues counted in rows": (aten.sum.dim_IntList, MASK, [1]),
    "small whole numbers summed up": (aten.cumsum.default, positions(*X).to(torch.int8), 1),
    "the fifth": (aten.kthvalue.default, numbers(*X), 5),
    "picked by a mask": (aten.masked_select.default, numbers(*X), MASK),
    "a gradient picked by a mask": (aten.masked_scatter_backward.default, numbers(*X), MASK, [200, 300]),
    "indexed by a mask": (aten.index.Tensor, numbers(*X), [MASK]),
    "positions": (aten.nonzero.default, MASK),
    "positions of numbers": (aten.nonzero.default, numbers(*X)),
    "rows that differ": (aten.unique_dim.default, positions(500, 4), 0),
    "half precision summed up in place": (
        *(aten.scatter_add_.default, numbers(*X, dtype=HALF), 1, positions(200, 50), numbers(200, 50, dtype=HALF)),
    ),
    "half precision written in place": (aten.scatter_.value, numbers(*X, dtype=HALF), 1, positions(200, 1), 1.0),
    "half precision averaged": (aten.mean.dim, numbers(16, 4, 64, 64, dtype=HALF), [1]),
    "a smaller float added": (aten.add_.Tensor, numbers(*X), numbers(*X, dtype=HALF)),
    "a larger float multiplied with": (aten.mul_.Tensor, numbers(*X), numbers(*X, dtype=DOUBLE)),
    "floats of two sizes": (aten.add.Tensor, numbers(*X), numbers(*X, dtype=DOUBLE)),
    "powers of matrices": (aten.linalg_matrix_exp.default, numbers(8, 64, 64)),
    "grids": (aten.affine_grid_generator.default, numbers(8, 2, 3), [8, 3, 32, 32], False),
    "products of three": (
        *(aten._trilinear.default, numbers(32, 64), numbers(16, 64, 64), numbers(32, 64)),
        *([1, 3], [0], [1, 2], [2, 3]),
    ),
    "the same for a gradient": (
        *(aten._trilinear.default, numbers(32, 16), numbers(16, 64, 64), numbers(32, 64)),
        *([2, 3], [0], [1, 2], [1, 3]),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    func, *args = OTHERS[name]
    assert_enough(func, tuple(args))


def test_where_data_decides_a_guess_is_for_the_first_time() -> None:
    """From then on it is what was seen at most, or what the op reads: all of that may be picked one day."""
    needs, func = OpNeeds(), aten.index.Tensor
    few, read = MASK.clone().fill_(False), nbytes_of(numbers(*X)) + nbytes_of(MASK)

    def likely() -> int:
        return needs.before(func, facts_of(func), (numbers(*X), [few]), {})[1].likely_bytes

    assert likely() >= 2 * read
    signature, _ = needs.before(func, facts_of(func), (numbers(*X), [few]), {})
    needs.measured(signature, 1000)
    assert likely() == read
    needs.measured(signature, 3 * read)
    needs.measured(signature, 1000)
    assert likely() == 3 * read


@pytest.mark.parametrize(
    "args",
    [
        (aten.mul_.Tensor, numbers(*X), torch.tensor(2.0, dtype=DOUBLE)),
        (aten.masked_fill_.Tensor, numbers(*X, dtype=HALF), MASK, torch.tensor(0.0)),
        (aten._foreach_mul_.Tensor, [numbers(*X, dtype=HALF)] * 4, torch.tensor(2.0)),
        (aten._amp_foreach_non_finite_check_and_unscale_.default, [numbers(*X)], numbers(1), numbers(1)),
        (aten.sum.default, torch.zeros(X, dtype=torch.complex64)),
    ],
    ids=lambda args: str(args[0]),
)
def test_what_converts_nothing_is_not_guessed_to(args: tuple[Any, ...]) -> None:
    func, *given = args
    assert guess(func, facts_of(func), given, {}, 0).likely_bytes <= 2 * 8 * prod(X) + 64
