"""A small GPT learns the source of Python's standard library, byte by byte, under a budget.

    python examples/gpt_stdlib.py --budget 60MiB --steps 60

Without --budget plain PyTorch trains it, with the same losses. Dropout is on: masks that went are drawn once more.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outgrow


def standard_library() -> Tensor:
    """The source of some modules as one long row of bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:40])
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Layer(nn.Module):
    """Attention to what came before, then a wide layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.wide(self.norms[1](x)))


class GPT(nn.Module):
    """Bytes in, the odds of the next byte out."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, 4) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1])
        return self.head(self.layers(self.bytes(text) + self.places(places)))


def main(arguments: Sequence[str] | None = None) -> tuple[list[float], outgrow.Summary | None]:
    """Train; the losses, and what the last step took if there is a budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", help="such as 60MiB; without it, plain PyTorch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    given = parser.parse_args(arguments)

    torch.manual_seed(0)
    text = standard_library()
    model = GPT(given.layers, given.width, given.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = outgrow.Session(model, optimizer, budget=given.budget) if given.budget else None
    losses: list[float] = []
    with session or nullcontext():
        for number in range(given.steps):
            starts = torch.randint(len(text) - given.length - 1, (given.batch, 1))
            windows = text[starts + torch.arange(given.length + 1)]
            with session.step() if session else nullcontext():
                odds = model(windows[:, :-1])
                loss = F.cross_entropy(odds.flatten(0, 1), windows[:, 1:].flatten())
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
