"""AlexNet: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014."""

from __future__ import annotations

from torch import Tensor, nn

from outgrow.networks.layers import fitted_max_pool, output_size, require_size

_LEAST = 7  # pixels: one 11 x 11 window with its padding of 2


class AlexNet(nn.Module):
    """The one-column AlexNet of arXiv 1404.5997, layer by layer as torchvision's.

    Images of at least 7 x 7 pixels. Pools whose 3 x 3 window does not fit a small image's map are
    padded. 61,100,840 parameters for 1,000 classes, whatever the image size.
    """

    def __init__(self, image_size: int = 224, classes: int = 1000, *, dropout: float = 0.5) -> None:
        super().__init__()
        require_size("AlexNet", image_size, _LEAST)
        size = output_size(image_size, 11, stride=4, padding=2)
        pool1, size = fitted_max_pool(size, 3, 2)
        pool2, size = fitted_max_pool(size, 3, 2)
        pool3, size = fitted_max_pool(size, 3, 2)
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            pool1,
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            pool2,
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            pool3,
        )
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x)).flatten(1)
        logits: Tensor = self.classifier(x)
        return logits
