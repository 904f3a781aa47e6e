"""One HTML file that needs nothing else: no server, no network, no other file.

`session.report`, `outgrow.report` and the commands write it.
The data lies in the page compressed, as base64: no word of it can be taken for HTML. A content security policy in the
page forbids it to load anything.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from outgrow.reporting.document import document_of
from outgrow.reporting.files import write_whole
from outgrow.reporting.subject import Subject


def write_report(path: str | Path, subject: Subject) -> None:
    """Write the page of a plan and, if there are any, of its steps.

    Raises:
        ReportError: the file cannot be written.
    """
    write_whole(path, plan_page(subject).encode(errors="replace"))


def plan_page(subject: Subject) -> str:
    """The page of a plan: memory over time, three lanes, what holds the peak, decisions, settings."""
    return page(subject.title, "plan.js", document_of(subject))


def page(title: str, script: str, document: Mapping[str, Any]) -> str:
    """A page that shows a document with one of the scripts in `assets`."""
    parts = {
        "TITLE": html.escape(title),
        "STYLE": _asset("report.css"),
        "DATA": _packed(document),
        "SCRIPT": _asset("common.js") + _asset(script),
    }
    # In one go: a title may look like a place to fill.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda place: parts[place[1]], _asset("report.html"))


def _asset(name: str) -> str:
    return resources.files("outgrow.reporting").joinpath("assets", name).read_text(encoding="utf-8")


def _packed(document: Mapping[str, Any]) -> str:
    plain = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    return base64.b64encode(gzip.compress(plain, mtime=0)).decode("ascii")
