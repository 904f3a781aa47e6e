"""A network's training step on synthetic data, to trace without training anything."""

from __future__ import annotations

import torch

from outgrow.networks import Network
from outgrow.tracing.capture import TrainingStep


def synthetic_step(
    network: Network, batch: int, image_size: int | None = None, *, momentum: float = 0.0
) -> TrainingStep:
    """Model, SGD and one step on random data; `image_size` is the network's own, if it is left out."""
    size = network.image_size if image_size is None else image_size
    model = network.build(size, network.classes).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum)
    data, target = network.sample(batch, size, network.classes)

    def step() -> None:
        network.loss(model(data), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return TrainingStep(model, optimizer, step)
