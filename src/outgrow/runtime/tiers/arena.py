"""One region of memory for CPU tensors, whose pages stay: built from `arena.cpp` when it is first wanted."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from outgrow.cache import cache_folder
from outgrow.runtime.tiers.resident import ResidentSet

_log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("arena.cpp")
# Addresses for each byte of the machine's memory: between blocks there are holes, and addresses cost nothing.
_ADDRESSES_PER_BYTE = 2
_COMPILE_SECONDS = 120


class Arena:
    """PyTorch's CPU allocator while a session is open, for blocks from 64 KiB up."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._open = library.outgrow_arena_open
        self.begin_step: Callable[[], object] = library.outgrow_arena_begin_step
        self.give_back: Callable[[], object] = library.outgrow_arena_give_back
        self._keep_under = library.outgrow_arena_keep_under
        self._present = library.outgrow_arena_present_bytes
        self._used = library.outgrow_arena_used_bytes
        self._keep_under.argtypes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t, ctypes.c_int)
        self._keep_under.restype = None
        for function in (self._present, self._used):
            function.restype = ctypes.c_size_t
        self._users = 0

    @property
    def present_bytes(self) -> int:
        """Bytes whose pages are there, in use or not."""
        return int(self._present())

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks in use, in whole pages."""
        return int(self._used())

    def keep_under(self, limit_bytes: int, resident: ResidentSet, nbytes: int) -> None:
        """Tell the arena how many pages it may have; it keeps to that by itself when it hands out a block.

        As many as blocks fill at their most in each step it keeps all the same.
        """
        self._keep_under(max(0, limit_bytes), resident.descriptor, resident.page_bytes, 0)

    def make_room_beside(self, limit_bytes: int, resident: ResidentSet, nbytes: int) -> None:
        """Give free pages back, those of the next steps too, if `nbytes` beside tensors would come over the limit."""
        self._keep_under(max(0, limit_bytes - nbytes), resident.descriptor, resident.page_bytes, 1)

    def open(self) -> None:
        """Hand out memory. Each call has its `close`."""
        self._users += 1
        self._open(1)

    def close(self) -> None:
        """With the last, hand out no more, and give free pages back; blocks in use stay good."""
        self._users -= 1
        if not self._users:
            self._open(0)


@cache
def find_arena() -> Arena | None:
    """The process's arena; None where there can be none, and the log says why."""
    if os.environ.get("OUTGROW_ARENA") == "0":
        return None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        library = ctypes.CDLL(str(_library()))
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("no arena, tensors stay on the heap: %s", error)
        return None
    library.outgrow_arena_install.argtypes = (ctypes.c_size_t,)
    if library.outgrow_arena_install(_ADDRESSES_PER_BYTE * memory):
        _log.info("no arena, tensors stay on the heap: no addresses for it, or another allocator comes first")
        return None
    return Arena(library)


def _library() -> Path:
    """The compiled allocator, from the cache or built now.

    Raises:
        OSError: there is no compiler, it fails, or the cache cannot be written.
        subprocess.SubprocessError: the compiler takes too long.
    """
    torch_root = Path(torch.__file__).parent
    made_for = _SOURCE.read_bytes() + f"{torch.__version__} {torch_root}".encode()
    folder = cache_folder()
    target = folder / f"arena-{hashlib.sha256(made_for).hexdigest()[:16]}.so"
    if target.exists():
        return target
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise OSError("there is no C++ compiler (g++, c++ or $CXX)")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / target.name
        command = [compiler, "-O2", "-std=c++20", "-shared", "-fPIC", f"-I{torch_root / 'include'}", str(_SOURCE)]
        command += ["-o", str(made), f"-L{torch_root / 'lib'}", "-lc10"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()}")
        os.replace(made, target)  # whole or not at all: others may be building it too
    return target
