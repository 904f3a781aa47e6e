"""What a budget costs on a GPU, and whether it changes a bit: one command, under nine minutes.

    python benchmarks/cuda_acceptance.py --output benchmarks/results/cuda.json

Sections, each of which may fail without losing the others; the file is written after each. Those that time nothing
run side by side, and first, while what the timed ones compile is compiled:

- equality: losses and state after 20 steps against plain PyTorch, to the bit, over networks, policies and budgets.
- closeness: gradients of 20 steps with the algorithms that PyTorch takes by itself, TF32 off, each from the state
  that plain PyTorch had: relative differences up to 1e-6, or twice what plain PyTorch differs by from itself.
- budgets: `max_memory_allocated` against the budget, and reserved memory against 1.05 of it, at sizes that matter.
- deep: ResNet-2504 at batch 16 in 12 GB, which is what a Titan X or a K40 has: 12 GiB.

The others have the GPU to themselves:

- overlap: of the copies' time that the simulator says the computation hides, the share that it did hide.
- time: steps that take turns with plain PyTorch and with what users would do, each at the peer's measured peak; and
  steps whose budget does not bind.
- workspaces: what each kind of `workspace=` takes and how fast it is, at the same budget.

Everything that trains is a process of its own (`cuda_worker.py`), with expandable segments unless the environment
says otherwise. The exit status is 2 where there is no GPU, 1 if a result differs or a budget was passed, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from threading import Lock, Thread
from typing import Any

import torch
from cuda_worker import OFFLOADED_BYTES, Spec
from environment import environment, write

from outgrow.networks import find

_START_SECONDS = 120.0
_COMPILE_SECONDS = 180.0
_WARMUP = 8  # a session records two steps, proves its recipes, and settles
_TWELVE_GB = 12 << 30  # the memory of the cards that vDNN and its kin were measured on

# Network, size, batch, share of the plain peak, policies.
_EQUALITY = (
    ("resnet-50", 224, 32, 0.5, ("auto", "vdnn-all", "superneurons", "lru")),
    ("gpt-12x384", 512, 8, 0.6, ("auto", "vdnn-all", "lru")),
    ("unet", 256, 4, 0.6, ("auto", "vdnn-all")),
    ("vgg-16", 224, 64, 0.9, ("auto", "vdnn-all")),
)
_EQUALITY_STEPS = 20
_CLOSE = (("resnet-50", 224, 32, 0.5), ("gpt-12x384", 512, 8, 0.6), ("unet", 256, 4, 0.7), ("vgg-16", 224, 64, 0.9))
_CLOSE_ENOUGH = 1e-6
# Network, size, batch, budget in bytes, or as a share of the plain peak.
_BUDGETS: tuple[tuple[str, int, int, float], ...] = (
    ("vgg-16", 224, 256, _TWELVE_GB),
    ("resnet-50", 224, 128, 0.5),
    ("resnet-152", 224, 64, 0.5),
    ("unet", 512, 8, 0.6),
    ("gpt-12x768", 1024, 8, 0.5),
)
# Network, size, batch, peers; "" is no peer: a budget that does not bind. What takes all to the host gets smaller
# batches, or the host runs out of pinned memory; and all batches are half as large on a GPU of less than 120 GiB.
_TIMED: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("resnet-50", 224, 384, ("per_block", "selective", "compiled:0.5", "")),
    ("gpt-12x768", 1024, 24, ("per_block", "selective", "compiled:0.5", "")),
    ("resnet-50", 224, 128, ("offload_all", "save_on_cpu")),
)
# What times nothing: lanes run side by side, beside what compiles meanwhile, and the groups of each one after the
# other, in some 110 GB; and on a smaller GPU, where compiling comes later.
_LANES = ((("equality",), ("closeness", "budgets")), (("deep",),))
_LANES_ON_SMALL = ((("equality", "closeness"), ("budgets", "deep")),)
_UNTIMED = ("equality", "closeness", "budgets", "deep")
_OVERLAP_SHARE = 0.7
_LEAST_FOR_RESERVED = 2 << 30
_UNBOUND = 1.5  # of the plain peak
_COMPILED = "compiled:"  # how the names of peers begin that torch.compile rewrites
# Where ours are compiled like the peer, and how. Elsewhere eager steps are the faster ones anyway.
_COMPILED_TOO = {("resnet-50", "compiled:0.5"): ("compiled:0.5", "compiled:0.45")}
_KINDS = (None, "memory", "speed", "dynamic")
_WORKSPACES_SHARE = 0.85
_SETTLED = 20  # by then the last plan is the one that stays
_ROUNDS = 4
_STEPS_A_ROUND = 5  # the first of a round finds the device at rest


class WorkerFailed(Exception):
    """A worker said that it failed, died, or took too long."""

    def __init__(self, spec: Spec, message: str, least_bytes: int | None = None) -> None:
        super().__init__(f"{spec.network}{' in a session' if spec.budget else ''} {spec.peer}: {message}")
        self.least_bytes = least_bytes


class Worker:
    """A process that trains when it is told to. It starts at once, and is waited for when it is first used."""

    def __init__(self, spec: Spec, until: float) -> None:
        """It is waited for `until` then at the longest, on the clock of `time.perf_counter`."""
        self.spec = spec
        self._until = until
        command = [sys.executable, str(Path(__file__).with_name("cuda_worker.py")), spec.to_json()]
        usual = {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "TORCHINDUCTOR_COMPILE_THREADS": "4",  # of several processes that compile side by side
        }
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=usual | os.environ,
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._errors: list[str] = []
        self._failed = ""
        Thread(target=self._read, daemon=True).start()
        Thread(target=self._read_errors, daemon=True).start()
        self._began = False

    def run(self, steps: int, limit: float) -> dict[str, Any]:
        """Have it train; 0 steps ask for the hash of its state. `limit` is in seconds."""
        return self._ask(f"{steps}", limit)

    def rest(self) -> None:
        """Have it give memory back that it does not need until it trains on."""
        self._ask("rest", 30)

    def open(self, budget: int) -> None:
        """Have it train in a session from here on."""
        self._ask(f"budget {budget}", _START_SECONDS)

    def gradients(self, steps: int, share: float, limit: float) -> dict[str, Any]:
        """Have it compare gradients of a session with plain ones."""
        return self._ask(f"gradients {steps} {share}", limit)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ask(self, line: str, limit: float) -> dict[str, Any]:
        if self._failed:  # its answer may still come, and would be taken for that to another question
            raise WorkerFailed(self.spec, self._failed)
        if not self._began:
            self._answer(_START_SECONDS)
            self._began = True
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer(limit)

    def _answer(self, limit: float) -> dict[str, Any]:
        try:
            limit = max(1.0, min(limit, self._until - time.perf_counter()))
            line = self._lines.get(timeout=limit)
        except Empty:
            self._failed = f"took longer than {limit:.0f} s"
            raise WorkerFailed(self.spec, self._failed) from None
        if not line:
            self._failed = f"died: {' '.join(self._errors)[-600:]}"
            raise WorkerFailed(self.spec, self._failed)
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise WorkerFailed(self.spec, f"{found['error']}: {found['message']}", found.get("least_bytes"))
        return found

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put("")

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = [*self._errors[-20:], line.strip()]


@dataclass(frozen=True)
class Race:
    """Whom steps are held against, nobody or a peer, and those of ours that are."""

    rival: Worker | None
    ours: Sequence[Worker]

    @property
    def workers(self) -> Iterator[Worker]:
        """All of them."""
        yield from self.ours
        if self.rival is not None:
            yield self.rival


class Bench:
    """The sections, and what they found so far."""

    def __init__(self, output: Path, limit: float, peers: Sequence[str] | None = None) -> None:
        """`limit` is in seconds; `peers` are those that are timed, all if None."""
        self._output = output
        self._limit = limit
        self._peers = peers
        self._began = time.perf_counter()
        self.result: dict[str, Any] = {"environment": environment() | gpu(), "failures": {}}
        self.bad: list[str] = []
        self._saving = Lock()
        self._compiled: dict[tuple[str, str], Race] = {}

    def worker(self, spec: Spec) -> Worker:
        """One that is given up ten seconds before the end."""
        return Worker(spec, self._began + self._limit - 10)

    def close(self) -> None:
        """End what was compiled and had no turn."""
        for worker in chain.from_iterable(race.workers for race in self._compiled.values()):
            worker.close()

    @property
    def left(self) -> float:
        """Seconds that are left for everything."""
        return self._limit - (time.perf_counter() - self._began)

    def section(self, name: str, act: Callable[[], Any]) -> None:
        """Run one section and write down what it found, or why it did not."""
        self.say(f"--- {name}, {self.left:.0f} s left")
        if self.left < 30:
            self.result["failures"][name] = "no time was left"
            self.judge(False, f"{name}: no time is left")
        else:
            try:
                self.result[name] = act()
            except Exception as error:
                self.result["failures"][name] = traceback.format_exc()[-3000:]
                self.judge(False, f"{name} failed: {error}")
        self.save()

    def save(self) -> None:
        """Write what is known by now."""
        with self._saving:
            self.result["seconds"] = time.perf_counter() - self._began
            self.result["bad"] = self.bad
            write(self._output, dict(self.result))

    def note(self, name: str, row: dict[str, Any]) -> dict[str, Any]:
        """Write one row of a section down before the others are there."""
        with self._saving:
            self.result.setdefault(name, []).append(row)
        self.save()
        return row

    def untimed(self, wanted: Sequence[str]) -> None:
        """Run the sections that time nothing, and have the timed ones compile meanwhile, where there is room."""
        acts: list[Callable[[], None]] = [
            partial(self._run_lane, [[name for name in group if name in wanted] for group in lane])
            for lane in (_LANES if is_large() else _LANES_ON_SMALL)
        ]
        if is_large() and "time" in wanted:
            acts.append(self.compile_ahead)
        _side_by_side(acts)

    def _run_lane(self, groups: Sequence[Sequence[str]]) -> None:
        for group in groups:
            _side_by_side([partial(self.section, name, getattr(self, name)) for name in group])

    def say(self, text: str) -> None:
        """Tell who watches."""
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def judge(self, good: bool, what: str) -> bool:
        """Take note of what is not as it has to be."""
        if not good:
            self.bad.append(what)
            self.say(f"NOT AS IT HAS TO BE: {what}")
        return good

    def judge_memory(self, where: str, measured: dict[str, Any], budget: int, *, reserved: bool = True) -> str:
        """Hold what a session took, from its first step on, against its budget; both shares in words."""
        peak, held = measured["peak_allocated"] / budget, measured["peak_reserved"] / budget
        self.judge(peak <= 1, f"{where}: peak {peak:.4f} of the budget")
        self.judge(not reserved or held <= 1.05, f"{where}: reserved {held:.4f} of the budget")
        return f"peak {peak:.3f}, reserved {held:.3f} of the budget"

    # --- the sections ---

    def equality(self) -> list[dict[str, Any]]:
        """Losses and state against plain training."""
        with ThreadPoolExecutor(len(_EQUALITY)) as pool:
            return [row for rows in pool.map(lambda case: self._equality_rows(*case), _EQUALITY) for row in rows]

    def _equality_rows(
        self, name: str, size: int, batch: int, share: float, policies: Sequence[str]
    ) -> list[dict[str, Any]]:
        spec = Spec(name, size, batch, deterministic=True)
        try:
            with self.worker(spec) as plain, self.worker(spec) as again:
                truth = plain.run(_EQUALITY_STEPS, 120) | plain.run(0, 60)
                repeats = again.run(2, 120) | again.run(_EQUALITY_STEPS - 2, 120) | again.run(0, 60)
        except WorkerFailed as error:
            self.judge(False, str(error))
            return [{"network": name, "failure": str(error)}]
        self.judge(truth["digest"] == repeats["digest"], f"{name}: plain PyTorch gives other bits each time")
        # That of steps in which cuDNN knows what it does.
        budget = int(repeats["peak_allocated"] * share)
        with ThreadPoolExecutor(len(policies)) as pool:
            specs = [replace(spec, budget=budget, policy=policy) for policy in policies]
            return list(pool.map(lambda spec: self.note("equality", self._compare(spec, truth, share)), specs))

    def _compare(self, spec: Spec, truth: dict[str, Any], share: float) -> dict[str, Any]:
        row: dict[str, Any] = {"spec": asdict(spec), "share": share}
        where = f"{spec.network} at {share:.0%}, {spec.policy}"
        try:
            with self.worker(spec) as worker:
                ours = worker.run(_EQUALITY_STEPS, 150) | worker.run(0, 60)
        except WorkerFailed as error:
            self.judge(False, f"{where}: {error}")
            return row | {"failure": str(error), "least_bytes": error.least_bytes}
        equal = ours["digest"] == truth["digest"] and ours["losses"] == truth["losses"]
        assert spec.budget is not None
        self.judge(equal, f"{where}: not equal to plain PyTorch")
        # Of a budget of 1 GiB one piece of the allocator's is 2%.
        shares = self.judge_memory(where, ours, spec.budget, reserved=spec.budget >= _LEAST_FOR_RESERVED)
        self.say(f"{where}: {'equal' if equal else 'DIFFERS'}, {shares}")
        return row | {"equal": equal, "inside": ours["peak_allocated"] <= spec.budget, "measured": ours}

    def closeness(self) -> list[dict[str, Any]]:
        """Gradients against plain ones, where PyTorch takes the algorithms that it likes."""
        with ThreadPoolExecutor(len(_CLOSE)) as pool:
            return list(pool.map(lambda case: self.note("closeness", self._close_row(*case)), _CLOSE))

    def _close_row(self, name: str, size: int, batch: int, share: float) -> dict[str, Any]:
        spec = Spec(name, size, batch, tf32=False)
        row: dict[str, Any] = {"spec": asdict(spec), "share": share}
        try:
            with self.worker(spec) as worker:
                row |= worker.gradients(_EQUALITY_STEPS, share, max(150.0, self.left - 30))
        except WorkerFailed as error:
            self.judge(False, f"{name}, TF32 off: {error}")
            return row | {"failure": str(error), "least_bytes": error.least_bytes}
        what = f"{name}, TF32 off: gradients {row['apart']:.1e} from plain ones, those {row['plain_apart']:.1e} apart"
        # Two runs of plain PyTorch may be further apart than that: then twice as far.
        self.judge(row["apart"] <= max(_CLOSE_ENOUGH, 2 * row["plain_apart"]), what)
        self.judge(row["peak_allocated"] <= row["budget"], f"{name}, TF32 off: over its budget")
        self.say(what)
        return row

    def budgets(self) -> list[dict[str, Any]]:
        """Peaks against budgets."""
        with ThreadPoolExecutor(len(_BUDGETS)) as pool:
            return list(pool.map(lambda case: self.note("budgets", self._budget_row(*case)), _BUDGETS))

    def _budget_row(self, name: str, size: int, batch: int, wanted: float) -> dict[str, Any]:
        spec = Spec(name, size, batch, channels_last=_has_images(name))
        row: dict[str, Any] = {"spec": asdict(spec)}
        budget = int(wanted)
        if wanted <= 1:
            try:
                with self.worker(spec) as plain:
                    plain.run(2, 60)
                    row["plain"] = plain.run(2, 60)
            except WorkerFailed as error:
                self.judge(False, str(error))
                return row | {"plain_failure": str(error)}
            budget = int(row["plain"]["peak_allocated"] * wanted)
        row["budget"] = budget
        try:
            with self.worker(replace(spec, budget=budget)) as worker:
                row["ours"] = ours = worker.run(_WARMUP + 4, 120)
        except WorkerFailed as error:
            self.judge(False, f"{spec.network}: {error}")
            return row | {"failure": str(error), "least_bytes": error.least_bytes}
        self.say(f"{spec.network}: {self.judge_memory(spec.network, ours, budget)}")
        return row | {
            "peak_share": ours["peak_allocated"] / budget,
            "reserved_share": ours["peak_reserved"] / budget,
        }

    def time(self) -> list[dict[str, Any]]:
        """Peers, and ours at their peaks, in turns with plain steps."""
        rows: list[dict[str, Any]] = []
        self.compile_ahead()
        with ExitStack() as stack:  # all start at once, and wait for their turn
            cast: list[tuple[Worker, list[Race]]] = []
            for spec, peers in self._timings():
                plain = stack.enter_context(self.worker(spec))
                races = [self._compiled.get((spec.network, peer)) or self._race(spec, peer) for peer in peers]
                for worker in chain.from_iterable(race.workers for race in races):
                    stack.enter_context(worker)
                cast.append((plain, races))
            for plain, races in cast:
                plain.run(2, 60)
                peak = plain.run(2, 60)["peak_allocated"]
                for race in races:
                    if self.left < 30:
                        self.judge(False, f"{plain.spec.network}: the rest is left out, for time")
                        break
                    rows += self._run_race(plain, peak, race)
                plain.close()
        return rows

    def _timings(self) -> Iterator[tuple[Spec, list[str]]]:
        """What trains plain, and the peers that are timed beside it."""
        for name, size, batch, peers in _TIMED:
            wanted = [peer for peer in peers if self._peers is None or peer in self._peers]
            if wanted:
                batch = batch if is_large() else batch // 2
                yield Spec(name, size, batch, channels_last=_has_images(name)), wanted

    def _race(self, spec: Spec, peer: str) -> Race:
        # What a peer sends away, however small, we may as well.
        least = {"offload_all": OFFLOADED_BYTES, "save_on_cpu": 1}.get(peer, spec.least_moved_bytes)
        ways = _COMPILED_TOO.get((spec.network, peer), ("",))
        ours = [self.worker(replace(spec, least_moved_bytes=least, peer=way)) for way in ways]
        return Race(self.worker(replace(spec, peer=peer)) if peer else None, ours)

    def compile_ahead(self) -> None:
        """Have those that compile do it side by side, as each takes a minute of several cores; once for all."""
        races = {
            (spec.network, peer): self._race(spec, peer)
            for spec, peers in self._timings()
            for peer in peers
            if peer.startswith(_COMPILED) and (spec.network, peer) not in self._compiled
        }
        self._compiled |= races
        workers = [worker for race in races.values() for worker in race.workers if worker.spec.peer]
        if workers:
            self.say(f"compiling {len(workers)} networks")
            # Who fails here fails once more in its turn.
            with ThreadPoolExecutor(len(workers)) as pool, suppress(WorkerFailed, OSError):
                list(pool.map(self._warm, workers))

    @staticmethod
    def _warm(worker: Worker) -> None:
        worker.run(1, _COMPILE_SECONDS)
        worker.rest()  # or all that wait for their turn hold the memory of a step

    def _run_race(self, plain: Worker, plain_peak: int, race: Race) -> list[dict[str, Any]]:
        """Each of ours beside a rival at the rival's peak, or beside plain steps at a budget that does not bind."""
        spec, rival = plain.spec, race.rival
        where = f"{spec.network}, batch {spec.batch}, {'unbound' if rival is None else rival.spec.peer}"
        rows: list[dict[str, Any]] = []
        for ours in race.ours:
            rows.append(self.note("time", self._timed(plain, plain_peak, rival, ours)))
            ours.close()
            failure, figures = rows[-1].get("failure"), rows[-1]
            self.say(f"{where}: {failure or {k: round(v, 3) for k, v in figures.items() if isinstance(v, float)}}")
            if failure is None:
                self.judge_memory(where, figures["ours"], figures["budget"])
        if rival is not None:
            rival.close()
        of_whom, most = ("plain", 1.01) if rival is None else ("peer", 1.0)
        best = min((row.get(f"ours_over_{of_whom}", float("inf")) for row in rows), default=float("inf"))
        self.judge(best < most, f"{where}: at best {best:.3f} x {of_whom}")
        return rows

    def _timed(self, plain: Worker, plain_peak: int, rival: Worker | None, ours: Worker) -> dict[str, Any]:
        spec = ours.spec
        name = "unbound" if rival is None else rival.spec.peer
        row: dict[str, Any] = {"network": spec.network, "batch": spec.batch, "peer": name, "ours_is": spec.peer}
        row["plain_peak"] = plain_peak
        everybody = {"plain": plain, "ours": ours}
        budget = int(plain_peak * _UNBOUND)
        try:
            if rival is not None:
                everybody[name] = rival
                rival.run(2, 120)
                found = rival.run(2, 60)
                budget, row["peer_reserved"] = found["peak_allocated"], found["peak_reserved"]
            row |= {"budget": budget, "share": budget / plain_peak}
            ours.open(budget)
            row["log"] = ours.run(_SETTLED, 120)["log"]
            times, last = self._take_turns(everybody)
        except WorkerFailed as error:
            return row | {"failure": str(error), "least_bytes": error.least_bytes}
        row["ours_over_plain"] = median(times["ours"]) / median(times["plain"])
        if rival is not None:
            row["peer_over_plain"] = median(times[name]) / median(times["plain"])
            row["ours_over_peer"] = median(times["ours"]) / median(times[name])
        return row | {"ours": last["ours"], "seconds": times}

    def _take_turns(self, everybody: dict[str, Worker]) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]]]:
        times: dict[str, list[float]] = {name: [] for name in everybody}
        last: dict[str, dict[str, Any]] = {}
        for _ in range(_ROUNDS):
            for name, worker in everybody.items():
                last[name] = worker.run(_STEPS_A_ROUND, 60)
                times[name].append(last[name]["seconds"])
        return times, last

    def overlap(self) -> list[dict[str, Any]]:
        """Copies of policies that only copy."""
        spec = Spec("resnet-50", 224, 128, channels_last=True)
        policies = ("vdnn-all", "accudnn")
        with ExitStack() as stack:  # all start at once, and wait for their turn
            workers = [stack.enter_context(self.worker(replace(spec, policy=policy))) for policy in policies]
            with self.worker(spec) as plain:
                plain.run(2, 60)
                budget = int(plain.run(2, 60)["peak_allocated"] * _OVERLAP_SHARE)
            return [self.note("overlap", self._overlap_row(worker, budget)) for worker in workers]

    def _overlap_row(self, worker: Worker, budget: int) -> dict[str, Any]:
        policy = worker.spec.policy
        row: dict[str, Any] = {"policy": policy, "share": _OVERLAP_SHARE, "budget": budget}
        try:
            worker.open(budget)
            worker.run(_WARMUP, max(10.0, min(120.0, self.left)))
            ours = worker.run(4, 60)
        except WorkerFailed as error:
            self.judge(False, f"{policy}: {error}")
            return row | {"failure": str(error)}
        finally:
            worker.close()
        self.judge_memory(policy, ours, budget)
        row["measured"] = ours
        if not ours.get("foretold_seconds"):
            self.judge(False, f"{policy}: nothing was copied that the simulator says can hide")
            return row
        row["hidden_share"] = hidden = ours["hidden_seconds"] / ours["foretold_seconds"]
        self.judge(hidden >= 0.9, f"{policy}: {hidden:.2f} of what should hide is hidden")
        self.say(f"{policy}: {hidden:.2f} of the copies' time that should hide is hidden")
        return row

    def workspaces(self) -> list[dict[str, Any]]:
        """VGG-16, whose convolutions want the largest workspaces, by what they may hold."""
        spec = Spec("vgg-16", 224, 64)
        with ExitStack() as stack:  # all start at once, and wait for their turn
            plain = stack.enter_context(self.worker(spec))
            workers = [stack.enter_context(self.worker(replace(spec, workspace=kind))) for kind in _KINDS]
            plain.run(2, 60)
            peak = plain.run(2, 60)["peak_allocated"]
            seconds = plain.run(4, 60)["seconds"]
            return [self.note("workspaces", self._workspace_row(worker, peak, seconds)) for worker in workers]

    def _workspace_row(self, worker: Worker, plain_peak: int, plain_seconds: float) -> dict[str, Any]:
        kind, budget = worker.spec.workspace, int(plain_peak * _WORKSPACES_SHARE)
        row: dict[str, Any] = {"workspace": kind, "share": _WORKSPACES_SHARE, "budget": budget}
        try:
            worker.open(budget)
            first = worker.run(_WARMUP, max(10.0, min(120.0, self.left)))
            ours = worker.run(4, 60)
        except WorkerFailed as error:
            self.judge(False, f"workspace {kind}: {error}")
            return row | {"failure": str(error), "least_bytes": error.least_bytes}
        finally:
            worker.close()
        self.judge_memory(f"workspace {kind}", ours, budget)
        row |= {"ours_over_plain": ours["seconds"] / plain_seconds, "first": first, "measured": ours}
        self.say(f"workspace {kind}: {row['ours_over_plain']:.3f} plain steps")
        return row

    def deep(self) -> dict[str, Any]:
        """ResNet-2504 at batch 16 in 12 GB."""
        spec = Spec("resnet-2504", 224, 16, budget=_TWELVE_GB, channels_last=True, momentum=0.0)
        with self.worker(spec) as worker:
            first = worker.run(1, self.left - 20)
            row: dict[str, Any] = {"spec": asdict(spec), "first": first}
            self.result["deep"] = row
            self.save()
            row["rest"] = rest = worker.run(3, self.left - 10)
        self.say(f"resnet-2504: {rest['seconds']:.2f} s a step, {self.judge_memory('resnet-2504', rest, _TWELVE_GB)}")
        return row


