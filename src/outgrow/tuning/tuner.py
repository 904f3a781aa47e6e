"""`outgrow.tune`: which batch is worth it under a budget, and which learning rate goes with it.

After AccUDNN's hyperparameter tuner (arXiv 1901.06773, abstract): with a memory manager on, the largest batch is
seldom the one that pays. Fake traces tell what a step takes at any batch, a few are run for real to set the estimates
right, `auto` plans each candidate from those, and gradients show what more samples in a step are worth.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import get_args

import psutil
from rich.progress import Progress

from outgrow.cost.measure import this_machine
from outgrow.errors import TuningError
from outgrow.planning.policies import find
from outgrow.progress import counting_bar
from outgrow.tracing.capture import TrainingStep
from outgrow.tuning.answer import Tuning
from outgrow.tuning.builder import Builder
from outgrow.tuning.forecast import Forecast
from outgrow.tuning.race import Objective, Race
from outgrow.tuning.rates import rate_factor, warmup_steps
from outgrow.tuning.records import Records
from outgrow.tuning.runs import Reporter, Runs
from outgrow.tuning.survey import Survey, sizes_between
from outgrow.tuning.trial import Terms
from outgrow.units import parse_bytes


def tune(
    make_step: Callable[..., TrainingStep],
    *,
    budget: int | str,
    objective: Objective = "goodput",
    base_batch: int = 32,
    max_batch: int | None = None,
    epoch_samples: int | None = None,
    noise_scale: float | None = None,
    policy: str = "auto",
    trials: int = 12,
    trial_steps: int = 5,
    spill_dir: str | Path | None = None,
    allow_tmpfs: bool = False,
    progress: bool = True,
) -> Tuning:
    """Find the batch that is worth it under a budget, and the learning rate that goes with it.

    Args:
        make_step: called with a batch size; builds model, optimizer and data anew, and returns a `TrainingStep` whose
            function runs one step, best on batches of that size that it is called with (`TrainingStep.batches`). If
            it takes `accumulation` as well, the step makes so many forward and backward passes of that size before
            its optimizer's, and dividing a batch is weighed.
        budget: the most that live bytes may reach: bytes, or "8GiB", "60%" (of the machine's memory).
        objective: "throughput" for most samples a second, "goodput" for most useful ones: throughput times what a
            sample is still worth in a step of that many (Pollux, OSDI 2021).
        base_batch: the batch, in samples, that the learning rates of make_step's optimizer were chosen for.
        max_batch: no larger batch is looked at; default: what fits.
        epoch_samples: samples in an epoch, for the length of the warm-up.
        noise_scale: the gradient noise scale in samples where it is known (`GradientNoise` measures it in training);
            `float("inf")` reckons with none. Default: it is measured, in some 30 steps of the base batch.
        policy: how plans are made.
        trials: how many runs for real there are at most, beyond the base batch and the ends of the curve.
        trial_steps: steps that count in each such run; more where they are short, and fewer where they are long.
        spill_dir: a folder on a disk for what is offloaded; default: the system's folder for temporary files.
        allow_tmpfs: take a spill folder that is in RAM all the same.
        progress: show a bar on standard error, where that is a terminal.

    Returns:
        The answer. All in it that is called measured was run; nothing of the models that were built for it stays.

    Raises:
        TuningError: an argument makes no sense, or make_step gives nothing that can be trained.
        BudgetTooSmall: not even the smallest batch fits; with the least budget that does.
        InvalidBudget, UnknownPolicy, SpillError: see `Session`.
    """
    _refuse_nonsense(objective, base_batch, max_batch, epoch_samples, noise_scale, trials, trial_steps)
    terms = Terms(
        parse_bytes(budget, total_bytes=psutil.virtual_memory().total),
        find(policy).name,
        Path(spill_dir) if isinstance(spill_dir, str) else spill_dir,
        allow_tmpfs,
    )
    with counting_bar() if progress else Progress(disable=True) as bar:
        reporter = Reporter(bar, bar.add_task("tracing"))
        builder, records = Builder(make_step), Records()
        least = builder.least_batch()
        if max_batch is not None and max_batch < least:
            raise TuningError(f"max_batch is {max_batch}, and the network takes {least} samples at least")
        forecast = Forecast(builder.trace, terms, this_machine(), records)
        runs = Runs(builder, terms, trial_steps, forecast, records, reporter)
        base = min(base_batch, max_batch or base_batch)

        survey = Survey(forecast, records, runs, reporter, least=least, budget_bytes=terms.budget_bytes)
        survey.run_base(base, measure_noise=noise_scale is None)
        if noise_scale is None:  # gradients that are all noise bound nothing
            noise_scale = inf if runs.noise is None else runs.noise.samples
        most = survey.plan_all(max_batch)

        # In several passes the base batch is in reach, where it does not fit in one.
        only_divided = sizes_between(most + 1, base) if builder.accumulates else []
        race = Race(
            forecast,
            records,
            objective,
            base_batch,
            noise_scale,
            divides=builder.accumulates,
            only_divided=only_divided,
        )
        race.run(runs, trials)

        chosen = race.best()
        candidates = sorted(race.candidates(), key=lambda item: (item.batch_size, item.accumulation))
        factor = rate_factor(runs.rule, chosen.batch_size, base_batch, noise_scale)
        return Tuning(
            objective=objective,
            budget_bytes=terms.budget_bytes,
            chosen=chosen,
            learning_rates=tuple(rate * factor for rate in runs.rates),
            base_batch=base_batch,
            base_rates=runs.rates,
            rule=runs.rule,
            warmup_steps=warmup_steps(factor, chosen.batch_size, base_batch, epoch_samples),
            noise=runs.noise,
            noise_samples=noise_scale,
            largest_batch=max(item.batch_size for item in candidates if item.feasible and item.accumulation == 1),
            plan=records.trials[chosen.micro_batch, chosen.accumulation].plan,
            candidates=tuple(candidates),
        )


def _refuse_nonsense(
    objective: str,
    base_batch: int,
    max_batch: int | None,
    epoch_samples: int | None,
    noise_scale: float | None,
    trials: int,
    trial_steps: int,
) -> None:
    if objective not in get_args(Objective):
        raise TuningError(f"objective is {objective!r}: give one of {', '.join(get_args(Objective))}")
    counts = {
        "base_batch": base_batch,
        "max_batch": max_batch,
        "epoch_samples": epoch_samples,
        "trials": trials,
        "trial_steps": trial_steps,
    }
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise TuningError(f"{name} is {count!r}: it must be a whole number of 1 or more")
    if noise_scale is not None and not noise_scale >= 0:  # a NaN fails every comparison
        raise TuningError(f"noise_scale is {noise_scale}: it is a number of samples, 0 or more")
