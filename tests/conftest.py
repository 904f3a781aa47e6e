"""Fixtures that several test modules share."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from outgrow.cost import measure

TESTS = Path(__file__).parent

# The tests run in two processes on two cores (`make test`): one thread each, or threads wait for each other.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
SOURCE = TESTS.parent / "src"


class RunChild(Protocol):
    """Runs a function of a test module in a process of its own and returns what it returned, by way of JSON."""

    def __call__(self, function: Callable[..., Any], *arguments: Any, own_mounts: bool = False) -> Any: ...


def child_command(function: Callable[..., Any], *arguments: Any, own_mounts: bool = False) -> list[str]:
    """The command that runs a function of a test module on one core; its result is the last line of its output."""
    code = (
        "import json, sys\n"
        f"sys.path[:0] = [{str(SOURCE)!r}, {str(TESTS)!r}]\n"
        "import torch\n"
        "torch.set_num_threads(1)\n"
        f"from {function.__module__} import {function.__name__} as run\n"
        f"print(json.dumps(run(*json.loads({json.dumps(arguments)!r}))))\n"
    )
    return [*(own_mounts_prefix() if own_mounts else ()), sys.executable, "-X", "faulthandler", "-c", code]


def own_mounts_prefix() -> Sequence[str]:
    """What gives a command mounts that nobody else sees and that go with it."""
    return ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--mount", "--map-root-user")


@pytest.fixture(scope="session")
def run_child() -> RunChild:
    """Limits, mounts, signals and faults stay in the child."""

    def run(function: Callable[..., Any], *arguments: Any, own_mounts: bool = False) -> Any:
        command = child_command(function, *arguments, own_mounts=own_mounts)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"the child ended with {done.returncode}:\n{done.stderr[-4000:]}"
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def _mounting_works() -> bool:
    command = [*own_mounts_prefix(), "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


@pytest.fixture
def own_mounts(_mounting_works: bool) -> None:
    """Skips where a child may not mount file systems of its own."""
    if not _mounting_works:
        pytest.skip("this system lets nobody mount a file system in a namespace of its own")


@pytest.fixture(autouse=True)
def no_remembered_speeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `outgrow doctor` found on this machine is the user's: tests measure, as a new user would."""
    if "own_cache" not in request.fixturenames:
        monkeypatch.setattr(measure, "remembered", lambda: None)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is free now was not in a cycle: nobody collects garbage meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors compute faster on one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def open_files() -> dict[int, str]:
    """This process's file descriptors, with what each is open on."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor that lists the folder
            continue
    return found


def open_files_in(folder: Path) -> list[int]:
    """The descriptors that are open on files in a folder, unnamed ones too."""
    return [descriptor for descriptor, target in open_files().items() if target.startswith(f"{folder}/")]
