"""What the tuner answers: the batch that is worth it, the learning rate that goes with it, and how it knows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from outgrow.planning.plan import Plan
from outgrow.tuning.noise import NoiseScale
from outgrow.tuning.rates import Rule, warm_up
from outgrow.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Candidate:
    """One batch, and what its step takes. Sizes in bytes, times in seconds; a step is a whole optimizer step.

    Attributes:
        batch_size: samples of a step: micro-batch times accumulation.
        micro_batch: samples of one forward and backward pass.
        accumulation: how many such passes add up their gradients.
        feasible: whether the step keeps inside the budget, as far as is known.
        predicted_peak_bytes: highest live bytes of the plan.
        predicted_step_seconds: as predicted from real steps of other candidates, and where `foretold` is false of it.
        offloaded_bytes: what the plan sends away in a pass, and `recomputed_bytes` what it drops.
        efficiency: what a sample is worth, in terms of one in a step of the base batch; never more than that.
        foretold: whether what is predicted was so before the candidate was run, if it was: the base batch and the
            ends of the curve are run first, to set estimates right, and are predicted from themselves as well.
        measured_peak_bytes: highest live bytes of all steps that were run; None if none was.
        measured_step_seconds: of the steps of a run the median, and of several runs theirs, each as it would have
            been at the pace that the machine had on the average of all runs (`pace.py`); None if none was.
    """

    batch_size: int
    micro_batch: int
    accumulation: int
    feasible: bool
    predicted_peak_bytes: int
    predicted_step_seconds: float
    offloaded_bytes: int
    recomputed_bytes: int
    efficiency: float
    foretold: bool = True
    measured_peak_bytes: int | None = None
    measured_step_seconds: float | None = None

    @property
    def predicted_samples_per_second(self) -> float:
        """Throughput as predicted."""
        return self.batch_size / self.predicted_step_seconds

    @property
    def measured_samples_per_second(self) -> float | None:
        """Throughput as measured; None if the candidate was not run."""
        return None if self.measured_step_seconds is None else self.batch_size / self.measured_step_seconds

    @property
    def samples_per_second(self) -> float:
        """Throughput as far as is known."""
        return self.measured_samples_per_second or self.predicted_samples_per_second

    @property
    def goodput(self) -> float:
        """Throughput times efficiency: useful samples per second (Pollux, section 3.1)."""
        return self.samples_per_second * self.efficiency

    def to_document(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self) | {
            "predicted_samples_per_second": self.predicted_samples_per_second,
            "measured_samples_per_second": self.measured_samples_per_second,
            "goodput": self.goodput,
        }


@dataclass(frozen=True)
class Tuning:
    """The answer of `outgrow.tune`.

        answer = outgrow.tune(make_step, budget="8GiB")
        made = make_step(answer.micro_batch)
        scheduler = answer.scheduler(made.optimizer)
        session = outgrow.Session(made.model, made.optimizer, budget="8GiB", plan=answer.plan)

    Attributes:
        objective: what was looked for: "goodput" or "throughput".
        budget_bytes: the budget, in bytes.
        chosen: the candidate that is worth it; `batch_size`, `micro_batch` and `accumulation` are its.
        learning_rates: for each parameter group of the optimizer (of all optimizers, in order).
        base_batch: the batch that the optimizer's own rates were chosen for.
        base_rates: those.
        rule: how rates follow the batch; `rule.source` says where that comes from.
        warmup_steps: steps over which the rates climb from the base ones.
        noise: what gradients showed; None if they were not asked.
        noise_samples: the noise scale that was reckoned with, in samples; infinite if there was none.
        largest_batch: the largest batch that was looked at and keeps inside the budget, by its plan and by what was
            run, without accumulation.
        plan: of the chosen candidate's step, as it was measured: for `Session(plan=...)`.
        candidates: all that were looked at, the smallest batch first.
    """

    objective: str
    budget_bytes: int
    chosen: Candidate
    learning_rates: tuple[float, ...]
    base_batch: int
    base_rates: tuple[float, ...]
    rule: Rule
    warmup_steps: int
    noise: NoiseScale | None
    noise_samples: float
    largest_batch: int
    plan: Plan
    candidates: tuple[Candidate, ...]

    @property
    def batch_size(self) -> int:
        """Samples of an optimizer step."""
        return self.chosen.batch_size

    @property
    def micro_batch(self) -> int:
        """Samples of one forward and backward pass."""
        return self.chosen.micro_batch

    @property
    def accumulation(self) -> int:
        """Passes in an optimizer step."""
        return self.chosen.accumulation

    @property
    def learning_rate(self) -> float:
        """The rate of the first parameter group."""
        return self.learning_rates[0]

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """Set the rates of an optimizer that make_step built, and warm up to them: step it once an optimizer step.

        Raises:
            TuningError: the optimizer has other parameter groups than make_step's.
        """
        return warm_up(optimizer, self.learning_rates, self.base_rates, self.warmup_steps)

    def plot(self, path: str | Path) -> None:
        """Draw samples per second against the batch. Needs matplotlib.

        Raises:
            TuningError: matplotlib is missing, does not know the suffix, or the file cannot be written.
        """
        from outgrow.tuning.picture import draw  # matplotlib is optional

        draw(self, Path(path))

    def report(self, path: str | Path) -> None:
        """Write one HTML page that shows all candidates; it needs no network.

        Raises:
            ReportError: the file cannot be written.
        """
        from outgrow.tuning.page import write_page  # it reads answers

        write_page(self, path)

    def to_document(self) -> dict[str, Any]:
        """As plain data for JSON, without the plan; an infinite noise scale is None."""
        return {
            "objective": self.objective,
            "budget_bytes": self.budget_bytes,
            "batch_size": self.batch_size,
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "learning_rates": list(self.learning_rates),
            "base_batch": self.base_batch,
            "base_rates": list(self.base_rates),
            "rule": self.rule.value,
            "rule_source": self.rule.source,
            "warmup_steps": self.warmup_steps,
            "noise_samples": _finite(self.noise_samples),
            "noise": None if self.noise is None else asdict(self.noise),
            "largest_batch": self.largest_batch,
            "chosen": self.chosen.to_document(),
            "candidates": [item.to_document() for item in self.candidates],
        }

    def in_words(self) -> dict[str, str]:
        """The answer for people, by name."""
        return {
            "batch": _batch_in_words(self.chosen),
            "samples per second": f"{self.chosen.samples_per_second:.1f}",
            "step": format_seconds(self.chosen.measured_step_seconds or self.chosen.predicted_step_seconds),
            "peak": f"{format_bytes(self.chosen.measured_peak_bytes or self.chosen.predicted_peak_bytes)}"
            f" of {format_bytes(self.budget_bytes)}",
            "largest batch": str(self.largest_batch),
            "learning rate": f"{self.learning_rate:.4g} ({self.rule} rule, from {self.base_rates[0]:.4g}"
            f" at batch {self.base_batch})",
            "warm-up": f"{self.warmup_steps} steps",
            "noise scale": "not known" if self.noise_samples == inf else f"{self.noise_samples:.0f} samples",
        }

    def __str__(self) -> str:
        rows = self.in_words()
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


def _batch_in_words(candidate: Candidate) -> str:
    if candidate.accumulation == 1:
        return str(candidate.batch_size)
    return f"{candidate.batch_size} ({candidate.accumulation} passes of {candidate.micro_batch})"


def _finite(number: float) -> float | None:
    return number if isfinite(number) else None
