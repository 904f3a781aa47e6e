"""Is the tuner right? Every batch that fits is really run, and its answer compared with that.

    python benchmarks/tuning.py --output benchmarks/results/cpu-tuning.json

For each network `outgrow.tune` looks for the most samples per second under a budget that binds. Five sizes that are
named here say how right its predictions were. A machine's speed wavers by a tenth to a third from one minute to the
next, so that a tuning and turns that follow it would each fall into a time of its own: they train in processes of
their own, and take a turn each time that the tuner is about to run something; at times new processes come.
Several tunings are held against all turns by their median prediction, and the first one's answer is judged.
All sizes that fit, powers of two and one and a half times those, train in processes of their own that take turns of a
few steps, or of some seconds where steps are short. What comes within a tenth of the best races once more, in new
processes and shorter turns: the best of many sizes was also the luckiest, and three turns say little where speeds
waver by a tenth.
The best of that final and the tuner's choice, where they differ, then meet alone: the best of some noisy figures is
again the luckiest of them, and only turns that did not choose it say by how much it is ahead.
Compared are what the tuner predicted of each size with what is measured now, the throughput of its choice with the
best one's, the largest batch that fits with plain PyTorch's, and the peak of 20 steps of its choice with the budget.
`--duels-of FILE` runs only the last meeting, of what an earlier run wrote.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import harmonic_mean, median
from typing import Any

from environment import environment, write
from torch._guards import active_fake_mode

import outgrow
from outgrow.cli.interleave import Row, Run, Setup, SetupFailed, Worker, interleave
from outgrow.cli.job import make_job
from outgrow.cli.options import Options
from outgrow.cost.hardware import Hardware
from outgrow.cost.measure import this_machine
from outgrow.tracing.ir import Trace
from outgrow.tuning.limits import largest
from outgrow.tuning.survey import sizes_between
from outgrow.units import parse_bytes

# Batch 1 of a network with batch norm at this size still has several pixels at its end.
_NETWORKS: Mapping[str, tuple[int, str]] = {
    "resnet-50": (64, "345MB"),
    "resnet-152": (64, "780MB"),
    "densenet-121": (64, "130MB"),
    "gpt-12x384": (128, "340MB"),
}
# The sizes at which predictions are judged: some that fit as they are, and some that do not.
_NAMED: Mapping[str, tuple[int, ...]] = {
    "resnet-50": (2, 4, 8, 16, 32),
    "resnet-152": (2, 4, 8, 16, 32),
    "densenet-121": (2, 4, 8, 16, 32),
    "gpt-12x384": (1, 2, 4, 8, 16),
}
_STEPS_OF_THE_CHOICE = 20
# The first step of a turn finds the caches cold, and the disk busy with what others wrote: it does not count.
# Of steps that take so many seconds that is a small part, and one is a turn.
_STEPS_OF_A_TURN = 3
_LONG_STEP_SECONDS = 2.5
_SECONDS_OF_A_TURN = 3.0
_STEPS_OF_A_FINAL_TURN = 2
_STEPS_OF_A_SHORT_TURN = 5
_SECONDS_OF_A_SHORT_TURN = 0.8
_TURNS_OF_A_PROCESS = 8
_NOISE_SAMPLES = 1000.0
_BASE_BATCH = 32  # the command line's
_CLOSE = 0.9
_TRAINING_LIMIT_SECONDS = 3600


@dataclass(frozen=True)
class Size:
    """One batch: samples per second as predicted, in the tuner's own run of it, and as measured now.

    `foretold` says that the prediction was made without a run of this batch.
    """

    batch: int
    foretold: bool
    predicted: float
    run_by_tuner: float | None
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


@dataclass(frozen=True)
class Named:
    """One of the named batches: samples per second as each tuning predicted, and in each turn.

    `foretold` says that no tuning had run it before it made its predictions.
    """

    batch: int
    foretold: bool
    predicted: tuple[float, ...]
    turns: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Predicted over measured: the median prediction, and what all turns come to."""
        return median(self.predicted) / harmonic_mean(self.turns)


