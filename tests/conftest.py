"""Fixtures that several test modules share."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import forkserver, get_context, set_start_method
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Protocol

import hypothesis
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import outgrow
from outgrow.cost import measure
from outgrow.cost.hardware import Hardware
from outgrow.planning.policies import auto
from outgrow.runtime.tiers.disk import Run
from outgrow.tuning import pace, trial

TESTS = Path(__file__).parent

# The tests run in two processes on two cores (`make test`): one thread each, or threads wait for each other.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
SOURCE = TESTS.parent / "src"
CHILD_SECONDS = 180
# Plans just above the least budget are not polished for seconds, but where tests ask how good plans are.
CHANGES = 60
ASK_HOW_GOOD_PLANS_ARE = ("test_auto", "test_learning", "test_policies")

hypothesis.settings.register_profile("fuzz", max_examples=500)


class RunChild(Protocol):
    """Runs a function of a test module in a process of its own and returns what it returned, by way of JSON."""

    def __call__(self, function: Callable[..., Any], *arguments: Any, own_mounts: bool = False) -> Any: ...


def child_command(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The command that runs a function of a test module on one core, as a program that ends as programs do."""
    code = (
        "import json, sys\n"
        f"sys.path[:0] = [{str(SOURCE)!r}, {str(TESTS)!r}]\n"
        "import torch\n"
        "torch.set_num_threads(1)\n"
        f"from {function.__module__} import {function.__name__} as run\n"
        f"print(json.dumps(run(*json.loads({json.dumps(arguments)!r}))))\n"
    )
    return [sys.executable, "-X", "faulthandler", "-c", code]


@pytest.fixture(scope="session")
def _forks() -> ForkServerContext:
    """Makes processes that are forked off one in which nothing ran, but imports are done: those take five seconds."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["conftest", "steps", "torch._dynamo", "scipy.optimize", "outgrow.session"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), str(TESTS), *filter(None, sys.path)]))
        forkserver.ensure_running()
    return context


def run_forked(answers: Connection, errors: str, function: Callable[..., Any], arguments: str, mounts: bool) -> None:
    """What a child does: its answer goes to a pipe, what it says on standard error to a file."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    set_start_method(None, force=True)  # its own children start as those of any program do
    faulthandler.enable()
    torch.set_num_threads(1)
    auto._CHANGES = CHANGES
    if mounts:
        take_own_mounts()
    answers.send(json.dumps(function(*json.loads(arguments))))


def take_own_mounts() -> None:
    """From here on this process mounts what nobody else sees and what goes with it.

    Raises:
        OSError: this system lets nobody do that.
    """
    new_mounts, new_user, recursive, private = 0x00020000, 0x10000000, 0x4000, 0x40000  # linux/sched.h, linux/mount.h
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(new_mounts | (new_user if user else 0)):
        raise OSError(ctypes.get_errno(), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if libc.mount(b"none", b"/", None, recursive | private, None):
        raise OSError(ctypes.get_errno(), "mount")


class Child:
    """A function of a test module that runs in a process of its own, on one core."""

    def __init__(
        self, forks: ForkServerContext, function: Callable[..., Any], *arguments: Any, own_mounts: bool
    ) -> None:
        self._errors = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 - it lives as long as the process
        self._answers, sender = forks.Pipe(duplex=False)
        call = (sender, self._errors.name, function, json.dumps(arguments), own_mounts)
        self._process = forks.Process(target=run_forked, args=call)
        self._process.start()
        sender.close()

    def result(self, seconds: float = CHILD_SECONDS) -> Any:
        """What the function returned, by way of JSON. A child that takes longer than `seconds` is killed."""
        with self._errors, self._answers:
            if not self._answers.poll(seconds):
                self._end()
            with suppress(EOFError):  # it ended without an answer
                answer = self._answers.recv()
            self._process.join()
            code = self._process.exitcode
            assert code == 0, f"the child ended with {code}:\n{self._said()}"
        return json.loads(answer)

    def _said(self) -> str:
        """The end of its standard error, without the list of modules that follows the stacks of a crash."""
        return self._errors.read().split("\nExtension modules:")[0][-8000:]

    def _end(self) -> None:
        """An abort makes it say first where each of its threads is."""
        os.kill(self._process.pid, signal.SIGABRT)
        self._process.join(10)
        self._process.kill()


class StartChild(Protocol):
    """Starts a function of a test module in a process of its own."""

    def __call__(self, function: Callable[..., Any], *arguments: Any, own_mounts: bool = False) -> Child: ...


@pytest.fixture(scope="session")
def start_child(_forks: ForkServerContext) -> StartChild:
    """Limits, mounts, signals and faults stay in the child."""

    def start(function: Callable[..., Any], *arguments: Any, own_mounts: bool = False) -> Child:
        return Child(_forks, function, *arguments, own_mounts=own_mounts)

    return start


@pytest.fixture(scope="session")
def run_child(start_child: StartChild) -> RunChild:
    """The same, and waits for its end."""
    return lambda function, *arguments, **options: start_child(function, *arguments, **options).result()


def mount_something(folder: str) -> bool:
    return subprocess.run(("mount", "-t", "tmpfs", "none", folder), capture_output=True).returncode == 0


@pytest.fixture(scope="session")
def _mounting_works(run_child: RunChild) -> bool:
    try:
        return run_child(mount_something, "/mnt", own_mounts=True)
    except AssertionError:
        return False


@pytest.fixture
def own_mounts(_mounting_works: bool) -> None:
    """Skips where a child may not mount file systems of its own."""
    if not _mounting_works:
        pytest.skip("this system lets nobody mount a file system in a namespace of its own")


@pytest.fixture(scope="session")
def measured_machine() -> Hardware:
    """What a session of a new user measures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "remembered", lambda: None)
        return measure.this_machine()


@pytest.fixture(autouse=True)
def own_speeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, measured_machine: Hardware) -> None:
    """What `outgrow doctor` found on this machine is the user's: tests measure, but not in each session anew."""
    if "own_cache" not in request.fixturenames:
        monkeypatch.setattr(measure, "remembered", lambda: measured_machine)


@pytest.fixture(autouse=True, scope="session")
def short_trials() -> Iterator[None]:
    """The tuner's runs are as short as a step allows: tests ask whether it is right, not whether a clock is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_LEAST_SECONDS", 0.0)
        patch.setattr(pace, "_SIZE", 8)
        yield


@pytest.fixture(autouse=True)
def short_searches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The local search of plans ends sooner."""
    if request.module.__name__ not in ASK_HOW_GOOD_PLANS_ARE:
        monkeypatch.setattr(auto, "_CHANGES", CHANGES)


@pytest.fixture(autouse=True, scope="module")
def few_to_look_through() -> None:
    """Collections, of which each refusal waits for one, do not look at what libraries made when they were loaded.

    Nor does the next module's collection here, which takes a quarter of a second where it looks at all.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy is an operation on the disk by itself, as those expect who stand in for these."""
    monkeypatch.setattr(Run, "takes", lambda run, slot: False)


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


def assert_nothing_is_open(session: outgrow.Session | None) -> None:
    """There was a session; it is closed, and no step of it is left half done."""
    assert _get_current_dispatch_mode_stack() == []
    assert session is not None
    with pytest.raises(outgrow.SessionError, match="closed"), session.step():
        pass


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
