"""Which learning rate goes with a batch, and how to get there."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import ceil, sqrt

import torch
from torch.optim.lr_scheduler import LinearLR, LRScheduler

from outgrow.errors import TuningError
from outgrow.tuning.noise import gain

# Goyal et al., section 2.2; where nobody says what an epoch is, so many steps of the base batch.
_WARMUP_EPOCHS = 5
_WARMUP_STEPS = 200


class Rule(StrEnum):
    """How the learning rate follows the batch. Both saturate at the noise scale."""

    LINEAR = "linear"
    SQUARE_ROOT = "square root"

    @property
    def source(self) -> str:
        """Where the rule comes from."""
        return _SOURCES[self]


_BOUND = "bounded by the noise scale: McCandlish et al. 2018, section 2.2"
_SOURCES = {
    Rule.LINEAR: f"Goyal et al. 2017, section 2.1; {_BOUND}",
    Rule.SQUARE_ROOT: f"Krizhevsky 2014, section 5; Malladi et al. 2022 for Adam; {_BOUND}",
}

# Their steps are divided by a running size of the gradient.
_ADAPTIVE = (
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)


def rule_for(optimizer: torch.optim.Optimizer) -> Rule:
    """Linear for SGD, with or without momentum; square root for what divides by the size of gradients, as Adam."""
    is_adaptive = isinstance(optimizer, _ADAPTIVE) or any("betas" in group for group in optimizer.param_groups)
    return Rule.SQUARE_ROOT if is_adaptive else Rule.LINEAR


def rate_factor(rule: Rule, batch: int, base: int, noise_samples: float) -> float:
    """What a learning rate that was chosen for `base` samples a step is multiplied by for `batch`.

    `noise_samples` is the noise scale, in samples; infinite where it does not bound.
    """
    steps = gain(batch, base, noise_samples)
    return steps if rule is Rule.LINEAR else sqrt(steps)


def warmup_steps(factor: float, batch: int, base: int, epoch_samples: int | None) -> int:
    """Steps over which the rate climbs from the base batch's to the one for `batch`; 0 if it does not climb.

    Five epochs (Goyal et al. 2017, section 2.2); if nobody says how many samples an epoch has, as many samples as 200
    steps of the base batch.
    """
    if factor <= 1:
        return 0
    samples = _WARMUP_STEPS * base if epoch_samples is None else _WARMUP_EPOCHS * epoch_samples
    return ceil(samples / batch)


def warm_up(
    optimizer: torch.optim.Optimizer, rates: Sequence[float], base: Sequence[float], steps: int
) -> LRScheduler:
    """Set the rates of an optimizer's groups, and climb to them from the base ones.

    Raises:
        TuningError: the optimizer has other groups.
    """
    if len(optimizer.param_groups) != len(rates):
        raise TuningError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, and the answer is for {len(rates)}: "
            "give the optimizer as make_step builds it"
        )
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        group.pop("initial_lr", None)  # an earlier scheduler's, for other rates
    start = min((low / high for low, high in zip(base, rates, strict=True) if high > 0), default=1.0)
    return LinearLR(optimizer, start_factor=min(1.0, start) if steps else 1.0, total_iters=max(1, steps))
