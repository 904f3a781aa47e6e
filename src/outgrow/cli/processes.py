"""How the command line starts processes that all import the same, which takes seconds: once, where that can be."""

from __future__ import annotations

import tempfile
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, SpawnContext

# What the process imports that the others are forked off. (Dynamo is what the first optimizer imports.)
_IMPORTED_AHEAD = ("outgrow.cli.train", "torch._dynamo")
# It is asked by way of a socket in the folder for temporary files, whose path may have so many bytes.
_MOST_PATH = 107
_IN_FOLDER = "/pymp-xxxxxxxx/listener-xxxxxxxx"


def forking() -> ForkServerContext | SpawnContext:
    """Starts processes that are forked off one that has imported all, or that import it each for itself."""
    if len(tempfile.gettempdir().encode()) + len(_IN_FOLDER) > _MOST_PATH:
        return spawning()
    context = get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED_AHEAD])
    return context


def spawning() -> SpawnContext:
    """Starts processes that begin anew, with the variables that the environment has when they are started."""
    return get_context("spawn")
