"""The bar that commands show while they work: on standard error, and only where that is a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


def counting_bar(refresh_per_second: float = 10) -> Progress:
    """A bar of so many out of so many, with what is being done before it and the time after it."""
    stderr = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=stderr,
        disable=not stderr.is_terminal,
        transient=True,
        refresh_per_second=refresh_per_second,
    )
