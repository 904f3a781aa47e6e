"""ResNet of any depth: He et al., "Deep Residual Learning for Image Recognition", 2015 (arXiv 1512.03385)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor, nn

from outgrow.networks.layers import FanOutConv2d, require_size

Blocks = tuple[int, int, int, int]

_BASIC: Mapping[int, Blocks] = MappingProxyType({18: (2, 2, 2, 2), 34: (3, 4, 6, 3)})
_BOTTLENECK: Mapping[int, Blocks] = MappingProxyType(
    {
        50: (3, 4, 6, 3),
        101: (3, 4, 23, 3),
        152: (3, 8, 36, 3),
        1517: (3, 83, 416, 3),  # Layrub
    }
)
_LEAST_BOTTLENECK = 14  # layers: one block a stage
# SuperNeurons' deep ResNets grow in their third stage alone.
_SUPERNEURONS_N1, _SUPERNEURONS_N2, _SUPERNEURONS_N4 = 6, 32, 6
# SuperNeurons' deepest on a K40 at batch 16 is labelled 1920, which no bottleneck ResNet has (3k + 2).
_LABELS: Mapping[int, int] = MappingProxyType({1920: 1922})


def block_counts(depth: int) -> Blocks:
    """How many blocks a ResNet of ``depth`` weight layers has in each of its four stages.

    18 and 34 are of basic blocks (2 convolutions), all others of bottlenecks (3), so that
    ``depth = 3 (n1 + n2 + n3 + n4) + 2``: 50, 101 and 152 as in the paper, 1517 as in Layrub, others
    from 137 up by SuperNeurons' rule n1 = 6, n2 = 32, n4 = 6 and n3 the rest, and shallower ones split
    in the proportions of ResNet-50. 1920 is SuperNeurons' label for a depth that does not exist: it
    gives the next above, 1922.

    Raises ValueError, with the nearest depths that exist, for any other depth.
    """
    depth = _LABELS.get(depth, depth)
    for known in (_BASIC, _BOTTLENECK):
        if depth in known:
            return known[depth]
    if not _exists(depth):
        nearest = ", ".join(map(str, _nearest(depth)))
        raise ValueError(f"no ResNet of depth {depth}; the nearest: {nearest}")
    total = (depth - 2) // 3
    n3 = total - _SUPERNEURONS_N1 - _SUPERNEURONS_N2 - _SUPERNEURONS_N4
    if n3 >= 1:
        return _SUPERNEURONS_N1, _SUPERNEURONS_N2, n3, _SUPERNEURONS_N4
    return _scaled(total)


def _exists(depth: int) -> bool:
    bottleneck = depth >= _LEAST_BOTTLENECK and (depth - 2) % 3 == 0
    return bottleneck or depth in _BASIC or depth in _LABELS


def _nearest(depth: int) -> list[int]:
    below = next((d for d in range(depth - 1, _LEAST_BOTTLENECK - 1, -1) if _exists(d)), None)
    first = max(depth + 1, _LEAST_BOTTLENECK)
    above = next(d for d in range(first, first + 3) if _exists(d))  # one in three is 3k + 2
    return [above] if below is None else [below, above]


def _scaled(total: int) -> Blocks:
    """``total`` blocks in the proportions of ResNet-50, at least one a stage."""
    shares = [total * n / 16 for n in _BOTTLENECK[50]]
    blocks = [max(1, int(share)) for share in shares]
    while sum(blocks) < total:
        furthest = max(range(4), key=lambda stage: shares[stage] - blocks[stage])
        blocks[furthest] += 1
    n1, n2, n3, n4 = blocks
    return n1, n2, n3, n4


class _BasicBlock(nn.Module):
    def __init__(self, in_channels: int, width: int, stride: int, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = FanOutConv2d(in_channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = FanOutConv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        identity: Tensor = x if self.shortcut is None else self.shortcut(x)
        out += identity
        out = self.relu(out)
        return out


class _Bottleneck(nn.Module):
    """The bottleneck in its v1.5 form: the stride is on the 3 x 3 convolution, not on the first 1 x 1."""

    def __init__(self, in_channels: int, width: int, stride: int, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = FanOutConv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = FanOutConv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = FanOutConv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        identity: Tensor = x if self.shortcut is None else self.shortcut(x)
        out += identity
        out = self.relu(out)
        return out


class ResNet(nn.Module):
    """A ResNet of ``depth`` weight layers (see :func:`block_counts`), layer by layer as torchvision's.

    Images of any size from 1 x 1 pixel up. For 1,000 classes ResNet-50 has 25,557,032 parameters,
    ResNet-101 44,549,160 and ResNet-152 60,192,808. Depth 1920 builds 1922 layers.
    """

    def __init__(self, depth: int = 50, image_size: int = 224, classes: int = 1000) -> None:
        super().__init__()
        blocks = block_counts(depth)
        require_size(f"ResNet-{depth}", image_size, 1)
        block, expansion = (_BasicBlock, 1) if depth in _BASIC else (_Bottleneck, 4)
        self.conv1 = FanOutConv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        stages: list[nn.Module] = []
        in_channels = 64
        for width, count, stride in zip((64, 128, 256, 512), blocks, (1, 2, 2, 2), strict=True):
            stages.append(_stage(block, in_channels, width, expansion, count, stride))
            in_channels = width * expansion
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(in_channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = self.avgpool(x).flatten(1)
        logits: Tensor = self.fc(x)
        return logits


def _stage(
    block: type[_BasicBlock] | type[_Bottleneck],
    in_channels: int,
    width: int,
    expansion: int,
    count: int,
    stride: int,
) -> nn.Sequential:
    out_channels = width * expansion
    shortcut = None
    if stride != 1 or in_channels != out_channels:
        shortcut = nn.Sequential(
            FanOutConv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
        )
    first = block(in_channels, width, stride, shortcut)
    return nn.Sequential(first, *(block(out_channels, width, 1, None) for _ in range(count - 1)))
