"""What a budget costs on a GPU, and whether it changes a bit: one command, under nine minutes.

    python benchmarks/cuda_acceptance.py --output benchmarks/results/cuda.json

Sections, each of which may fail without losing the others; the file is written after each:

- equality: losses and state against plain PyTorch, to the bit, over networks, policies and budgets.
- budgets: `max_memory_allocated` against the budget, and reserved memory against 1.05 of it, at sizes that matter.
- time: steps that take turns with plain PyTorch and with what users would do, each at the peer's measured peak.
- overlap: the share of its copies' time for which the device did not stand still.
- workspaces: what each kind of `workspace=` takes and how fast it is, at the same budget.
- deep: ResNet-2504 at batch 16 in 12 GB, which is what a Titan X or a K40 has: 12 GiB.

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from threading import Thread
from typing import Any

import torch
from cuda_worker import Spec
from environment import environment, write

from outgrow.networks import find

_LIMIT_SECONDS = 520.0
_START_SECONDS = 60.0
_WARMUP = 6  # a session records two steps, proves its recipes, and settles
_TWELVE_GB = 12 << 30  # the memory of the cards that vDNN and its kin were measured on

# Network, size, batch, share of the plain peak, policies.
_EQUALITY = (
    ("resnet-50", 224, 32, 0.5, ("auto", "vdnn-all", "superneurons", "lru")),
    ("gpt-12x384", 512, 8, 0.6, ("auto", "vdnn-all", "lru")),
    ("unet", 256, 4, 0.6, ("auto", "vdnn-all")),
    ("vgg-16", 224, 16, 0.7, ("auto", "vdnn-all")),
)
_EQUALITY_STEPS = 6
# Network, size, batch, budget in bytes, or as a share of the plain peak.
_BUDGETS: tuple[tuple[str, int, int, float], ...] = (
    ("vgg-16", 224, 256, _TWELVE_GB),
    ("resnet-50", 224, 128, 0.5),
    ("resnet-152", 224, 64, 0.5),
    ("unet", 512, 8, 0.6),
    ("gpt-12x768", 1024, 8, 0.5),
)
_TIMED = (("resnet-50", 224, 128), ("gpt-12x768", 1024, 8))
_KINDS = (None, "memory", "speed", "dynamic")
_PEERS = ("per_block", "selective", "save_on_cpu")
_ROUNDS = 4
_STEPS_A_ROUND = 3


class WorkerFailed(Exception):
    """A worker said that it failed, died, or took too long."""

    def __init__(self, spec: Spec, message: str, least_bytes: int | None = None) -> None:
        super().__init__(f"{spec.network}{' in a session' if spec.budget else ''} {spec.peer}: {message}")
        self.least_bytes = least_bytes


class Worker:
    """A process that trains when it is told to. It starts at once, and is waited for when it is first used."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        command = [sys.executable, str(Path(__file__).with_name("cuda_worker.py")), spec.to_json()]
        usual = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
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
        Thread(target=self._read, daemon=True).start()
        Thread(target=self._read_errors, daemon=True).start()
        self._began = False

    def run(self, steps: int, limit: float) -> dict[str, Any]:
        """Have it train; 0 steps ask for the hash of its state. `limit` is in seconds."""
        if not self._began:
            self._answer(_START_SECONDS)
            self._began = True
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._answer(limit)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _answer(self, limit: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(1.0, limit))
        except Empty:
            raise WorkerFailed(self.spec, f"took longer than {limit:.0f} s") from None
        if not line:
            raise WorkerFailed(self.spec, f"died: {' '.join(self._errors)[-600:]}")
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


