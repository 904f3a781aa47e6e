"""`outgrow.tune`: which batch is worth it under a budget, and which learning rate goes with it.

After AccUDNN's hyperparameter tuner (arXiv 1901.06773, abstract): with a memory manager on, the largest batch is
seldom the one that pays. Fake traces tell what a step takes at any batch, a few are run for real to set the estimates
right, `auto` plans each candidate from those, and gradients show what more samples in a step are worth.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf, sqrt
from pathlib import Path
from statistics import median
from typing import Literal, get_args

import psutil
from rich.progress import Progress, TaskID

from outgrow.cost.estimate import estimate
from outgrow.cost.hardware import Hardware
from outgrow.cost.measure import this_machine
from outgrow.errors import BudgetTooSmall, TuningError
from outgrow.learning import Planner, keeps_everything
from outgrow.planning.floor import least_budget
from outgrow.planning.plan import Plan
from outgrow.planning.policies import find
from outgrow.planning.problem import Problem
from outgrow.progress import counting_bar
from outgrow.runtime.faults import is_out_of_memory
from outgrow.runtime.tiers.ram import Ram
from outgrow.session import Session
from outgrow.tracing.capture import TrainingStep, as_sequence
from outgrow.tracing.ir import Kind, Phase, Trace
from outgrow.tracing.liveness import plain_profile
from outgrow.tuning.answer import Candidate, Tuning
from outgrow.tuning.builder import Builder, rates_of
from outgrow.tuning.calibration import Calibration, Sample
from outgrow.tuning.limits import largest_within
from outgrow.tuning.noise import GradientNoise, NoiseScale, efficiency
from outgrow.tuning.pace import FixedWork, at_usual_pace
from outgrow.tuning.rates import rate_factor, warmup_steps
from outgrow.tuning.scaling import StepFamily
from outgrow.tuning.trial import Terms, Trial, run_step, run_trial
from outgrow.units import parse_bytes

_LOG = logging.getLogger(__name__)

Objective = Literal["goodput", "throughput"]

# Gradients say little of the training before it has begun: so many steps are trained first, and then so many backward
# passes are compared.
_NOISE_STEPS, _NOISE_PASSES = 16, 16
_MOST_PASSES = 16
_RUNS_OF_THE_BEST = 2  # no answer was run less
# So often what all predictions rest on is run, in turns: a machine's speed wavers for half a minute at a time.
_ROUNDS = 3
# What a batch is worth may be more by this share where it was foretold, which falls with the root of its runs.
_DOUBT = 0.1
# No line is drawn over a wider gap between batches than this times the smaller one, if there is one in between.
_WIDEST_GAP = 3
# The largest batch that predictions rest on, over the base batch: still larger ones take long, and lie on its line.
_FURTHEST = 4


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
        None if spill_dir is None else Path(spill_dir),
        allow_tmpfs,
    )
    with counting_bar() if progress else Progress(disable=True) as bar:
        search = _Search(
            Builder(make_step),
            terms,
            objective,
            base_batch,
            noise_scale,
            trial_steps,
            _Reporter(bar, bar.add_task("")),
        )
        search.run_base(max_batch)
        search.survey(max_batch)
        search.run_best(trials)
        return search.answer(epoch_samples)


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


def sizes_between(least: int, most: int) -> list[int]:
    """Powers of two and one and a half times those, from `least` to `most`."""
    found = {power * factor // 2 for power in (1 << bit for bit in range(most.bit_length() + 1)) for factor in (2, 3)}
    return sorted(size for size in found if least <= size <= most)


def _without_frames(error: Exception) -> Exception:
    """An error without what its frames hold, which is the model and its graph."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _middles(chosen: Sequence[int], sizes: Sequence[int]) -> set[int]:
    """Of all sizes those in the middle, by ratio, of gaps between the chosen ones that are too wide."""
    found: set[int] = set()
    for low, high in pairwise(chosen):
        if high > _WIDEST_GAP * low:
            between = [size for size in sizes if low < size < high]
            found |= {*sorted(between, key=lambda size: abs(size * size - low * high) / size)[:1]}
    return found


