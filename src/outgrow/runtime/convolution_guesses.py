"""What a convolution that nobody saw yet takes beside its results.

Of a CPU this was seen in PyTorch 2.11 and 2.13, with the oneDNN that they come with.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import gt
from typing import Any, NamedTuple

import torch
from torch._prims_common import suggest_memory_format

from outgrow.cost.workspaces import most_bytes
from outgrow.tracing.convolution import FORWARD, Convolution, convolution_shape
from outgrow.tracing.ops import nbytes_of

_FORWARD, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
# Twice that are kept free for what cuDNN may transform: with more it would not be the fast way.
_MOST_TRANSFORMED_BYTES = 3 << 29
# PyTorch's own ways, which multiply all patches of an image, laid out as columns.
_BY_COLUMNS = "Slow"
# What oneDNN keeps beside all that.
_LITTLE_BYTES = 16 << 10


class ConvolutionCall(NamedTuple):
    """A call of a convolution or of its backward pass. `gradient` is None in the former; `wants` are gradients."""

    x: torch.Tensor
    weight: torch.Tensor
    gradient: torch.Tensor | None
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int
    wants: Sequence[bool] = ()

    @classmethod
    def of(cls, func: Any, args: Sequence[Any]) -> ConvolutionCall | None:
        """None for other operators, for other layouts, and where some arguments have names."""
        gradient: torch.Tensor | None = None
        if func not in (_FORWARD, _BACKWARD) or len(args) != len(func._schema.arguments):
            return None
        if func is _BACKWARD:
            gradient, *args = args
        x, weight, _, *how = args
        return cls(x, weight, gradient, *how) if x.layout is weight.layout is torch.strided else None

    @property
    def channels(self) -> tuple[int, int]:
        """Of each group, in and out."""
        rows, columns = self.weight.shape[0] // self.groups, self.weight.shape[1]
        return (rows, columns) if self.transposed else (columns, rows)

    @property
    def is_by_columns(self) -> bool:
        """Whether PyTorch runs it by itself on a CPU: single small images, float64, types that the CPU has not."""
        backend = torch._C._select_conv_backend(
            self.x, self.weight, None, self.stride, self.padding, self.dilation, self.transposed,
            self.output_padding, self.groups,
        )  # fmt: skip
        return str(backend.name).startswith(_BY_COLUMNS)


def workspace_on_cpu(call: ConvolutionCall, made: int) -> int:
    """Bytes that it takes on a CPU beside its results of `made` bytes."""
    if call.is_by_columns:
        return _blocked_bytes(call, made) + _columns_bytes(call, made)
    return _blocked_bytes(call, made) + _partial_sums_bytes(call) + _padded_weight_bytes(call) + _LITTLE_BYTES


def transformed_on_gpu(call: ConvolutionCall) -> int:
    """What cuDNN keeps of transformed images and weights, where it may not multiply on tensor cores.

    Of many channels on small maps that is far more than the operands: 2.4 GB for a convolution of VGG-16 on an H200,
    whose images and weights are 60 MB.
    """
    x, weight = call.x, call.weight
    if call.transposed or x.dtype is not torch.float32 or x.dim() != 4:
        return 0
    if torch.backends.cudnn.conv.fp32_precision == "tf32":  # type: ignore[attr-defined]
        return 0
    result = (0, len(weight), *x.shape[2:])
    shape = convolution_shape(x.shape, weight.shape, result, call.stride, call.dilation, call.groups, FORWARD)
    return min(_MOST_TRANSFORMED_BYTES, most_bytes(Convolution(*shape)))


def _filled(nbytes: int, channels: int, itemsize: int = 4) -> int:
    """Bytes of so many channels, filled up to whole blocks: oneDNN works on as many at a time as a register has."""
    block = (64 if torch.cpu._is_avx512_supported() else 32) // itemsize
    return nbytes * -(-channels // block) * block // max(1, channels)


def _blocked_bytes(call: ConvolutionCall, made: int) -> int:
    """Copies of operands and results in blocks of channels.

    The weight may be copied twice, to the format of the images before; and so may a transposed convolution's result.
    """
    inputs, outputs = (count * call.groups for count in call.channels)
    weight, size = nbytes_of(call.weight), call.weight.itemsize
    if call.groups == 1:
        weight = _filled(_filled(weight, inputs, size), outputs, size)
    else:
        weight = _filled(weight, call.groups, size)
    images = _filled(nbytes_of(call.x), inputs, size)
    if call.gradient is None:
        return images + 2 * weight + _filled(made, outputs, size) * (1 + call.transposed)
    wants_images, wants_weight, _ = call.wants
    maps = _filled(nbytes_of(call.gradient), outputs, size)
    return maps + images * (1 + wants_images) + weight * (2 + wants_weight)


def _columns_bytes(call: ConvolutionCall, made: int) -> int:
    """All patches, as columns (aten/src/ATen/native/ConvolutionMM2d.cpp)."""
    inputs, outputs = (count * call.groups for count in call.channels)
    maps = made if call.gradient is None else nbytes_of(call.gradient)
    patches = nbytes_of(call.x) // max(1, inputs) if call.transposed else maps // max(1, outputs)
    rows = outputs if call.transposed else inputs
    return int(patches * rows * prod(call.weight.shape[2:]))


def _partial_sums_bytes(call: ConvolutionCall) -> int:
    """What a weight's gradient is summed up in where the window is larger than the maps.

    That is so in deep stages of networks on small images. oneDNN's way for all cases, on CPUs without AVX-512, took
    four float32 sums a thread.
    """
    is_larger = any(map(gt, call.weight.shape[2:], call.x.shape[2:]))
    if call.gradient is None or len(call.x) < 2 or not is_larger:
        return 0
    return int(4 * torch.get_num_threads() * call.weight.numel() * torch.float32.itemsize)


def _padded_weight_bytes(call: ConvolutionCall) -> int:
    """What becomes of a weight in groups where channels come last: whole blocks of channels, of each group.

    So a depthwise one's gradient is summed up in 256 times its own bytes on CPUs with AVX-512, and in 64 times on
    others, unless its window is of 3 x 3 pixels and inside of the maps. Of 16-bit floats images become such blocks,
    too, in whatever order they lie, and sums are of float32.
    """
    is_half = call.weight.itemsize == 2
    is_depthwise = call.channels == (1, 1)
    are_apart = all(suggest_memory_format(tensor) is torch.contiguous_format for tensor in (call.x, call.weight))
    if call.groups == 1 or (are_apart and (is_depthwise or not is_half)):
        return 0
    window = call.weight.shape[2:]
    is_small = len(window) == 2 and max(window) <= 3 and not any(map(gt, window, call.x.shape[2:]))
    if is_depthwise and (is_small or call.gradient is None):
        return 0
    inputs, outputs = call.channels
    weight = _filled(_filled(nbytes_of(call.weight), inputs), outputs)
    if not is_half:
        return weight
    maps = 0 if call.gradient is None else nbytes_of(call.gradient)
    return 5 * weight + _filled(nbytes_of(call.x), inputs) + _filled(maps, outputs)