class Bench:
    """The sections, and what they found so far."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._began = time.perf_counter()
        self.result: dict[str, Any] = {"environment": environment() | gpu(), "failures": {}}
        self.bad: list[str] = []

    @property
    def left(self) -> float:
        """Seconds that are left for everything."""
        return _LIMIT_SECONDS - (time.perf_counter() - self._began)

    def section(self, name: str, act: Callable[[], Any]) -> None:
        """Run one section and write down what it found, or why it did not."""
        self.say(f"--- {name}, {self.left:.0f} s left")
        if self.left < 30:
            self.result["failures"][name] = "no time was left"
            self.say("no time is left")
        else:
            try:
                self.result[name] = act()
            except Exception as error:
                self.result["failures"][name] = traceback.format_exc()[-3000:]
                self.say(f"{name} failed: {error}")
        self.save()

    def save(self) -> None:
        """Write what is known by now."""
        self.result["seconds"] = time.perf_counter() - self._began
        self.result["bad"] = self.bad
        write(self._output, self.result)

    def say(self, text: str) -> None:
        """Tell who watches."""
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def judge(self, good: bool, what: str) -> bool:
        """Take note of what is not as it has to be."""
        if not good:
            self.bad.append(what)
            self.say(f"NOT AS IT HAS TO BE: {what}")
        return good

    # --- the sections ---

    def equality(self) -> list[dict[str, Any]]:
        """Losses and state against plain training."""
        rows: list[dict[str, Any]] = []
        for name, size, batch, share, policies in _EQUALITY:
            spec = Spec(name, size, batch, deterministic=True)
            try:
                with Worker(spec) as plain, Worker(spec) as again:
                    truth = plain.run(_EQUALITY_STEPS, 90) | plain.run(0, 60)
                    repeats = again.run(_EQUALITY_STEPS, 90) | again.run(0, 60)
                repeatable = truth["digest"] == repeats["digest"]
                budget = int(truth["peak_allocated"] * share)
                workers = [Worker(replace(spec, budget=budget, policy=policy)) for policy in policies]
                try:
                    rows += [self._compare(worker, truth, repeatable, share) for worker in workers]
                finally:
                    for worker in workers:
                        worker.close()
            except WorkerFailed as error:
                rows.append({"network": name, "failure": str(error)})
                self.say(str(error))
            self.result["equality"] = rows
            self.save()
        return rows

    def _compare(self, worker: Worker, truth: dict[str, Any], repeatable: bool, share: float) -> dict[str, Any]:
        spec = worker.spec
        row: dict[str, Any] = {"spec": asdict(spec), "share": share, "plain_is_repeatable": repeatable}
        where = f"{spec.network} at {share:.0%}, {spec.policy}"
        try:
            ours = worker.run(_EQUALITY_STEPS, 120) | worker.run(0, 60)
        except WorkerFailed as error:
            self.say(f"{where}: {error}")
            return row | {"failure": str(error), "least_bytes": error.least_bytes}
        equal = ours["digest"] == truth["digest"] and ours["losses"] == truth["losses"]
        assert spec.budget is not None
        inside = ours["peak_allocated"] <= spec.budget
        self.judge(equal or not repeatable, f"{where}: not equal to plain PyTorch")
        self.judge(inside, f"{where}: peak {ours['peak_allocated']} over {spec.budget}")
        self.say(f"{where}: {'equal' if equal else 'DIFFERS'}, peak {ours['peak_allocated'] / spec.budget:.3f} of it")
        return row | {"equal": equal, "inside": inside, "measured": ours}

    def budgets(self) -> list[dict[str, Any]]:
        """Peaks against budgets."""
        rows: list[dict[str, Any]] = []
        for name, size, batch, wanted in _BUDGETS:
            if self.left < 200:
                self.say(f"{name}: left out, for time")
                continue
            rows.append(self._budget_row(Spec(name, size, batch, channels_last=_has_images(name)), wanted))
            self.result["budgets"] = rows
            self.save()
        return rows

    def _budget_row(self, spec: Spec, wanted: float) -> dict[str, Any]:
        row: dict[str, Any] = {"spec": asdict(spec)}
        try:
            with Worker(spec) as plain:
                row["plain"] = plain.run(4, 60)
        except WorkerFailed as error:  # where the plain step does not fit, it has no peak to take a share of
            row["plain_failure"] = str(error)
        budget = int(wanted) if wanted > 1 else int(row["plain"]["peak_allocated"] * wanted)
        row["budget"] = budget
        try:
            with Worker(replace(spec, budget=budget)) as worker:
                row["ours"] = ours = worker.run(_WARMUP + 2, 120)
        except WorkerFailed as error:
            self.say(f"{spec.network}: {error}")
            return row | {"failure": str(error), "least_bytes": error.least_bytes}
        peak, reserved = ours["peak_allocated"] / budget, ours["peak_reserved"] / budget
        self.judge(peak <= 1, f"{spec.network}: peak {peak:.3f} of the budget")
        self.judge(reserved <= 1.05, f"{spec.network}: reserved {reserved:.3f} of the budget")
        row |= {"peak_share": peak, "reserved_share": reserved}
        if "plain" in row:
            row["over_plain"] = median(ours["seconds"][_WARMUP:]) / median(row["plain"]["seconds"][1:])
            self.say(f"{spec.network}: peak {peak:.3f}, reserved {reserved:.3f}, {row['over_plain']:.3f} x plain")
        return row

    def time(self) -> list[dict[str, Any]]:
        """Peers, and ours at their peaks, in turns with plain steps."""
        rows: list[dict[str, Any]] = []
        for name, size, batch in _TIMED:
            if self.left < 120:
                self.say(f"{name}: left out, for time")
                continue
            rows += self._timed(Spec(name, size, batch, channels_last=_has_images(name)))
            self.result["time"] = rows
            self.save()
        return rows

    def _timed(self, spec: Spec) -> list[dict[str, Any]]:
        plain = Worker(spec)
        rivals = {peer: Worker(replace(spec, peer=peer)) for peer in _PEERS}
        managed: dict[str, Worker] = {}
        rows: list[dict[str, Any]] = []
        try:
            warm = plain.run(3, 60)
            peaks: dict[str, int] = {"plain": warm["peak_allocated"]}
            for peer, worker in list(rivals.items()):
                try:
                    peaks[peer] = worker.run(3, 60)["peak_allocated"]
                    managed[peer] = Worker(replace(spec, budget=peaks[peer]))
                except WorkerFailed as error:
                    self.say(str(error))
                    rows.append({"network": spec.network, "peer": peer, "failure": str(error)})
                    worker.close()
                    del rivals[peer]
            for peer, worker in list(managed.items()):
                try:
                    worker.run(_WARMUP + 2, 120)
                except WorkerFailed as error:
                    self.say(f"at the peak of {peer}: {error}")
                    rows.append({"network": spec.network, "peer": peer, "ours_failure": str(error)})
                    worker.close()
                    del managed[peer]
            everybody = {"plain": plain, **rivals, **{f"ours at {peer}": worker for peer, worker in managed.items()}}
            times, last = self._take_turns(everybody)
            for peer in rivals:
                ours = f"ours at {peer}"
                row: dict[str, Any] = {
                    "network": spec.network,
                    "peer": peer,
                    "peak": peaks[peer],
                    "share": peaks[peer] / peaks["plain"],
                    "peer_over_plain": median(times[peer]) / median(times["plain"]),
                }
                if ours in times:
                    row["ours_over_plain"] = median(times[ours]) / median(times["plain"])
                    row["ours_over_peer"] = median(times[ours]) / median(times[peer])
                    row["ours"] = last[ours]
                    self.judge(
                        last[ours]["peak_allocated"] <= peaks[peer],
                        f"{spec.network} at the peak of {peer}: {last[ours]['peak_allocated']} over {peaks[peer]}",
                    )
                rows.append(row | {"seconds": {name: times[name] for name in ("plain", peer, ours) if name in times}})
                figures = {key: round(value, 3) for key, value in row.items() if isinstance(value, float)}
                self.say(f"{spec.network}, {peer}: {figures}")
        finally:
            for worker in (plain, *rivals.values(), *managed.values()):
                worker.close()
        return rows

    def _take_turns(self, everybody: dict[str, Worker]) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]]]:
        times: dict[str, list[float]] = {name: [] for name in everybody}
        last: dict[str, dict[str, Any]] = {}
        for _ in range(_ROUNDS):
            for name, worker in everybody.items():
                last[name] = worker.run(_STEPS_A_ROUND, 60)
                times[name] += last[name]["seconds"]
        return times, last

    def overlap(self) -> list[dict[str, Any]]:
        """Copies of policies that only copy."""
        rows: list[dict[str, Any]] = []
        for policy, share in (("vdnn-all", 0.7), ("accudnn", 0.7)):
            spec = Spec("resnet-50", 224, 128, policy=policy, channels_last=True)
            try:
                with Worker(spec) as plain:
                    peak = plain.run(3, 60)["peak_allocated"]
                with Worker(replace(spec, budget=int(peak * share))) as worker:
                    ours = worker.run(_WARMUP + 2, 120)
            except WorkerFailed as error:
                rows.append({"policy": policy, "failure": str(error)})
                self.say(str(error))
                continue
            rows.append({"policy": policy, "share": share, "measured": ours})
            self.say(f"{policy}: {ours.get('hidden_share')} of the copies' time is hidden")
        return rows

    def workspaces(self) -> list[dict[str, Any]]:
        """VGG-16, whose convolutions want the largest workspaces, by what they may hold."""
        rows: list[dict[str, Any]] = []
        spec = Spec("vgg-16", 224, 128)
        for share in (0.8, 1.2):
            try:
                with Worker(spec) as plain:
                    peak = plain.run(3, 60)["peak_allocated"]
            except WorkerFailed as error:
                self.say(str(error))
                return [{"failure": str(error)}]
            budget = int(peak * share)
            for kind in _KINDS:
                row: dict[str, Any] = {"workspace": kind, "share": share, "budget": budget}
                try:
                    with Worker(replace(spec, budget=budget, workspace=kind)) as worker:
                        row["measured"] = ours = worker.run(_WARMUP + 4, 120)
                except WorkerFailed as error:
                    self.say(f"workspace {kind}: {error}")
                    rows.append(row | {"failure": str(error), "least_bytes": error.least_bytes})
                    continue
                row["step_seconds"] = median(ours["seconds"][_WARMUP:])
                self.judge(ours["peak_allocated"] <= budget, f"workspace {kind}: peak over the budget at {share:.0%}")
                self.say(f"workspace {kind} at {share:.0%}: {row['step_seconds']:.3f} s a step")
                rows.append(row)
        return rows

    def deep(self) -> dict[str, Any]:
        """ResNet-2504 at batch 16 in 12 GB."""
        spec = Spec("resnet-2504", 224, 16, budget=_TWELVE_GB, channels_last=True)
        with Worker(spec) as worker:
            first = worker.run(1, self.left - 20)
            row: dict[str, Any] = {"spec": asdict(spec), "first": first}
            self.result["deep"] = row
            self.save()
            row["rest"] = rest = worker.run(4, self.left - 10)
        self.judge(rest["peak_allocated"] <= _TWELVE_GB, f"resnet-2504: peak {rest['peak_allocated']}")
        self.say(f"resnet-2504: {rest['seconds'][-1]:.2f} s a step, peak {rest['peak_allocated'] / 2**30:.2f} GiB")
        return row


def _has_images(network: str) -> bool:
    return find(network).kind != "text"


def gpu() -> dict[str, Any]:
    """The GPU, as far as there is anything to say about it."""
    properties = torch.cuda.get_device_properties(0)
    return {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the figures; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("equality", "time", "budgets", "overlap", "workspaces", "deep")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cuda.json"), help="a JSON file")
    parser.add_argument("--sections", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no CUDA device that PyTorch can use: nothing was measured", file=sys.stderr)
        return 2
    bench = Bench(given.output)
    for name in given.sections:
        bench.section(name, getattr(bench, name))
    bench.say(f"{len(bench.bad)} results are not as they have to be; figures in {given.output}")
    return 1 if bench.bad else 0


if __name__ == "__main__":
    sys.exit(main())
