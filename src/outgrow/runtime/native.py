"""Our own C++, compiled on the machine that it runs on: for its PyTorch, once, into the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from outgrow.cache import cache_folder

_COMPILE_SECONDS = 120


def built(source: Path, *libraries: str, for_python: bool = False) -> Path:
    """The compiled `source`, from the cache or built now; `libraries` of PyTorch it is linked with.

    What is `for_python` is a module of this Python's, and needs its headers.

    Raises:
        OSError: there is no compiler, it fails, or the cache cannot be written.
        subprocess.SubprocessError: the compiler takes too long.
    """
    torch_root = Path(torch.__file__).parent
    made_for = source.read_bytes() + f"{torch.__version__} {torch_root}".encode()
    includes = [torch_root / "include"]
    if for_python:
        headers = Path(sysconfig.get_path("include"))
        if not (headers / "Python.h").exists():
            raise OSError(f"there are no headers of Python in {headers}")
        made_for += f" {sys.version} {headers}".encode()
        includes.append(headers)
    folder = cache_folder()
    target = folder / f"{source.stem}-{hashlib.sha256(made_for).hexdigest()[:16]}.so"
    if target.exists():
        return target
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise OSError("there is no C++ compiler (g++, c++ or $CXX)")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / target.name
        command = [compiler, "-O2", "-std=c++20", "-shared", "-fPIC", *(f"-I{include}" for include in includes)]
        command += [str(source), "-o", str(made), f"-L{torch_root / 'lib'}", *(f"-l{name}" for name in libraries)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()}")
        os.replace(made, target)  # whole or not at all: others may be building it too
    return target
