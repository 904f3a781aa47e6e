"""WideResNet: Zagoruyko and Komodakis, "Wide Residual Networks", 2016 (arXiv 1605.07146)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from outgrow.networks.layers import FanOutConv2d, require_size


class _WideBlock(nn.Module):
    """Two 3 x 3 convolutions in pre-activation order: batch norm, ReLU, convolution."""

    def __init__(self, in_channels: int, channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = FanOutConv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.conv2 = FanOutConv2d(channels, channels, 3, padding=1, bias=False)
        self.shortcut = (
            None if in_channels == channels else FanOutConv2d(in_channels, channels, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x), inplace=True)
        out: Tensor = F.relu(self.bn2(self.conv1(active)), inplace=True)
        if self.dropout is not None:
            out = self.dropout(out)
        out = self.conv2(out)
        # Where the shape changes, the shortcut starts behind the activation, as in the authors' code.
        out += x if self.shortcut is None else self.shortcut(active)
        return out


class WideResNet(nn.Module):
    """WRN-``depth``-``widen`` for CIFAR, pre-activation, as the authors' code; without dropout by default.

    Images of any size from 1 x 1 pixel up (the paper's: 32). WRN-28-10 has 36,479,194 parameters for 10
    classes. Raises ValueError unless the depth is 6n + 4.
    """

    def __init__(
        self,
        image_size: int = 32,
        classes: int = 10,
        *,
        depth: int = 28,
        widen: int = 10,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 4, 6)
        if rest or blocks < 1:
            raise ValueError(f"a WideResNet has 6n + 4 layers (10, 16, 22, 28, ...), not {depth}")
        require_size(f"WRN-{depth}-{widen}", image_size, 1)
        self.conv1 = FanOutConv2d(3, 16, 3, padding=1, bias=False)
        groups: list[nn.Module] = []
        in_channels = 16
        for channels, stride in ((16 * widen, 1), (32 * widen, 2), (64 * widen, 2)):
            first = _WideBlock(in_channels, channels, stride, dropout)
            others = (_WideBlock(channels, channels, 1, dropout) for _ in range(blocks - 1))
            groups.append(nn.Sequential(first, *others))
            in_channels = channels
        self.groups = nn.Sequential(*groups)
        self.bn = nn.BatchNorm2d(in_channels)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(in_channels, classes)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.groups(self.conv1(x))), inplace=True)
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits
