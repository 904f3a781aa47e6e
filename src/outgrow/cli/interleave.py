"""Times training steps of several set-ups turn by turn, each in a process of its own.

A machine's speed wavers over minutes; steps that take turns waver together, so the ratio of their medians says
what the set-ups differ in. Processes of their own keep one set-up's heap out of the other's way. `outgrow compare
--measure` and the benchmarks use it.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import IO, Any

from outgrow.cli.options import Options
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
        environment: variables that its process has besides those of this one.
    """

    name: str
    options: Options
    prepare: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def warmup(self) -> int:
        """Steps until its steps are alike."""
        return PLAIN_WARMUP if self.options.budget is None else SESSION_WARMUP

    def to_json(self) -> str:
        """For the command line of its process."""
        return json.dumps(asdict(self), default=str)  # a folder is no JSON

    @classmethod
    def from_json(cls, text: str) -> Setup:
        """The reverse of `to_json`."""
        document = json.loads(text)
        options = document["options"]
        folder = options["spill_dir"]
        options["spill_dir"] = None if folder is None else Path(folder)
        return cls(document["name"], Options(**options), tuple(document["prepare"]), document["environment"])


@dataclass(frozen=True)
class Row:
    """One step: its times in seconds, its loss (None if that diverged), and the session's figures if there is one."""

    seconds: float
    user_seconds: float
    system_seconds: float
    page_faults: int
    loss: float | None
    summary: Summary | None

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Row:
        """From what a process reported."""
        summary = document["summary"]
        return cls(**{**document, "summary": None if summary is None else Summary(**summary)})

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
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        # The process finds the modules that this one finds.
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, setup.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **path, **setup.environment},
        )

    def ready(self, limit_seconds: float | None = None) -> None:
        """Wait until its model is built.

        Raises:
            SetupFailed: it could not be; so do the others below.
        """
        self._answer(limit_seconds)

    def step(self, limit_seconds: float | None = None) -> Row:
        """Run one step and tell what it was."""
        return Row.from_document(self._ask("step", limit_seconds))

    def plan(self) -> PlanFigures | None:
        """What the plan of the next step says; None without a session or before its plan."""
        figures = self._ask("plan")["plan"]
        return None if figures is None else PlanFigures(**figures)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()

    def _ask(self, word: str, limit_seconds: float | None = None) -> dict[str, Any]:
        assert self._process.stdin is not None
        # Who died says so below, when no answer comes.
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
        return self._answer(limit_seconds)

    def _answer(self, limit_seconds: float | None) -> dict[str, Any]:
        assert self._process.stdout is not None
        # One line answers one question, so nothing waits in the buffer of `readline` that select would not see.
        if limit_seconds is not None and not select.select([self._process.stdout], [], [], limit_seconds)[0]:
            self._kill()
            raise SetupFailed(self.setup.name, Failure("TimeoutError", f"took longer than {limit_seconds:.0f} s"))
        line = self._process.stdout.readline()
        if not line:
            raise SetupFailed(self.setup.name, Failure("Died", self._last_words()))
        document: dict[str, Any] = json.loads(line)
        if "failure" in document:
            raise SetupFailed(self.setup.name, Failure(**document["failure"]))
        return document

    def _last_words(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        words = " ".join(self._stderr.read().decode(errors="replace").split())
        return f"its process ended with {code}: {words[-_STDERR_TAIL:]}"

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()


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


def _work(setup: Setup, questions: IO[str], answers: IO[str]) -> None:
    """Build what the set-up says, then answer each question with one line of JSON."""

    def answer(document: Mapping[str, Any]) -> None:
        print(json.dumps(document), file=answers, flush=True)

    # The model and what prepares it may raise anything: whoever asked decides what to make of it.
    try:
        _answer_all(setup, questions, answer)
    except Exception as error:
        least = error.least_bytes if isinstance(error, BudgetTooSmall) else None
        message = " ".join(str(error).split()) or repr(error)
        answer({"failure": asdict(Failure(type(error).__name__, message, least))})


def _answer_all(setup: Setup, questions: IO[str], answer: Callable[[Mapping[str, Any]], None]) -> None:
    from outgrow.cli.job import make_job
    from outgrow.cli.train import open_session, timed_step

    job = make_job(setup.options)
    batches = job.batches()
    model, optimizer = job.build()
    if setup.prepare:
        module, function, *arguments = setup.prepare
        getattr(import_module(module), function)(model, *arguments)
    session = None if job.budget_bytes is None else open_session(job, model, optimizer)
    answer({"ready": True})
    for question in questions:
        if question.strip() == "plan":
            plan = None if session is None else session.plan
            answer({"plan": None if plan is None else asdict(_figures(plan))})
            continue
        batch = next(batches)
        before = resource.getrusage(resource.RUSAGE_SELF)
        loss, seconds = timed_step(job, model, optimizer, (batch,), session)
        after = resource.getrusage(resource.RUSAGE_SELF)
        row = Row(
            seconds=seconds,
            user_seconds=after.ru_utime - before.ru_utime,
            system_seconds=after.ru_stime - before.ru_stime,
            page_faults=after.ru_minflt - before.ru_minflt,
            loss=loss if math.isfinite(loss) else None,
            summary=None if session is None else session.summary(),
        )
        answer(asdict(row))
    if session is not None:
        session.close()


def _figures(plan: Plan) -> PlanFigures:
    return PlanFigures(plan.least_budget_bytes, plan.simulate().plain_step_seconds)


def _main() -> None:
    # What libraries print must not come between the answers: it goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Ctrl-C reaches the whole group; whoever asks ends this process.
    with suppress(KeyboardInterrupt):
        _work(Setup.from_json(sys.argv[1]), sys.stdin, answers)


if __name__ == "__main__":
    _main()
