"""A U-Net learns which pixels of a picture are ink, and of which digit, under a budget.

    python examples/unet_digits.py --budget 24MiB --steps 40

Pictures and masks are made from scikit-learn's digits: four of them on a sheet with noise. Without --budget plain
PyTorch trains it, with the same losses. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import outgrow

PAPER = 10  # the class of what is no digit


def sheets(batch: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pictures of (1, size, size), and for each pixel a digit or PAPER; without end."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float() / 16
    labels = torch.from_numpy(bunch.target)
    half = size // 2
    while True:
        picked = torch.randint(len(images), (batch, 2, 2))
        ink = F.interpolate(images[picked].flatten(0, 2)[:, None], size=(half, half), mode="bilinear")
        ink = ink.view(batch, 2, 2, half, half).transpose(2, 3).reshape(batch, 1, size, size)
        digits = labels[picked].repeat_interleave(half, 1).repeat_interleave(half, 2)
        masks = torch.where(ink[:, 0] > 0.5, digits, PAPER)
        yield ink + 0.2 * torch.randn_like(ink), masks


def twice(width_in: int, width: int) -> nn.Sequential:
    """Two convolutions."""
    return nn.Sequential(
        nn.Conv2d(width_in, width, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Down, and up again past what was there on the way down."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList([twice(1, width), *(twice(a, b) for a, b in pairwise(widths))])
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * wide, wide, 2, 2) for wide in widths[-2::-1]])
        self.join = nn.ModuleList([twice(2 * wide, wide) for wide in widths[-2::-1]])
        self.head = nn.Conv2d(width, PAPER + 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for number, stage in enumerate(self.down):
            x = stage(x if number == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        for up, join, skip in zip(self.up, self.join, skips[-2::-1], strict=True):
            x = join(torch.cat((up(x), skip), 1))
        return self.head(x)


def main(arguments: Sequence[str] | None = None) -> tuple[list[float], outgrow.Summary | None]:
    """Train; the losses, and what the last step took if there is a budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", help="such as 24MiB; without it, plain PyTorch")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=16)
    given = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = UNet(given.width, depth=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = outgrow.Session(model, optimizer, budget=given.budget) if given.budget else None
    losses: list[float] = []
    with session or nullcontext():
        for number, (images, masks) in zip(range(given.steps), sheets(given.batch, given.image_size), strict=False):
            with session.step() if session else nullcontext():
                loss = F.cross_entropy(model(images), masks)
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
