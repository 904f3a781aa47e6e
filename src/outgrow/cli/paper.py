"""`outgrow paper`: the figures of a paper beside what its policy and `auto` do on its GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from outgrow.cost.workspaces import find_workspace
from outgrow.papers import figures_of
from outgrow.papers.figure import Row, in_words
from outgrow.papers.lab import Lab
from outgrow.papers.trial import measurer_here
from outgrow.progress import counting_bar


def paper(name: str, as_json: bool, workspace: str | None = None) -> None:
    """Work out all figures of one paper, and print them: a table, or with `as_json` one line of JSON.

    `workspace` is what convolutions hold for their work; figures that are about workspaces say that themselves.
    """
    figures = figures_of(name)
    rows: list[Row] = []
    with counting_bar() as progress:
        task = progress.add_task(name, total=len(figures))
        lab = Lab(
            lambda what: progress.update(task, description=what),
            workspace=find_workspace(workspace),
            measurer=measurer_here(),
        )
        for figure in figures:
            progress.update(task, description=figure.name)
            rows += figure.work_out(lab)
            progress.advance(task)
    if as_json:
        print(json.dumps({"paper": name, "workspace": workspace, "rows": [asdict(row) for row in rows]}), flush=True)
    else:
        Console().print(_table(name, rows))


def _table(name: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"The figures of {name}, and ours", show_lines=True)
    table.add_column("figure")
    for heading in ("paper", "plain", "its policy", "auto", "samples/s", "measured"):
        table.add_column(heading, justify="right")
    table.add_column("remarks")
    for row in rows:
        speed = "" if row.auto_samples_per_second is None else f"{row.auto_samples_per_second:.1f}"
        numbers = (in_words(number, row.unit) for number in (row.reported, row.plain, row.own, row.auto))
        remarks = f"{row.source}. {row.note}".strip()
        if not row.fits:
            remarks = f"auto does not fit. {remarks}"
        measured = in_words(row.measured, row.unit) or "—"
        table.add_row(f"{row.claim}\n{row.setting}\n({row.policy}; {row.unit})", *numbers, speed, measured, remarks)
    table.caption = (
        "Simulated on the paper's GPU, from fake traces: 'plain' is PyTorch as it is, 'its policy' ours after the "
        "paper, 'samples/s' auto's. 'measured' is auto's on the CUDA device that is here, if there is one."
    )
    return table
