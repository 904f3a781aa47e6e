"""The user's handle: gives each training step a budget, and learns from the steps that it sees."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ClassVar, NoReturn, ParamSpec, TypeVar

import torch

from outgrow.errors import BudgetTooSmall, OutgrowError, SessionError
from outgrow.planning.plan import Plan
from outgrow.planning.policies import Policy, policy_of
from outgrow.planning.problem import LEAST_MOVED_BYTES
from outgrow.reporting.page import write_report
from outgrow.reporting.subject import Subject
from outgrow.runtime.backend import open_backend
from outgrow.runtime.convolutions import open_convolutions
from outgrow.runtime.executor import Executor
from outgrow.runtime.faults import is_out_of_memory
from outgrow.runtime.interrupts import Interrupts
from outgrow.runtime.outcome import StepOutcome
from outgrow.runtime.pool import Pool
from outgrow.runtime.recompute import Verdicts
from outgrow.runtime.tiers.disk import SpillFile
from outgrow.runtime.updates import FirstUpdates
from outgrow.session.aftermath import Aftermath
from outgrow.session.kinds import Kinds
from outgrow.session.learning import Planner
from outgrow.session.opening import (
    device_of,
    host_bytes_of,
    memory_of,
    refuse_foreign_plan,
    refuse_what_is_neither,
    workspace_of,
)
from outgrow.session.parallel import refuse_sharded
from outgrow.session.recorded import JITTER_SHARE, LEAST_BASE_BYTES, Recorded
from outgrow.session.refusals import Refusals, refuse_hopeless_budget
from outgrow.session.state import TrainingState
from outgrow.summary import Summary
from outgrow.tracing.capture import as_sequence
from outgrow.tracing.compiled import compiled_modules
from outgrow.tracing.ledger import Ledger
from outgrow.tracing.recorder import ModuleNames, Recorder
from outgrow.units import parse_bytes

_LOG = logging.getLogger(__name__)
# The interpreter of scripts has an error of its own for whatever is raised in them, without its words.
_IN_SCRIPT = "TorchScript"

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Session:
    """Trains inside a budget.

        session = outgrow.Session(model, optimizer, budget="8GiB")
        for x, y in batches:
            with session.step():
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    The first step of each kind runs in cache mode and is recorded; later ones follow a plan. Gradients are those
    of plain PyTorch, to the bit.
    """

    _open: ClassVar[weakref.WeakSet[Session]] = weakref.WeakSet()  # to refuse two sessions over one model

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        budget: int | str,
        policy: str | Policy = "auto",
        plan: Plan | None = None,
        host_budget: int | str | None = None,
        spill_dir: str | Path | None = None,
        allow_tmpfs: bool = False,
        least_moved_bytes: int = LEAST_MOVED_BYTES,
        workspace: str | None = None,
    ) -> None:
        """Open a session.

        Args:
            model: what is trained; several modules as a sequence.
            optimizer: its optimizer or optimizers; may be left out.
            budget: the most that live bytes may reach: bytes, or "8GiB", "800MB", "60%" (of the device's memory,
                which is the machine's RAM where the model is on the CPU).
            policy: how plans are made: one of the names in `outgrow.policies()`, or a `Policy` of your own.
            plan: what the first steps follow, made before (`outgrow.tune`, `Plan.load`) for this step and a budget
                that is no larger. If it was made from a measured trace, nothing is recorded or searched for while
                steps are as it says.
            host_budget: of a model on a GPU, the most pinned host memory that what leaves it may take, in the same
                terms ("60%" is of the machine's RAM); default: half of the RAM that is free. What has no room there
                goes to the disk.
            spill_dir: a folder on a disk for what is offloaded; default: the system's folder for temporary files.
            allow_tmpfs: take a spill folder that is in RAM all the same.
            least_moved_bytes: smaller values stay where they are, in bytes.
            workspace: of a model on a GPU, how convolutions get memory for their work. None: as without a session, so
                that results are plain PyTorch's to the bit. "memory": the way that holds least. "speed": the
                fastest, and values leave for its workspace. "dynamic": at each convolution the fastest whose
                workspace is free at that moment. With the extra `cudnn` these are chosen among the plans of cuDNN's
                frontend, without it by PyTorch (`torch.backends.cudnn.benchmark`). They may differ from plain
                PyTorch, and from each other's runs, in the last bits.

        Raises:
            InvalidBudget: the budget cannot be read.
            BudgetTooSmall: it does not even hold the training state.
            HostBudgetTooSmall: the host budget does not even hold the buffers on the way to the disk.
            UnknownPolicy: there is no such policy.
            UnknownWorkspace: there are no such workspaces, or the model is on the CPU.
            SpillError: the spill folder cannot be used.
            SessionError: another session is open over this model, there is a host budget for a model on the CPU, or
                the plan is for another budget or device.
            UnsupportedDevice: the model is neither on the CPU nor on one CUDA device.
            UnsupportedModel: the model is sharded over processes (`fully_shard`, `FullyShardedDataParallel`).
        """
        self._closed = True  # until everything below has worked
        models, optimizers = as_sequence(model), as_sequence(optimizer)
        refuse_what_is_neither(models if model is not None else (None,), optimizers)
        refuse_sharded(models)
        self._device = device_of(models)
        if not isinstance(least_moved_bytes, int) or least_moved_bytes < 1:
            raise SessionError(f"least_moved_bytes is {least_moved_bytes!r}: it must be a whole number, 1 or more")
        kind_of_workspace = workspace_of(self._device, workspace)
        host_bytes = host_bytes_of(self._device, host_budget)
        self.budget_bytes = parse_bytes(budget, total_bytes=memory_of(self._device))
        refuse_foreign_plan(plan, self.budget_bytes, self._device)
        self._policy = policy_of(policy)
        self._ledger = Ledger(self._device.type, self._device.index)
        self._state = TrainingState(models, optimizers, self._ledger)
        self._settings = {"model": _classes(models), "optimizer": _classes(optimizers) or "none"}
        self._refuse_second_session()
        if self._device.type == "cpu":  # elsewhere the allocator is asked, and knows of them
            self._ledger.hide(self._state.hidden_bucket_bytes())
        refuse_hopeless_budget(self.budget_bytes, self._state, self._ledger)
        self._least_moved = least_moved_bytes
        self._spill = SpillFile(spill_dir, allow_tmpfs=allow_tmpfs)
        try:
            backend = open_backend(self._device, self._ledger, self.budget_bytes, host_bytes, self._spill)
        except BaseException:
            self._spill.close()
            raise
        self._copies, self._memory = backend.copies, backend.memory
        convolutions = open_convolutions(kind_of_workspace, self._device, _weakly(self._free_bytes))
        self._watches_all = convolutions.needs_all
        planner = Planner(self._policy, self._memory, margin_bytes=backend.memory.margin_bytes)
        self._interrupts = Interrupts()
        self._held = ExitStack()  # in a step: they wait
        self._pool = Pool(
            self._ledger,
            self.budget_bytes,
            backend.places,
            self._copies,
            self._memory,
            least_moved_bytes,
            backend.fast_path,
            self._interrupts,
            backend.strays,
        )
        self._kinds = Kinds(self._state.wrappers.syncs(), self._pool.make_way)
        compiled = compiled_modules(models)
        self._executor = Executor(
            self._ledger,
            self._pool,
            backend,
            self.budget_bytes,
            least_moved_bytes,
            _weakly(self._too_small),
            _weakly(self._state.gradients),
            _weakly(self._state.may_be_lent),
            self._kinds,
            convolutions,
            compiled,
            self._interrupts,
        )
        recorded = Recorded(
            self.budget_bytes,
            self._device,
            self._kinds,
            planner,
            self._ledger,
            self._pool,
            self._copies,
            self._memory,
            self._interrupts,
            least_moved_bytes,
        )
        if plan is not None and compiled and (plan.parks or plan.reuses):
            _LOG.info("the plan is for the model as it was before it was compiled: the first step is recorded")
        elif plan is not None:
            self._kinds.expect(plan)
        self._in_step = False
        self._thread = 0  # that the step is on
        self._begun: Plan | None = None  # what the step that is open goes by
        self._aftermath = Aftermath(
            self.budget_bytes, self._policy.name, self._kinds, planner, recorded, self._memory, self._interrupts
        )
        self._first_updates = FirstUpdates(self._optimizer_begins)
        self._refusals = Refusals(self.budget_bytes, self._state, self._ledger, self._pool, self._first_updates)
        self._closed = False
        Session._open.add(self)

    # --- what users call ---

    def step(self) -> Step:
        """A context for one training step: forward, loss, backward and, if there is one, the optimizer."""
        return Step(self)

    def summary(self) -> Summary:
        """The figures of the last step.

        Raises:
            SessionError: no step was finished yet.
        """
        if not (history := self.history):
            raise SessionError("no step was finished yet: run one inside `with session.step():`")
        return history[-1]

    @property
    def history(self) -> tuple[Summary, ...]:
        """The figures of the last steps, at most 1000, the oldest first."""
        self._aftermath.read_clock(adapt=not self._in_step)
        return tuple(self._aftermath.history)

    def report(self, path: str | Path, *, title: str | None = None) -> None:
        """Write what the session plans and measures as one HTML file, for any browser and without a network.

        It shows live bytes over the step beside the plain step's and the budget, what the device and the two copy
        lanes do and when, what holds the peak, the decisions module by module, and predictions beside measurements.
        A session may be reported on at any time after its first step, closed or not.

        Args:
            path: where the file goes; one that is there is replaced, once the new one is whole.
            title: the heading; default: the names of the models' classes.

        Raises:
            SessionError: there is no plan yet.
            ReportError: the file cannot be written.
        """
        history = self.history
        plan = self.plan
        if plan is None:
            raise SessionError("there is no plan to report on yet: run a step inside `with session.step():` first")
        names = self._settings["model"]
        first = self._kinds.steps - len(history) + 1
        subject = Subject(title or names, plan, history, first, self._settings, self.budget_bytes)
        write_report(path, subject)

    @property
    def live_bytes(self) -> int:
        """Bytes alive on the device now, as far as the session sees them."""
        return self._ledger.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest measured peak of any step so far, in bytes."""
        return self._aftermath.peak_bytes

    @property
    def plan(self) -> Plan | None:
        """The plan that the next step will follow; None before there is one."""
        return None if self._kinds.expected is None else self._kinds.expected.plan

    def close(self) -> None:
        """End the session: saved values that are still wanted come back, threads end, the spill file goes.

        Closing twice is harmless.

        Raises:
            SessionError: a step is open.
            SpillError, DeviceOutOfMemory, BudgetTooSmall, TraceMismatch: a saved value could not come back; all else
                is closed.
        """
        if self._closed:
            return
        if self._in_step:
            raise SessionError("close the session after its step, not inside it")
        self._closed = True
        Session._open.discard(self)
        with self._interrupts.held(), ExitStack() as undo:
            for part in (self._ledger, self._executor, self._memory, self._pool, self._first_updates):
                undo.callback(part.close)
            self._aftermath.read_clock(adapt=False)
            self._executor.kept = None
        self._state.let_go()

    def __reduce__(self) -> NoReturn:
        raise SessionError(
            "a session cannot be copied or pickled: save the state_dict() of its model and optimizer, and plan.save()"
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OutgrowError:  # what could not come back belongs to the step that failed
            if error is None:
                raise

    def __del__(self) -> None:
        on_lane = threading.current_thread().name.startswith("outgrow-")  # cannot wait for its own end
        if not getattr(self, "_closed", True) and not self._in_step and not on_lane:
            self.close()

    def _free_bytes(self) -> int:
        """Bytes of the budget that nobody has now."""
        self._memory.count(self.budget_bytes)
        return self.budget_bytes - self._ledger.live_bytes

    # --- one step ---

    def _begin(self) -> None:
        if self._closed:
            raise SessionError("the session is closed: open a new one")
        if self._in_step:
            raise SessionError("a step is open already: steps of a session do not nest")
        here = threading.get_ident()
        if any(other._in_step and other._thread == here for other in Session._open):
            raise SessionError(
                "a step of another session is open: steps do not nest. Models that train together share one session: "
                "outgrow.Session([model, other], [optimizer, its_optimizer], budget=...)"
            )
        with ExitStack() as undo:
            undo.enter_context(self._interrupts.held())
            self._open_step()
            self._held = undo.pop_all()
        self._thread = here
        self._in_step = True
        self._executor.kept = self  # should nobody hold the step that is open

    def _open_step(self) -> None:
        self._executor.come_here()
        self._layouts = self._state.wrappers.layouts()
        kind = self._kinds.begin(self._state.wrappers.syncs(), self._ledger.live_bytes)
        plan = None if kind is None else kind.plan
        if plan is not None and plan.spill_bytes:
            self._pool.make_way(plan.spill_bytes)
        kinds = self._state.kinds()
        records = self._kinds.should_record
        self._recorder = Recorder(self._ledger, ModuleNames(self._state.models), kinds) if records else None
        watch = records or plan is None or self._aftermath.wary or self._watches_all or plan.needs_watch
        # What the plan knows nothing of may take its room; graphs of earlier steps have to leave for it.
        watch = watch or self._is_fuller_than(plan) or any(True for _ in self._pool.spare())
        watch = watch or self._kinds.come_in_no_order  # what goes by another plan later has its ops pass then, too
        verdicts = Verdicts() if kind is None else kind.verdicts
        if self._recorder is not None:
            self._recorder.start(self._state.tensors())
        self._executor.begin(
            plan,
            verdicts,
            kinds,
            self._recorder,
            watch=watch,
            fits=kind is not None and kind.fits,
            limits=kind.held_from_begin if kind is not None and self._kinds.are_ragged else None,
            is_foreign=kind is not None and kind.is_foreign,
        )
        self._begun = plan
        self._refusals.begin()

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """An optimizer is about to make its state, of which no plan knows."""
        if self._in_step and self._thread == threading.get_ident():
            self._executor.watch()
            if not has_closure:  # which computes, and is refused what it computes with
                self._refusals.update_begins(optimizer)

    def _end(self, error: BaseException | None) -> None:
        if self._in_step and threading.get_ident() != self._thread:
            raise SessionError("a step ends on the thread that it began on: leave its `with` block there")
        with self._held:
            self._close_step(error)

    def _close_step(self, error: BaseException | None) -> None:
        recorder, self._recorder = self._recorder, None
        try:
            with self._interrupts.shut():
                outcome = self._executor.end()
        finally:
            self._in_step = False
            self._executor.kept = self if self._pool.has_entries else None
        self._aftermath.measured(outcome)
        if error is not None:
            self._failed(error, outcome)
            return
        if outcome.failure is not None:
            raise outcome.failure
        finish, is_laid_out = None, True
        if recorder is not None:
            finish = partial(recorder.finish, self._state.kinds(), self._device.type, measured=True)
            is_laid_out = self._state.wrappers.layouts() == self._layouts
        self._aftermath.went_well(outcome, self._begun, finish, is_laid_out=is_laid_out)

    def _failed(self, error: BaseException, outcome: StepOutcome) -> None:
        """The step that is over raised an error."""
        if is_out_of_memory(error):
            self._aftermath.wary = True
        if outcome.failure is not None:
            error.add_note(str(outcome.failure))
        in_script = self._refusals.last() if _IN_SCRIPT in str(error) else None
        refusal = error if isinstance(error, BudgetTooSmall) else in_script
        if refusal is not None:
            self._refusals.foresee(refusal)
            self._kinds.refused(is_strange=not outcome.followed)
        if in_script is not None:
            raise in_script from error

    def _is_fuller_than(self, plan: Plan | None) -> bool:
        """Whether more is there as a step begins than its plan reckons with."""
        if plan is None:
            return True
        foreseen = plan.problem.trace.bytes_before + plan.problem.base_bytes
        return self._ledger.live_bytes > foreseen + max(LEAST_BASE_BYTES, self.budget_bytes // JITTER_SHARE)

    # --- refusals ---

    def _refuse_second_session(self) -> None:
        mine = self._state.parameters().keys()

        def is_open() -> bool:
            return any(mine & other._state.parameters().keys() for other in Session._open)

        if is_open():
            gc.collect()  # nobody may hold that session any more
        if is_open():
            raise SessionError("another session is open over this model: close it first")

    def _too_small(self, needed: int, where: str) -> Exception:
        return self._refusals.too_small(needed, where)


class Step:
    """One training step of a session; use it with `with`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> Step:
        self._session._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._session._end(error)


def _classes(items: Sequence[object]) -> str:
    return ", ".join(type(item).__name__ for item in items)


def _weakly(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A session's method, for its parts: a session that nobody holds any more ends at once, and holds no model."""
    weak = weakref.WeakMethod(method)

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        strong = weak()
        assert strong is not None, "a step, and a graph that wants values of it, hold their session"
        return strong(*args, **kwargs)

    return call
