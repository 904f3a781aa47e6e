"""`make demo`: a ResNet-50 trains on real images in half of its memory, beside plain steps of the same run.

The plain steps are taken outside the session in three groups, before, in the middle and after, so that a
machine that slows down or speeds up meanwhile does so for both.
"""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from dataclasses import replace

from rich.console import Console

from outgrow.cli.job import make_job
from outgrow.cli.options import Options
from outgrow.cli.train import make_progress, open_session, show_step, timed_step
from outgrow.tracing.liveness import plain_profile
from outgrow.units import format_bytes, format_seconds

BATCH = 16
IMAGE_SIZE = 160
STEPS = 36
PLAIN_GROUP = 3
ENDS = 5  # steps at each end whose losses are averaged: one alone is noise
WARM_UP = 1  # of each group: the first steps after a change fault in their memory anew


def demo() -> None:
    """Run the demo; everything goes to standard output but the progress bar."""
    stdout, stderr = Console(), Console(stderr=True)
    job = make_job(Options("resnet-50", data="digits", batch=BATCH, image_size=IMAGE_SIZE))
    with stderr.status("Tracing and planning") if stderr.is_terminal else nullcontext():
        trace = job.fake_trace()
        plain_peak = plain_profile(trace).peak_bytes
        job = replace(job, budget_bytes=plain_peak // 2)
        made = job.plan(trace, plain_peak // 2)
    stdout.print(
        f"ResNet-50 on scikit-learn's digits, {BATCH} images of {IMAGE_SIZE} x {IMAGE_SIZE} pixels a step. "
        f"A plain step needs {format_bytes(plain_peak)}; the budget is half of that. The plan:",
        soft_wrap=True,
    )
    stdout.print(str(made), markup=False, highlight=False)
    stdout.print()

    batches = job.batches()
    model, optimizer = job.build()
    plain: list[float] = []
    managed: list[float] = []
    losses: list[float] = []
    with open_session(job, model, optimizer) as session, make_progress(stderr) as progress:
        groups = [(PLAIN_GROUP, False), (STEPS // 2, True)] * 2 + [(PLAIN_GROUP, False)]
        task = progress.add_task("", total=sum(count for count, _ in groups), loss="", speed="", memory="")
        for count, inside in groups:
            for index in range(count):
                chosen = session if inside else None
                loss, seconds = timed_step(job, model, optimizer, (next(batches),), chosen)
                losses.append(loss)
                if index >= WARM_UP:
                    (managed if inside else plain).append(seconds)
                show_step(progress, task, BATCH, loss, seconds, session)
        summary = session.summary()
        peak = session.peak_bytes
    stdout.print("\nThe last step under the budget:")
    stdout.print(str(summary), markup=False, highlight=False)
    plain_seconds, seconds = statistics.median(plain), statistics.median(managed)
    stdout.print(
        f"\nThe loss went from {statistics.mean(losses[:ENDS]):.2f} to {statistics.mean(losses[-ENDS:]):.2f} "
        f"(means of the first and last {ENDS} of {len(losses)} steps). "
        f"Outgrow trained in {format_bytes(peak)} instead of {format_bytes(plain_peak)}, "
        f"{1 - peak / plain_peak:.0%} less memory, at {seconds / plain_seconds:.2f} x the time of a plain "
        f"step ({format_seconds(seconds)} against {format_seconds(plain_seconds)}, medians of "
        f"{len(managed)} and {len(plain)} steps of this run).",
        highlight=False,
        soft_wrap=True,
    )
