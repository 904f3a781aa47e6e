"""Times training steps of several set-ups turn by turn, each in a process of its own.

A machine's speed wavers over minutes; steps that take turns waver together, so the ratio of their medians says
what the set-ups differ in. Processes of their own keep one set-up's heap out of the other's way. `outgrow compare
--measure` and the benchmarks use it.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from outgrow.cli.options import Options
from outgrow.cli.processes import forking, spawning
from outgrow.errors import BudgetTooSmall, OutgrowError
from outgrow.planning.plan import Plan
from outgrow.summary import Summary

UNBOUNDED_BYTES = 1 << 62  # a budget that nothing reaches

# glibc's settings that an open session chooses for itself (`runtime/tiers/heap.py`), for a plain run.
HEAP_KEPT: Mapping[str, str] = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}

SESSION_WARMUP = 7  # cold, recorded, proofs of recipes, three that set the plan's times right, and one more
PLAIN_WARMUP = 2  # cold, and one with the optimizer's state in its place
_CLOSE_SECONDS = 20.0  # a process that was told to end and takes longer is killed
_STDERR_TAIL = 400  # characters of what a process that died had to say


@dataclass(frozen=True)
class Setup:
    """One way to train one network.

    Attributes:
        name: what it is called in one comparison; no two of them share it.
        options: what to train and how; without a budget, plain PyTorch.
        prepare: what changes the model before it trains: a module, a function in it, and strings that the function
            gets after the model. Empty for nothing.
        environment: variables that its process has besides those of this one, from its very begin.
    """

    name: str
    options: Options
    prepare: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def warmup(self) -> int:
        """Steps until its steps are alike."""
        return PLAIN_WARMUP if self.options.budget is None else SESSION_WARMUP


@dataclass(frozen=True)
class Row:
    """One step: its times in seconds, its loss (None if that diverged), and the session's figures if there is one."""

    seconds: float
    user_seconds: float
    system_seconds: float
    page_faults: int
    loss: float | None
    summary: Summary | None

    def to_document(self) -> dict[str, Any]:
        """As plain data for JSON, the session's figures beside the others."""
        document = asdict(self)
        return document | (document.pop("summary") or {})


@dataclass(frozen=True)
class PlanFigures:
    """What a session's plan says of its step: the least budget that any plan can hold, and a plain step's seconds."""

    least_budget_bytes: int
    plain_step_seconds: float


@dataclass(frozen=True)
class Failure:
    """Why a set-up could not go on: the error's class and message, and the least budget in bytes if it named one."""

    kind: str
    message: str
    least_bytes: int | None = None


class SetupFailed(OutgrowError):
    """A set-up raised an error, died, or took too long."""

    def __init__(self, name: str, failure: Failure) -> None:
        self.failure = failure
        super().__init__(f"{name}: {failure.message}")


@dataclass(frozen=True)
class Run:
    """What came of one set-up: its measured steps, or the failure that ended it.

    `losses` are those of all its steps, the warm-up's too. `plan` is what the last plan says; None without a session.
    """

    setup: Setup
    rows: tuple[Row, ...]
    losses: tuple[float | None, ...]
    plan: PlanFigures | None = None
    failure: Failure | None = None

    @property
    def seconds(self) -> float:
        """Median time of a step."""
        return median(row.seconds for row in self.rows)

    @property
    def summaries(self) -> list[Summary]:
        """The session's figures of each step."""
        return [row.summary for row in self.rows if row.summary is not None]

    @property
    def peak_bytes(self) -> int:
        """The highest live bytes of the measured steps; there must be a session."""
        return max(summary.measured_peak_bytes for summary in self.summaries)


