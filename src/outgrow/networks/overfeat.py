"""OverFeat, fast model: Sermanet et al., "OverFeat: Integrated Recognition, Localization and Detection
using Convolutional Networks", 2013 (arXiv 1312.6229).
"""

from __future__ import annotations

from torch import Tensor, nn

from outgrow.networks.layers import fitted_max_pool, fitting_padding, output_size, require_size

_LEAST = 11  # pixels: one window of the first convolution
_MAP = 6  # pixels: side of the map that the fully connected layers expect (the paper's table 1)


class OverFeat(nn.Module):
    """The fast model of arXiv 1312.6229, table 1, with dropout on the fully connected layers 6 and 7.

    Images of at least 11 x 11 pixels. At 231 (the paper's) the last pool gives the 6 x 6 map that the
    fully connected layers expect; at other sizes an adaptive average pool makes one. Windows that do
    not fit a small image's map are padded. 145,920,872 parameters for 1,000 classes.
    """

    def __init__(self, image_size: int = 231, classes: int = 1000, *, dropout: float = 0.5) -> None:
        super().__init__()
        require_size("OverFeat", image_size, _LEAST)
        size = output_size(image_size, 11, stride=4)
        pool1, size = fitted_max_pool(size, 2, 2)
        padding2 = fitting_padding(size, 5)
        size = output_size(size, 5, padding=padding2)
        pool2, size = fitted_max_pool(size, 2, 2)
        pool5, size = fitted_max_pool(size, 2, 2)
        self.features = nn.Sequential(
            nn.Conv2d(3, 96, 11, stride=4),
            nn.ReLU(inplace=True),
            pool1,
            nn.Conv2d(96, 256, 5, padding=padding2),
            nn.ReLU(inplace=True),
            pool2,
            nn.Conv2d(256, 512, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(512, 1024, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(1024, 1024, 3, padding=1),
            nn.ReLU(inplace=True),
            pool5,
        )
        if size != _MAP:
            self.features.append(nn.AdaptiveAvgPool2d(_MAP))
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(1024 * _MAP * _MAP, 3072),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(3072, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.normal_(module.weight, std=0.01)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits
