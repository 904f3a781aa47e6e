"""The networks of the list, small: `test_networks_equal` and `benchmarks/equality.py` train them."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch._guards import active_fake_mode

from outgrow.networks import find
from steps import Make, trained_on

# Name, input size, batch: small inputs, and small depths for the deepest. Every builder of the list is here; deep
# VGGs are nearly all state, and take minutes.
CASES = (
    ("alexnet", 64, 2),
    ("overfeat", 32, 1),
    ("vgg-16", 32, 2),
    ("googlenet", 64, 2),
    ("inception-v4", 48, 2),
    ("resnet-18", 32, 2),
    ("resnet-50", 64, 2),
    ("resnet-152", 32, 2),
    ("wrn-28-10", 8, 2),
    ("densenet-121", 32, 2),
    ("unet", 32, 1),
    ("vit-b16", 16, 2),
    ("gpt-2x64", 64, 2),
)


def training_of(name: str, size: int, batch: int, momentum: float = 0.9) -> Make:
    network = find(name)
    classes = network.classes if network.kind == "text" else 10
    built: list[torch.nn.Module] = []  # once: to draw a hundred million parameters takes longer than a step

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return network.build(size, classes)

    def fresh() -> torch.nn.Module:
        if active_fake_mode() is not None:
            return build()
        if not built:
            built.append(build())
        return deepcopy(built[0])

    def loss_of(model: torch.nn.Module, k: int) -> torch.Tensor:
        x, y = network.sample(batch, size, classes, torch.Generator().manual_seed(k))
        loss: torch.Tensor = network.loss(model(x), y)
        return loss

    return trained_on(fresh, loss_of, lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=momentum))
