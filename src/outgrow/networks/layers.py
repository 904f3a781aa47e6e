"""Pieces that several of the image networks share: sizes of feature maps, initialised convolutions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def require_size(network: str, image_size: int, least: int) -> None:
    """Raise ValueError if ``image_size`` (pixels) is below the least that the network works with."""
    if image_size < least:
        raise ValueError(f"{network} needs images of at least {least} x {least} pixels, not {image_size}")


def output_size(size: int, kernel: int, stride: int = 1, padding: int = 0) -> int:
    """Height (= width) of what a convolution or pool makes of a map of ``size`` pixels."""
    return (size + 2 * padding - kernel) // stride + 1


def fitting_padding(size: int, kernel: int) -> int:
    """The padding of a layer that has none in its paper: none, unless the map is smaller than the window.

    Networks designed for images of 224 pixels or more shrink small images to nothing. Padding the
    windows that no longer fit keeps every layer in place, so a small image runs the same sequence of
    ops; at the papers' sizes nothing is padded.
    """
    return 0 if size >= kernel else kernel // 2


def fitted_max_pool(size: int, kernel: int, stride: int) -> tuple[nn.MaxPool2d, int]:
    """A max pool that fits a map of ``size`` pixels, and the size of the map that it makes."""
    padding = fitting_padding(size, kernel)
    return nn.MaxPool2d(kernel, stride, padding), output_size(size, kernel, stride, padding)


def truncated_normal_(weight: Tensor, std: float) -> None:
    """Fill ``weight`` from a normal distribution of mean 0, cut at two standard deviations.

    By the inverse of the distribution: torch's own ``trunc_normal_`` draws until all fit, which looks
    at the drawn numbers and so cannot run under FakeTensorMode.
    """
    inside = math.erf(2 / math.sqrt(2))
    with torch.no_grad():
        weight.uniform_(-inside, inside).erfinv_().mul_(std * math.sqrt(2))


# The two subclasses below replace torch's default initialisation instead of adding a second pass after
# it: a ResNet of 2,504 layers has 0.9 billion weights, and drawing them once is slow enough.


class FanOutConv2d(nn.Conv2d):
    """A convolution with He initialisation by fan-out (He et al., arXiv 1502.01852) and a zero bias."""

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class FanInConv2d(nn.Conv2d):
    """A convolution with He initialisation by fan-in (He et al., arXiv 1502.01852) and a zero bias."""

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_in", nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ConvBnRelu(nn.Module):
    """Convolution without bias, batch norm (eps 0.001, as TensorFlow's Inceptions) and in-place ReLU."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)
