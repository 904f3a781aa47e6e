"""A callback for the Trainer of Hugging Face Transformers, and of what is built on it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, Unpack

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from outgrow.integrations.keeper import SessionOptions, StepKeeper
from outgrow.session import Session

__all__ = ["OutgrowCallback"]


class OutgrowCallback(TrainerCallback):
    """Trains inside a budget: a callback, and a context for `trainer.train()`.

        with OutgrowCallback(budget="8GiB") as callback:
            Trainer(model=model, args=args, train_dataset=data, callbacks=[callback]).train()

    Each `train()` has a session of its own. A step of the session is an optimizer's step with all batches whose
    gradients add up in it; evaluation and saving run outside of steps.

    Trainer tells its callbacks nothing of an error. The `with` block is what ends step and session then, so that they
    are gone when the error reaches the user; `close` does the same by hand, and so does the next `train()`.
    """

    def __init__(self, budget: int | str, **options: Unpack[SessionOptions]) -> None:
        """Nothing is opened before `train()`.

        Args:
            budget: the most that live bytes may reach: bytes, or "8GiB", "800MB", "60%" (of the device's memory).
            options: more keyword arguments of `outgrow.Session`, such as `policy` and `spill_dir`.
        """
        self._keeper = StepKeeper(budget, options)

    @property
    def session(self) -> Session | None:
        """The session of the training that runs, or of the last one; None before the first."""
        return self._keeper.session

    def close(self, error: BaseException | None = None) -> None:
        """End the step and the session that are open, with the error that ended them; harmless where none is."""
        self._keeper.close(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._keeper.close(error)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the session: model and optimizer are where they will be trained.

        Raises:
            OutgrowError: see `outgrow.Session`.
        """
        self._keeper.open(kwargs["model"], [_unwrapped(kwargs["optimizer"])])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin a step: the first batch of those whose gradients add up."""
        self._keeper.begin()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the step: the optimizer has made its own, and gradients are zero again.

        Raises:
            BudgetTooSmall: no plan keeps such a step inside the budget.
        """
        self._keeper.end()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the step of an epoch that another callback has stopped between two batches."""
        self._keeper.end()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the session."""
        self._keeper.close()


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's wrapper, which is one itself."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer
