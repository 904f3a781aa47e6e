"""DenseNet: Huang et al., "Densely Connected Convolutional Networks", 2016 (arXiv 1608.06993)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outgrow.networks.layers import FanInConv2d, require_size

_LEAST = 29  # pixels: the third transition still halves a map of 2 x 2


class _DenseLayer(nn.Module):
    def __init__(self, in_channels: int, growth: int, bottleneck: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = FanInConv2d(in_channels, bottleneck * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bottleneck * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = FanInConv2d(bottleneck * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        new: Tensor = self.conv2(self.relu2(self.norm2(x)))
        return new


class _DenseBlock(nn.Module):
    def __init__(self, layers: int, in_channels: int, growth: int, bottleneck: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_DenseLayer(in_channels + i * growth, growth, bottleneck) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """DenseNet-121 by default (DenseNet-BC, growth 32), layer by layer as torchvision's.

    Images of at least 29 x 29 pixels. 7,978,856 parameters for 1,000 classes.
    """

    def __init__(
        self,
        image_size: int = 224,
        classes: int = 1000,
        *,
        blocks: tuple[int, ...] = (6, 12, 24, 16),
        growth: int = 32,
        bottleneck: int = 4,
    ) -> None:
        super().__init__()
        require_size("DenseNet", image_size, _LEAST)
        channels = 2 * growth
        stages: list[nn.Module] = [
            FanInConv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        for number, layers in enumerate(blocks, start=1):
            stages.append(_DenseBlock(layers, channels, growth, bottleneck))
            channels += layers * growth
            if number < len(blocks):
                stages.append(
                    nn.Sequential(
                        nn.BatchNorm2d(channels),
                        nn.ReLU(inplace=True),
                        FanInConv2d(channels, channels // 2, 1, bias=False),
                        nn.AvgPool2d(2, 2),
                    )
                )
                channels //= 2
        stages.append(nn.BatchNorm2d(channels))
        self.features = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, classes)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.features(x), inplace=True)
        logits: Tensor = self.classifier(self.avgpool(x).flatten(1))
        return logits