@dataclass(frozen=True)
class Final:
    """The sizes that came close to the best, raced again: samples per second, turn by turn.

    `best_batch` has the highest median, and `best_share` is the median over the turns of the choice's throughput over
    that one's in the same turn; those of the `duel`, where only the two took turns, unless they are the same.
    """

    samples_per_second: Mapping[int, tuple[float, ...]]
    best_batch: int
    best_share: float
    duel: Mapping[int, tuple[float, ...]]


@dataclass(frozen=True)
class Result:
    """What came of one network. Sizes in bytes; `best_batch` and `best_share` are of all sizes, before the final."""

    network: str
    image_size: int
    budget_bytes: int
    plain_batch: int
    largest_batch: int
    chosen_batch: int
    best_batch: int
    best_share: float
    named: tuple[Named, ...]
    foretold: int
    foretold_within_10_percent: int
    sizes: tuple[Size, ...]
    choice_peak_bytes: int
    choice_oom_retries: int
    tuning: Mapping[str, Any]
    final: Final


def main() -> None:
    given = _arguments()
    if given.duels_of is not None:
        _meet_again(given)
        return
    device = this_machine()
    results: list[Result] = []
    for name in given.network or _NETWORKS:
        results.append(_measure(name, given, device))
        print(_in_words(results[-1]), flush=True)
        write(given.output, {"environment": environment(), "results": [_with_ratios(result) for result in results]})


def _meet_again(given: argparse.Namespace) -> None:
    """The duels of what an earlier run measured, and all of that with them."""
    results = json.loads(given.duels_of.read_text())["results"]
    for result in results:
        name = result["network"]
        if name not in (given.network or _NETWORKS):
            continue
        earlier = {int(batch): tuple(speeds) for batch, speeds in result["final"]["samples_per_second"].items()}
        final = _decided(name, earlier, result["tuning"]["micro_batch"], given.duel_rounds)
        result["final"] = asdict(final)
        print(f"{name}: {_final_in_words(final, result['chosen_batch'])}", flush=True)
    write(given.output, {"environment": environment(), "results": results})


def _final(name: str, measured: Mapping[int, float], chosen: int, rounds: int, duel_rounds: int) -> Final:
    least = _CLOSE * max(measured.values())
    close = {batch: speed for batch, speed in measured.items() if speed >= least}
    close.setdefault(chosen, measured.get(chosen, least))
    return _decided(name, _turns(name, close, rounds), chosen, duel_rounds)


def _decided(name: str, turns: Mapping[int, tuple[float, ...]], chosen: int, duel_rounds: int) -> Final:
    best = max(turns, key=lambda batch: median(turns[batch]))
    if best == chosen:
        return Final(turns, best, 1.0, {})
    duel = _turns(name, {batch: median(turns[batch]) for batch in (chosen, best)}, duel_rounds)
    share = median(ours / theirs for ours, theirs in zip(duel[chosen], duel[best], strict=True))
    return Final(turns, best, share, duel)


def _turns(name: str, batches: Mapping[int, float], rounds: int) -> dict[int, tuple[float, ...]]:
    """Samples per second of each size in each turn, in processes of their own; given is about what they will be."""
    image_size, budget = _NETWORKS[name]
    options = Options(name, image_size=image_size, budget=budget, data="synthetic")
    setups = [Setup(str(batch), replace(options, batch=batch)) for batch in batches]
    are_long = all(batch / speed >= _LONG_STEP_SECONDS for batch, speed in batches.items())
    steps = 1 if are_long else _STEPS_OF_A_FINAL_TURN
    runs = interleave(setups, rounds, steps)
    turns: dict[int, tuple[float, ...]] = {}
    for batch in batches:
        run = runs[str(batch)]
        if run.failure is not None:
            raise SetupFailed(str(batch), run.failure)
        turns[batch] = tuple(batch / median(turn) for turn in _counted(run, steps))
    return turns