def _side_by_side(acts: Sequence[Callable[[], None]]) -> None:
    threads = [Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _has_images(network: str) -> bool:
    return find(network).kind != "text"


def is_large() -> bool:
    """Whether the GPU holds all that may run side by side: some 110 GB."""
    return torch.cuda.get_device_properties(0).total_memory >= 120 << 30


def gpu() -> dict[str, Any]:
    """The GPU, as far as there is anything to say about it."""
    properties = torch.cuda.get_device_properties(0)
    return {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the figures; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*_UNTIMED, "overlap", "time", "workspaces")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cuda.json"), help="a JSON file")
    parser.add_argument("--sections", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--peers", nargs="+", metavar="NAME", help='peers to time; "" is a budget that does not bind')
    parser.add_argument("--seconds", type=float, default=520.0, help="what is not begun by then is left out (520)")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no CUDA device that PyTorch can use: nothing was measured", file=sys.stderr)
        return 2
    bench = Bench(given.output, given.seconds, given.peers)
    try:
        bench.untimed(given.sections)
        for name in names:
            if name in given.sections and name not in _UNTIMED:
                bench.section(name, getattr(bench, name))
    finally:
        bench.close()
    bench.say(f"{len(bench.bad)} results are not as they have to be; figures in {given.output}")
    return 1 if bench.bad else 0


if __name__ == "__main__":
    sys.exit(main())
