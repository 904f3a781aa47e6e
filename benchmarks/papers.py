"""The papers' figures, worked out anew: as JSON for each paper, and as tables in Markdown.

    python benchmarks/papers.py --output-dir benchmarks/results --tables docs/papers.md

Nothing is trained and no GPU is needed; all four take an hour on one core. `--tables` alone is made anew from what is
in the folder with `--paper none`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from environment import environment, write

from outgrow.papers import figures_of, papers
from outgrow.papers.figure import Row, Unit, in_words
from outgrow.papers.lab import Lab
from outgrow.papers.trial import measurer_here

_HEAD = """# The papers' figures

Each figure of the four papers, and what our simulator makes of it on the paper's GPU: plain PyTorch, the paper's own
policy (`outgrow/planning/policies/`), and `auto`. All from fake traces and the profiles of `outgrow doctor --json`;
nothing of it has run on a GPU. What is quoted from memory is marked. `outgrow paper NAME` works a paper out anew;
these tables are `benchmarks/papers.py`'s, from `benchmarks/results/paper-*.json`.

Convolutions are as fast as cuDNN's fastest algorithm and hold no workspace, but where a row says otherwise: "(m)" is
none and the slowest algorithm, "(p)" whatever the fastest wants, "dynamic" the fastest that fits the bytes that are
free at that moment. `outgrow paper NAME --workspace KIND` works all rows out so.

"measured" is what `auto` measures with the budget as the wall where there is a CUDA device, which is not the paper's:
time against plain PyTorch there, the peak of live bytes, or the batch that the simulator answered with, if it trains.
"—": not measured. So far no such row was run on one.
"""


def work_out(name: str, folder: Path, wanted: str | None = None) -> None:
    """All figures of one paper; what is done is written after each.

    With `wanted`, only figures with that in their name; the other rows stay as they are in the folder, and "later"
    says where the new ones were worked out.
    """
    path = folder / f"paper-{name}.json"
    document: dict[str, Any] = {"environment": environment(), "paper": name, "later": {}, "rows": []}
    if wanted is not None:
        document |= json.loads(path.read_text())
    rows: list[dict[str, Any]] = [asdict(_row(row)) for row in document["rows"]]
    lab = Lab(measurer=measurer_here())
    for figure in figures_of(name):
        if wanted is not None and wanted not in figure.name:
            continue
        for row in figure.work_out(lab):
            known = [_key(other) for other in rows]
            if _key(asdict(row)) in known:
                rows[known.index(_key(asdict(row)))] = asdict(row)
            else:
                rows.append(asdict(row))
            numbers = (in_words(number, row.unit) or "-" for number in (row.reported, row.plain, row.own, row.auto))
            print(f"{name}: {row.claim}, {row.setting}:", *numbers, flush=True)
        if wanted is not None:
            document["later"][figure.name] = environment()
        write(path, document | {"rows": rows})


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["claim"], row["setting"], row["policy"]


def tables(folder: Path) -> Iterator[str]:
    """The tables of all papers whose figures are in the folder."""
    yield _HEAD
    for name in papers():
        path = folder / f"paper-{name}.json"
        if path.exists():
            document = json.loads(path.read_text())
            yield f"\n## {name}\n\n"
            yield "| figure | paper | plain | its policy | auto | samples/s | measured | remarks |\n"
            yield "|---" * 8 + "|\n"
            yield from map(_line, document["rows"])


def _row(document: Mapping[str, Any]) -> Row:
    return Row(**{**document, "unit": Unit(document["unit"])})


def _line(document: Mapping[str, Any]) -> str:
    row = _row(document)
    numbers = [in_words(number, row.unit) for number in (row.reported, row.plain, row.own, row.auto)]
    speed = "" if row.auto_samples_per_second is None else f"{row.auto_samples_per_second:.1f}"
    remarks = "; ".join(filter(None, (row.source, row.note, "" if row.fits else "auto does not fit")))
    measured = in_words(row.measured, row.unit) or "—"
    cells = (f"{row.claim} ({row.unit}): {row.setting}; {row.policy}", *numbers, speed, measured, remarks)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


def main() -> None:
    """Work out what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"), help="where the JSON goes")
    parser.add_argument("--paper", action="append", help=f"one of {', '.join(papers())}, or none; may be repeated")
    parser.add_argument("--figure", help="only figures with this in their name; other rows are kept as they are")
    parser.add_argument("--tables", type=Path, help="the Markdown file that gets the tables")
    given = parser.parse_args()
    for name in given.paper or papers():
        if name != "none":
            work_out(name, given.output_dir, given.figure)
    if given.tables is not None:
        given.tables.write_text("".join(tables(given.output_dir)))


if __name__ == "__main__":
    main()
