"""Does the tuned batch get there sooner? Time to a fixed accuracy or loss, against the default batch untuned.

    python benchmarks/time_to_target.py --output benchmarks/results/cpu-time-to-target.json

A small ResNet on scikit-learn's digits and a small GPT on the source of Python's standard library, under a budget
that twice the default batch just fits. Time is that of training steps alone, tuning left out (it is in the figures
beside it); both settings begin with a plan of steps that were run before. For each seed they train in processes of
their own, and take turns from score to score: so a machine whose speed wavers is the same for both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from environment import environment, write
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import outgrow
from outgrow.cli.datasets import standard_library_text
from outgrow.networks import find
from outgrow.planning.floor import least_budget
from outgrow.tracing.liveness import plain_profile

Batch = tuple[Tensor, Tensor]
_BASE_BATCH = 16  # the command line's default
_STEPS_TO_SETTLE = 6


@dataclass(frozen=True)
class Task:
    """What is trained, and what counts as having got there.

    `batches` gives an endless stream for a batch size and a seed; `score` tells how good a model is, higher being
    better; `target` is a score; scores are taken every `samples_between` samples, until `most_samples`.
    """

    name: str
    epoch_samples: int
    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    batches: Callable[[int, int], Iterator[Batch]]
    score: Callable[[nn.Module], float]
    target: float
    samples_between: int
    most_samples: int


@dataclass(frozen=True)
class Race:
    """One training: seconds and samples until the target (None if it was not reached), and the last score."""

    seed: int
    batch: int
    seconds_to_target: float | None
    samples_to_target: int | None
    final_score: float
    step_seconds: float
    peak_bytes: int


def digits() -> Task:
    bunch = load_digits()
    split = train_test_split(bunch.images, bunch.target, test_size=0.25, random_state=0, stratify=bunch.target)
    train_x, test_x = (torch.from_numpy(images).float().unsqueeze(1) / 16 - 0.3 for images in split[:2])
    train_y, test_y = (torch.from_numpy(labels).long() for labels in split[2:])
    size = 32

    def enlarged(images: Tensor) -> Tensor:
        return F.interpolate(images, size=(size, size), mode="bilinear").repeat(1, 3, 1, 1)

    def batches(batch: int, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        waiting = torch.empty(0, dtype=torch.long)
        while True:
            while len(waiting) < batch:
                waiting = torch.cat((waiting, torch.randperm(len(train_x), generator=generator)))
            yield enlarged(train_x[waiting[:batch]]), train_y[waiting[:batch]]
            waiting = waiting[batch:]

    def accuracy(model: nn.Module) -> float:
        guesses = torch.cat([model(enlarged(part)).argmax(1) for part in test_x.split(64)])
        return float((guesses == test_y).float().mean())

    network = find("resnet-18")
    return Task(
        "resnet-18 on digits",
        len(train_x),
        lambda: network.build(size, 10),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4),
        F.cross_entropy,
        batches,
        accuracy,
        target=0.97,
        samples_between=512,
        most_samples=16384,
    )


def text() -> Task:
    tokens = standard_library_text()
    length = 64
    cut = len(tokens) * 9 // 10
    span = torch.arange(length + 1)
    held_out = tokens[cut:][torch.arange(0, 256 * 1000, 1000).unsqueeze(1) + span].long()

    def batches(batch: int, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            windows = tokens[torch.randint(cut - length - 1, (batch, 1), generator=generator) + span].long()
            yield windows[:, :-1].clone(), windows[:, 1:].clone()

    def score(model: nn.Module) -> float:
        losses = [
            F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) for part in held_out.split(32)
        ]
        return -float(torch.stack(losses).mean())

    network = find("gpt-4x128")
    return Task(
        "gpt-4x128 on source text",
        cut // length,
        lambda: network.build(length, 256),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        batches,
        score,
        target=-2.3,
        samples_between=512,
        most_samples=8192,
    )


def make_step(task: Task, batch: int, accumulation: int = 1, *, seed: int = 0) -> outgrow.TrainingStep:
    torch.manual_seed(seed)
    model = task.build().train()
    optimizer = task.optimizer(model)

    def step(drawn: list[Batch]) -> None:
        for data, target in drawn:
            loss = task.loss(model(data), target)
            (loss if accumulation == 1 else loss / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()

    def batches() -> Iterator[list[Batch]]:
        stream = task.batches(batch, seed)
        while True:
            yield [next(stream) for _ in range(accumulation)]

    return outgrow.TrainingStep(model, optimizer, step, batches())


def plan_of_default(task: Task, budget: int) -> outgrow.Plan:
    """What a session knows of the default batch after some steps, as the tuner does of its own."""
    made = make_step(task, _BASE_BATCH, seed=1000)
    with outgrow.Session(made.model, made.optimizer, budget=budget) as session:
        for _ in range(_STEPS_TO_SETTLE):
            step = made.drawn()
            with session.step():
                step()
        plan = session.plan
    assert plan is not None, "there is one after the first step"
    return plan


@dataclass(frozen=True)
class Setting:
    """What a training is held to: the budget in bytes, and the plan to begin with. Without an answer: the default."""

    budget: int
    plan: outgrow.Plan
    answer: outgrow.Tuning | None


def race(task: Task, seed: int, setting: Setting, pause: Callable[[], None]) -> Race:
    """Train until the samples are spent; the time of scoring does not count, nor that of the pauses that follow."""
    answer = setting.answer
    batch, passes = (_BASE_BATCH, 1) if answer is None else (answer.micro_batch, answer.accumulation)
    made = make_step(task, batch, passes, seed=seed)
    assert isinstance(made.model, nn.Module)
    assert isinstance(made.optimizer, torch.optim.Optimizer)
    scheduler = None if answer is None else answer.scheduler(made.optimizer)
    seconds, samples, next_score = 0.0, 0, task.samples_between
    times: list[float] = []
    reached: tuple[float, int] | None = None
    score = 0.0
    with outgrow.Session(made.model, made.optimizer, budget=setting.budget, plan=setting.plan) as session:
        while samples < task.most_samples:
            step = made.drawn()
            began = time.perf_counter()
            with session.step():
                step()
            if scheduler is not None:
                scheduler.step()
            times.append(time.perf_counter() - began)
            seconds += times[-1]
            samples += batch * passes
            if samples >= next_score:
                next_score += task.samples_between
                made.model.eval()
                with torch.no_grad():
                    score = task.score(made.model)
                made.model.train()
                if reached is None and score >= task.target:
                    reached = seconds, samples
                pause()
        peak = session.peak_bytes
    seconds_to_it, samples_to_it = reached or (None, None)
    median = statistics.median(times)
    return Race(seed, batch * passes, seconds_to_it, samples_to_it, score, median, peak)


def meet(name: str, seed: int, settings: list[Setting]) -> list[Race]:
    """Train under all settings, in turns; what came of each."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    for setting in settings:
        ours, theirs = context.Pipe()
        context.Process(target=_race_in_turns, args=(theirs, name, seed, setting), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    races: dict[int, Race] = {}
    while len(races) < len(pipes):
        for number, pipe in enumerate(pipes):
            if number not in races:
                pipe.send(None)
                if (result := pipe.recv()) is not None:
                    races[number] = result
    return [races[number] for number in range(len(pipes))]


def _race_in_turns(pipe: Connection, name: str, seed: int, setting: Setting) -> None:
    def pause() -> None:
        pipe.send(None)
        pipe.recv()

    pause()  # until all have started
    pipe.send(race(TASKS[name](), seed, setting, pause))


def measure(name: str, seeds: int) -> dict[str, Any]:
    """Tune once, then race both settings, seed by seed."""
    task = TASKS[name]()
    trace = outgrow.trace(lambda: make_step(task, 2 * _BASE_BATCH), fake=False)
    budget = plain_profile(trace).peak_bytes
    floor = least_budget(outgrow.plan(trace, budget=budget).problem)
    began = time.perf_counter()
    answer = outgrow.tune(
        lambda batch, accumulation=1: make_step(task, batch, accumulation, seed=1000),
        budget=budget,
        base_batch=_BASE_BATCH,
        epoch_samples=task.epoch_samples,
    )
    tuning_seconds = time.perf_counter() - began
    print(task.name, answer, sep="\n", flush=True)
    settings = [Setting(budget, plan_of_default(task, budget), None), Setting(budget, answer.plan, answer)]
    races: list[list[Race]] = []
    for seed in range(seeds):
        order = 1 if seed % 2 == 0 else -1  # now one first, and now the other
        races.append(meet(name, seed, settings[::order])[::order])
        print(*races[-1], sep="\n", flush=True)
    default, tuned = zip(*races, strict=True)
    medians = [_median([item.seconds_to_target for item in found]) for found in (default, tuned)]
    return {
        "task": task.name,
        "target": task.target,
        "budget_bytes": budget,
        "least_budget_bytes": floor.bytes,
        "default_median_seconds": medians[0],
        "tuned_median_seconds": medians[1],
        "ratio": None if None in medians else medians[1] / medians[0],
        "default_final": statistics.median(item.final_score for item in default),
        "tuned_final": statistics.median(item.final_score for item in tuned),
        "spread_of_default_final": max(x.final_score for x in default) - min(x.final_score for x in default),
        "tuning_seconds": tuning_seconds,
        "default": [asdict(item) for item in default],
        "tuned": [asdict(item) for item in tuned],
        "answer": answer.to_document(),
    }


def _median(times: list[float | None]) -> float | None:
    """Those that did not get there are slower than all others."""
    ordered = sorted(times, key=lambda item: float("inf") if item is None else item)
    return ordered[len(ordered) // 2]


TASKS = {"digits": digits, "text": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--task", choices=tuple(TASKS), action="append")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cpu-time-to-target.json"))
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    for name in given.task or TASKS:
        results.append(measure(name, given.seeds))
        print({key: results[-1][key] for key in ("ratio", "default_final", "tuned_final")}, flush=True)
        write(given.output, {"environment": environment(), "results": results})


if __name__ == "__main__":
    main()