@dataclass(frozen=True)
class _Reporter:
    """Says what is done now. The whole is what is known to be left, and grows when more is."""

    bar: Progress
    task: TaskID

    def expect(self, more: int) -> None:
        total = self.bar.tasks[0].total or 0
        self.bar.update(self.task, total=total + more)

    def say(self, what: str) -> None:
        self.bar.update(self.task, description=what)

    def advance(self) -> None:
        self.bar.advance(self.task)


class _Search:
    """One search, from the least batch to the answer."""

    def __init__(
        self,
        builder: Builder,
        terms: Terms,
        objective: Objective,
        base_batch: int,
        noise_samples: float | None,
        trial_steps: int,
        reporter: _Reporter,
    ) -> None:
        self._builder = builder
        self._terms = terms
        self._objective = objective
        self._base = base_batch
        self._noise: NoiseScale | None = None
        self._noise_samples = noise_samples
        self._trial_steps = trial_steps
        self._reporter = reporter
        self._hardware = this_machine()
        self._calibration = Calibration(self._hardware)
        # Plans leave free what a session's own do.
        self._margin_bytes = Ram.margin_of(terms.budget_bytes)
        self._planner = Planner(find(terms.policy), margin_bytes=self._margin_bytes)
        self._family = StepFamily(builder.trace)
        reporter.say("tracing")
        self._least = builder.least_batch()
        self._rates: tuple[float, ...] = ()
        self._plans: dict[int, Plan] = {}  # of one pass, by its batch
        self._only_divided: list[int] = []  # batches that are in reach in several passes alone
        self._fixed_work = FixedWork()
        self._trials: dict[tuple[int, int], Trial] = {}
        self._seconds: dict[tuple[int, int], float] = {}  # of a step of what was run, at the machine's usual pace
        self._predicted: dict[tuple[int, int], Candidate] = {}  # of what was run later, as predicted before
        self._failed: set[tuple[int, int]] = set()
        self._failures: list[Exception] = []

    # --- the parts of a search, in order ---

    def run_base(self, max_batch: int | None) -> None:
        """Run the base batch, or the nearest below it that fits: how fast is the machine?

        Its gradients also tell how much larger batches are worth.
        """
        if max_batch is not None and max_batch < self._least:
            raise TuningError(f"max_batch is {max_batch}, and the network takes {self._least} samples at least")
        budget = self._terms.budget_bytes
        floor = least_budget(self._problem(self._least))
        if floor.bytes > budget:
            trace = self._family.at(self._least)
            where = f"{trace.describe_op(floor.op)} with a batch of {self._least}"
            raise BudgetTooSmall(budget, floor.bytes, floor.holders, where)
        wanted = max(self._least, min(self._base, max_batch or self._base))
        for size in reversed([*sizes_between(self._least, wanted - 1), wanted]):
            if size > self._least and least_budget(self._problem(size)).bytes > budget:
                continue
            if self._noise_samples is None:
                steps = max(self._trial_steps, _NOISE_STEPS)
                self._run(size, 1, steps=steps, afterwards=partial(self._measure_noise, size))
            else:
                self._run(size, 1)
            if self._trials:
                break
        else:
            raise self._failures[-1]
        if self._noise_samples is None:  # gradients that are all noise bound nothing
            self._noise_samples = inf if self._noise is None else self._noise.samples

    def survey(self, max_batch: int | None) -> None:
        """Plan every batch that fits, from estimates that a few real steps have set right."""
        self._reporter.say("looking for the largest batch")
        fits = largest_within(
            lambda size: least_budget(self._problem(size)).bytes, self._terms.budget_bytes, self._least
        )
        most = fits or self._least
        most = most if max_batch is None else min(most, max_batch)
        run = {batch for batch, _ in self._trials}
        sizes = sorted({*sizes_between(self._least, most), *run, most})
        # Without the very largest: just above its least budget a plan moves all that it can, as no other does.
        near = sorted({*sizes_between(self._least, min(most, _FURTHEST * max(run))), *run})
        while ends := self._ends(near):  # what was run says better which are kept whole
            for size in ends:
                if not self._is_out(size, 1):  # the ones before may have failed
                    self._run(size, 1)
        for _ in range(_ROUNDS - 1):
            for batch, passes in list(self._trials):
                self._run(batch, passes)
        if self._builder.accumulates:  # in several passes the base batch is in reach, where it does not fit in one
            self._only_divided = sizes_between(most + 1, min(self._base, max_batch or self._base))
        self._reporter.expect(len(sizes))
        for size in sizes:
            self._plan(size)
            self._reporter.advance()

    def _ends(self, sizes: Sequence[int]) -> list[int]:
        """What is yet to be run: the ends of what is kept whole, and of what is not, as far as is known.

        The two smallest that are kept: one sample runs other kernels than two. And in the middle of what would be a
        wide gap.
        """
        run = {batch for batch, _ in self._trials}
        kept = [size for size in sizes if not self._moves(size)]
        moved = [size for size in sizes if self._moves(size)]
        wanted = {*kept[:2], *kept[-1:], *moved[:1], *moved[-1:], *run}
        for such in (kept, moved):
            wanted |= _middles([size for size in such if size in wanted], such)
        return sorted(size for size in wanted - run if not self._is_out(size, 1))

    def run_best(self, trials: int) -> None:
        """Run what is best as far as is known, and what may be better, until nothing may, but no more than so often.

        Of the best and of the one that may be better by most, the one that was run less (LUCB, Kalyanakrishnan et al.
        2012): a machine's speed wavers, and the best of some single runs was also the luckiest.
        """
        for _ in range(trials):
            known = list(self._candidates())
            if not known:
                return
            best = max(known, key=self._worth)
            rivals = [item for item in known if item is not best]
            rival = max(rivals, key=self._hope, default=best)
            if self._is_sure(best) and (rival is best or self._hope(rival) <= self._worth(best)):
                return
            following = rival if self._is_sure(best) and self._runs(rival) <= self._runs(best) else best
            self._run(following.micro_batch, following.accumulation)

    def _runs(self, candidate: Candidate) -> int:
        trial = self._trials.get((candidate.micro_batch, candidate.accumulation))
        return 0 if trial is None else len(trial.runs)

    def _hope(self, candidate: Candidate) -> float:
        """What a candidate may be worth."""
        return self._worth(candidate) * (1 + _DOUBT / sqrt(1 + self._runs(candidate)))

    def _is_sure(self, candidate: Candidate) -> bool:
        return self._runs(candidate) >= _RUNS_OF_THE_BEST

    def answer(self, epoch_samples: int | None) -> Tuning:
        """The best of what was run."""
        candidates = sorted(self._all_candidates(), key=lambda item: (item.batch_size, item.accumulation))
        run = [item for item in candidates if item.feasible and item.measured_step_seconds is not None]
        if not run:
            raise self._failures[0]
        chosen = max([item for item in run if self._is_sure(item)] or run, key=self._worth)
        factor = rate_factor(self._rule, chosen.batch_size, self._base, self._samples_of_noise)
        return Tuning(
            objective=self._objective,
            budget_bytes=self._terms.budget_bytes,
            chosen=chosen,
            learning_rates=tuple(rate * factor for rate in self._rates),
            base_batch=self._base,
            base_rates=self._rates,
            rule=self._rule,
            warmup_steps=warmup_steps(factor, chosen.batch_size, self._base, epoch_samples),
            noise=self._noise,
            noise_samples=self._samples_of_noise,
            largest_batch=max(item.batch_size for item in candidates if item.feasible and item.accumulation == 1),
            plan=self._trials[chosen.micro_batch, chosen.accumulation].plan,
            candidates=tuple(candidates),
        )

    # --- estimates ---

    @property
    def _samples_of_noise(self) -> float:
        return inf if self._noise_samples is None else self._noise_samples

    def _worth(self, candidate: Candidate) -> float:
        return candidate.goodput if self._objective == "goodput" else candidate.samples_per_second

    def _estimated(self, batch: int) -> Trace:
        return estimate(self._family.at(batch), self._hardware)

    def _sized(self, batch: int) -> Trace:
        return self._calibration.sized(batch, self._estimated(batch))

    def _moves(self, batch: int) -> bool:
        """Whether a plan for this batch has to move something."""
        trial = self._trials.get((batch, 1))
        if trial is not None:
            return not keeps_everything(trial.plan)
        return plain_profile(self._sized(batch)).peak_bytes > self._terms.budget_bytes - self._margin_bytes

    def _problem(self, batch: int) -> Problem:
        trial = self._trials.get((batch, 1))
        if trial is not None:
            return replace(trial.plan.problem, trace=trial.trace_of(self._seconds[batch, 1]))
        trace = self._calibration.timed(batch, self._sized(batch), moves=self._moves(batch))
        return Problem(trace, self._calibration.hardware, self._terms.budget_bytes)

    def _plan(self, batch: int) -> None:
        self._reporter.say(f"planning batch {batch}")
        problem = self._problem(batch)
        trial = self._trials.get((batch, 1))
        # What was run has a plan, and that is what its session would follow again.
        self._plans[batch] = self._planner.plan(problem) if trial is None else replace(trial.plan, problem=problem)

    def _candidates(self) -> Iterator[Candidate]:
        return (item for item in self._all_candidates() if item.feasible)

    def _all_candidates(self) -> Iterator[Candidate]:
        """Each batch in one pass, and in several where that is predicted to be faster."""
        for size in [*self._plans, *self._only_divided]:
            whole = self._candidate(size, 1) if size in self._plans else None
            if whole is not None:
                yield whole
            if not self._builder.accumulates:
                continue
            divided = [self._candidate(size // passes, passes) for passes in self._divisions(size)]
            fits = [item for item in divided if item.feasible]
            best = min(fits, key=lambda item: item.predicted_step_seconds, default=None)
            if best is not None and (whole is None or best.predicted_step_seconds < whole.predicted_step_seconds):
                yield best
            yield from (
                item for item in divided if item is not best and (item.micro_batch, item.accumulation) in self._trials
            )

    def _divisions(self, size: int) -> Iterator[int]:
        for passes in range(2, _MOST_PASSES + 1):
            if size % passes == 0 and size // passes in self._plans:
                yield passes

    def _candidate(self, micro_batch: int, passes: int) -> Candidate:
        key = micro_batch, passes
        known = self._predicted.get(key)
        if known is None:
            known = self._prediction(micro_batch, passes)
        trial = self._trials.get(key)
        batch = micro_batch * passes
        return replace(
            known,
            feasible=not self._is_out(micro_batch, passes) and (trial is not None or known.feasible),
            efficiency=efficiency(batch, self._base, self._samples_of_noise),
            foretold=trial is None or key in self._predicted,
            measured_peak_bytes=None if trial is None else trial.peak_bytes,
            measured_step_seconds=self._seconds.get(key),
        )

    def _is_out(self, micro_batch: int, passes: int) -> bool:
        """Whether this, or a smaller batch in as many passes, was run and did not fit: whatever is predicted."""
        return any(batch <= micro_batch and passes == times for batch, times in self._failed)

    def _prediction(self, micro_batch: int, passes: int) -> Candidate:
        """From the plan of one pass: the update comes once, and gradients stay from pass to pass."""
        plan = self._plans[micro_batch]
        prediction = plan.simulate()
        trace = plan.problem.trace
        update = sum(op.seconds for op in trace.ops if op.phase is Phase.UPDATE)
        peak = prediction.peak_bytes
        if passes > 1:
            # As many bytes as the parameters have before the step changes them.
            peak += sum(value.nbytes for value in trace.values if value.kind is Kind.PARAMETER and value.birth < 0)
        return Candidate(
            batch_size=micro_batch * passes,
            micro_batch=micro_batch,
            accumulation=passes,
            feasible=prediction.feasible and peak <= self._terms.budget_bytes,
            predicted_peak_bytes=peak,
            predicted_step_seconds=passes * (prediction.step_seconds - update) + update,
            offloaded_bytes=prediction.offloaded_bytes,
            recomputed_bytes=sum(trace.values[item.value].nbytes for item in plan.recomputes),
            efficiency=1.0,
        )

    # --- real runs ---

    def _run(
        self,
        micro_batch: int,
        passes: int,
        steps: int | None = None,
        afterwards: Callable[[TrainingStep, Session], None] | None = None,
    ) -> None:
        """Run a candidate and learn from it. One that does not fit after all is out of the race."""
        key = micro_batch, passes
        before = self._trials.get(key)
        if micro_batch in self._plans and before is None:
            self._predicted[key] = self._prediction(micro_batch, passes)
        at_least = 2 if steps is None else steps
        steps = self._trial_steps if steps is None else steps
        self._reporter.expect(steps)
        self._reporter.say(f"running batch {micro_batch * passes}")
        try:
            trial = run_trial(
                partial(self._make, micro_batch, passes),
                self._terms,
                steps,
                self._fixed_work,
                at_least=at_least,
                plan=self._plan_to_run(micro_batch, passes),
                on_step=self._reporter.advance,
                afterwards=afterwards,
            )
        except (BudgetTooSmall, RuntimeError, MemoryError) as error:
            if not isinstance(error, BudgetTooSmall) and not is_out_of_memory(error):
                raise
            _LOG.warning("%d samples in %d passes are out of the race: %s", micro_batch * passes, passes, error)
            self._failed.add(key)
            self._failures.append(_without_frames(error))
            return
        self._trials[key] = trial if before is None else trial.after(before)
        self._learn(trial.plan.problem.hardware)

    def _learn(self, hardware: Hardware) -> None:
        """See what all runs say together: one more also says more of the pace that the machine had in the others."""
        paced = at_usual_pace({key: trial.runs for key, trial in self._trials.items()})
        self._seconds = {key: median(seconds) for key, seconds in paced.items()}
        samples = (
            Sample(
                batch,
                not keeps_everything(trial.plan),
                self._estimated(batch),
                trial.trace_of(self._seconds[batch, 1]),
            )
            for (batch, passes), trial in self._trials.items()
            if passes == 1
        )
        self._calibration = Calibration(hardware, samples)
        self._correct()

    def _plan_to_run(self, micro_batch: int, passes: int) -> Plan | None:
        """The plan of the run before; else ours, as one whose trace has yet to be recorded.

        It saves a step that nobody planned, and the first also another search.
        """
        before = self._trials.get((micro_batch, passes))
        if before is not None:
            return before.plan
        plan = self._plans.get(micro_batch)
        if plan is None or passes > 1 or not plan.simulate().feasible:
            return None
        return replace(plan, problem=replace(plan.problem, trace=replace(plan.problem.trace, measured=False)))

    def _make(self, micro_batch: int, passes: int) -> TrainingStep:
        made = self._builder.make(micro_batch, passes)
        if not self._rates:  # the base batch comes first, and its rates are what others are derived from
            self._rates, self._rule = rates_of(made)
        return made

    def _measure_noise(self, batch: int, made: TrainingStep, session: Session) -> None:
        assert made.optimizer is not None, "the builder saw to it"
        self._reporter.expect(_NOISE_PASSES)
        self._reporter.say("measuring the noise of gradients")
        noise = GradientNoise(made.optimizer, batch_size=batch)
        try:
            with noise.held(*as_sequence(made.model)):
                for _ in range(_NOISE_PASSES):
                    run_step(made, session)
                    self._reporter.advance()
            self._noise = noise.scale
        except BudgetTooSmall as error:  # all gradients are there in all passes, which not every budget holds
            _LOG.warning(
                "the budget has no room to measure the noise of gradients, so none is reckoned with: %s", error
            )
        finally:
            noise.close()

    def _correct(self) -> None:
        """Predict all plans anew, and make those anew that no longer fit, or no longer have to move anything."""
        for size, plan in self._plans.items():
            if (size, 1) in self._trials:
                self._plan(size)
                continue
            problem = self._problem(size)
            corrected = replace(plan, problem=problem)
            no_longer_fits = plan.simulate().feasible and not corrected.simulate().feasible
            if no_longer_fits or keeps_everything(plan) == self._moves(size):
                self._plan(size)
            else:
                self._plans[size] = corrected
