"""Data parallel: sessions under DistributedDataParallel in two processes, and `outgrow train --nproc`.

Two processes train all cases of `ranks.py` once; the tests read what they found.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import SOURCE, TESTS, RunChild, StartChild
from outgrow.cache import cache_folder
from outgrow.cli.main import run
from ranks import CASES, cases_of_rank

pytestmark = pytest.mark.slow

# What issue 5 asks for: one rank's end is the others' too within a minute.
END_SECONDS = 60
CASES_SECONDS = 300
TINY_GPT = ("gpt-2x64", "--batch", "8", "--image-size", "64", "--seed", "3")  # 9 MB at its plain peak


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(SOURCE), str(TESTS), *filter(None, sys.path)])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache that has what was compiled so far, and nothing else: ranks need not compile it once more."""
    folder = tmp_path / "cache"
    (folder / "outgrow").mkdir(parents=True)
    for compiled in cache_folder().glob("*.so"):
        shutil.copy(compiled, folder / "outgrow")
    return folder


@pytest.fixture(scope="module")
def found(start_child: StartChild, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, as `ranks.py` writes it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return what_ranks_find(start_child, tmp_path_factory.mktemp("ranks"))
    # Of several test processes the first runs the ranks, and the others wait for that.
    folder = tmp_path_factory.getbasetemp().parent / f"ranks-{run}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return what_ranks_find(start_child, folder)


def what_ranks_find(start_child: StartChild, folder: Path) -> list[dict[str, Any]]:
    """Run the cases of `ranks.py` in two processes, unless that was done in this folder before."""
    results = folder / "ranks.json"
    if not results.exists():
        children = [start_child(cases_of_rank, rank, str(folder)) for rank in range(2)]
        results.write_text(json.dumps([child.result(CASES_SECONDS) for child in children]))
    found: list[dict[str, Any]] = json.loads(results.read_text())
    return found


def of_ranks(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [rank["cases"][name] for rank in found]


@pytest.mark.parametrize("name", CASES)
def test_losses_and_state_equal_those_of_plain_data_parallel(found: list[dict[str, Any]], name: str) -> None:
    for case in of_ranks(found, name):
        assert case["ours"]["losses"] == case["plain"]["losses"]
        assert case["ours"]["state"] == case["plain"]["state"]


@pytest.mark.parametrize("name", CASES)
def test_the_budget_binds_and_is_held_in_each_rank(found: list[dict[str, Any]], name: str) -> None:
    for case in of_ranks(found, name):
        peaks = case["ours"]["peaks"]
        assert case["budget"] < case["peak"]
        assert case["ours"]["moved"] > 0
        # A session that was not given the wrapper learns of the buckets in its first step.
        assert max(peaks[1:] if CASES[name].inner else peaks) <= case["budget"]


def test_the_ranks_see_samples_of_their_own(found: list[dict[str, Any]]) -> None:
    first, second = of_ranks(found, "vdnn-all")
    assert first["ours"]["losses"] != second["ours"]["losses"]


@pytest.mark.parametrize("view", ["False", "True"])
def test_buckets_are_counted_from_the_start(found: list[dict[str, Any]], view: str) -> None:
    for rank in found:
        counted = rank["accounting"][view]
        assert counted["buckets"] > 400_000
        assert counted["before"] == counted["buckets"]
        assert counted["after"] == counted["buckets"]
        assert counted["stays"] == counted["buckets"]  # no plan may send them anywhere


def test_steps_that_exchange_gradients_have_plans_of_their_own(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["plans"][6:] == [False, False, True] * 3


def test_a_batch_twice_as_large_exchanges_half_as_often(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["exchanges"] == {"4": 8, "8": 4}


# --- what cannot be shared ---


def refusals() -> dict[str, list[str]]:
    """Runs in a child: the class and the message of what a session says to models that are sharded, by kind."""
    import torch
    from torch import distributed, nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import distribute_tensor
    from torch.nn.parallel.distributed import DistributedDataParallel, _MixedPrecision

    import outgrow

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def plain() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    inside, tensors = plain(), plain()
    fully_shard(inside[1], mesh=mesh)
    tensors[0].weight = nn.Parameter(distribute_tensor(tensors[0].weight.detach(), mesh))
    mixed = DistributedDataParallel(plain())
    # As its argument this makes a stream, which PyTorch for CUDA cannot where there is no GPU.
    mixed.mixed_precision = _MixedPrecision(torch.bfloat16)
    models = {
        "fully_shard": fully_shard(plain(), mesh=mesh),
        "inside": inside,
        "FullyShardedDataParallel": FullyShardedDataParallel(plain(), device_id=torch.device("cpu")),
        "DTensor": tensors,
        "mixed_precision": mixed,
        "nothing of it": plain(),
    }
    said = {}
    for kind, model in models.items():
        try:
            outgrow.Session(model, budget="1GiB").close()
        except outgrow.OutgrowError as error:
            said[kind] = [type(error).__name__, str(error)]
    distributed.destroy_process_group()
    return said


def test_sharded_models_are_refused_with_what_to_use_instead(run_child: RunChild) -> None:
    said = run_child(refusals)
    instead = "DistributedDataParallel, and give each process's session a budget"
    named = {
        "fully_shard": ("fully_shard", instead),
        "inside": ("fully_shard", instead),
        "FullyShardedDataParallel": ("FullyShardedDataParallel", instead),
        "DTensor": ("DTensor", instead),
        "mixed_precision": ("mixed_precision=", "torch.autocast"),
    }
    assert said.keys() == named.keys()
    for kind, (error, message) in said.items():
        assert error == "UnsupportedModel"
        assert all(words in message for words in named[kind])


# --- the ends of ranks ---


def wait_until(true: Any, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what} took more than {seconds} s"
        time.sleep(0.05)


def test_a_rank_whose_peer_is_killed_ends_with_an_error_and_leaves_no_file(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "spill").mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "ranks.py"), str(tmp_path), str(rank)],
            env=environment(XDG_CACHE_HOME=str(cache)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in range(2):
            wait_until((tmp_path / f"pid-{rank}").exists, 120, "training")
        assert list((tmp_path / "spill").iterdir()) == []  # what lies there has no name
        ranks[1].kill()
        _, said = ranks[0].communicate(timeout=END_SECONDS)
        # PyTorch's threads can still be at their exchange when the interpreter has gone: then it aborts after all.
        aborted = said.rstrip().endswith("terminate called without an active exception")
        assert ranks[0].returncode == (-signal.SIGABRT if aborted else 1), said[-4000:]
        assert "RuntimeError" in said
        assert list((tmp_path / "spill").iterdir()) == []
        # Nothing but what each process may use again, whole: no partial file.
        left = [path.suffix for path in cache.rglob("*") if path.is_file()]
        assert set(left) <= {".so"}
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_under_torchrun_ranks_train_as_plain_ones_do_and_end_together(tmp_path: Path, cache: Path) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*torchrun, str(TESTS / "ranks.py"), str(tmp_path)],
        env=environment(XDG_CACHE_HOME=str(cache)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    ranks: list[psutil.Process] = []
    try:
        for rank in range(2):
            known = tmp_path / f"pid-{rank}"
            wait_until(lambda known=known: process.poll() is not None or known.exists(), 120, "training")
            found = json.loads((tmp_path / f"found-{rank}.json").read_text())
            assert found["ours"]["losses"] == found["plain"]["losses"]
            assert found["ours"]["state"] == found["plain"]["state"]
            assert found["ours"]["moved"] > 0
            assert max(found["ours"]["peaks"]) <= found["budget"] < found["peak"]
            ranks.append(psutil.Process(int((tmp_path / f"pid-{rank}").read_text())))
        ranks[1].kill()
        _, said = process.communicate(timeout=END_SECONDS)
        assert process.returncode != 0
        assert "SIGKILL" in said
        assert not any(rank.is_running() for rank in ranks)
        assert list(spill.iterdir()) == []
    finally:
        with suppress(psutil.NoSuchProcess):
            ranks += psutil.Process(process.pid).children(recursive=True)
        for each in (*ranks, process):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.communicate()


# --- the command line ---


def outgrow_train(*arguments: str, **more: str) -> subprocess.Popen[str]:
    """Starts `outgrow train` in a process group of its own, as a terminal does."""
    command = [sys.executable, "-m", "outgrow.cli.main", "train", *arguments]
    return subprocess.Popen(
        command,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def printed_by_trainings(*trainings: Sequence[str]) -> list[str]:
    """What `outgrow train --json` prints in this process, of several trainings in turn."""
    os.environ.update(environment())
    printed = []
    for arguments in trainings:
        with redirect_stdout(io.StringIO()) as out:
            assert run(["train", *arguments, "--json"]) == 0
        printed.append(out.getvalue())
    return printed


def test_the_command_line_trains_in_ranks_as_plain_data_parallel_does(run_child: RunChild) -> None:
    budget = 6 << 20
    command = (*TINY_GPT, "--steps", "4", "--nproc", "2")
    printed = run_child(printed_by_trainings, command, (*command, "--budget", str(budget)))
    plain, ours = map(json.loads, printed)
    assert ours["losses"] == plain["losses"]
    assert ours["parameters_sha256"] == plain["parameters_sha256"]
    assert [rank["rank"] for rank in ours["ranks"]] == [0, 1]
    assert all(0 < rank["highest_peak_bytes"] <= budget for rank in ours["ranks"])
    assert ours["highest_peak_bytes"] == max(rank["highest_peak_bytes"] for rank in ours["ranks"])
    assert all(rank["offloaded_bytes"] + rank["recomputed_bytes"] > 0 for rank in ours["ranks"])
    first, second = (rank["losses"] for rank in ours["ranks"])
    assert first != second
    assert ours["losses"] == [(one + other) / 2 for one, other in zip(first, second, strict=True)]
    assert (ours["nproc"], ours["samples"], ours["synchronizations"]) == (2, 64, 4)
    assert plain["samples"] == ours["samples"]


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks that `outgrow train` has started: itself, or by way of a process that they are forked off."""
    children = {child: " ".join(child.cmdline()) for child in psutil.Process(process.pid).children()}
    forked = [rank for child, command in children.items() if "forkserver" in command for rank in child.children()]
    return forked + [child for child, command in children.items() if "spawn_main" in command]


def spills(ranks: Sequence[psutil.Process], folder: Path) -> bool:
    """Whether each rank has a file open in a folder: it trains."""
    return len(ranks) == 2 and all(
        any(target.startswith(f"{folder}/") for target in _open_in(rank.pid)) for rank in ranks
    )


def _open_in(pid: int) -> Iterator[str]:
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            yield os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:  # closed meanwhile
            continue


ENDLESS = (*TINY_GPT, "--steps", "1000000", "--nproc", "2", "--budget", "6MiB", "--allow-tmpfs", "--spill-dir")


@pytest.mark.parametrize("how", ["a rank is killed", "Ctrl-C"])
def test_all_ranks_end_together_and_leave_no_file(how: str, request: pytest.FixtureRequest) -> None:
    """Nor does the length of the folder's name matter: they are started in another way where that is long."""
    folder = tempfile.TemporaryDirectory()
    request.addfinalizer(folder.cleanup)
    name = "tmp" if how == "Ctrl-C" else 3 * "longer-than-the-paths-of-sockets-may-be"
    spill, temporary = Path(folder.name) / "spill", Path(folder.name) / name
    spill.mkdir()
    temporary.mkdir()
    process = outgrow_train(*ENDLESS, str(spill), TMPDIR=str(temporary))
    try:
        wait_until(lambda: spills(ranks_of(process), spill), 120, "training")
        ranks = ranks_of(process)
        if how == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        else:
            ranks[1].send_signal(signal.SIGKILL)
        _, said = process.communicate(timeout=END_SECONDS)
        if how == "Ctrl-C":
            assert process.returncode == 130
            assert said.strip().endswith("outgrow: interrupted")
        else:
            assert process.returncode == 2
            assert "was ended by SIGKILL" in said or "lost another one, which ended without a word" in said
        assert "Traceback" not in said
        assert not any(rank.is_running() for rank in ranks)
        assert list(spill.iterdir()) == []
        assert [path for path in temporary.rglob("*") if path.is_file()] == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_the_error_of_one_rank_ends_all_with_its_message(tmp_path: Path) -> None:
    from PIL import Image

    for label in ("one", "two"):
        (tmp_path / label).mkdir()
        for number in range(4):
            Image.new("RGB", (16, 16), (40 * number, 90, 10)).save(tmp_path / label / f"{number}.png")
    (tmp_path / "two" / "3.png").write_bytes(b"no picture")
    options = ("--data", str(tmp_path), "--batch", "2", "--image-size", "32", "--steps", "1000", "--nproc", "2")
    process = outgrow_train("resnet-18", *options)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    assert said.count("outgrow: rank") == 1
    assert "cannot read the image" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nproc", "0"), "--nproc"),
        (("--nproc", "100000"), "cores"),
        (("--nproc", "2", "--budget", "90%"), "--budget is for each rank"),
        (("--nproc", "2", "--budget", "100KiB"), "the least budget is"),
    ],
)
def test_nonsense_is_refused_before_any_process_starts(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from outgrow.cli import ranks

    monkeypatch.setattr(ranks, "_launch", lambda *arguments: pytest.fail("ranks were started"))
    monkeypatch.setattr(ranks.os, "sched_getaffinity", lambda pid: {0, 1})
    assert run(["train", *TINY_GPT, *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
