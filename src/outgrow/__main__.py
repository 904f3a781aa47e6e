"""`python -m outgrow`: the command line, where its script is not on the path."""

from __future__ import annotations

import sys

from outgrow.cli.main import run

if __name__ == "__main__":
    sys.exit(run())
