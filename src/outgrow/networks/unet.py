"""U-Net: Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", 2015."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outgrow.networks.layers import FanInConv2d, require_size

_WIDTHS = (64, 128, 256, 512, 1024)  # channels at each level, the bottom last
_LEAST = 16  # pixels: four pools, each of which halves the map


def _double_conv(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        FanInConv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
        FanInConv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


class _Up(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(in_channels, out_channels, 2, stride=2)
        self.conv = _double_conv(2 * out_channels, out_channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.up(x)
        rows, columns = skip.shape[-2] - x.shape[-2], skip.shape[-1] - x.shape[-1]
        if rows or columns:  # a map of odd size lost a row and a column to its pool
            x = F.pad(x, (0, columns, 0, rows))
        out: Tensor = self.conv(torch.cat([skip, x], 1))
        return out


class UNet(nn.Module):
    """U-Net of arXiv 1505.04597 in its usual form: padded 3 x 3 convolutions, batch norm, 3 input channels.

    The paper's network has convolutions without padding and no batch norm, so that its output is
    smaller than its input; here both have the same size, and the logits are (batch, classes, height,
    width). Dropout is at the end of the contracting path, as in the paper. Images of at least 16 x 16
    pixels. 31,037,698 parameters for 2 classes.
    """

    def __init__(self, image_size: int = 572, classes: int = 2, *, dropout: float = 0.5) -> None:
        super().__init__()
        require_size("U-Net", image_size, _LEAST)
        self.down = nn.ModuleList(_double_conv(i, o) for i, o in zip((3, *_WIDTHS[:-1]), _WIDTHS, strict=True))
        self.pool = nn.MaxPool2d(2, 2)
        self.dropout = nn.Dropout(dropout)
        upwards = _WIDTHS[::-1]
        self.up = nn.ModuleList(_Up(i, o) for i, o in pairwise(upwards))
        self.head = nn.Conv2d(_WIDTHS[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, down in enumerate(self.down):
            x = down(x if level == 0 else self.pool(x))
            if level >= len(_WIDTHS) - 2:  # the authors' model drops in its two deepest levels
                x = self.dropout(x)
            skips.append(x)
        skips.pop()  # the bottom itself
        for up in self.up:
            x = up(x, skips.pop())
        logits: Tensor = self.head(x)
        return logits
