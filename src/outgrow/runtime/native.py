"""Our own C++, compiled on the machine that it runs on: for its PyTorch, once, into the cache."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import TypeVar

import torch

from outgrow.cache import cache_folder
from outgrow.progress import say

_LOG = logging.getLogger(__name__)

_COMPILE_SECONDS = 120


@dataclass(frozen=True)
class Code:
    """C++ of ours: where it is, and the `libraries` of PyTorch that it is linked with.

    What is `for_python` is a module of this Python's, and needs its headers.
    """

    source: Path
    libraries: tuple[str, ...]
    for_python: bool = False

    @property
    def includes(self) -> list[Path]:
        """The folders of the headers that it includes."""
        return [_torch_root() / "include", *([Path(sysconfig.get_path("include"))] if self.for_python else [])]

    @property
    def target(self) -> Path:
        """Where it is when it is compiled: under another name for other sources, another PyTorch or Python."""
        made_for = self.source.read_bytes() + f"{torch.__version__} {_torch_root()}".encode()
        if self.for_python:
            made_for += f" {sys.version} {self.includes[-1]}".encode()
        return cache_folder() / f"{self.source.stem}-{hashlib.sha256(made_for).hexdigest()[:16]}.so"


_Made = TypeVar("_Made")


def once(make: Callable[[], _Made]) -> Callable[[], _Made]:
    """Called once in a process: `functools.cache` calls once for each thread that comes before the first is done."""
    lock, known = threading.Lock(), cache(make)

    @wraps(make)
    def get() -> _Made:
        with lock:
            return known()

    return get


def _torch_root() -> Path:
    return Path(torch.__file__).parent


def build_ahead(*codes: Code) -> None:
    """Compile what is not there yet, side by side. What fails, fails again where it is wanted."""
    with suppress(OSError, RuntimeError):  # no folder for a cache, no thread
        missing = [code for code in codes if not _is_whole(code.target)]
        if len(missing) < 2 or _compiler() is None:
            return
        say("compiling what runs past Python for this machine, once: some 15 seconds")
        with ThreadPoolExecutor(len(missing)) as pool:
            for building in [pool.submit(built, code) for code in missing]:
                with suppress(OSError, subprocess.SubprocessError):
                    building.result()


@contextmanager
def _alone_with(source: Path) -> Iterator[None]:
    """While this lasts, other processes that want to compile a source wait, where the file system can do that."""
    with ExitStack() as stack:
        with suppress(OSError):
            fcntl.flock(stack.enter_context(source.open("rb")), fcntl.LOCK_EX)
        yield


def built(code: Code) -> Path:
    """The compiled code, from the cache or built now.

    Raises:
        OSError: there is no compiler, it fails, or the cache cannot be written.
        subprocess.SubprocessError: the compiler takes too long.
    """
    target = code.target
    if _is_whole(target):
        return target
    if code.for_python and not (code.includes[-1] / "Python.h").exists():
        raise OSError(f"there are no headers of Python in {code.includes[-1]}")
    compiler = _compiler()
    if compiler is None:
        raise OSError("there is no C++ compiler (g++, c++ or $CXX)")
    folder = target.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone_with(code.source), tempfile.TemporaryDirectory(dir=folder) as work:
        if _is_whole(target):
            return target
        _LOG.info("compiling %s, once", code.source.name)
        made = Path(work) / target.name
        command = [compiler, "-O2", "-std=c++20", "-shared", "-fPIC", *(f"-I{include}" for include in code.includes)]
        command += [str(code.source), "-o", str(made)]
        command += [f"-L{_torch_root() / 'lib'}", *(f"-l{name}" for name in code.libraries)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()}")
        _seal(made)
        os.replace(made, target)  # whole or not at all: others may be building it too
    return target


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def _seal(made: Path) -> None:
    """Write a hash of a file behind its end, where no loader looks."""
    digest = hashlib.sha256(made.read_bytes()).digest()
    with made.open("ab") as file:
        file.write(digest)


def _is_whole(target: Path) -> bool:
    """Whether a file is there, and is what was compiled: where the machine stopped soon after, it may have no end.

    The process that loads such a file dies of SIGBUS.
    """
    try:
        content = target.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]
