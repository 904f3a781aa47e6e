"""The record that describes a network: how to build it, feed it and score it. The catalog makes these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outgrow.networks.googlenet import GoogLeNetOutput

_AUXILIARY_WEIGHT = 0.3  # of each auxiliary loss: GoogLeNet, arXiv 1409.4842, section 5

Kind = Literal["image", "segmentation", "text"]


@dataclass(frozen=True)
class Network:
    """One of the networks that the papers and the field measure with.

    Attributes:
        name: canonical name, for example ``"resnet-50"``; :func:`outgrow.networks.find` accepts it.
        kind: what goes in and comes out: an image and one label, an image and a label for each pixel,
            or tokens and the token that follows each.
        image_size: default height = width of the input in pixels; for text the default sequence length.
        classes: default number of classes; for text the vocabulary.
        build: makes the module from an image size (or sequence length) and a number of classes. Raises
            ValueError for an image smaller than the least size that the network can be built for.
        reference: the paper.
    """

    name: str
    kind: Kind
    image_size: int
    classes: int
    build: Callable[[int, int], nn.Module] = field(repr=False, compare=False)
    reference: str

    def loss(self, output: Tensor | GoogLeNetOutput, target: Tensor) -> Tensor:
        """Cross entropy, a scalar: mean over images, over pixels or over all positions of a text.

        The auxiliary logits that GoogLeNet returns in training count 0.3 each.
        """
        if isinstance(output, GoogLeNetOutput):
            main = F.cross_entropy(output.logits, target)
            aux1 = F.cross_entropy(output.aux_logits1, target)
            aux2 = F.cross_entropy(output.aux_logits2, target)
            return main + _AUXILIARY_WEIGHT * (aux1 + aux2)
        if self.kind == "text":
            return F.cross_entropy(output.flatten(0, 1), target.flatten())
        return F.cross_entropy(output, target)

    def sample(
        self,
        batch: int,
        image_size: int,
        classes: int,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A synthetic input and target for a network built with this image size and number of classes.

        Returns for an image: (batch, 3, size, size) of normal noise, int64 labels (batch,); for a
        segmentation: the same and labels (batch, size, size); for a text: int64 tokens (batch, length)
        and the same moved on by one. ``generator`` must live on ``device``; under FakeTensorMode it is
        None, as is usual there.
        """
        if self.kind == "text":
            shape: tuple[int, ...] = (batch, image_size + 1)
            tokens = torch.randint(classes, shape, generator=generator, device=device)
            # Copies, not views: a view of one storage would tie input and target together in a trace.
            return tokens[:, :-1].clone(), tokens[:, 1:].clone()
        images = torch.randn(batch, 3, image_size, image_size, generator=generator, device=device)
        shape = (batch, image_size, image_size) if self.kind == "segmentation" else (batch,)
        return images, torch.randint(classes, shape, generator=generator, device=device)
