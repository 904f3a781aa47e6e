"""What `--channels-last` means for a benchmark: which networks it can measure, and where the figures go."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from outgrow.networks import find


def default_networks(names: Iterable[str], channels_last: bool) -> list[str]:
    """Those of the names that can be measured so: networks over text have no channels."""
    return [name for name in names if not channels_last or find(name).kind != "text"]


def with_suffix(path: Path, channels_last: bool) -> Path:
    """The path, with "-channels-last" at the end of its name where it holds such figures."""
    return path.with_stem(f"{path.stem}-channels-last") if channels_last else path