class Worker:
    """A process that runs one step each time it is asked, and sleeps meanwhile."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._errors = tempfile.NamedTemporaryFile()  # noqa: SIM115 - it lives as long as the process
        context = spawning() if setup.environment else forking()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(setup, theirs, self._errors.name))
        # The process that others are forked off finds the modules that this one finds.
        with _environment({"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **setup.environment}):
            self._process.start()
        theirs.close()

    def ready(self, limit_seconds: float | None = None) -> None:
        """Wait until its model is built.

        Raises:
            SetupFailed: it could not be; so do the others below.
        """
        self._answer(limit_seconds)

    def step(self, limit_seconds: float | None = None) -> Row:
        """Run one step and tell what it was."""
        row: Row = self._ask("step", limit_seconds)
        return row

    def plan(self) -> PlanFigures | None:
        """What the plan of the next step says; None without a session or before its plan."""
        figures: PlanFigures | None = self._ask("plan")
        return figures

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(_CLOSE_SECONDS)
        if self._process.is_alive():
            self._kill()
        self._errors.close()

    def _ask(self, word: str, limit_seconds: float | None = None) -> Any:
        # Who died says so below, when no answer comes.
        with suppress(BrokenPipeError):
            self._pipe.send(word)
        return self._answer(limit_seconds)

    def _answer(self, limit_seconds: float | None) -> Any:
        if limit_seconds is not None and not self._pipe.poll(limit_seconds):
            self._kill()
            raise SetupFailed(self.setup.name, Failure("TimeoutError", f"took longer than {limit_seconds:.0f} s"))
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise SetupFailed(self.setup.name, Failure("Died", self._last_words())) from None
        if isinstance(answer, Failure):
            raise SetupFailed(self.setup.name, answer)
        return answer

    def _last_words(self) -> str:
        self._process.join()
        words = " ".join(self._errors.read().decode(errors="replace").split())
        return f"its process ended with {self._process.exitcode}: {words[-_STDERR_TAIL:]}"

    def _kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process has these variables too."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def interleave(
    setups: Sequence[Setup],
    rounds: int,
    steps: int | Mapping[str, int] = 1,
    *,
    on_step: Callable[[Setup], None] = lambda setup: None,
    in_doubt: Callable[[Mapping[str, Sequence[Row]]], bool] = lambda rows: False,
    doubt_rounds: int = 0,
    limit_seconds: float | None = None,
) -> dict[str, Run]:
    """Train all set-ups, so many rounds after their warm-up, in each of which every one takes some steps in turn.

    All processes live at once. One that fails is left out from there on.

    Args:
        setups: what to train.
        rounds: how often all take turns.
        steps: measured steps of each turn, of all alike or by the set-ups' names.
        on_step: called after each step, those of the warm-up too.
        in_doubt: given the measured steps of each after the last round, says whether `doubt_rounds` more are wanted;
            it is asked once, and all rounds count alike.
        doubt_rounds: how many those are.
        limit_seconds: the most that one step, or building a model, may take.
    """
    rows: dict[str, list[Row]] = {setup.name: [] for setup in setups}
    losses: dict[str, list[float | None]] = {setup.name: [] for setup in setups}
    failures: dict[str, Failure] = {}
    plans: dict[str, PlanFigures | None] = {}
    with _workers(setups) as workers:

        def turn(worker: Worker, count: int) -> list[Row]:
            found: list[Row] = []
            if worker.setup.name not in failures:
                try:
                    for _ in range(count):
                        found.append(worker.step(limit_seconds))
                        losses[worker.setup.name].append(found[-1].loss)
                        on_step(worker.setup)
                except SetupFailed as error:
                    failures[worker.setup.name] = error.failure
            return found

        for worker in workers:  # before anybody's first step, which a neighbour's start would slow down
            try:
                worker.ready(limit_seconds)
            except SetupFailed as error:
                failures[worker.setup.name] = error.failure
        for worker in workers:
            turn(worker, worker.setup.warmup)
        for number in range(rounds + doubt_rounds):
            if number == rounds and not in_doubt(rows):
                break
            # Every other round goes backwards, so that nobody always runs after the same neighbour.
            for worker in workers if number % 2 == 0 else reversed(workers):
                name = worker.setup.name
                rows[name] += turn(worker, steps if isinstance(steps, int) else steps[name])
        for worker in workers:
            if worker.setup.name not in failures:
                plans[worker.setup.name] = worker.plan()
    return {
        setup.name: Run(
            setup,
            tuple(rows[setup.name]),
            tuple(losses[setup.name]),
            plans.get(setup.name),
            failures.get(setup.name),
        )
        for setup in setups
    }


def ratio(found: Mapping[str, Run], ours: str, base: str) -> float:
    """Ratio of the medians of step seconds."""
    return found[ours].seconds / found[base].seconds


@dataclass(frozen=True)
class Bounds:
    """Between which budgets plans have something to do: the least that any can hold, and a plain step's peak."""

    least_budget_bytes: int
    plain_peak_bytes: int


