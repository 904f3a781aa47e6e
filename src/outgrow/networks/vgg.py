"""VGG-16 and its deeper forms.

VGG-16: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
2014 (arXiv 1409.1556). VGG-116 to 416: vDNN, Rhu et al. 2016 (arXiv 1602.08124).
"""

from __future__ import annotations

from torch import Tensor, nn

from outgrow.networks.layers import FanOutConv2d, require_size

_LEAST = 32  # pixels: five pools, each of which halves the map
_GROUPS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, convolutions: configuration D
_BASE = 16  # weight layers of configuration D
_STEP = 100  # vDNN: 20 more convolutions in each of the five groups


def extra_convolutions(depth: int) -> int:
    """How many convolutions a VGG of ``depth`` weight layers has in each group on top of VGG-16's.

    Raises ValueError unless the depth is 16 plus a multiple of 100 (vDNN, section V: VGG-116, 216, 316, 416).
    """
    hundreds, rest = divmod(depth - _BASE, _STEP)
    if rest or hundreds < 0:
        below = _BASE + _STEP * hundreds
        nearest = [d for d in (below, below + _STEP) if d >= _BASE] or [_BASE]
        raise ValueError(f"no VGG of depth {depth}; the nearest: {', '.join(map(str, nearest))}")
    return 20 * hundreds


class VGG(nn.Module):
    """VGG-16 (configuration D, no batch norm) as torchvision's, or vDNN's VGG of 116, 216, 316, 416 layers.

    Images of at least 32 x 32 pixels. VGG-16 has 138,357,544 parameters for 1,000 classes.
    """

    def __init__(self, depth: int = 16, image_size: int = 224, classes: int = 1000, *, dropout: float = 0.5) -> None:
        super().__init__()
        extra = extra_convolutions(depth)
        require_size(f"VGG-{depth}", image_size, _LEAST)
        features: list[nn.Module] = []
        in_channels = 3
        for channels, convolutions in _GROUPS:
            for _ in range(convolutions + extra):
                features += [FanOutConv2d(in_channels, channels, 3, padding=1), nn.ReLU(inplace=True)]
                in_channels = channels
            features.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, classes),
        )
        for module in self.classifier:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x)).flatten(1)
        logits: Tensor = self.classifier(x)
        return logits
