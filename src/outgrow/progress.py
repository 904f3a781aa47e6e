"""What commands show while they work: a bar, only where standard error is a terminal, and the library's log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
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


def say(line: str) -> None:
    """Tell whoever waits at a terminal, and nobody else, what for."""
    # A daemon has no such stream, and a program may put there what it likes.
    with suppress(AttributeError, OSError, ValueError):
        if sys.stderr.isatty():
            print(f"outgrow: {line}", file=sys.stderr)  # a bar that is there goes on below


@contextmanager
def log_to(console: Console) -> Iterator[None]:
    """What the library logs goes to a console meanwhile, one line a message, above a bar that is there."""
    logger = logging.getLogger("outgrow")
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, show_level=False, highlighter=NullHighlighter())
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
