"""The README and the pages of the documentation, block by block: what test_docs.py and run_pages.py read."""

from __future__ import annotations

import importlib.util
import re
import shlex
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(
    r"^```(?P<kind>\w*)\n(?P<code>.*?)^```$|^<!-- hidden\n(?P<hidden>.*?)^-->$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    kind: str
    code: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, with what docs/figures.py puts into it."""
    text = page.read_text()
    if "<!-- figures:" in text:
        text = load_module(ROOT / "docs" / "figures.py").on_page_markdown(text)
    return [
        Block("python", found["hidden"]) if found["hidden"] else Block(found["kind"] or "sh", found["code"])
        for found in _BLOCK.finditer(text)
    ]


def commands(page: Path) -> Iterator[list[str]]:
    """The shell commands of a page, as words."""
    for block in blocks(page):
        if block.kind == "sh":
            for line in block.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield words


def write_files(page: Path, folder: Path) -> None:
    """The page's own files: blocks that begin with a file's name."""
    for block in blocks(page):
        first = block.code.split("\n", 1)[0]
        if found := re.fullmatch(r"# (\w+\.py)", first):
            (folder / found[1]).write_text(block.code)


def load_module(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
