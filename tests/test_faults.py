"""Disks fail: the error says where, training state stays as it was, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outgrow
from conftest import RunChild, open_files, open_files_in
from outgrow import SpillError

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4
# Two activations of the network are 1 MiB, of about 13 MiB that are alive at the peak.
BUDGET = 5 << 20


def network() -> nn.Module:
    """No op depends on earlier steps, so that a step that failed can be run again."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(8):
        layers += [nn.GELU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


class Training:
    """A network, its optimizer and one batch a step; the same in every process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def session(self, folder: Path | str, **options: Any) -> outgrow.Session:
        options = {"budget": BUDGET, "policy": "vdnn-all", "spill_dir": folder, **options}
        return outgrow.Session(self.model, self.optimizer, **options)

    def forward(self, k: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(k)
        x = torch.randn(8, 3, 32, 32, generator=generator)
        return F.cross_entropy(self.model(x), torch.randint(0, 10, (8,), generator=generator))

    def step(self, k: int) -> None:
        self.forward(k).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def plainly_trained(steps: int = STEPS) -> list[torch.Tensor]:
    training = Training()
    for k in range(steps):
        training.step(k)
    return training.parameters


def finish(training: Training, session: outgrow.Session, first: int) -> bool:
    """Train on in a session that met a fault; whether that ends where plain PyTorch ends."""
    for k in range(first, STEPS):
        with session.step():
            training.step(k)
    return same(training.parameters, plainly_trained())


# --- folders that will not do ---


@contextmanager
def refused_without_a_trace(training: Training, *words: str) -> Iterator[None]:
    """The error has the words; no descriptor or thread stays, and a session elsewhere can be opened at once."""
    files, threads = open_files(), threading.active_count()
    with pytest.raises(SpillError) as caught:
        yield
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert open_files() == files
    assert threading.active_count() == threads
    training.session("/tmp", allow_tmpfs=True).close()


def test_a_missing_spill_folder_is_refused(tmp_path: Path) -> None:
    training = Training()
    with refused_without_a_trace(training, str(tmp_path / "nowhere"), "does not exist"):
        training.session(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_spill_folder_where_nobody_can_write_is_refused() -> None:
    training = Training()
    with refused_without_a_trace(training, "cannot make a spill file in /proc", "another spill_dir"):
        training.session("/proc")


def open_on_read_only_mount(folder: str) -> str:
    for command in (("mount", "--bind", folder, folder), ("mount", "-o", "remount,bind,ro", folder)):
        subprocess.run(command, check=True)
    training = Training()
    with refused_without_a_trace(training, "cannot make a spill file in", folder, "Read-only file system"):
        training.session(folder, allow_tmpfs=True)
    return "refused"


@pytest.mark.usefixtures("own_mounts")
def test_a_read_only_spill_folder_is_refused(run_child: RunChild, tmp_path: Path) -> None:
    assert run_child(open_on_read_only_mount, str(tmp_path), own_mounts=True) == "refused"


def train_on_tmpfs(folder: str) -> bool:
    subprocess.run(("mount", "-t", "tmpfs", "none", folder), check=True)
    training = Training()
    with refused_without_a_trace(training, folder, "tmpfs", "RAM", "allow_tmpfs=True"):
        training.session(folder)
    with training.session(folder, allow_tmpfs=True) as session:
        ended_like_plain = finish(training, session, first=0)
        assert session.summary().offloaded_bytes > 0
    return ended_like_plain


@pytest.mark.usefixtures("own_mounts")
def test_a_spill_folder_in_ram_is_refused_unless_forced(run_child: RunChild, tmp_path: Path) -> None:
    assert run_child(train_on_tmpfs, str(tmp_path), own_mounts=True)


# --- a full file system ---


def mount_small(kind: str, folder: str) -> None:
    """A file system of 16 MiB of its own."""
    if kind == "tmpfs":
        subprocess.run(("mount", "-t", "tmpfs", "-o", "size=16m", "none", folder), check=True)
        return
    image = f"{folder}.image"
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    subprocess.run(("mke2fs", "-q", "-t", "ext4", "-m", "0", "-O", "^has_journal", image), check=True)
    subprocess.run(("mount", "-o", "loop", image, folder), check=True)


def free_bytes(folder: str) -> int:
    os.sync()
    status = os.statvfs(folder)
    return status.f_bfree * status.f_bsize


def fill_up(folder: str, leave: int) -> Path:
    """Take all the room of a file system but so many bytes."""
    ballast = Path(folder, "ballast")
    with ballast.open("wb") as file:
        status = os.statvfs(folder)
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_bsize - leave)
    return ballast


def meet_full_disk(kind: str, folder: str) -> dict[str, Any]:
    """Run into a full disk in the first step, which has no plan, and again when a plan asks for its room."""
    mount_small(kind, folder)
    training = Training()
    before, room = training.parameters, free_bytes(folder)
    session = training.session(folder, allow_tmpfs=True)
    found: dict[str, Any] = {"errors": []}
    ballast = fill_up(folder, leave=3 << 20)
    with pytest.raises(SpillError) as caught, session.step():
        training.step(0)
    found["errors"].append((caught.value.errno, str(caught.value)))
    found["state_is_as_before"] = same(before, training.parameters)
    del caught
    ballast.unlink()
    training.optimizer.zero_grad()
    with session.step():
        training.step(0)
    # The plan sends away more than the cache did, and so wants a larger file.
    after_one = training.parameters
    ballast = fill_up(folder, leave=1 << 20)
    with pytest.raises(SpillError) as caught, session.step():
        training.step(1)
    found["errors"].append((caught.value.errno, str(caught.value)))
    found["state_is_as_after_one_step"] = same(after_one, training.parameters)
    found["hooks"] = sum(len(module._forward_hooks) for module in training.model.modules())
    ballast.unlink()
    found["goes_on_like_plain"] = finish(training, session, first=1)
    session.close()
    found["left"] = [name for name in os.listdir(folder) if name != "lost+found"]
    found["room_is_back"] = free_bytes(folder) == room
    return found


@pytest.mark.usefixtures("own_mounts")
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_fills_up_in_a_step_leaves_training_as_it_was(
    run_child: RunChild, tmp_path: Path, kind: str
) -> None:
    if kind == "ext4" and (os.geteuid() != 0 or not Path("/dev/loop-control").exists()):
        pytest.skip("only root can mount an image, and only where there are loop devices")
    if kind == "ext4" and shutil.which("mke2fs") is None:
        pytest.skip("there is no mke2fs on PATH")
    folder = tmp_path / "small"
    folder.mkdir()
    found = run_child(meet_full_disk, kind, str(folder), own_mounts=True)
    in_step, at_begin = found["errors"]
    for number, text in (in_step, at_begin):
        assert number == errno.ENOSPC
        assert f"{kind} on " in text
        assert f"mounted at {folder}" in text
        assert "No space left on device" in text
    assert re.search(r"writing \S+ \w+ failed", in_step[1])
    assert re.search(r"setting \S+ \w+ aside failed", at_begin[1])
    assert found["state_is_as_before"]
    assert found["state_is_as_after_one_step"]
    assert found["hooks"] == 0
    assert found["goes_on_like_plain"]
    assert found["left"] == []
    assert found["room_is_back"]


# --- I/O errors ---


def catch(run: Callable[[], object], match: str, number: int) -> str:
    """The message of the SpillError that `run` ends with; nothing holds the error afterwards."""
    try:
        run()
    except SpillError as error:
        text, found = str(error), error.errno
    else:
        pytest.fail("there was no error")
    assert re.search(match, text)
    assert found == number
    return text


@contextmanager
def replaced_by(path: str, flags: int, folder: Path) -> Iterator[None]:
    """The spill file's descriptor leads elsewhere for a while, unless the session closes it before."""
    [descriptor] = open_files_in(folder)
    real, other = os.dup(descriptor), os.open(path, flags)
    os.dup2(other, descriptor)
    os.close(other)
    try:
        yield
    finally:
        if descriptor in open_files():
            os.dup2(real, descriptor)
        os.close(real)


def wait_for_copies(session: outgrow.Session) -> None:
    """Out, and back for graphs that are gone by now."""
    pool = session._pool
    while not all(copy.done for copy, *_ in (*pool._leaving._copies, *pool._abandoned)):
        time.sleep(0.01)


def full_disk(folder: Path) -> AbstractContextManager[None]:
    """Every write fails for want of room."""
    return replaced_by("/dev/full", os.O_RDWR, folder)


def live_bytes_at_rest(training: Training, session: outgrow.Session) -> int:
    """What is alive when no gradient is and no copy is under way."""
    training.optimizer.zero_grad()
    wait_for_copies(session)
    session._pool.land()
    return session.live_bytes


@contextmanager
def unreadable(folder: Path, session: outgrow.Session) -> Iterator[None]:
    """Every read is an I/O error, of the kernel's own: nothing is mapped where /proc/self/mem begins."""
    wait_for_copies(session)
    with replaced_by("/proc/self/mem", os.O_RDONLY, folder):
        yield


@pytest.mark.usefixtures("no_collection")
def test_a_write_that_fails_raises_and_the_session_goes_on(tmp_path: Path) -> None:
    training = Training()
    with training.session(tmp_path) as session:
        for k in range(2):
            with session.step():
                training.step(k)
        before, live = training.parameters, session.live_bytes

        def step() -> None:
            with session.step():
                training.step(2)

        with full_disk(tmp_path):
            catch(step, r"writing \S+ \w+ failed", errno.ENOSPC)
        assert same(before, training.parameters)
        assert live_bytes_at_rest(training, session) == live
        assert finish(training, session, first=2)


def test_a_session_whose_last_step_met_a_write_error_can_be_closed(tmp_path: Path) -> None:
    training = Training()
    files, threads = open_files(), threading.active_count()
    session = training.session(tmp_path)
    with full_disk(tmp_path):
        with pytest.raises(SpillError) as caught, session.step():
            loss = training.forward(0)
        session.close()
    assert caught.value.errno == errno.ENOSPC  # and its frames held the graph until now
    assert "loss" not in locals()
    assert open_files() == files
    assert threading.active_count() == threads


@pytest.mark.usefixtures("no_collection")
def test_a_read_that_fails_raises_in_the_backward_pass_and_the_session_goes_on(tmp_path: Path) -> None:
    training = Training()
    with training.session(tmp_path) as session:
        for k in range(2):
            with session.step():
                training.step(k)
        before, live = training.parameters, session.live_bytes

        def step() -> None:
            with session.step():
                loss = training.forward(2)
                with unreadable(tmp_path, session):
                    loss.backward()

        assert "mounted at" in catch(step, r"reading \S+ \w+ failed", errno.EIO)
        assert same(before, training.parameters)
        assert live_bytes_at_rest(training, session) == live
        assert finish(training, session, first=2)


def test_after_a_read_error_was_mended_the_same_graph_gives_the_right_gradient(tmp_path: Path) -> None:
    training, plain = Training(), Training()
    for k in range(2):
        plain.step(k)
    plain.forward(2).backward()
    with training.session(tmp_path) as session:
        for k in range(2):
            with session.step():
                training.step(k)
        with session.step():
            loss = training.forward(2)
            with unreadable(tmp_path, session), pytest.raises(SpillError) as caught:
                loss.backward(retain_graph=True)
            training.optimizer.zero_grad()
            loss.backward()
    # The error still holds the frames of the first attempt, and with them memory that was never filled.
    assert caught.value.__traceback__ is not None
    for ours, theirs in zip(training.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_what_cannot_be_read_back_when_the_session_closes_is_an_error_then_and_later(tmp_path: Path) -> None:
    training = Training()
    files, threads = open_files(), threading.active_count()
    session = training.session(tmp_path)
    with session.step():
        loss = training.forward(0)
    with unreadable(tmp_path, session), pytest.raises(SpillError, match=r"reading \S+ \w+ failed"):
        session.close()
    assert open_files() == files
    assert threading.active_count() == threads
    with pytest.raises(SpillError):
        loss.backward()
    assert threading.active_count() == threads


# --- a killed process ---


def train_until_killed(folder: str, ready: Connection) -> None:
    training = Training()
    with training.session(folder, allow_tmpfs=True) as session, session.step():
        training.forward(0)
        ready.send("in the middle of a step")
        time.sleep(120)


def kill_in_step(folder: str, mount: bool) -> dict[str, Any]:
    if mount:
        mount_small("tmpfs", folder)
    room = free_bytes(folder)
    fork = get_context("fork")
    ready, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=train_until_killed, args=(folder, sender))
    process.start()
    assert ready.recv() == "in the middle of a step"
    blocks = sum(
        file.stat().st_blocks
        for file in Path(f"/proc/{process.pid}/fd").iterdir()
        if os.readlink(file).startswith(folder)
    )
    process.kill()
    process.join()
    assert process.exitcode is not None
    return {
        "ended_by": -process.exitcode,
        "spilled_bytes": blocks * 512,
        "left": os.listdir(folder),
        "room_is_back": free_bytes(folder) == room,
    }


def test_a_process_killed_in_a_step_leaves_no_file(run_child: RunChild, tmp_path: Path) -> None:
    found = run_child(kill_in_step, str(tmp_path), False)
    assert found["ended_by"] == signal.SIGKILL
    assert found["spilled_bytes"] > 1 << 20
    assert found["left"] == []


@pytest.mark.usefixtures("own_mounts")
def test_a_process_killed_in_a_step_gives_its_room_on_the_disk_back(run_child: RunChild, tmp_path: Path) -> None:
    found = run_child(kill_in_step, str(tmp_path), True, own_mounts=True)
    assert found["ended_by"] == signal.SIGKILL
    assert found["spilled_bytes"] > 1 << 20
    assert found["left"] == []
    assert found["room_is_back"]
