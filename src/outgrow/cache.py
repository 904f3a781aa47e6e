"""Where Outgrow keeps what it would otherwise make anew in each process."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder, which may not exist yet: `$XDG_CACHE_HOME/outgrow`, else `~/.cache/outgrow`.

    Raises:
        OSError: there is no home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outgrow"
    except RuntimeError as error:
        raise OSError(f"no folder for a cache: {error}") from error
