"""A model of your own, for the command line: a function that makes one training step. From this folder:

outgrow plan examples/own_model.py:make_step --batch 1024
outgrow train examples/own_model.py:make_step --batch 1024 --steps 20 --budget 19MiB
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import outgrow


def make_step(batch: int) -> outgrow.TrainingStep:
    """Build everything here: `outgrow plan` runs this with tensors that have no memory."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
    model = nn.Sequential(nn.Linear(64, 256), *layers, nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(batch, 64), torch.randint(0, 10, (batch,))

    def step() -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return outgrow.TrainingStep(model, optimizer, step)
