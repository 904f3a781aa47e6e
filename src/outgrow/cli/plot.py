"""Plots of step time against peak memory, written to a file. matplotlib is optional, and no display is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outgrow.cli.job import OptionError

_INCHES = (7.5, 5.0)
_DOTS_PER_INCH = 150


@dataclass(frozen=True)
class Line:
    """One series: (peak, time) points, each relative to the plain step's.

    `group` chooses the color, so that what was measured and what was predicted of one policy match; `measured`
    draws full lines and filled marks, otherwise lines are dashed and marks hollow. `joined` is False for points
    that are no curve.
    """

    label: str
    group: str
    points: tuple[tuple[float, float], ...]
    measured: bool
    joined: bool = True


def check_plot_path(path: Path) -> None:
    """Fail before any work is done for a plot that could not be written in the end.

    Raises:
        OptionError: matplotlib is missing, does not know the file's suffix, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise OptionError('--plot needs matplotlib: pip install "outgrow[plot]"') from error
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise OptionError(f"--plot {path}: the file must end in one of .{', .'.join(known)}")
    was_there = path.exists()
    try:
        path.open("ab").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise OptionError(f"--plot {path} cannot be written: {error.strerror}") from error


def draw(path: Path, title: str, lines: Sequence[Line]) -> None:
    """Write the plot; the suffix of `path` says in which format.

    Raises:
        OptionError: the file cannot be written.
    """
    # The object interface: pyplot would choose a backend, and might want a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = {group: f"C{number % 10}" for number, group in enumerate(dict.fromkeys(line.group for line in lines))}
    for line in lines:
        if not line.points:
            continue
        peaks, times = zip(*sorted(line.points), strict=True)
        color = colors[line.group]
        axes.plot(
            peaks,
            times,
            label=line.label,
            color=color,
            linestyle=("-" if line.measured else "--") if line.joined else "none",
            marker="o" if line.joined else "D",
            markerfacecolor=color if line.measured else "none",
        )
    axes.axhline(1, color="gray", linewidth=0.8, zorder=0)
    axes.axvline(1, color="gray", linewidth=0.8, zorder=0)
    axes.set_title(title)
    axes.set_xlabel("peak memory / that of a plain step")
    axes.set_ylabel("time of a step / that of a plain step")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise OptionError(f"--plot {path} cannot be written: {error.strerror}") from error
