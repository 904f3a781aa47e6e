"""Accelerate's loop trains the same under a budget, with a session as it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import outgrow
from steps import digest

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.usefixtures("one_thread")

SHARE = 0.6
BATCH = 48
BATCHES = 6


@dataclass
class Trained:
    losses: list[float]
    state: str
    peak_bytes: int


def training() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[torch.Tensor, ...]]]:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(nn.Linear(32, 128), *layers, nn.Flatten(), nn.Linear(32 * 128, 10))
    data = TensorDataset(torch.randn(BATCHES * BATCH, 32, 32), torch.randint(10, (BATCHES * BATCH,)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), DataLoader(data, BATCH, shuffle=True)


def train(budget: int | str | None, folder: Path, *, accumulation: int = 1, precision: str = "no") -> Trained:
    """Accelerate's own loop; the three lines with `outgrow` or `session` are all that a budget adds."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it is one for the process
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=accumulation, mixed_precision=precision
    )
    model, optimizer, loader = accelerator.prepare(*training())
    losses = []
    if budget is None:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return Trained(losses, digest([accelerator.unwrap_model(model)]), 0)
    session = outgrow.Session(model, optimizer, budget=budget)
    for number, (x, y) in enumerate(loader):
        with session.step(), accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if number == 2:
            accelerator.save_state(str(folder / "state"))
    session.close()
    return Trained(losses, digest([accelerator.unwrap_model(model)]), session.peak_bytes)


@pytest.mark.parametrize(
    ("accumulation", "precision"), [(1, "no"), (3, "no"), (1, "bf16")], ids=["plain", "accumulation", "bfloat16"]
)
def test_the_same_losses_and_parameters_within_60_percent_of_the_plain_peak(
    tmp_path: Path, accumulation: int, precision: str
) -> None:
    plain = train(None, tmp_path, accumulation=accumulation, precision=precision)
    peak = train("1TiB", tmp_path, accumulation=accumulation, precision=precision).peak_bytes
    budget = int(SHARE * peak)
    ours = train(budget, tmp_path, accumulation=accumulation, precision=precision)
    assert ours.losses == plain.losses
    assert ours.state == plain.state
    assert ours.peak_bytes <= budget
