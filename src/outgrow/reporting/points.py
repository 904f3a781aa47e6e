"""A page with one chart and one table: time against memory for policies, budgets or whatever else was compared.

`outgrow compare` makes one; anything that ends in points can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outgrow.reporting.files import write_whole
from outgrow.reporting.page import page

Cell = str | float | int | None


@dataclass(frozen=True)
class Mark:
    """One point: where it lies, and lines of text that are shown when somebody points at it."""

    x: float
    y: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Series:
    """Points of one thing. Those of one `group` share a color; a `dashed` line and hollow marks are predictions.

    `joined` is False for points that are no curve; `starred` points stand out: the winner of a search.
    """

    label: str
    group: str
    marks: tuple[Mark, ...]
    dashed: bool = False
    joined: bool = True
    starred: bool = False


@dataclass(frozen=True)
class Column:
    """A column of the table. `unit` says how numbers are shown: "bytes", "seconds", "percent", "factor" or as is."""

    name: str
    unit: str = ""


@dataclass(frozen=True)
class PointsPage:
    """What the page shows, from top to bottom: `facts` are small cards of (label, value, remark).

    The lines `x_line` and `y_line` mark what everything is relative to, a plain step say; None draws none.
    """

    title: str
    subtitle: str
    facts: tuple[tuple[str, str, str], ...]
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    x_unit: str = ""
    y_unit: str = ""
    x_line: float | None = None
    y_line: float | None = None


def write_points(path: str | Path, content: PointsPage) -> None:
    """Write the page.

    Raises:
        ReportError: the file cannot be written.
        ValueError: a row has more or fewer cells than there are columns, or a number is not finite.
    """
    write_whole(path, points_page(content).encode())


def points_page(content: PointsPage) -> str:
    """The page as text; see `write_points`."""
    _check_rows(content.columns, content.rows)
    return page(content.title, "points.js", {"kind": "points"} | asdict(content))


def _check_rows(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a row of {len(row)} cells for {len(columns)} columns: {row!r}")
