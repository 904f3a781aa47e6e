"""The user's `make_step`, asked for steps of any batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

from outgrow.errors import OutgrowError, TuningError
from outgrow.runtime.faults import is_out_of_memory
from outgrow.tracing.capture import TrainingStep, as_sequence, trace
from outgrow.tracing.ir import Trace
from outgrow.tuning.noise import parameters_of
from outgrow.tuning.rates import Rule, rule_for

# A step that cannot be faked is run for real, without a budget, to see what it does: only as far as this.
_MOST_SAMPLES_UNTRACED = 8
_MOST_LEAST_BATCH = 16


class Builder:
    """Builds steps, and says what is wrong with them.

    `make_step(batch)` builds model, optimizer and data, and returns a `TrainingStep` over so many samples. One that
    takes a second argument, `accumulation`, may be asked for a step of several such passes before its optimizer's.
    """

    def __init__(self, make_step: Callable[..., TrainingStep]) -> None:
        if not callable(make_step):
            raise TuningError(f"make_step is {type(make_step).__name__}: give a function of the batch size")
        self._make_step = make_step
        self.accumulates = "accumulation" in _parameter_names(make_step)

    def make(self, batch: int, accumulation: int = 1) -> TrainingStep:
        """A step, for real unless fake tensors are on.

        Raises:
            TuningError: make_step failed, or what it gave cannot be tuned.
        """
        try:
            made = self._make_step(batch) if accumulation == 1 else self._make_step(batch, accumulation=accumulation)
        except OutgrowError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise TuningError(f"make_step({batch}) failed: {error!r}") from error
        if not isinstance(made, TrainingStep):
            raise TuningError(f"make_step({batch}) gave {type(made).__name__}: it must give an outgrow.TrainingStep")
        optimizers = as_sequence(made.optimizer)
        if not optimizers:
            raise TuningError("make_step gives no optimizer: there is no learning rate to tune")
        elsewhere = sorted({item.device.type for item in parameters_of(optimizers)} - {"cpu"})
        if elsewhere:
            raise TuningError(f"the model is on {elsewhere[0]}: batches are tuned on the CPU alone so far")
        if not any(item.requires_grad for item in parameters_of(optimizers)):
            raise TuningError("the optimizer has no parameter that is trained: there is nothing to tune")
        return made

    def trace(self, batch: int) -> Trace:
        """The trace of a step with `batch` samples, without times.

        Raises:
            TuningError: the step cannot be traced.
        """
        try:
            return trace(lambda: self.make(batch), fake=True)
        except OutgrowError:
            raise
        except Exception as error:  # whatever a step does with numbers that fake tensors have not
            if batch > _MOST_SAMPLES_UNTRACED:
                raise TuningError(
                    f"a step of {batch} samples cannot be traced on fake tensors: {error!r}. Steps must not ask a "
                    "tensor for its numbers (loss.item(), printing), or not before their end"
                ) from error
        return replace(trace(lambda: self.make(batch), fake=False), measured=False)

    def least_batch(self) -> int:
        """The smallest batch that the network takes: batch norm, say, cannot train on one sample of one pixel.

        Raises:
            TuningError: it takes none.
        """
        batch = 1
        while True:
            try:
                self.trace(batch)
            except TuningError:
                raise
            except (ValueError, RuntimeError) as error:
                if batch >= _MOST_LEAST_BATCH:
                    raise TuningError(f"steps of 1 to {batch} samples fail: {error}") from error
                batch *= 2
            else:
                return batch


def rates_of(made: TrainingStep) -> tuple[tuple[float, ...], Rule]:
    """The learning rates of all parameter groups, and the rule that fits the first optimizer."""
    optimizers = as_sequence(made.optimizer)
    rates = tuple(float(group["lr"]) for each in optimizers for group in each.param_groups)
    return rates, rule_for(optimizers[0])


def _parameter_names(function: Callable[..., object]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin, say, that does not tell
        return ()
