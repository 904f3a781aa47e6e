"""The shape of a convolution, which says what algorithms there are for it. Recorders fill it, estimates read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Bits of `Convolution.passes`.
FORWARD, DATA_GRADIENT, WEIGHT_GRADIENT = 1, 2, 4


class Convolution(NamedTuple):
    """A convolution over images. In a trace it is the plain tuple of these numbers.

    Attributes:
        batch: images.
        channels_in, height_in, width_in: what one of them is.
        channels_out, height_out, width_out: what becomes of it.
        kernel_height, kernel_width: the window, in pixels.
        stride, dilation: the larger one of both directions.
        groups: into how many parts the channels are split.
        passes: what the op works out: the result (1), or gradients of the images (2), of the weight (4), or both (6).
    """

    batch: int
    channels_in: int
    height_in: int
    width_in: int
    channels_out: int
    height_out: int
    width_out: int
    kernel_height: int
    kernel_width: int
    stride: int
    dilation: int
    groups: int
    passes: int


def convolution_shape(
    images: Sequence[int],
    weight: Sequence[int],
    result: Sequence[int],
    stride: Iterable[int],
    dilation: Iterable[int],
    groups: int,
    passes: int,
) -> tuple[int, ...]:
    """The numbers of a `Convolution`; none where it is not one over images."""
    if not len(images) == len(weight) == len(result) == 4:
        return ()
    batch, channels_in, height_in, width_in = images
    _, channels_out, height_out, width_out = result
    return tuple(
        Convolution(
            batch, channels_in, height_in, width_in, channels_out, height_out, width_out, weight[2], weight[3],
            max(stride), max(dilation), groups, passes,
        )
    )  # fmt: skip


def is_convolution_shape(numbers: Sequence[int]) -> bool:
    """Whether numbers from a file are those of a convolution that there can be."""
    return len(numbers) == len(Convolution._fields) and min(numbers) > 0 and numbers[-1] <= 6