def live_bounds(setup: Setup) -> Bounds:
    """The measured peak of live bytes of a set-up that nothing limits, and the least budget for it.

    A session that keeps everything watches; the set-up's own budget and policy do not count.

    Raises:
        SetupFailed: it could not be trained.
    """
    watched = replace(setup.options, budget=str(UNBOUNDED_BYTES), policy="keep")
    worker = Worker(replace(setup, options=watched))
    try:
        worker.ready()
        # Two that are recorded, and so watched, and one under the plan, whose prediction has the last word: what a
        # step leaves behind, as its loss, is there all through the next.
        summaries = [worker.step().summary for _ in range(3)]
        plan = worker.plan()
    finally:
        worker.close()
    assert plan is not None, "there is one after the first step"
    peaks = [(item.measured_peak_bytes, item.predicted_peak_bytes or 0) for item in summaries if item is not None]
    return Bounds(plan.least_budget_bytes, max(max(pair) for pair in peaks))


def live_peak_bytes(setup: Setup) -> int:
    """The measured peak of live bytes of a set-up that nothing limits, once its optimizer state is there."""
    return live_bounds(setup).plain_peak_bytes


@contextmanager
def _workers(setups: Sequence[Setup]) -> Iterator[list[Worker]]:
    started: list[Worker] = []
    try:
        for setup in setups:
            started.append(Worker(setup))  # noqa: PERF401 - those that did start must end, if another does not
        yield started
    finally:
        for worker in started:
            worker.close()


# --- the process of one set-up ---


def _main(setup: Setup, pipe: Connection, errors: str) -> None:
    """What the process does, from its begin to its end; what libraries print goes to a file."""
    written = os.open(errors, os.O_WRONLY | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    # Ctrl-C reaches the whole group; whoever asks ends this process.
    with suppress(KeyboardInterrupt):
        _work(setup, _received(pipe), pipe.send)


def _received(pipe: Connection) -> Iterator[str]:
    with suppress(EOFError):
        while True:
            yield pipe.recv()


def _work(setup: Setup, questions: Iterable[str], answer: Callable[[object], None]) -> None:
    """Build what the set-up says, then answer each question."""
    # The model and what prepares it may raise anything: whoever asked decides what to make of it.
    try:
        _answer_all(setup, questions, answer)
    except Exception as error:
        least = error.least_bytes if isinstance(error, BudgetTooSmall) else None
        message = " ".join(str(error).split()) or repr(error)
        answer(Failure(type(error).__name__, message, least))


def _answer_all(setup: Setup, questions: Iterable[str], answer: Callable[[object], None]) -> None:
    from outgrow.cli.job import make_job
    from outgrow.cli.train import open_session, timed_step

    job = make_job(setup.options)
    batches = job.batches()
    model, optimizer = job.build()
    if setup.prepare:
        module, function, *arguments = setup.prepare
        getattr(import_module(module), function)(model, *arguments)
    session = None if job.budget_bytes is None else open_session(job, model, optimizer)
    answer(None)
    for question in questions:
        if question == "plan":
            plan = None if session is None else session.plan
            answer(None if plan is None else _figures(plan))
            continue
        batch = next(batches)
        before = resource.getrusage(resource.RUSAGE_SELF)
        loss, seconds = timed_step(job, model, optimizer, (batch,), session)
        after = resource.getrusage(resource.RUSAGE_SELF)
        answer(
            Row(
                seconds=seconds,
                user_seconds=after.ru_utime - before.ru_utime,
                system_seconds=after.ru_stime - before.ru_stime,
                page_faults=after.ru_minflt - before.ru_minflt,
                loss=loss if math.isfinite(loss) else None,
                summary=None if session is None else session.summary(),
            )
        )
    if session is not None:
        session.close()


def _figures(plan: Plan) -> PlanFigures:
    return PlanFigures(plan.least_budget_bytes, plan.simulate().plain_step_seconds)
