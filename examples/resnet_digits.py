"""A ResNet learns scikit-learn's digits under a budget, with a data loader whose workers are processes.

    python examples/resnet_digits.py --budget 40MiB --steps 60

Without --budget plain PyTorch trains it, with the same losses. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import outgrow


class Digits(Dataset[tuple[Tensor, int]]):
    """1797 digits of 8 x 8 pixels, scaled up."""

    def __init__(self, size: int) -> None:
        bunch = load_digits()
        self.images = torch.from_numpy(bunch.images).float().div(8).sub(1)
        self.labels = bunch.target.tolist()
        self.size = size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index][None, None]
        return F.interpolate(image, size=(self.size, self.size), mode="bilinear")[0], self.labels[index]


class Block(nn.Module):
    """Two convolutions and what passes them by."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = width_in == width and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet(depth: int = 2, width: int = 16) -> nn.Sequential:
    """Three stages of `depth` blocks."""
    stages: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1)]
    width_in = width
    for stage in range(3):
        for number in range(depth):
            width_out = width * 2**stage
            stages.append(Block(width_in, width_out, 2 if stage and not number else 1))
            width_in = width_out
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, 10))


def endless(loader: DataLoader[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch after another."""
    while True:
        yield from loader


def main(arguments: Sequence[str] | None = None) -> tuple[list[float], outgrow.Summary | None]:
    """Train; the losses, and what the last step took if there is a budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", help="such as 40MiB; without it, plain PyTorch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(
        Digits(given.image_size), given.batch, shuffle=True, drop_last=True, num_workers=given.workers
    )
    session = outgrow.Session(model, optimizer, budget=given.budget) if given.budget else None
    losses: list[float] = []
    with session or nullcontext():
        for number, (images, labels) in zip(range(given.steps), endless(loader), strict=False):
            with session.step() if session else nullcontext():
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if number % 10 == 0:
                print(f"step {number:3}: loss {losses[-1]:.4f}")
    if session is None:
        return losses, None
    print(session.summary())
    return losses, session.summary()


if __name__ == "__main__":
    main()
