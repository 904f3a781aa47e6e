"""`outgrow networks`: the networks by name, with their size and what a plain step of them takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

import outgrow
from outgrow.cli.job import costed, find_listed, make_job
from outgrow.cli.options import Options
from outgrow.networks import names
from outgrow.progress import counting_bar
from outgrow.tracing.liveness import plain_profile
from outgrow.units import format_bytes


def networks(chosen: Sequence[str], batch: int, as_json: bool) -> None:
    """Print the networks of these names, all of them if there are none."""
    known = [find_listed(name).name for name in chosen or names()]
    rows = []
    with counting_bar() as progress:
        task = progress.add_task("", total=len(known))
        for name in known:
            progress.update(task, description=f"tracing {name}")
            rows.append(measure(name, batch))
            progress.advance(task)
    if as_json:
        print(json.dumps(rows), flush=True)
    else:
        Console().print(_table(rows, batch))


def measure(name: str, batch: int) -> dict[str, Any]:
    """What is said of one network: its parameters, and the peak of a plain step with sgd, in bytes."""
    job = make_job(Options(name, batch=batch))
    parameters = 0

    def make_step() -> outgrow.TrainingStep:
        nonlocal parameters
        made = job.make_step()
        assert isinstance(made.model, nn.Module)
        parameters = sum(parameter.numel() for parameter in made.model.parameters())
        return made

    profile = plain_profile(costed(outgrow.trace(make_step, fake=True)))
    return {
        "name": job.network.name,
        "kind": job.network.kind,
        "image_size": job.shape.image_size,
        "classes": job.shape.classes,
        "parameters": parameters,
        "batch": batch,
        "plain_peak_bytes": profile.peak_bytes,
        "reference": job.network.reference,
    }


def _table(rows: list[dict[str, Any]], batch: int) -> Table:
    table = Table(caption="Size in pixels, for text in tokens. Peak of a plain step, float32, sgd with momentum.")
    table.add_column("network")
    table.add_column("takes")
    table.add_column("size", justify="right")
    table.add_column("parameters", justify="right")
    table.add_column(f"peak at batch {batch}", justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            row["kind"],
            str(row["image_size"]),
            f"{row['parameters']:,}",
            format_bytes(row["plain_peak_bytes"]),
        )
    return table
