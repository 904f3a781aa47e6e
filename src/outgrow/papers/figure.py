"""One figure of a paper beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from outgrow.units import format_bytes

if TYPE_CHECKING:
    from outgrow.papers.lab import Lab


class Unit(StrEnum):
    """What a figure counts."""

    SLOWER = "slower than with enough memory"
    SAVED = "less memory"
    BYTES = "peak bytes"
    LAYERS = "layers"
    BATCH = "samples in a batch"
    TIMES = "times"


@dataclass(frozen=True)
class Row:
    """One figure of a paper beside ours. A number is None where there is none.

    Shares (`Unit.SLOWER`, `Unit.SAVED`) are of 1, sizes in bytes.

    Attributes:
        claim: what the figure says.
        setting: network, batch, device and budget.
        unit: what all the numbers count.
        reported: the paper's number; `source` says where it stands, or that it is quoted from memory.
        plain: plain PyTorch's, simulated on the same device.
        policy: the paper's policy by our name, and `own` what comes of it in our simulator.
        auto: what comes of `auto`.
        measured: what `auto` measured on a CUDA device with the budget as the wall; None where none was there,
            where it did not fit, or where the figure cannot be measured in a few steps.
        auto_samples_per_second: speed of `auto`'s step.
        fits: whether `auto`'s step keeps to the budget.
        note: why figures differ, and how ours came to be.
    """

    claim: str
    setting: str
    unit: Unit
    source: str
    policy: str
    reported: float | None = None
    plain: float | None = None
    own: float | None = None
    auto: float | None = None
    measured: float | None = None
    auto_samples_per_second: float | None = None
    fits: bool = True
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure that can be worked out: its name for the progress bar, and how."""

    name: str
    work_out: Callable[[Lab], Sequence[Row]]


def in_words(number: float | None, unit: Unit) -> str:
    """A number of a row for people; empty where there is none."""
    if number is None:
        return ""
    if unit in (Unit.SLOWER, Unit.SAVED):
        sign = "+" if unit is Unit.SLOWER else "-"
        return f"{sign}{number:.1%}"
    if unit is Unit.BYTES:
        return format_bytes(number)
    return f"{number:.2f} x" if unit is Unit.TIMES else f"{number:,.0f}"