def _measure(name: str, given: argparse.Namespace, device: Hardware) -> Result:
    image_size, budget = _NETWORKS[name]
    options = Options(name, image_size=image_size, budget=budget)
    answer, named = _tunings(name, options, given)
    predicted = _in_one_pass(answer)
    batches = [batch for batch in sizes_between(1, answer["largest_batch"]) if batch in predicted]
    setups = [Setup(str(batch), replace(options, batch=batch, data="synthetic")) for batch in batches]
    steps = {str(batch): _steps_of_a_turn(predicted[batch]["predicted_step_seconds"]) for batch in batches}
    runs = interleave(setups, given.rounds, steps)
    sizes = tuple(
        Size(
            batch,
            predicted[batch]["foretold"],
            predicted[batch]["predicted_samples_per_second"],
            predicted[batch]["measured_samples_per_second"],
            batch / _steady_seconds(runs[str(batch)], steps[str(batch)]),
        )
        for batch in batches
        if runs[str(batch)].failure is None
    )
    for batch in batches:
        failure = runs[str(batch)].failure
        if failure is not None:
            print(f"{name}, batch {batch}: {failure.message}", file=sys.stderr)
    chosen = answer["batch_size"]
    # Accumulation comes at the end of the list: a choice of several passes has no turn of its own, its run counts.
    ours = next((size.measured for size in sizes if size.batch == chosen), answer["chosen"]["goodput"])
    best = max(sizes, key=lambda size: size.measured)
    measured = {size.batch: size.measured for size in sizes}
    final = _final(name, measured, answer["micro_batch"], given.final_rounds, given.duel_rounds)
    trained = _trained(replace(options, batch=answer["micro_batch"]), _STEPS_OF_THE_CHOICE)
    job = make_job(options)
    budget_bytes = parse_bytes(budget)

    def trace_of(size: int) -> Trace:
        return make_job(replace(options, batch=size)).untimed_trace()

    plain = largest(trace_of, budget_bytes=budget_bytes, hardware=device, policy="keep")
    most = largest(trace_of, budget_bytes=budget_bytes, hardware=device, policy="auto")
    return Result(
        network=name,
        image_size=job.shape.image_size,
        budget_bytes=budget_bytes,
        plain_batch=0 if plain is None else plain.size,
        largest_batch=0 if most is None else most.size,
        chosen_batch=chosen,
        best_batch=best.batch,
        best_share=ours / best.measured,
        named=named,
        foretold=sum(size.foretold for size in sizes),
        foretold_within_10_percent=sum(size.foretold and abs(size.ratio - 1) <= 0.10 for size in sizes),
        sizes=sizes,
        choice_peak_bytes=trained["highest_peak_bytes"],
        choice_oom_retries=trained["oom_retries"],
        tuning=answer,
        final=final,
    )


def _tunings(name: str, options: Options, given: argparse.Namespace) -> tuple[dict[str, Any], tuple[Named, ...]]:
    """The first tuning's answer, and how right all were of the named batches, which take turns meanwhile."""
    with closing(_Turns(options, _NAMED[name])) as turns:
        answers = [_tuning(options, given.max_batch, turns.take) for _ in range(given.tunings)]
    of_each = [_in_one_pass(answer) for answer in answers]
    named = tuple(
        Named(
            batch,
            all(predicted[batch]["foretold"] for predicted in of_each),
            tuple(predicted[batch]["predicted_samples_per_second"] for predicted in of_each),
            tuple(speeds),
        )
        for batch, speeds in turns.found.items()
    )
    return answers[0], named


def _tuning(options: Options, max_batch: int | None, before_run: Callable[[], None]) -> dict[str, Any]:
    """What `outgrow tune` answers; `before_run` is called each time that the tuner builds something to run it."""
    job = make_job(replace(options, data="synthetic"))

    def make_step(batch: int, accumulation: int = 1) -> outgrow.TrainingStep:
        if active_fake_mode() is None:
            before_run()
        return job.sized_step(batch, accumulation)

    answer = outgrow.tune(
        make_step,
        budget=options.budget or "100%",
        objective="throughput",
        base_batch=_BASE_BATCH,
        max_batch=max_batch,
        noise_scale=_NOISE_SAMPLES,
    )
    print(answer, flush=True)
    return answer.to_document()


