"""The gradient noise scale: up to which batch a larger one pays, told by the gradients that training makes anyway.

McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training" (2018). A gradient over b samples is
the true one, G, plus noise whose square is tr(S) / b. Gradients over two numbers of samples tell both (appendix A.1).
Here the smaller ones are those of single backward passes, the larger is their sum, which is there where gradients
are accumulated or averaged over processes: so no second copy of them is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from outgrow.errors import TuningError
from outgrow.tracing.capture import as_sequence

# A change of the square of the gradients' norm that no rounding makes.
_CLIPPED = 1e-4


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """What gradients showed.

    Attributes:
        gradient_square: the square of the true gradient's norm, |G|^2; as an estimate it may fall below 0.
        noise: the variance of the gradient of one sample, summed over all parameters, tr(S).
        measurements: of how many measurements these are the mean.
    """

    gradient_square: float
    noise: float
    measurements: int

    @property
    def samples(self) -> float:
        """The batch whose noise is as large as the gradient, tr(S) / |G|^2; infinite if all is noise."""
        if self.gradient_square <= 0:
            return inf
        return max(0.0, self.noise / self.gradient_square)


def efficiency(batch: float, base: float, noise_samples: float) -> float:
    """What a sample of a step with `batch` samples is worth in terms of one of a step with `base` samples.

    Qiao et al., "Pollux" (OSDI 2021), section 2.2: with a learning rate that matches the batch, as many samples more
    are needed to get as far. As there it is never more than 1. The noise is near nothing when a training begins,
    which is when it is measured, and soon grows (Merrill et al., "Critical Batch Size Revisited", 2025): so it says
    too much for batches below the one that somebody chose.
    """
    return min(1.0, _worth(batch, base, noise_samples))


def gain(batch: float, base: float, noise_samples: float) -> float:
    """How many steps of `base` samples one step of `batch` samples is worth.

    Near batch / base while both are far below the noise scale, and never more than 1 + noise_samples / base.
    """
    return batch / base * _worth(batch, base, noise_samples)


def _worth(batch: float, base: float, noise_samples: float) -> float:
    """As `efficiency`, and more than 1 for what is smaller than the base."""
    return 1.0 if noise_samples == inf else (noise_samples + base) / (noise_samples + batch)


class GradientNoise:
    """Watches the gradients of a training loop and estimates their noise scale.

        noise = outgrow.GradientNoise(optimizer, batch_size=8)
        ...                                   # some steps, each of several backward passes, or of several processes
        noise.scale.samples
        noise.close()

    Each backward pass is over `batch_size` samples, and an optimizer's step uses the sum or mean of the passes before
    it. What a pass is divided by does not matter, but it must be the same for all. A step of one backward pass in
    one process tells nothing; `held` is for that. Gradients may be clipped by their norm, but not where they are
    averaged over processes. Scaled losses (`GradScaler`) are not seen through.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        batch_size: int,
        processes: int = 1,
        decay: float = 1.0,
    ) -> None:
        """Start watching.

        Args:
            optimizer: whose parameters' gradients are watched.
            batch_size: samples of one backward pass in one process.
            processes: over how many processes gradients are averaged before the step (DistributedDataParallel).
                Each estimates for itself, from its own passes and the common mean.
            decay: what earlier measurements count when a new one comes; 1 for all alike, 0.9 to follow a training.

        Raises:
            TuningError: one of these is nothing to measure with.
        """
        self._optimizers: tuple[torch.optim.Optimizer, ...] = as_sequence(optimizer)
        self._parameters = [
            parameter
            for parameter in parameters_of(self._optimizers)
            if parameter.requires_grad and not parameter.is_sparse
        ]
        if not self._parameters:
            raise TuningError("the optimizer has no parameter that is trained: there are no gradients to measure")
        if batch_size < 1 or processes < 1:
            raise TuningError(f"batch_size is {batch_size}, processes {processes}: both must be 1 or more")
        if not 0 < decay <= 1:
            raise TuningError(f"decay is {decay}: it must be above 0, and 1 at most")
        self._batch, self._processes, self._decay = batch_size, processes, decay
        self._weight = self._gradient_square = self._noise = 0.0
        self._measurements = 0
        self._held = False
        self._forget_passes()
        self._hooks: list[Any] = []
        for number, parameter in enumerate(self._parameters):
            self._hooks.append(parameter.register_hook(partial(self._seen, number)))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._added, number)))
        for each in self._optimizers:
            self._hooks.append(each.register_step_pre_hook(self._steps))

    @property
    def scale(self) -> NoiseScale | None:
        """The estimate so far; None before the first measurement."""
        if not self._weight:
            return None
        return NoiseScale(self._gradient_square / self._weight, self._noise / self._weight, self._measurements)

    def close(self) -> None:
        """Stop watching. Closing twice is harmless."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def held(self, *models: torch.nn.Module) -> Iterator[None]:
        """Inside, the optimizers neither step nor clear gradients: passes add up, and parameters stay as they are.

        Nor do `models`, for programs that clear gradients by a model's `zero_grad`. When it ends, all passes make one
        measurement, and the gradients are cleared.

        Raises:
            TuningError: something else cleared the gradients between two passes.
        """
        for each in self._optimizers:
            each.zero_grad()
        self._forget_passes()
        self._held = True
        instead: list[tuple[Any, str, Callable[..., None]]] = [
            *((each, "step", self._in_place_of_a_step) for each in self._optimizers),
            *((each, "zero_grad", _do_nothing) for each in (*self._optimizers, *models)),
        ]
        were = [(each, name, each.__dict__.get(name)) for each, name, _ in instead]
        for each, name, function in instead:
            each.__dict__[name] = function
        try:
            yield
            self._measure()
        finally:
            self._held = False
            for each, name, was in were:
                _put_back(each, name, was)
            for each in self._optimizers:
                each.zero_grad()
            self._forget_passes()

    # --- what the passes since the last step showed ---

    def _forget_passes(self) -> None:
        self._passes = [0] * len(self._parameters)  # of each parameter
        self._squares: list[list[Tensor]] = []  # of each pass, one number a parameter
        self._sums: dict[int, Tensor] = {}  # of each parameter, of what was accumulated

    def _seen(self, number: int, gradient: Tensor) -> None:
        """A parameter's gradient of one backward pass, before it is added to the others."""
        index = self._passes[number]
        if self._held and index > 0 and self._parameters[number].grad is None:
            raise TuningError(
                "gradients were cleared between two backward passes, so their noise cannot be measured: clear them"
                " by the optimizer's or the model's zero_grad(), or give noise_scale="
            )
        self._passes[number] += 1
        if index == len(self._squares):
            self._squares.append([])
        self._squares[index].append(_square(gradient))

    def _added(self, number: int, parameter: Tensor) -> None:
        if self._processes == 1 and parameter.grad is not None:
            self._sums[number] = _square(parameter.grad)

    def _steps(self, *_: object) -> None:
        """An optimizer is about to step."""
        if not self._held:
            self._measure()
            self._forget_passes()

    def _in_place_of_a_step(self, *_: object, **__: object) -> None:
        """While held: what the program did to the gradients after its backward pass was clipping; it is undone.

        Else little would be left of the first passes when the last comes.
        """
        before, now = _total(self._sums.values()), self._square_now()
        if 0 < now < inf and isfinite(before) and abs(before / now - 1) > _CLIPPED:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(sqrt(before / now))

    def _square_now(self) -> float:
        return _total(_square(item.grad) for item in self._parameters if item.grad is not None)

    def _measure(self) -> None:
        own = len(self._squares)
        passes = own * self._processes
        if own == 0 or passes == 1:  # nothing to compare with
            return
        small = sum(_total(items) for items in self._squares) / own
        large = (self._square_now() if self._processes > 1 else _total(self._sums.values())) / own**2
        if not isfinite(small) or not isfinite(large):
            return
        self._gradient_square *= self._decay
        self._noise *= self._decay
        self._weight = self._weight * self._decay + 1
        self._gradient_square += (passes * large - small) / (passes - 1)
        self._noise += (small - large) * passes / (passes - 1) * self._batch
        self._measurements += 1


def parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """The parameters of all groups, each once, in order."""
    found = {id(item): item for each in optimizers for group in each.param_groups for item in group["params"]}
    return list(found.values())


def _square(tensor: Tensor) -> Tensor:
    """The square of the norm, in double precision, as a tensor where the gradient is: nobody waits for it."""
    with torch.no_grad():
        norm: Tensor = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
        return norm * norm


def _total(squares: Any) -> float:
    items = list(squares)
    return float(torch.stack(items).sum()) if items else 0.0


def _do_nothing(*_: object, **__: object) -> None:
    return None


def _put_back(owner: object, name: str, was: object) -> None:
    if was is None:
        del owner.__dict__[name]
    else:
        owner.__dict__[name] = was
