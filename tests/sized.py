"""Networks that take batches of any size, to be trained on given sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import outgrow
from outgrow.tracing.ir import Trace
from steps import Make, trained_on

WORDS = 64


class Reader(nn.Module):
    """A transformer over sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Parameter(torch.randn(128, 32))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, 0.1, "gelu", batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(32, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x) * self.places[: x.shape[1]].sigmoid()
        for layer in self.layers:
            y = layer(y)
        return F.cross_entropy(self.out(y).flatten(0, 1), x.flatten())


class Maps(nn.Module):
    """A network on images of any size, with a skip that is held all the way, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(5)
        )
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = y = self.first(x)
        for layer in self.layers:
            y = layer(y)
        return self.last(torch.cat([skip, y], 1)).pow(2).mean()


def sequences(lengths: Sequence[int]) -> Make:
    """Trains a `Reader` on sequences of these lengths."""
    return on_batches(
        Reader,
        lambda k, generator: torch.randint(0, WORDS, (4, lengths[k % len(lengths)]), generator=generator),
    )


def images(sizes: Sequence[int]) -> Make:
    """Trains `Maps` on images of these sizes."""

    def image(k: int, generator: torch.Generator) -> torch.Tensor:
        size = sizes[k % len(sizes)]
        return torch.randn(4, 3, size, size, generator=generator)

    return on_batches(Maps, image)


def on_batches(build: Callable[[], nn.Module], batch: Callable[[int, torch.Generator], Any]) -> Make:
    """Trains a model that gives its loss on a batch."""

    def loss_of(model: nn.Module, k: int) -> torch.Tensor:
        loss: torch.Tensor = model(batch(k, torch.Generator().manual_seed(k)))
        return loss

    return trained_on(build, loss_of)


def traced(make: Make, *, fake: bool = False) -> Trace:
    """The trace of its first step."""
    training = make()
    return outgrow.trace(
        lambda: outgrow.TrainingStep(training.models, training.optimizers, lambda: training.run(0)), fake=fake
    )
