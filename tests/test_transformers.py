"""Hugging Face's Trainer trains the same under a budget, and its errors leave nothing open."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import outgrow
from conftest import assert_nothing_is_open
from steps import digest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from outgrow.integrations.transformers import OutgrowCallback

pytestmark = pytest.mark.usefixtures("one_thread")

SHARE = 0.6
STEPS = 4
BATCH = 8
LENGTH = 64
CLASSES = 4
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}

Data = list[dict[str, torch.Tensor]]


def bert() -> tuple[nn.Module, Data]:
    """A small BERT with random weights, dropout on, and random sentences."""
    config = BertConfig(vocab_size=128, max_position_embeddings=LENGTH, num_labels=CLASSES, **SMALL)
    data = [
        {"input_ids": torch.randint(128, (LENGTH,)), "labels": torch.randint(CLASSES, ())} for _ in range(4 * BATCH)
    ]
    return BertForSequenceClassification(config), data


def vit() -> tuple[nn.Module, Data]:
    """A small ViT with random weights, and random pictures."""
    config = ViTConfig(image_size=32, patch_size=4, num_labels=CLASSES, **SMALL)
    data = [{"pixel_values": torch.randn(3, 32, 32), "labels": torch.randint(CLASSES, ())} for _ in range(4 * BATCH)]
    return ViTForImageClassification(config), data


class Recorded(Trainer):
    """A Trainer that remembers its losses; what it logs is rounded."""

    losses: list[float]

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **named)
        self.losses.append(loss.item())
        return loss


@dataclass
class Trained:
    losses: list[float]
    state: str
    session: outgrow.Session | None


class Lab:
    """Trainers over small models, with folders of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def trainer(self, model: nn.Module, data: Data, callback: OutgrowCallback | None, **arguments: Any) -> Recorded:
        settings = {"max_steps": STEPS, "save_strategy": "no", "logging_steps": 1, **arguments}
        trainer = Recorded(
            model=model,
            args=TrainingArguments(
                output_dir=str(self.folder),
                per_device_train_batch_size=BATCH,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                **settings,
            ),
            train_dataset=data,
            eval_dataset=data[:BATCH],
            callbacks=[] if callback is None else [callback],
        )
        trainer.losses = []
        return trainer

    def train(
        self, make: Callable[[], tuple[nn.Module, Data]], budget: int | str | None = None, **arguments: Any
    ) -> Trained:
        torch.manual_seed(0)
        model, data = make()
        callback = None if budget is None else OutgrowCallback(budget=budget)
        with nullcontext() if callback is None else callback:
            trainer = self.trainer(model, data, callback, **arguments)
            trainer.train()
        return Trained(trainer.losses, digest([model]), None if callback is None else callback.session)

    def plain_peak(self, make: Callable[[], tuple[nn.Module, Data]], **arguments: Any) -> int:
        """The peak under a budget that does not bind, in bytes."""
        session = self.train(make, "1TiB", **arguments).session
        assert session is not None
        return session.peak_bytes


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (bert, {}),
        (vit, {}),
        (bert, {"gradient_accumulation_steps": 2}),
        (bert, {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}),
    ],
    ids=["bert", "vit", "accumulation", "evaluation and saving between"],
)
def test_the_same_losses_and_parameters_within_60_percent_of_the_plain_peak(
    lab: Lab, make: Callable[[], tuple[nn.Module, Data]], arguments: dict[str, Any]
) -> None:
    plain = lab.train(make, **arguments)
    budget = int(SHARE * lab.plain_peak(make, **arguments))
    ours = lab.train(make, budget, **arguments)
    assert ours.losses == plain.losses
    assert ours.state == plain.state
    assert ours.session is not None
    assert ours.session.peak_bytes <= budget


def test_a_training_goes_on_from_a_checkpoint(lab: Lab) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = lab.train(bert, "1TiB", **saving)
    torch.manual_seed(0)
    model, data = bert()
    with OutgrowCallback(budget="1TiB") as callback:
        trainer = lab.trainer(model, data, callback, **saving)
        trainer.train(resume_from_checkpoint=str(lab.folder / "checkpoint-2"))
    assert trainer.losses == whole.losses[2:]
    assert digest([model]) == whole.state


def test_each_training_has_a_session_of_its_own(lab: Lab) -> None:
    torch.manual_seed(0)
    model, data = bert()
    with OutgrowCallback(budget="1TiB") as callback:
        trainer = lab.trainer(model, data, callback)
        trainer.train()
        first = callback.session
        assert_nothing_is_open(callback.session)
        trainer.train()
        assert callback.session is not first
    assert_nothing_is_open(callback.session)
    assert callback.session is not None
    assert callback.session.summary().budget_bytes == 1 << 40


class Broken(TrainerCallback):
    """Fails in the middle of a step, as a model or the data might."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            raise ValueError("broken on purpose")


def test_an_error_leaves_nothing_open_behind_the_with_block(lab: Lab) -> None:
    model, data = bert()

    def train(callback: OutgrowCallback) -> None:
        with callback:
            trainer = lab.trainer(model, data, callback)
            trainer.add_callback(Broken())
            trainer.train()

    callback = OutgrowCallback(budget="1TiB")
    with pytest.raises(ValueError, match="broken on purpose"):
        train(callback)
    assert_nothing_is_open(callback.session)


def test_without_a_with_block_the_next_training_or_close_ends_what_an_error_left_open(lab: Lab) -> None:
    model, data = bert()
    callback = OutgrowCallback(budget="1TiB")
    trainer = lab.trainer(model, data, callback)
    broken = Broken()
    trainer.add_callback(broken)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken on purpose"):
            trainer.train()
        assert _get_current_dispatch_mode_stack() != []
    callback.close()
    assert_nothing_is_open(callback.session)
    trainer.remove_callback(broken)
    trainer.train()
    assert_nothing_is_open(callback.session)


class StopsBetween(TrainerCallback):
    """Ends each epoch between two batches whose gradients add up."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_epoch_stop = True
        return control


def test_an_epoch_that_is_stopped_between_two_batches_ends_its_step(lab: Lab) -> None:
    model, data = bert()
    with OutgrowCallback(budget="1TiB") as callback:
        trainer = lab.trainer(model, data, callback, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2)
        trainer.add_callback(StopsBetween())
        trainer.train()
    assert len(trainer.losses) == 2
    assert_nothing_is_open(callback.session)


def test_too_small_a_budget_reaches_the_user_with_the_least_one(lab: Lab) -> None:
    model, data = bert()
    with (
        pytest.raises(outgrow.BudgetTooSmall, match="least budget"),
        OutgrowCallback(budget="100kB") as callback,
    ):
        lab.trainer(model, data, callback).train()
    peak = lab.plain_peak(bert)
    with pytest.raises(outgrow.BudgetTooSmall, match="least budget") as caught:
        lab.train(bert, int(0.2 * peak))
    assert caught.value.least_bytes > 0.2 * peak
    trained = lab.train(bert, int(0.25 * peak))
    assert trained.session is not None
    assert trained.session.peak_bytes <= 0.25 * peak
    plain = lab.train(bert)
    assert (trained.losses, trained.state) == (plain.losses, plain.state)
    assert _get_current_dispatch_mode_stack() == []


def test_a_script_ends_with_its_error_although_nobody_closed_the_step(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(outgrow.__file__).parents[1])!r}]
from pathlib import Path
from test_transformers import Broken, Lab, OutgrowCallback, bert
trainer = Lab(Path({str(tmp_path)!r})).trainer(*bert(), OutgrowCallback(budget="1TiB"))
trainer.add_callback(Broken())
trainer.train()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: broken on purpose"
