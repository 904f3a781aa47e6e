"""Lightning's Trainer trains the same under a budget, and its errors leave nothing open."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, TensorDataset

import outgrow
from conftest import assert_nothing_is_open
from steps import digest

try:
    import lightning.pytorch as pl
except ImportError:
    pl = pytest.importorskip("pytorch_lightning")

from outgrow.integrations.lightning import OutgrowCallback

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice on workers and loggers
]

SHARE = 0.6
BATCH = 16


class Net(pl.LightningModule):
    """Convolutions with batch norm and dropout; `fails_at` is the batch in which the loss cannot be had."""

    def __init__(self, *, fails_at: int | None = None, skips_at: int | None = None) -> None:
        super().__init__()
        blocks = [
            layer
            for _ in range(4)
            for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Dropout(0.1))
        ]
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3), *blocks, nn.Flatten(), nn.Linear(16 * 14 * 14, 10))
        self.fails_at, self.skips_at = fails_at, skips_at
        self.losses: list[float] = []
        self.validated_inside = False

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        if number == self.fails_at:
            raise ValueError("broken on purpose")
        x, y = batch
        loss = F.cross_entropy(self.body(x), y)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.validated_inside |= bool(_get_current_dispatch_mode_stack())
        x, y = batch
        self.log("validation", F.cross_entropy(self.body(x), y))

    def on_train_batch_start(self, batch: Any, number: int) -> int | None:
        return -1 if number == self.skips_at else None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ByHand(Net):
    """The same with the optimizer's steps, every other batch, in the module's own hands."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], number: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, number))
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


@dataclass
class Lab:
    """Trainers over small models, with a folder of their own."""

    folder: Path
    batches: int = 6
    callbacks: list[Any] = field(default_factory=list)

    def loader(self) -> DataLoader[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.batches * BATCH, 1, 16, 16, generator=generator)
        labels = torch.randint(10, (len(images),), generator=generator)
        return DataLoader(TensorDataset(images, labels), BATCH)

    def trainer(self, callback: OutgrowCallback | None, **arguments: Any) -> Any:
        settings = {"max_epochs": 1, "enable_checkpointing": False, "logger": False, **arguments}
        return pl.Trainer(
            accelerator="cpu",
            devices=1,
            default_root_dir=self.folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*([] if callback is None else [callback]), *self.callbacks],
            **settings,
        )

    def fit(
        self, budget: int | str | None = None, kind: type[Net] = Net, *, validate: bool = False, **arguments: Any
    ) -> tuple[Net, outgrow.Session | None]:
        torch.manual_seed(0)
        model = kind()
        callback = None if budget is None else OutgrowCallback(budget=budget)
        self.trainer(callback, **arguments).fit(model, self.loader(), self.loader() if validate else None)
        return model, None if callback is None else callback.session

    def plain_peak(self, kind: type[Net] = Net, **arguments: Any) -> int:
        """The peak under a budget that does not bind, in bytes."""
        session = self.fit("1TiB", kind, **arguments)[1]
        assert session is not None
        return session.peak_bytes


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (Net, {}),
        (Net, {"max_epochs": 2, "validate": True, "val_check_interval": 3}),
        (Net, {"accumulate_grad_batches": 2}),
        (Net, {"accumulate_grad_batches": 2, "validate": True, "val_check_interval": 3}),
        (Net, {"gradient_clip_val": 0.5, "precision": "bf16-mixed"}),
        (ByHand, {}),
    ],
    ids=["plain", "validation", "accumulation", "validation between", "clipped in bfloat16", "by hand"],
)
def test_the_same_losses_and_parameters_within_60_percent_of_the_plain_peak(
    lab: Lab, kind: type[Net], arguments: dict[str, Any]
) -> None:
    plain, _ = lab.fit(None, kind, **arguments)
    budget = int(SHARE * lab.plain_peak(kind, **arguments))
    ours, session = lab.fit(budget, kind, **arguments)
    assert ours.losses == plain.losses
    assert digest([ours]) == digest([plain])
    assert session is not None
    assert session.peak_bytes <= budget
    assert not ours.validated_inside


def test_checkpoints_are_saved_between_steps_and_read_again(lab: Lab) -> None:
    checkpoint = pl.callbacks.ModelCheckpoint(lab.folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    lab.callbacks = [checkpoint]
    whole, _ = lab.fit("1TiB", max_epochs=1, enable_checkpointing=True)
    torch.manual_seed(0)
    model = Net()
    callback = OutgrowCallback(budget="1TiB")
    trainer = lab.trainer(callback, enable_checkpointing=True)
    torch.manual_seed(1)  # dropout differs from here on
    trainer.fit(model, lab.loader(), ckpt_path=lab.folder / "step=4.ckpt", weights_only=False)
    assert len(model.losses) == 2
    assert len(whole.losses) == 6
    assert_nothing_is_open(callback.session)


def test_each_fit_has_a_session_of_its_own(lab: Lab) -> None:
    torch.manual_seed(0)
    model, callback = Net(), OutgrowCallback(budget="1TiB")
    lab.trainer(callback).fit(model, lab.loader())
    first = callback.session
    assert_nothing_is_open(callback.session)
    lab.trainer(callback).fit(model, lab.loader())
    assert callback.session is not first
    assert_nothing_is_open(callback.session)
    assert callback.session is not None
    assert callback.session.summary().budget_bytes == 1 << 40


def test_an_error_leaves_nothing_open(lab: Lab) -> None:
    callback = OutgrowCallback(budget="1TiB")
    with pytest.raises(ValueError, match="broken on purpose"):
        lab.trainer(callback).fit(Net(fails_at=2), lab.loader())
    assert_nothing_is_open(callback.session)
    lab.trainer(callback).fit(Net(), lab.loader())
    assert_nothing_is_open(callback.session)


def test_a_module_may_skip_the_rest_of_an_epoch(lab: Lab) -> None:
    torch.manual_seed(0)
    model, callback = Net(skips_at=3), OutgrowCallback(budget="1TiB")
    lab.trainer(callback, max_epochs=2).fit(model, lab.loader())
    assert len(model.losses) == 6
    assert_nothing_is_open(callback.session)


def test_too_small_a_budget_reaches_the_user_with_the_least_one(lab: Lab) -> None:
    with pytest.raises(outgrow.BudgetTooSmall, match="least budget"):
        lab.fit("100kB")
    budget = int(0.2 * lab.plain_peak())
    with pytest.raises(outgrow.BudgetTooSmall, match="least budget") as caught:
        lab.fit(budget)
    assert caught.value.least_bytes > budget
    assert _get_current_dispatch_mode_stack() == []
