"""Vision transformer: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020 (arXiv 2010.11929)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outgrow.networks.layers import require_size
from outgrow.networks.transformer import Block


class ViT(nn.Module):
    """ViT-B/16 by default: learned positions, class token, pre-norm blocks, linear head.

    Dropout 0.1 as the paper trains it from scratch on ImageNet (table 3; torchvision and timm default
    to none). The side of the image must be a multiple of the patch. 86,567,656 parameters for 1,000
    classes at 224 pixels (the positions follow the image size).
    """

    def __init__(
        self,
        image_size: int = 224,
        classes: int = 1000,
        *,
        patch: int = 16,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        require_size("ViT", image_size, patch)
        if image_size % patch:
            raise ValueError(f"ViT needs a multiple of {patch} pixels as image size, not {image_size}")
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (image_size // patch) ** 2 + 1, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(
                Block(
                    width,
                    heads,
                    causal=False,
                    dropout=dropout,
                    hidden_dropout=dropout,
                    attention_dropout=0.0,
                    eps=1e-6,
                    gelu="none",
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

        # timm's initialisation (its truncation, at 100 standard deviations, cuts nothing). The paper's
        # head starts at zero, which would make every other gradient of the first step zero: useless for
        # comparing gradients.
        nn.init.normal_(self.positions, std=0.02)
        nn.init.normal_(self.class_token, std=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1)
        x = self.blocks(self.dropout(x + self.positions))
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits
