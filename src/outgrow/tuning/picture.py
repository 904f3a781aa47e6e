"""Draws an answer of the tuner: samples per second against the batch. matplotlib is optional."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outgrow.errors import TuningError

if TYPE_CHECKING:
    from outgrow.tuning.answer import Tuning

_INCHES = (7.5, 5.0)
_DOTS_PER_INCH = 150


def draw(answer: Tuning, path: Path) -> None:
    """Write the plot; the suffix of `path` says in which format.

    Raises:
        TuningError: matplotlib is missing, does not know the suffix, or the file cannot be written.
    """
    try:
        # The object interface: pyplot would choose a backend, and might want a display.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TuningError('a plot needs matplotlib: pip install "outgrow[plot]"') from error
    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    feasible = [item for item in answer.candidates if item.feasible]
    sizes = [item.batch_size for item in feasible]
    axes.plot(sizes, [item.predicted_samples_per_second for item in feasible], "o--", mfc="none", label="predicted")
    if answer.objective == "goodput":
        axes.plot(sizes, [item.goodput for item in feasible], ":", color="C2", label="goodput")
    run = [(item.batch_size, item.measured_samples_per_second) for item in feasible]
    measured = [(size, speed) for size, speed in run if speed is not None]
    axes.plot([size for size, _ in measured], [speed for _, speed in measured], "o", color="C1", label="measured")
    axes.axvline(answer.batch_size, color="gray", linewidth=0.8, zorder=0, label=f"chosen: {answer.batch_size}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("samples in a step")
    axes.set_ylabel("samples per second")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH)
    except (OSError, ValueError) as error:
        raise TuningError(f"the plot {path} cannot be written: {error}") from error
