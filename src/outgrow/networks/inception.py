"""Inception-v4: Szegedy et al., "Inception-v4, Inception-ResNet and the Impact of Residual
Connections on Learning", 2016 (arXiv 1602.07261).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outgrow.networks.layers import ConvBnRelu, fitting_padding, output_size, require_size

_LEAST = 3  # pixels: one window of the first convolution


class _Parallel(nn.Module):
    """Branches over the same input, their outputs concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _wide(in_channels: int, out_channels: int, length: int) -> ConvBnRelu:
    """A convolution with a window of 1 x ``length`` pixels."""
    return ConvBnRelu(in_channels, out_channels, (1, length), padding=(0, length // 2))


def _tall(in_channels: int, out_channels: int, length: int) -> ConvBnRelu:
    """A convolution with a window of ``length`` x 1 pixels."""
    return ConvBnRelu(in_channels, out_channels, (length, 1), padding=(length // 2, 0))


def _pooled(in_channels: int, out_channels: int) -> nn.Sequential:
    pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return nn.Sequential(pool, ConvBnRelu(in_channels, out_channels, 1))


def _stem4(padding: int) -> _Parallel:
    return _Parallel(
        nn.Sequential(ConvBnRelu(160, 64, 1), ConvBnRelu(64, 96, 3, padding=padding)),
        nn.Sequential(
            ConvBnRelu(160, 64, 1), _wide(64, 64, 7), _tall(64, 64, 7), ConvBnRelu(64, 96, 3, padding=padding)
        ),
    )


def _inception_a() -> _Parallel:
    return _Parallel(
        ConvBnRelu(384, 96, 1),
        nn.Sequential(ConvBnRelu(384, 64, 1), ConvBnRelu(64, 96, 3, padding=1)),
        nn.Sequential(ConvBnRelu(384, 64, 1), ConvBnRelu(64, 96, 3, padding=1), ConvBnRelu(96, 96, 3, padding=1)),
        _pooled(384, 96),
    )


def _reduction_a(padding: int) -> _Parallel:
    return _Parallel(
        ConvBnRelu(384, 384, 3, stride=2, padding=padding),
        nn.Sequential(
            ConvBnRelu(384, 192, 1),
            ConvBnRelu(192, 224, 3, padding=1),
            ConvBnRelu(224, 256, 3, stride=2, padding=padding),
        ),
        nn.MaxPool2d(3, 2, padding),
    )


def _inception_b() -> _Parallel:
    return _Parallel(
        ConvBnRelu(1024, 384, 1),
        nn.Sequential(ConvBnRelu(1024, 192, 1), _wide(192, 224, 7), _tall(224, 256, 7)),
        nn.Sequential(
            ConvBnRelu(1024, 192, 1),
            _tall(192, 192, 7),
            _wide(192, 224, 7),
            _tall(224, 224, 7),
            _wide(224, 256, 7),
        ),
        _pooled(1024, 128),
    )


def _reduction_b(padding: int) -> _Parallel:
    return _Parallel(
        nn.Sequential(ConvBnRelu(1024, 192, 1), ConvBnRelu(192, 192, 3, stride=2, padding=padding)),
        nn.Sequential(
            ConvBnRelu(1024, 256, 1),
            _wide(256, 256, 7),
            _tall(256, 320, 7),
            ConvBnRelu(320, 320, 3, stride=2, padding=padding),
        ),
        nn.MaxPool2d(3, 2, padding),
    )


def _inception_c() -> _Parallel:
    return _Parallel(
        ConvBnRelu(1536, 256, 1),
        nn.Sequential(ConvBnRelu(1536, 384, 1), _Parallel(_wide(384, 256, 3), _tall(384, 256, 3))),
        nn.Sequential(
            ConvBnRelu(1536, 384, 1),
            _tall(384, 448, 3),
            _wide(448, 512, 3),
            _Parallel(_wide(512, 256, 3), _tall(512, 256, 3)),
        ),
        _pooled(1536, 256),
    )


class InceptionV4(nn.Module):
    """Inception-v4 of arXiv 1602.07261, figures 3 to 9, layer by layer as timm's, with the paper's dropout.

    Images of at least 3 x 3 pixels (the paper's: 299). The stem and the reductions use windows without
    padding; where a small image's map is smaller than the window, it is padded. 42,679,816 parameters
    for 1,000 classes.
    """

    def __init__(self, image_size: int = 299, classes: int = 1000, *, dropout: float = 0.2) -> None:
        super().__init__()
        require_size("Inception-v4", image_size, _LEAST)
        # The layers whose 3 x 3 windows the paper leaves without padding, in order, by their strides:
        # two in the stem, its three mixed blocks, the two reductions.
        size, paddings = image_size, []
        for stride in (2, 1, 2, 1, 2, 2, 2):
            paddings.append(fitting_padding(size, 3))
            size = output_size(size, 3, stride, paddings[-1])
        conv1, conv2, mixed3, mixed4, mixed5, reduction_a, reduction_b = paddings
        self.features = nn.Sequential(
            ConvBnRelu(3, 32, 3, stride=2, padding=conv1),
            ConvBnRelu(32, 32, 3, padding=conv2),
            ConvBnRelu(32, 64, 3, padding=1),
            _Parallel(nn.MaxPool2d(3, 2, mixed3), ConvBnRelu(64, 96, 3, stride=2, padding=mixed3)),
            _stem4(mixed4),
            _Parallel(ConvBnRelu(192, 192, 3, stride=2, padding=mixed5), nn.MaxPool2d(3, 2, mixed5)),
            *(_inception_a() for _ in range(4)),
            _reduction_a(reduction_a),
            *(_inception_b() for _ in range(7)),
            _reduction_b(reduction_b),
            *(_inception_c() for _ in range(3)),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(1536, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.avgpool(self.features(x)).flatten(1))
        logits: Tensor = self.fc(x)
        return logits
