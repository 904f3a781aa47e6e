"""Where and with what figures were measured: every benchmark writes it beside them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import outgrow
from outgrow.cost.measure import processor_name


def environment() -> dict[str, Any]:
    """The machine, the day and the versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "outgrow": outgrow.__version__,
        "huge_pages": os.environ.get("THP_MEM_ALLOC_ENABLE") == "1",
    }


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write figures as JSON; folders that are missing are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
