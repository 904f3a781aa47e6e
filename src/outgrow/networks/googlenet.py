"""GoogLeNet (Inception v1): Szegedy et al., "Going Deeper with Convolutions", 2014 (arXiv 1409.4842)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outgrow.networks.layers import ConvBnRelu, require_size, truncated_normal_

_LEAST = 15  # pixels: torchvision's least; below it the third pool has no window


class GoogLeNetOutput(NamedTuple):
    """What GoogLeNet returns in training: logits of the main head and of the two auxiliary ones."""

    logits: Tensor
    aux_logits2: Tensor
    aux_logits1: Tensor


class _Inception(nn.Module):
    def __init__(
        self,
        in_channels: int,
        ch1x1: int,
        ch3x3_reduce: int,
        ch3x3: int,
        ch5x5_reduce: int,
        ch5x5: int,
        pool_projection: int,
    ) -> None:
        super().__init__()
        self.branch1 = ConvBnRelu(in_channels, ch1x1, 1)
        self.branch2 = nn.Sequential(
            ConvBnRelu(in_channels, ch3x3_reduce, 1), ConvBnRelu(ch3x3_reduce, ch3x3, 3, padding=1)
        )
        # 3 x 3 where the paper has 5 x 5: torchvision took it over from TensorFlow's port, and its
        # published parameter counts are those of this form.
        self.branch3 = nn.Sequential(
            ConvBnRelu(in_channels, ch5x5_reduce, 1), ConvBnRelu(ch5x5_reduce, ch5x5, 3, padding=1)
        )
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True), ConvBnRelu(in_channels, pool_projection, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class _AuxiliaryHead(nn.Module):
    def __init__(self, in_channels: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.conv = ConvBnRelu(in_channels, 128, 1)
        self.fc1 = nn.Linear(2048, 1024)
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(1024, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(F.adaptive_avg_pool2d(x, (4, 4))).flatten(1)
        x = self.dropout(F.relu(self.fc1(x), inplace=True))
        logits: Tensor = self.fc2(x)
        return logits


class GoogLeNet(nn.Module):
    """GoogLeNet with batch norm, layer by layer as torchvision's.

    With auxiliary heads, training mode returns a :class:`GoogLeNetOutput`; otherwise the logits alone.
    Images of at least 15 x 15 pixels. For 1,000 classes 13,004,888 parameters, 6,624,904 without the heads.
    """

    def __init__(
        self,
        image_size: int = 224,
        classes: int = 1000,
        *,
        auxiliary_heads: bool = True,
        dropout: float = 0.2,
        auxiliary_dropout: float = 0.7,
    ) -> None:
        super().__init__()
        require_size("GoogLeNet", image_size, _LEAST)
        self.conv1 = ConvBnRelu(3, 64, 7, stride=2, padding=3)
        self.maxpool1 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.conv2 = ConvBnRelu(64, 64, 1)
        self.conv3 = ConvBnRelu(64, 192, 3, padding=1)
        self.maxpool2 = nn.MaxPool2d(3, stride=2, ceil_mode=True)

        self.inception3a = _Inception(192, 64, 96, 128, 16, 32, 32)
        self.inception3b = _Inception(256, 128, 128, 192, 32, 96, 64)
        self.maxpool3 = nn.MaxPool2d(3, stride=2, ceil_mode=True)

        self.inception4a = _Inception(480, 192, 96, 208, 16, 48, 64)
        self.inception4b = _Inception(512, 160, 112, 224, 24, 64, 64)
        self.inception4c = _Inception(512, 128, 128, 256, 24, 64, 64)
        self.inception4d = _Inception(512, 112, 144, 288, 32, 64, 64)
        self.inception4e = _Inception(528, 256, 160, 320, 32, 128, 128)
        self.maxpool4 = nn.MaxPool2d(2, stride=2, ceil_mode=True)

        self.inception5a = _Inception(832, 256, 160, 320, 32, 128, 128)
        self.inception5b = _Inception(832, 384, 192, 384, 48, 128, 128)

        self.aux1 = _AuxiliaryHead(512, classes, auxiliary_dropout) if auxiliary_heads else None
        self.aux2 = _AuxiliaryHead(528, classes, auxiliary_dropout) if auxiliary_heads else None
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(1024, classes)

        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                truncated_normal_(module.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor | GoogLeNetOutput:
        x = self.maxpool1(self.conv1(x))
        x = self.maxpool2(self.conv3(self.conv2(x)))
        x = self.maxpool3(self.inception3b(self.inception3a(x)))
        x = self.inception4a(x)
        aux1 = self.aux1(x) if self.training and self.aux1 is not None else None
        x = self.inception4d(self.inception4c(self.inception4b(x)))
        aux2 = self.aux2(x) if self.training and self.aux2 is not None else None
        x = self.maxpool4(self.inception4e(x))
        x = self.inception5b(self.inception5a(x))
        x = self.dropout(self.avgpool(x).flatten(1))
        logits: Tensor = self.fc(x)
        if aux1 is None or aux2 is None:
            return logits
        return GoogLeNetOutput(logits, aux2, aux1)
