"""How near the simulator comes to what is measured: peak and step time of planned steps, network by network.

    python benchmarks/predictions.py --output benchmarks/results/cpu-predictions.json

Budgets lie between the least feasible one and the plain peak, so that each plan has to move something. Steps take
turns with plain ones: the last ratio compares times in terms of plain steps, so that a machine whose speed wavered
since the plan was made does not count as a wrong prediction. Single steps waver by a tenth and more, and slow ones
come in a row: where the median of nine is off by more than 6%, 27 more are measured, no matter what they show, and
the figure is the median of all 36.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from environment import environment, write
from layout import default_networks, with_suffix

from outgrow.cli.interleave import Bounds, Row, Run, Setup, SetupFailed, interleave, live_bounds
from outgrow.cli.options import Options
from outgrow.networks import find
from outgrow.summary import Summary
from outgrow.units import format_bytes

# Batch and input size with which a plain step takes about a second on two cores.
_SIZES: Mapping[str, tuple[int, int]] = {
    "resnet-50": (8, 160),
    "resnet-152": (4, 160),
    "vgg-16": (8, 192),
    "googlenet": (16, 160),
    "densenet-121": (8, 160),
    "unet": (2, 160),
    "vit-b16": (4, 224),
    "gpt-12x384": (4, 256),
}
_BUDGETS = 6
_ABOVE_FLOOR, _BELOW_PLAIN = 1.03, 0.97
_PEAK_GOAL, _TIME_GOAL = 0.02, 0.10
_DOUBTFUL = 0.06  # a time that is off by more is measured on, so many times longer
_LONGER = 3


@dataclass(frozen=True)
class Prediction:
    """What was measured under one budget, over what was predicted. Sizes in bytes, times in seconds.

    Attributes:
        share: the budget over the plain peak.
        same_plan_steps: measured steps under the last plan; times in seconds are medians of those.
        highest_peak_bytes: of all measured steps, whatever their plan.
        peak_ratio: highest measured peak under the last plan over the predicted one.
        time_ratio: median over all measured steps of their time over what was predicted before the step began.
        time_ratio_in_plain_steps: the same with each side divided by its plain step: the measured one by the plain
            steps that took turns, the predicted one by what the plan takes a plain step for.
        all_seconds: the time of each measured step, beside what was predicted for it.
        note: why there are no figures; None if there are.
    """

    network: str
    batch: int
    image_size: int
    plain_peak_bytes: int
    budget_bytes: int
    share: float
    same_plan_steps: int = 0
    highest_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    peak_ratio: float | None = None
    step_seconds: float | None = None
    predicted_step_seconds: float | None = None
    plain_step_seconds: float | None = None
    predicted_plain_step_seconds: float | None = None
    time_ratio: float | None = None
    time_ratio_in_plain_steps: float | None = None
    last_summary: Summary | None = None
    all_seconds: tuple[tuple[float, float], ...] = ()
    note: str | None = None


@dataclass(frozen=True)
class Worst:
    """The summary of all rows: ratios that are furthest from 1, and how many rows are near it."""

    rows: int
    failed: int
    worst_peak_ratio: float
    worst_time_ratio: float
    worst_time_ratio_in_plain_steps: float
    peaks_within_2_percent: int
    times_within_10_percent: int
    times_in_plain_steps_within_10_percent: int


def measure(name: str, given: argparse.Namespace) -> list[Prediction]:
    """All budgets of one network, one after the other."""
    network = find(name)
    batch, image_size = _SIZES.get(network.name, (4, network.image_size))
    plain = Setup(
        "plain",
        Options(
            network.name,
            data="synthetic",
            batch=given.batch or batch,
            image_size=given.image_size or image_size,
            channels_last=given.channels_last,
        ),
    )
    bounds = live_bounds(plain)
    found: list[Prediction] = []
    for budget in _budgets(bounds, given.shares):
        managed = Setup("managed", replace(plain.options, budget=str(budget), policy=given.policy))
        more = _LONGER * given.rounds
        runs = interleave([plain, managed], given.rounds, given.steps, in_doubt=_is_off, doubt_rounds=more)
        if runs["plain"].failure is not None:
            raise SetupFailed("plain", runs["plain"].failure)
        found.append(_compare(plain.options, bounds, budget, runs["managed"], runs["plain"]))
        print(_in_words(found[-1]), flush=True)
    return found


def _budgets(bounds: Bounds, shares: Sequence[float] | None) -> list[int]:
    """Evenly spaced where plans have something to do, largest first; or shares of the plain peak."""
    if shares is not None:
        return [int(bounds.plain_peak_bytes * share) for share in shares]
    top = bounds.plain_peak_bytes * _BELOW_PLAIN
    bottom = min(bounds.least_budget_bytes * _ABOVE_FLOOR, top)
    return [int(top - (top - bottom) * number / (_BUDGETS - 1)) for number in range(_BUDGETS)]


def _compare(options: Options, bounds: Bounds, budget: int, managed: Run, plain: Run) -> Prediction:
    assert options.image_size is not None
    row = Prediction(
        network=options.network,
        batch=options.batch,
        image_size=options.image_size,
        plain_peak_bytes=bounds.plain_peak_bytes,
        budget_bytes=budget,
        share=budget / bounds.plain_peak_bytes,
    )
    if managed.failure is not None or managed.plan is None:
        return replace(row, note="no plan" if managed.failure is None else managed.failure.message)
    last = managed.summaries[-1]
    if last.predicted_peak_bytes is None or last.predicted_step_seconds is None:
        return replace(row, note="the last step had no plan")
    same = _under_the_last_plan(managed.rows)
    seconds = median(item.seconds for item in same)
    peak = max(item.summary.measured_peak_bytes for item in same if item.summary is not None)
    predicted_in_plain_steps = last.predicted_step_seconds / managed.plan.plain_step_seconds
    return replace(
        row,
        same_plan_steps=len(same),
        highest_peak_bytes=managed.peak_bytes,
        measured_peak_bytes=peak,
        predicted_peak_bytes=last.predicted_peak_bytes,
        peak_ratio=peak / last.predicted_peak_bytes,
        step_seconds=seconds,
        predicted_step_seconds=last.predicted_step_seconds,
        plain_step_seconds=plain.seconds,
        predicted_plain_step_seconds=managed.plan.plain_step_seconds,
        time_ratio=_time_ratio(managed.rows),
        all_seconds=tuple(_measured_and_predicted(managed.rows)),
        time_ratio_in_plain_steps=(seconds / plain.seconds) / predicted_in_plain_steps,
        last_summary=last,
    )


def _measured_and_predicted(rows: Sequence[Row]) -> Iterator[tuple[float, float]]:
    for row in rows:
        if row.summary is not None and row.summary.predicted_step_seconds is not None:
            yield row.seconds, row.summary.predicted_step_seconds


def _time_ratio(rows: Sequence[Row]) -> float | None:
    ratios = [measured / predicted for measured, predicted in _measured_and_predicted(rows)]
    return median(ratios) if ratios else None


def _is_off(rows: Mapping[str, Sequence[Row]]) -> bool:
    found = _time_ratio(rows["managed"])
    return found is not None and abs(found - 1) > _DOUBTFUL


def _under_the_last_plan(rows: Sequence[Row]) -> list[Row]:
    """The steps from the end back to the one at which the plan changed."""
    found: list[Row] = []
    for row in reversed(rows):
        if found and _plan_of(row) != _plan_of(found[0]):
            break
        found.append(row)
    return found


def _plan_of(row: Row) -> tuple[float | None, int | None]:
    assert row.summary is not None
    return row.summary.predicted_step_seconds, row.summary.predicted_peak_bytes


def summarise(rows: Sequence[Prediction]) -> Worst:
    """The figures that say how good the simulator is."""
    peaks = [row.peak_ratio for row in rows if row.peak_ratio is not None]
    times = [row.time_ratio for row in rows if row.time_ratio is not None]
    relative = [row.time_ratio_in_plain_steps for row in rows if row.time_ratio_in_plain_steps is not None]
    return Worst(
        rows=len(rows),
        failed=sum(row.note is not None for row in rows),
        worst_peak_ratio=_furthest(peaks),
        worst_time_ratio=_furthest(times),
        worst_time_ratio_in_plain_steps=_furthest(relative),
        peaks_within_2_percent=_near(peaks, _PEAK_GOAL),
        times_within_10_percent=_near(times, _TIME_GOAL),
        times_in_plain_steps_within_10_percent=_near(relative, _TIME_GOAL),
    )


def _furthest(ratios: Sequence[float]) -> float:
    return max(ratios, key=lambda ratio: abs(ratio - 1), default=1.0)


def _near(ratios: Sequence[float], goal: float) -> int:
    return sum(abs(ratio - 1) <= goal for ratio in ratios)


def _in_words(row: Prediction) -> str:
    where = f"{row.network} at {row.share:.0%} of {format_bytes(row.plain_peak_bytes)}"
    if row.last_summary is None:
        return f"{where}: {row.note}"
    return (
        f"{where}: peak {row.peak_ratio:.4f} x predicted, step {row.time_ratio:.2f} x predicted,"
        f" {row.time_ratio_in_plain_steps:.2f} x in plain steps ({row.same_plan_steps} steps),"
        f" {format_bytes(row.last_summary.offloaded_bytes)} offloaded,"
        f" {format_bytes(row.last_summary.recomputed_bytes)} recomputed"
    )


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", help=f"one or more; default: {', '.join(_SIZES)}")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--channels-last", action="store_true", help="all in that memory format; no gpt by default")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--shares", type=float, nargs="+", help="budgets over the plain peak")
    parser.add_argument("--rounds", type=int, default=9, help="how often plain and managed steps take turns")
    parser.add_argument("--steps", type=int, default=1, help="measured steps of a turn")
    parser.add_argument("--output", type=Path, help="where the figures go, as JSON")
    given = parser.parse_args()
    rows: list[Prediction] = []
    for name in given.network or default_networks(_SIZES, given.channels_last):
        rows += measure(name, given)
        if given.output is not None:  # after each network: a run of all takes long
            document = {
                "channels_last": given.channels_last,
                "summary": asdict(summarise(rows)),
                "environment": environment(),
                "rows": [asdict(row) for row in rows],
            }
            write(with_suffix(given.output, given.channels_last), document)
    worst = summarise(rows)
    print(
        f"{worst.rows} budgets, {worst.failed} without figures. Worst ratios to what was predicted: peak"
        f" {worst.worst_peak_ratio:.4f}, step {worst.worst_time_ratio:.2f}, step in plain steps"
        f" {worst.worst_time_ratio_in_plain_steps:.2f}. Within 2%: {worst.peaks_within_2_percent} peaks; within 10%:"
        f" {worst.times_within_10_percent} steps, {worst.times_in_plain_steps_within_10_percent} in plain steps."
    )


if __name__ == "__main__":
    main()
