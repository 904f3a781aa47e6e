"""A callback for Lightning's Trainer (`lightning` or `pytorch_lightning`, whichever is installed)."""

from __future__ import annotations

from typing import Any, Unpack

from outgrow.integrations.keeper import SessionOptions, StepKeeper
from outgrow.session import Session

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer

__all__ = ["OutgrowCallback"]


class OutgrowCallback(Callback):
    """Trains inside a budget: `Trainer(callbacks=[OutgrowCallback(budget="8GiB")])`.

    Each `fit` has a session of its own, which ends with it, well or badly. A step of the session is what lies between
    two steps of the optimizer: with `accumulate_grad_batches=4` that is four batches. Validation, sanity checks and
    tests run outside of steps.
    """

    def __init__(self, budget: int | str, **options: Unpack[SessionOptions]) -> None:
        """Nothing is opened before `fit`.

        Args:
            budget: the most that live bytes may reach: bytes, or "8GiB", "800MB", "60%" (of the device's memory).
            options: more keyword arguments of `outgrow.Session`, such as `policy` and `spill_dir`.
        """
        super().__init__()
        self._keeper = StepKeeper(budget, options)
        self._steps_before = 0

    @property
    def session(self) -> Session | None:
        """The session of the fit that runs, or of the last one; None before the first."""
        return self._keeper.session

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the session: model and optimizers are where they will be trained.

        Raises:
            OutgrowError: see `outgrow.Session`.
        """
        self._keeper.open(pl_module, trainer.optimizers)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a step, unless the batch adds to the gradients of the one before."""
        if not self._keeper.in_step:
            self._steps_before = trainer.global_step
            self._keeper.begin()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step if the optimizer has made one.

        Raises:
            BudgetTooSmall: no plan keeps such a step inside the budget.
        """
        if trainer.global_step != self._steps_before:
            self._keeper.end()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Between two batches whose gradients add up, too: no step may be open while a model is only evaluated."""
        self._keeper.end()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End what manual optimization has left open."""
        self._keeper.end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the session."""
        self._keeper.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the step with the error that ended the fit, and close the session."""
        self._keeper.close(exception)
