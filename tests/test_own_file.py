"""`outgrow train FILE.py:FUNCTION`: a user's own step, and what is said where the file is at fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outgrow.cli.main import run

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = """
import torch
from torch import nn
from torch.nn import functional as F

import outgrow


def make_step(batch):
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(batch, 64), torch.randint(0, 10, (batch,))

    def step():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return RETURNED

    return outgrow.TrainingStep(model, optimizer, step)


def without_batch():
    return make_step(8)


def two(batch, accumulation):
    return make_step(batch)


def in_passes(batch, accumulation=1):
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(batch, 64)

    def step():
        for _ in range(accumulation):
            (model(x).square().mean() / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()

    return outgrow.TrainingStep(model, optimizer, step)


def wrong(batch):
    return {"model": None}


def swapped():
    model, optimizer, step, _ = make_step(8)
    return outgrow.TrainingStep(optimizer, model, step)


def no_step():
    return make_step(8)._replace(step=7)


def a_list():
    return make_step(8)._replace(batches=[1, 2])


number = 3
"""

Command = Callable[..., Any]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a file, from which the functions are named as users do, without a folder before it."""
    monkeypatch.chdir(tmp_path)

    def file(text: str = STEP, returned: str = "loss.detach()", name: str = "mine.py") -> str:
        (tmp_path / name).write_text(text.replace("RETURNED", returned))
        return name

    return file


@pytest.fixture
def result(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command that must succeed with --json, and gives its object."""

    def command(*arguments: str) -> Any:
        code = run((*arguments, "--json"))
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return json.loads(captured.out)

    return command


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command that must fail as a mistake in the input, and gives its one line of complaint."""

    def command(*arguments: str) -> str:
        code = run(arguments)
        captured = capsys.readouterr()
        assert (code, captured.out) == (2, ""), captured
        assert len(captured.err.splitlines()) == 1, captured.err
        return captured.err

    return command


def test_a_file_trains_the_same_under_a_budget_and_plainly(write: Command, result: Command) -> None:
    step = f"{write()}:make_step"
    plan = result("plan", step, "--batch", "256")
    assert plan["network"] == step
    assert (plan["batch"], plan["image_size"]) == (256, None)
    assert plan["least_budget_bytes"] < 0.6 * plan["plain_peak_bytes"]
    plain = result("train", step, "--batch", "256", "--steps", "3")
    budget = int(0.6 * plan["plain_peak_bytes"])
    ours = result("train", step, "--batch", "256", "--steps", "3", "--budget", str(budget))
    assert plain["policy"] == "plain"
    assert ours["policy"] == "auto"
    assert ours["losses"] == plain["losses"]
    assert ours["parameters_sha256"] == plain["parameters_sha256"]
    assert ours["highest_peak_bytes"] <= budget
    assert set(ours) == set(plain)
    other = result("train", step, "--batch", "256", "--steps", "3", "--seed", "1")
    assert other["losses"] != plain["losses"]


@pytest.mark.parametrize(
    ("returned", "is_known"),
    [("loss", True), ("loss.item()", True), ("None", False), ("'low'", False), ("model(x)", False)],
)
def test_a_step_may_return_its_loss(write: Command, result: Command, returned: str, is_known: bool) -> None:
    trained = result("train", f"{write(returned=returned)}:make_step", "--batch", "8", "--steps", "1")
    assert trained["losses"] == [pytest.approx(2.3, abs=0.5)] if is_known else [None]


def test_a_file_is_tuned_and_its_step_divided_only_where_its_function_knows_how(
    write: Command, result: Command, refused: Command
) -> None:
    file = write()
    search = ("--budget", "2MB", "--max-batch", "64", "--noise-scale", "100", "--trials", "1")
    whole = result("tune", f"{file}:make_step", *search)
    assert whole["network"] == f"{file}:make_step"
    assert whole["chosen"]["measured_peak_bytes"] <= 2_000_000
    assert whole["rule"] == "square root", "its optimizer is AdamW"
    assert {item["accumulation"] for item in whole["candidates"]} == {1}
    # The base batch does not fit in one pass here; in several it is in reach.
    low = ("--budget", "700kB", "--batch", "1024", "--noise-scale", "100", "--trials", "1")
    divided = result("tune", f"{file}:in_passes", *low)
    assert max(item["accumulation"] for item in divided["candidates"]) > 1
    assert "takes no batch size" in refused("tune", f"{file}:without_batch", *search)


def test_a_function_may_take_no_batch(write: Command, result: Command, refused: Command) -> None:
    step = f"{write()}:without_batch"
    assert result("train", step, "--steps", "1")["batch"] is None
    assert "takes no batch size" in refused("train", step, "--batch", "8")


def test_a_file_is_run_as_a_script_would_be(write: Command, result: Command) -> None:
    write(name="beside.py")
    importing = "from beside import make_step\nassert __name__ != '__main__'\n"
    assert result("train", f"{write(importing, name='importing.py')}:make_step", "--steps", "1")["batch"] == 16


def test_tables_leave_out_what_nobody_knows(write: Command, capsys: pytest.CaptureFixture[str]) -> None:
    step = f"{write(returned='None')}:without_batch"
    assert run(("train", step, "--steps", "1")) == 0
    assert "samples per second" not in capsys.readouterr().out
    assert run(("plan", step)) == 0
    assert "None" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("missing.py:make_step", "there is no such file"),
        ("mine.py", "mine.py:make_step"),
        ("mine.py:", "which function"),
        ("mine.py:make_stop", "it has make_step, without_batch, two, in_passes, wrong, swapped, no_step, a_list"),
        ("mine.py:number", "number is int and no function"),
        ("mine.py:two", "has to take the batch size alone, or nothing"),
        ("mine.py:wrong", "wrong returned dict: it has to return outgrow.TrainingStep"),
        ("mine.py:swapped", "model is AdamW: give a torch.nn.Module"),
        ("mine.py:no_step", "the step of no_step is no function"),
        ("mine.py:a_list", "the batches of a_list are no iterator"),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_what_is_no_step_is_named(write: Command, refused: Command, command: str, named: str, message: str) -> None:
    write()
    assert message in refused(command, named)


@pytest.mark.parametrize(
    "option",
    [
        ("--data", "digits"),
        ("--image-size", "32"),
        ("--optimizer", "sgd"),
        ("--momentum", "0.5"),
        ("--lr", "0.1"),
        ("--dtype", "float32"),
        ("--channels-last",),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_options_that_the_file_decides_are_refused(
    write: Command, refused: Command, command: str, option: tuple[str, ...]
) -> None:
    complaint = refused(command, f"{write()}:make_step", *option)
    assert option[0] in complaint
    assert "mine.py" in complaint


def test_options_of_a_budget_need_one(write: Command, refused: Command) -> None:
    assert "needs a --budget" in refused("train", f"{write()}:make_step", "--policy", "lru")
    assert "vdnn-dyn" in refused("train", f"{write()}:make_step", "--policy", "magic", "--budget", "1GiB")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("import nowhere\n", "mine.py, line 1 (import nowhere): the file cannot be imported: ModuleNotFoundError"),
        ("def make_step(:\n", "mine.py, line 1: the file cannot be imported: SyntaxError"),
        (
            "def make_step(batch):\n    return 1 / 0\n",
            "mine.py, line 2 (return 1 / 0): make_step failed: ZeroDivisionError",
        ),
        (
            STEP.replace("RETURNED", "open('/no/such/file')"),
            "mine.py, line 20 (return open('/no/such/file')): the step failed: FileNotFoundError",
        ),
    ],
)
@pytest.mark.parametrize("budget", [(), ("--budget", "1GiB")], ids=["plain", "under a budget"])
def test_an_error_in_the_file_comes_with_its_line(
    write: Command, refused: Command, text: str, place: str, budget: tuple[str, ...]
) -> None:
    assert place in refused("train", f"{write(text)}:make_step", "--batch", "8", *budget)


def test_a_step_that_looks_at_its_numbers_cannot_be_planned(write: Command, refused: Command) -> None:
    complaint = refused("plan", f"{write(returned='loss.item()')}:make_step")
    assert "mine.py, line 20 (return loss.item())" in complaint
    assert "failed while it was traced, on fake tensors" in complaint


def test_too_small_a_budget_is_refused_with_the_least_one(write: Command, refused: Command) -> None:
    assert "least budget" in refused("train", f"{write()}:make_step", "--budget", "10kB")
