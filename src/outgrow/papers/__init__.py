"""The figures of the four papers, each worked out anew: the paper's policy and `auto` on the paper's GPU.

lab.py           traces and plans that several figures share
figure.py        Row: one figure of a paper beside ours
vdnn.py, superneurons.py, layrub.py, accudnn.py    the figures of each paper, one function a figure
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from outgrow.errors import UnknownPaper
from outgrow.papers import accudnn, layrub, superneurons, vdnn
from outgrow.papers.figure import Figure

__all__ = ["figures_of", "papers"]


def papers() -> tuple[str, ...]:
    """The papers by the names of their systems, in the order in which they appeared."""
    return ("vdnn", "superneurons", "layrub", "accudnn")


def figures_of(paper: str) -> Sequence[Figure]:
    """The figures of one paper.

    Raises:
        UnknownPaper: none has this name.
    """
    by_name = dict(zip(papers(), (vdnn.FIGURES, superneurons.FIGURES, layrub.FIGURES, accudnn.FIGURES), strict=True))
    name = paper.strip().lower()
    if name not in by_name:
        close = difflib.get_close_matches(name, by_name, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UnknownPaper(f"no paper is called {paper!r}.{hint} There are: {', '.join(by_name)}")
    return by_name[name]
