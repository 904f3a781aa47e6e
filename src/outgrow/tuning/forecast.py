"""What steps of any batch will take under a budget: estimates that real runs have set right, and a plan for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from outgrow.cost.estimate import estimate
from outgrow.cost.hardware import Hardware
from outgrow.planning.floor import Floor, least_budget
from outgrow.planning.plan import Plan
from outgrow.planning.policies import find
from outgrow.planning.problem import Problem
from outgrow.runtime.tiers.ram import Ram
from outgrow.session.learning import Planner
from outgrow.tracing.ir import Kind, Phase, Trace
from outgrow.tracing.liveness import plain_profile
from outgrow.tuning.answer import Candidate
from outgrow.tuning.calibration import Calibration, Sample
from outgrow.tuning.records import Key, Records
from outgrow.tuning.scaling import StepFamily
from outgrow.tuning.trial import Terms


class Forecast:
    """Plans and predictions for every batch.

    Attributes:
        plans: of one pass, by its batch, as far as they were asked for.
    """

    def __init__(self, trace_at: Callable[[int], Trace], terms: Terms, hardware: Hardware, records: Records) -> None:
        """`trace_at` gives the fake trace of a step of so many samples."""
        self.plans: dict[int, Plan] = {}
        self._family = StepFamily(trace_at)
        self._hardware = hardware
        self._budget = terms.budget_bytes
        # Plans leave free what a session's own do.
        self._margin_bytes = Ram.margin_of(terms.budget_bytes)
        self._planner = Planner(find(terms.policy), margin_bytes=self._margin_bytes)
        self._records = records
        self._calibration = Calibration(hardware)
        self._estimates: dict[int, Trace] = {}
        self._earlier: dict[Key, Candidate] = {}  # of what was run later, as predicted before

    def trace_of(self, batch: int) -> Trace:
        """A step of so many samples, without times."""
        return self._family.at(batch)

    def floor(self, batch: int) -> Floor:
        """The least budget of a batch, and what takes it."""
        return least_budget(self._problem(batch))

    def moves(self, batch: int) -> bool:
        """Whether a plan for this batch has to move something."""
        trial = self._records.whole(batch)
        if trial is not None:
            return not trial.plan.keeps_everything
        return plain_profile(self._sized(batch)).peak_bytes > self._budget - self._margin_bytes

    def plan(self, batch: int) -> None:
        """Plan a step of a batch in one pass."""
        problem = self._problem(batch)
        trial = self._records.whole(batch)
        # What was run has a plan, and that is what its session would follow again.
        self.plans[batch] = self._planner.plan(problem) if trial is None else replace(trial.plan, problem=problem)

    def plan_to_run(self, micro_batch: int, passes: int) -> Plan | None:
        """The plan of the run before; else ours, as one whose trace has yet to be recorded.

        It saves a step that nobody planned, and the first also another search.
        """
        before = self._records.trials.get((micro_batch, passes))
        if before is not None:
            return before.plan
        plan = self.plans.get(micro_batch)
        if plan is None or passes > 1 or not plan.simulate().feasible:
            return None
        return replace(plan, problem=replace(plan.problem, trace=replace(plan.problem.trace, measured=False)))

    def candidate(self, micro_batch: int, passes: int) -> Candidate:
        """What is known of so many samples in so many passes. What was run is judged by what was predicted before."""
        key = micro_batch, passes
        known = self._earlier.get(key)
        if known is None:
            known = self._prediction(micro_batch, passes)
        trial = self._records.trials.get(key)
        return replace(
            known,
            feasible=not self._records.is_out(micro_batch, passes) and (trial is not None or known.feasible),
            foretold=trial is None or key in self._earlier,
            measured_peak_bytes=None if trial is None else trial.peak_bytes,
            measured_step_seconds=self._records.seconds.get(key),
        )

    def will_run(self, micro_batch: int, passes: int) -> None:
        """Keep what is predicted of a candidate that is about to be run for the first time."""
        if micro_batch in self.plans and (micro_batch, passes) not in self._records.trials:
            self._earlier[micro_batch, passes] = self._prediction(micro_batch, passes)

    def learn(self, hardware: Hardware) -> None:
        """Set estimates right by all that was run; `hardware` has the speeds of copies that were seen last.

        Plans that no longer fit, or no longer have to move anything, are made anew.
        """
        self._calibration = Calibration(hardware, self._samples())
        for size, plan in self.plans.items():
            if self._records.whole(size) is not None:
                self.plan(size)
                continue
            problem = self._problem(size)
            corrected = replace(plan, problem=problem)
            no_longer_fits = plan.simulate().feasible and not corrected.simulate().feasible
            if no_longer_fits or plan.keeps_everything == self.moves(size):
                self.plan(size)
            else:
                self.plans[size] = corrected

    def _samples(self) -> Iterator[Sample]:
        for (batch, passes), trial in self._records.trials.items():
            if passes == 1:
                measured = trial.trace_of(self._records.seconds[batch, 1])
                yield Sample(batch, not trial.plan.keeps_everything, self._estimated(batch), measured)

    def _estimated(self, batch: int) -> Trace:
        if batch not in self._estimates:
            self._estimates[batch] = estimate(self._family.at(batch), self._hardware)
        return self._estimates[batch]

    def _sized(self, batch: int) -> Trace:
        return self._calibration.sized(batch, self._estimated(batch))

    def _problem(self, batch: int) -> Problem:
        trial = self._records.whole(batch)
        if trial is not None:
            return replace(trial.plan.problem, trace=trial.trace_of(self._records.seconds[batch, 1]))
        trace = self._calibration.timed(batch, self._sized(batch), moves=self.moves(batch))
        return Problem(trace, self._calibration.hardware, self._budget)

    def _prediction(self, micro_batch: int, passes: int) -> Candidate:
        """From the plan of one pass: the update comes once, and gradients stay from pass to pass."""
        plan = self.plans[micro_batch]
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
            feasible=prediction.feasible and peak <= self._budget,
            predicted_peak_bytes=peak,
            predicted_step_seconds=passes * (prediction.step_seconds - update) + update,
            offloaded_bytes=prediction.offloaded_bytes,
            recomputed_bytes=sum(trace.values[item.value].nbytes for item in plan.recomputes),
            efficiency=1.0,
        )
