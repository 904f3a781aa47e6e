"""From a step that was recorded to a kind of step with a plan."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from outgrow.cost.hardware import Hardware
from outgrow.cost.measure import this_gpu, this_machine
from outgrow.errors import BudgetTooSmall
from outgrow.planning.floor import least_budget
from outgrow.planning.plan import Plan
from outgrow.planning.problem import Problem
from outgrow.runtime.copies.copy import Copies
from outgrow.runtime.interrupts import Interrupts
from outgrow.runtime.outcome import StepOutcome
from outgrow.runtime.pool import Pool
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.session.kind import StepKind
from outgrow.session.kinds import Kinds
from outgrow.session.learning import Planner, in_a_line
from outgrow.tracing.ir import Kind, Trace
from outgrow.tracing.ledger import Ledger
from outgrow.tracing.liveness import with_lasting_state
from outgrow.tracing.resizing import resized
from outgrow.units import format_bytes

_LOG = logging.getLogger(__name__)
# What a step makes to last beyond what its trace shows; less than this may be anything's.
LEAST_BASE_BYTES = 4096
# What an allocator that is counted may have given out more than in the step before, as a share of the budget: blocks
# are rounded up, and which ones were free is not the same twice.
JITTER_SHARE = 64


class Recorded:
    """Plans from recorded steps: for more of their kind, and for others that differ from them in their sizes alone.

    Attributes:
        replans: how often that gave a kind that was known another plan.
    """

    def __init__(
        self,
        budget_bytes: int,
        device: torch.device,
        kinds: Kinds,
        planner: Planner,
        ledger: Ledger,
        pool: Pool,
        copies: Copies,
        memory: DeviceMemory,
        interrupts: Interrupts,
        least_moved_bytes: int,
    ) -> None:
        """The parts of a session that trains inside `budget_bytes`; `kinds` are told of what is learned."""
        self._budget = budget_bytes
        self._device = device
        self._kinds = kinds
        self._planner = planner
        self._ledger = ledger
        self._pool = pool
        self._copies = copies
        self._memory = memory
        self._interrupts = interrupts
        self._least_moved = least_moved_bytes
        self._hardware: Hardware | None = None
        self.replans = 0

    def learn(self, outcome: StepOutcome, trace: Trace, planned_budget: int, *, is_laid_out: bool) -> StepKind:
        """A step was recorded: remember its kind, which is returned, and plan for it in `planned_budget` bytes.

        `is_laid_out`: gradients lie where they will from now on. The step in which they are laid out anew runs ops
        that no other step does.

        Raises:
            BudgetTooSmall: no plan holds such steps.
        """
        start = time.perf_counter()
        trace = with_lasting_state(trace)
        known = self._kinds.known(trace)
        # What is of the expected kind and departed all the same has changed where nothing that is saved shows it.
        if known is not None and known.steady and (known is not self._kinds.expected or not known.departed()):
            self._kinds.learnt(known)
            return known
        like = [] if known is not None else self._kinds.like(trace)
        covering = self._kinds.covering(trace, like)
        if covering is not None:
            self._kinds.learnt(covering)
            return covering
        # What else was made in this step and stays is there from now on.
        base = max(0, self._ledger.live_bytes - trace.resident_bytes(-1) - self._passing_bytes(trace))
        is_for_many = bool(like) and self._kinds.are_ragged  # it may never come again, and smaller ones will
        is_new = known is None
        is_planned = not is_new or self._kinds.come_again or is_for_many or not self._planner.searches
        room = 0 if known is None else known.room_bytes
        problem = Problem(trace, self.hardware(), planned_budget - room, base, self._least_moved)
        with self._interrupts.let_in():
            if is_planned:
                # What is new is planned for again, when it comes again or others went by its plan.
                plan = self._planner.plan(problem, at_once=is_new)
            else:
                plan = self._planner.without_search(problem)
        steady = is_laid_out and not outcome.blind and self._is_usual(base, known)
        did_fit = outcome.knows_peak and outcome.peak_bytes <= self._budget
        if not plan.evicts or (steady and not did_fit):
            self._refuse_what_cannot_fit(plan)
        seconds = time.perf_counter() - start
        if known is None:
            known = StepKind(
                trace.packs,
                plan,
                steady,
                outcome.peak_bytes,
                seconds,
                is_planned=is_planned,
                is_resized=bool(like),
                is_rough=is_planned,
                syncs=self._kinds.syncs,
            )
            sizes = (len(trace.ops), len(trace.saved), format_bytes(outcome.peak_bytes))
            _LOG.info("recorded a new kind of step: %d ops, %d saved tensors, peak %s", *sizes)
            if is_planned:
                _LOG.info("planned: %s", in_a_line(plan, seconds))
            else:
                _LOG.info("as the last kinds of step never came again, this one is planned for when it does")
        else:
            why = "its plan had proved wrong" if known.recordings else "the step had not settled yet"
            known.learn(plan, steady=steady, measured_peak=outcome.peak_bytes, plan_seconds=seconds)
            self.replans += 1
            _LOG.info("re-planned, as %s: %s", why, in_a_line(plan, seconds))
        self._kinds.learnt(known)
        return known

    def foresee(self, followed: StepKind, outcome: StepOutcome, planned_budget: int) -> StepKind | None:
        """A kind that nobody recorded, with a plan: of a step that went by another's, with tensors of other sizes.

        Two that were recorded show how its ops grow. None where they do not, or where no plan is known to hold it.
        """
        start = time.perf_counter()
        packs = outcome.packs
        like = self._kinds.recorded_like(followed, packs, outcome.ops)
        if not like:
            return None
        near, known = like[0], like[0].plan.problem
        traces = (resized(known.trace, far.plan.problem.trace, packs) for far in like[1:])
        trace = next((trace for trace in traces if trace is not None), None)
        if trace is None:
            return None
        problem = Problem(trace, self.hardware(), planned_budget, known.base_bytes, self._least_moved)
        with self._interrupts.let_in():
            plan = self._planner.plan(problem, at_once=True)
        if not plan.simulate().feasible:
            return None
        seconds = time.perf_counter() - start
        kind = StepKind(
            trace.packs,
            plan,
            False,
            plan.expected_peak_bytes,
            seconds,
            verdicts=near.verdicts.for_other_sizes(),
            is_foreseen=True,
            is_resized=True,
            is_rough=True,
            syncs=near.syncs,
        )
        self._kinds.foresaw(kind)
        _LOG.info("planned for sizes that nobody recorded: %s", in_a_line(plan, seconds))
        return kind

    def hardware(self) -> Hardware:
        """This machine, with the speeds of copies as those of the session were measured so far."""
        if self._hardware is None:
            spare = max(0, self._budget - self._ledger.live_bytes)
            self._hardware = this_machine(spare) if self._device.type == "cpu" else this_gpu(self._device, spare)
        out, back, usual = self._copies.out, self._copies.back, self._hardware
        cost = out.cost_per_byte() or usual.copy_cost_seconds_per_byte
        return replace(
            usual,
            copy_out_bandwidth=out.bandwidth() or usual.copy_out_bandwidth,
            copy_in_bandwidth=back.bandwidth() or usual.copy_in_bandwidth,
            copy_cost_seconds_per_byte=(cost + (back.cost_per_byte() or cost)) / 2,
        )

    def _is_usual(self, base_bytes: int, known: StepKind | None) -> bool:
        """Whether what a step of a kind that is `known` made to last was there after the one before."""
        if known is None:
            return False
        # Blocks in use are larger than what lies in them, never by quite as much.
        jitter = self._budget // JITTER_SHARE if self._memory.is_counted else 0
        # A program that keeps something of each step until the next one has as much there all the time.
        return base_bytes <= max(LEAST_BASE_BYTES, known.plan.problem.base_bytes) + jitter

    def _passing_bytes(self, trace: Trace) -> int:
        """Bytes of what the step of a trace made that is still there, and will not be there all the time.

        Gradients: the next step makes them anew, or finds them and is another one than this, as programs clear them
        when they like. And graphs that the program keeps: they leave where their room is needed.
        """
        births = trace.storage_births
        made = {value.storage for value in trace.values if value.kind is Kind.GRADIENT and births[value.storage] >= 0}
        new = sum(record.nbytes for record in self._ledger.alive() if record.serial in made)
        before = [value for value in trace.values if value.birth < 0]
        old = sum(value.nbytes for value in before if value.kind is Kind.GRADIENT and value.death < len(trace.ops))
        known = {value.storage for value in before}
        spare = sum(record.nbytes for record in self._pool.spare() if record.serial not in known)
        return max(0, new - old) + spare

    def _refuse_what_cannot_fit(self, plan: Plan) -> None:
        if plan.simulate().feasible:
            return
        if not plan.evicts:
            peak = plan.simulate().peak_bytes
            if peak > self._budget:
                raise BudgetTooSmall(self._budget, peak, {"the plain step": peak})
            return
        floor = least_budget(plan.problem)
        if floor.bytes > self._budget:
            where = plan.problem.trace.describe_op(floor.op)
            raise BudgetTooSmall(self._budget, floor.bytes, floor.holders, where)