class _Turns:
    """Batches that take turns in processes of their own: samples per second of each, turn by turn.

    A process has luck of its own with the memory it is given, some hundredths all its life: at times new ones come.
    """

    def __init__(self, options: Options, batches: Sequence[int]) -> None:
        self._setups = [Setup(str(batch), replace(options, batch=batch, data="synthetic")) for batch in batches]
        self._workers = ExitStack()
        self._current: list[Worker] = []
        self.found: dict[int, list[float]] = {batch: [] for batch in batches}
        self._taken = 0

    def take(self) -> None:
        """One turn of each, of some steps; the first finds the caches cold, and does not count."""
        if self._taken % _TURNS_OF_A_PROCESS == 0:
            self._renew()
        self._taken += 1
        for worker in self._current:
            batch = worker.setup.options.batch
            worker.step()
            rows: list[Row] = []
            while len(rows) < _STEPS_OF_A_SHORT_TURN and sum(row.seconds for row in rows) < _SECONDS_OF_A_SHORT_TURN:
                rows.append(worker.step())
            self.found[batch].append(batch / median(row.seconds for row in rows))

    def close(self) -> None:
        """End all processes."""
        self._workers.close()

    def _renew(self) -> None:
        self._workers.close()
        self._workers = ExitStack()
        self._current = [self._workers.enter_context(closing(Worker(setup))) for setup in self._setups]
        for worker in self._current:
            worker.ready()
        for worker in self._current:
            for _ in range(worker.setup.warmup):
                worker.step()


def _in_one_pass(answer: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The candidates that do not accumulate, by their batch."""
    return {item["batch_size"]: item for item in answer["candidates"] if item["accumulation"] == 1}


def _steps_of_a_turn(step_seconds: float) -> int:
    is_long = step_seconds >= _LONG_STEP_SECONDS
    return 1 if is_long else max(_STEPS_OF_A_TURN, 1 + ceil(_SECONDS_OF_A_TURN / step_seconds))


def _steady_seconds(run: Run, steps_of_a_turn: int) -> float:
    return median(seconds for turn in _counted(run, steps_of_a_turn) for seconds in turn)


def _counted(run: Run, steps_of_a_turn: int) -> list[list[float]]:
    """Of each turn the seconds of the steps that count."""
    first = 0 if steps_of_a_turn == 1 else 1
    starts = range(0, len(run.rows), steps_of_a_turn)
    return [[row.seconds for row in run.rows[start + first : start + steps_of_a_turn]] for start in starts]


def _trained(options: Options, steps: int) -> dict[str, Any]:
    """What `outgrow train` says of so many steps, in a process of its own."""
    given = [options.network, "--image-size", str(options.image_size), "--budget", str(options.budget)]
    given += ["--batch", str(options.batch), "--data", "synthetic", "--steps", str(steps), "--json"]
    arguments = [sys.executable, "-m", "outgrow.cli.main", "train", *given]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True, timeout=_TRAINING_LIMIT_SECONDS)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _with_ratios(result: Result) -> dict[str, Any]:
    sizes = [asdict(size) | {"ratio": size.ratio} for size in result.sizes]
    named = [asdict(item) | {"ratio": item.ratio} for item in result.named]
    return asdict(result) | {"sizes": sizes, "named": named}


def _in_words(result: Result) -> str:
    named = " ".join(f"{item.batch}{'' if item.foretold else '*'}:{item.ratio:.2f}" for item in result.named)
    sizes = " ".join(f"{size.batch}{'' if size.foretold else '*'}:{size.ratio:.2f}" for size in result.sizes)
    return (
        f"{result.network}: {_final_in_words(result.final, result.chosen_batch)}; "
        f"largest {result.largest_batch}, plain {result.plain_batch}; predicted / measured (* not foretold) {named}; "
        f"in few turns {sizes}; "
        f"peak of its choice {result.choice_peak_bytes / result.budget_bytes:.3f} of the budget"
    )


def _final_in_words(final: Final, chosen: int) -> str:
    return f"chose {chosen}, {final.best_share:.3f} of the best ({final.best_batch})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=list(_NETWORKS), help="only this one; may be repeated")
    parser.add_argument("--tunings", type=int, default=3, help="how often the tuner looks")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each batch")
    parser.add_argument("--final-rounds", type=int, default=6, help="turns in the final; of two steps one counts")
    parser.add_argument("--duel-rounds", type=int, default=12, help="turns of the two that meet at the end, alike")
    parser.add_argument("--duels-of", type=Path, metavar="FILE", help="run only the last meetings of what FILE has")
    parser.add_argument("--max-batch", type=int, help="the largest batch that is looked at and run; default: all fit")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cpu-tuning.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
