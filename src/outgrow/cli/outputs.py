"""The files that commands write beside what they print: a report, a picture, a trace for viewers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from outgrow.cli.plot import check_plot_path
from outgrow.reporting.figure import draw_plan
from outgrow.reporting.files import check_writable
from outgrow.reporting.page import write_report
from outgrow.reporting.perfetto import write_perfetto
from outgrow.reporting.subject import Subject


@dataclass(frozen=True)
class Outputs:
    """Where a report, a picture and a Chrome trace go; None where none was asked for."""

    report: Path | None = None
    plot: Path | None = None
    perfetto: Path | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The options that were given."""
        given = {"--report": self.report, "--plot": self.plot, "--perfetto": self.perfetto}
        return tuple(name for name, path in given.items() if path is not None)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Where they go, in the same order."""
        return tuple(path for path in (self.report, self.plot, self.perfetto) if path is not None)

    def check(self) -> None:
        """Fail before any work is done for a file that could not be written in the end.

        Raises:
            ReportError: a file cannot be written.
            OptionError: matplotlib is missing, or does not know the picture's suffix.
        """
        for path in (self.report, self.perfetto):
            if path is not None:
                check_writable(path)
        if self.plot is not None:
            check_plot_path(self.plot)

    def write(self, subject: Subject, stderr: Console) -> None:
        """Write what was asked for, with a line for each file where standard error is a terminal.

        Raises:
            ReportError: a file cannot be written.
        """
        for path, writer in ((self.report, write_report), (self.plot, draw_plan), (self.perfetto, write_perfetto)):
            if path is not None:
                writer(path, subject)
                if stderr.is_terminal:
                    stderr.print(f"wrote {path}", markup=False, highlight=False)


NO_OUTPUTS = Outputs()
