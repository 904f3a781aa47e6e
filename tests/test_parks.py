"""Values that the program holds and nobody reads leave the device and come back; nobody can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from outgrow.planning.policies import Policy
from steps import (
    Make,
    ParkAll,
    ParkToFit,
    Training,
    assert_equal_to_plain,
)

PARKING = (
    ParkAll(),
    ParkAll("park-all-late", prefetch=False),
    ParkAll("park-and-offload", offload=True),
    ParkToFit(),
)


class Skip(nn.Module):
    """A small U-Net: what goes down waits for what comes up."""

    def __init__(self, depth: int = 3, width: int = 16, *, inplace: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.up = nn.ModuleList(nn.Conv2d(2 * width, width, 3, padding=1) for _ in range(depth))
        self.leave = nn.Conv2d(width, 10, 1)
        self.act = nn.ReLU(inplace=inplace)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        skips = []
        for layer in self.down:
            x = self.act(layer(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        for layer, skip in zip(self.up, reversed(skips), strict=True):
            x = F.interpolate(x, scale_factor=2.0)
            x = self.dropout(self.act(layer(torch.cat([x, skip], 1))))
        return self.leave(x).mean((2, 3))


class Dense(nn.Module):
    """A small DenseNet block: each layer reads all features before it, of which Python holds a list."""

    def __init__(self, layers: int = 5, growth: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, growth, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(growth * (n + 1)), nn.ReLU(), nn.Conv2d(growth * (n + 1), growth, 3, padding=1)
            )
            for n in range(layers)
        )
        self.leave = nn.Linear(growth * (layers + 1), 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [self.enter(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.leave(torch.cat(features, 1).mean((2, 3)))


class Residual(nn.Module):
    """Residual blocks with a projection: a gradient waits for its other half."""

    def __init__(self, blocks: int = 3, width: int = 16, *, inplace: bool = True) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=inplace),
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.shortcuts = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(blocks))
        self.act = nn.ReLU(inplace=inplace)
        self.leave = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block, shortcut in zip(self.blocks, self.shortcuts, strict=True):
            x = self.act(shortcut(x) + block(x))
        return self.leave(x.mean((2, 3)))


Forward = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]


def supervised(build: Callable[[], nn.Module], forward: Forward | None = None, *, passes: int = 1) -> Make:
    """Classification of random images; `passes` batches are accumulated before each update."""

    def make() -> Training:
        model = build()
        opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def run(k: int) -> torch.Tensor:
            total = torch.zeros(())
            for part in range(passes):
                generator = torch.Generator().manual_seed(passes * k + part)
                x = torch.randn((8, 3, 32, 32), generator=generator)
                y = torch.randint(0, 10, (8,), generator=generator)
                out = model(x) if forward is None else forward(model, x, k)
                loss = F.cross_entropy(out, y)
                loss.backward()
                total += loss.detach()
            opt.step()
            opt.zero_grad()
            return total

        return Training([model], [opt], run)

    return make


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "skip": Skip,
    "skip-inplace": lambda: Skip(inplace=True),
    "skip-dropout": lambda: Skip(dropout=0.3),
    "dense": Dense,
    "residual": Residual,
}


@pytest.mark.parametrize("policy", PARKING, ids=str)
@pytest.mark.parametrize("network", NETWORKS)
def test_networks_with_skips_train_the_same(network: str, policy: Policy) -> None:
    assert_equal_to_plain(supervised(NETWORKS[network]), policy=policy, share=0.5)
