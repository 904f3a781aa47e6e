"""Reports from sessions and from the command line, and what both say on the way."""

from __future__ import annotations

import json
import logging
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import outgrow
from outgrow.cli.main import run
from outgrow.cli.train import memory_gauge, timed_step
from outgrow.errors import ReportError, SessionError
from outgrow.progress import log_to
from test_faults import BUDGET, Training
from test_reporting import PNG, data_of
from test_wall import Shortage, forward_with, greedy, wide_network

TINY = ("gpt-2x64", "--batch", "2", "--image-size", "32")

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `outgrow` in this process; gives its exit code, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def trained() -> tuple[outgrow.Session, list[outgrow.Summary]]:
    """A session after four steps under a budget, closed; and what each step's summary was."""
    training, summaries = Training(), []
    with training.session("/var/tmp", allow_tmpfs=True) as session:
        for k in range(4):
            with session.step():
                training.step(k)
            summaries.append(session.summary())
    return session, summaries


# --- sessions ---


def test_a_session_remembers_its_steps(trained: tuple[outgrow.Session, list[outgrow.Summary]]) -> None:
    session, summaries = trained
    assert list(session.history) == summaries


def test_a_session_reports_its_plan_and_what_it_measured(
    trained: tuple[outgrow.Session, list[outgrow.Summary]], tmp_path: Path
) -> None:
    session, summaries = trained
    session.report(tmp_path / "run.html")
    data = data_of((tmp_path / "run.html").read_text())
    assert session.plan is not None
    assert (data["title"], data["policy"]) == ("Sequential", "vdnn-all")
    assert data["budget_bytes"] == BUDGET
    assert data["prediction"]["peak_bytes"] == session.plan.simulate().peak_bytes
    assert [outgrow.Summary(**step) for step in data["history"]["steps"]] == summaries
    assert data["history"]["first_step"] == 1
    assert ["optimizer", "SGD"] in data["settings"]
    session.report(str(tmp_path / "run.html"), title="Mine")
    assert data_of((tmp_path / "run.html").read_text())["title"] == "Mine"


def test_before_the_first_step_there_is_nothing_to_report(tmp_path: Path) -> None:
    with Training().session("/var/tmp", allow_tmpfs=True) as session:
        with pytest.raises(SessionError, match="no plan to report on yet"):
            session.report(tmp_path / "run.html")
        assert session.history == ()
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_says_so_and_harms_nothing(
    trained: tuple[outgrow.Session, list[outgrow.Summary]], tmp_path: Path
) -> None:
    with pytest.raises(ReportError, match="no folder"):
        trained[0].report(tmp_path / "nowhere" / "run.html")


# --- commands ---


def test_plan_writes_all_three_files(command: Command, tmp_path: Path) -> None:
    files = {name: str(tmp_path / name) for name in ("a.html", "a.png", "a.json")}
    code, out, err = command(
        "plan", *TINY, "--budget", "10MiB", "--json",
        "--report", files["a.html"], "--plot", files["a.png"], "--perfetto", files["a.json"],
    )  # fmt: skip
    assert code == 0, err
    printed = json.loads(out)
    data = data_of(Path(files["a.html"]).read_text())
    assert data["title"] == "gpt-2x64, batch 2, size 32"
    assert data["prediction"]["peak_bytes"] == printed["predicted_peak_bytes"]
    assert data["plain"]["peak_bytes"] == printed["plain_peak_bytes"]
    assert data["decisions"] == printed["decisions"]
    assert data["history"]["steps"] == []
    assert Path(files["a.png"]).read_bytes().startswith(PNG)
    assert json.loads(Path(files["a.json"]).read_text())["otherData"]["budget_bytes"] == 10 << 20
    assert sorted(item.name for item in tmp_path.iterdir()) == sorted(files)


def test_train_reports_every_step(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    code, out, err = command("train", *TINY, "--budget", "10MiB", "--steps", "3", "--json", "--report", str(path))
    assert code == 0, err
    data, printed = data_of(path.read_text()), json.loads(out)
    assert len(data["history"]["steps"]) == 3
    assert data["history"]["steps"][-1]["measured_peak_bytes"] == printed["measured_peak_bytes"]
    assert data["budget_bytes"] == 10 << 20


# A step of one's own that goes wrong after some steps went well.
FAILING = """
import signal

import torch
from torch import nn

import outgrow


def make_step(batch):
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(batch, 256)

    def step(number):
        loss = model(x).square().mean()
        loss.backward()
        if number == GOOD_STEPS:
            AFTER_THEM
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return outgrow.TrainingStep(model, optimizer, step, iter(range(100)))
"""


@pytest.mark.parametrize(
    ("after", "code", "said"),
    [
        ("signal.raise_signal(signal.SIGINT)", 130, "outgrow: interrupted"),
        ("raise ValueError('bad weather')", 2, "bad weather"),
    ],
)
def test_a_training_that_ends_early_writes_what_it_has(
    command: Command, tmp_path: Path, after: str, code: int, said: str
) -> None:
    own = tmp_path / "own.py"
    own.write_text(FAILING.replace("GOOD_STEPS", "3").replace("AFTER_THEM", after))
    files = [str(tmp_path / name) for name in ("a.html", "a.png", "a.json")]
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background begin without it
    try:
        ended = command(
            "train", f"{own}:make_step", "--batch", "512", "--budget", "8MiB", "--steps", "9",
            "--report", files[0], "--plot", files[1], "--perfetto", files[2],
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, usual)
    assert (ended[0], ended[1]) == (code, "")
    first, last = ended[2].splitlines()
    assert first == f"outgrow: stopped after 3 of 9 steps: {', '.join(files)} shows these"
    assert said in last
    data = data_of(Path(files[0]).read_text())
    assert len(data["history"]["steps"]) == 3
    assert data["history"]["first_step"] == 1
    assert Path(files[1]).read_bytes().startswith(PNG)
    assert json.loads(Path(files[2]).read_text())["otherData"]["budget_bytes"] == 8 << 20


def test_a_network_that_ends_early_writes_what_it_has(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[None] = []

    def interrupted(*given: Any) -> tuple[float, float]:
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(None)
        return timed_step(*given)

    monkeypatch.setattr("outgrow.cli.train.timed_step", interrupted)
    path = tmp_path / "run.html"
    code, _, err = command("train", *TINY, "--budget", "10MiB", "--steps", "4", "--report", str(path))
    assert code == 130
    assert f"stopped after 2 of 4 steps: {path} shows these" in err
    assert len(data_of(path.read_text())["history"]["steps"]) == 2


def test_a_training_without_a_finished_step_says_that_nothing_is_written(command: Command, tmp_path: Path) -> None:
    own, path = tmp_path / "own.py", tmp_path / "a.html"
    own.write_text(FAILING.replace("GOOD_STEPS", "0").replace("AFTER_THEM", "raise ValueError('bad weather')"))
    code, _, err = command("train", f"{own}:make_step", "--budget", "8MiB", "--report", str(path))
    assert code == 2
    assert err.splitlines()[0] == "outgrow: no step was finished: nothing is written for --report"
    assert "bad weather" in err.splitlines()[1]
    assert not path.exists()


def test_an_early_end_is_not_hidden_by_a_report_that_cannot_be_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise ReportError("the disk is full")

    monkeypatch.setattr("outgrow.cli.outputs.write_report", full)
    own = tmp_path / "own.py"
    own.write_text(FAILING.replace("GOOD_STEPS", "1").replace("AFTER_THEM", "raise ValueError('bad weather')"))
    code, _, err = command("train", f"{own}:make_step", "--budget", "8MiB", "--report", str(tmp_path / "a.html"))
    assert code == 2
    assert err.splitlines()[0] == "outgrow: the disk is full"
    assert "bad weather" in err.splitlines()[1]


def test_report_plans_as_plan_does(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    code, out, err = command("report", *TINY, "--budget", "10MiB", "--output", str(path), "--hardware", "k40c")
    assert (code, out, err) == (0, "", "")
    _, printed, _ = command("plan", *TINY, "--budget", "10MiB", "--json", "--hardware", "k40c")
    assert data_of(path.read_text())["prediction"]["step_seconds"] == json.loads(printed)["predicted_step_seconds"]


def test_report_shows_a_saved_plan(
    command: Command, trained: tuple[outgrow.Session, list[outgrow.Summary]], tmp_path: Path
) -> None:
    plan = trained[0].plan
    assert plan is not None
    plan.save(tmp_path / "mine.json")
    code, _, err = command("report", str(tmp_path / "mine.json"), "--output", str(tmp_path / "a.html"))
    assert code == 0, err
    data = data_of((tmp_path / "a.html").read_text())
    assert (data["title"], data["prediction"]["peak_bytes"]) == ("mine", plan.simulate().peak_bytes)


def test_compare_shows_every_point(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "points.html"
    code, out, err = command(
        "compare", *TINY, "--budgets", "100,60,1", "--policies", "lru,keep", "--json", "--report", str(path)
    )
    assert code == 0, err
    data, points = data_of(path.read_text()), json.loads(out)["predicted"]["points"]
    assert [row[0] for row in data["rows"]] == [point["policy"] for point in points]
    assert [row[6] for row in data["rows"]] == [point["peak_bytes"] for point in points]
    marks = sum(len(series["marks"]) for series in data["series"])
    assert marks == sum(point["fits"] for point in points)
    assert any("does not fit" in row[1] for row in data["rows"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", *TINY, "--report", "/no/such/folder/a.html"), "there is no folder /no/such/folder"),
        (("plan", *TINY, "--perfetto", "/no/such/folder/a.json"), "there is no folder"),
        (("plan", *TINY, "--plot", "/no/such/folder/a.png"), "/no/such/folder/a.png"),
        (("plan", *TINY, "--plot", "a.doc"), ".png"),
        (("plan", *TINY, "--report", "/"), "it is a folder"),
        (("train", *TINY, "--budget", "10MiB", "--report", "/no/such/folder/a.html"), "there is no folder"),
        (("train", *TINY, "--report", "a.html"), "--report needs a --budget"),
        (("train", *TINY, "--perfetto", "a.json"), "--perfetto needs a --budget"),
        (("compare", *TINY, "--report", "/no/such/folder/a.html"), "there is no folder"),
        (("report", *TINY, "--output", "/no/such/folder/a.html"), "there is no folder"),
        (("report", "/no/such/plan.json", "--output", "/dev/null"), "/no/such/plan.json cannot be read"),
        (("report", "/no/such/plan.json", "--output", "/dev/null", "--budget", "1GiB"), "--budget has no effect"),
        (("report", "no-such-network", "--output", "/dev/null"), "no-such-network"),
    ],
)
def test_a_mistake_is_one_line_before_any_work(
    command: Command, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    def too_late(*_: Any, **__: Any) -> None:
        raise AssertionError("work began before the mistake was found")

    monkeypatch.setattr(outgrow, "trace", too_late)
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert message in err


def test_a_file_that_is_no_plan_is_a_mistake(command: Command, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    code, _, err = command("report", str(tmp_path / "a.json"), "--output", str(tmp_path / "a.html"))
    assert code == 2
    assert "not a plan" in err
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


# --- the terminal ---


def test_the_gauge_shows_the_share_of_the_budget() -> None:
    assert memory_gauge(6 << 20, 12 << 20) == "peak [######------] 6.00 MiB of 12.0 MiB"
    assert "[############]" in memory_gauge(13, 12)
    assert "[------------]" in memory_gauge(0, 12)


def test_train_says_what_it_plans_only_where_it_is_asked_to(command: Command) -> None:
    arguments = ("train", *TINY, "--budget", "10MiB", "--steps", "2", "--json")
    _, _, quiet = command(*arguments)
    _, out, loud = command(*arguments, "--verbose")
    assert "planned:" not in quiet
    assert len([line for line in loud.splitlines() if " planned: auto" in line]) == 1
    assert json.loads(out)["policy"] == "auto"
    assert logging.getLogger("outgrow").handlers == []


def test_the_log_goes_to_the_console_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    for is_terminal in (False, True):
        with log_to(Console(stderr=True, force_terminal=is_terminal, width=200)):
            logging.getLogger("outgrow.session").info("planned: [red]%s", "auto")
        assert "planned: [red]auto" in re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)


# --- the log ---


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(record.levelno == logging.INFO for record in caplog.records)
    assert all("\n" not in record.getMessage() for record in caplog.records)
    return [f"{record.name}: {record.getMessage()}" for record in caplog.records if record.name.startswith("outgrow")]


def test_recording_and_planning_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outgrow")
    training = Training()
    with training.session("/var/tmp", allow_tmpfs=True) as session:
        for k in range(2):
            with session.step():
                training.step(k)
    first, second, third, *rest = messages(caplog)
    assert re.fullmatch(
        r"outgrow.session.recorded: recorded a new kind of step: \d+ ops, \d+ saved tensors, peak .* MiB", first
    )
    assert second.startswith("outgrow.session.recorded: planned: vdnn-all, predicted peak ")
    assert re.search(r"; planning took [\d.]+ m?s$", second)
    assert third.startswith("outgrow.session.recorded: re-planned, as the step had not settled yet: vdnn-all")
    assert rest == []


def test_a_step_that_departs_from_its_trace_is_logged_with_the_place(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    with training.session("/var/tmp", allow_tmpfs=True) as session:
        for k in range(3):
            with session.step():
                training.step(k)
        caplog.set_level(logging.INFO, "outgrow")
        with session.step():
            training.model(torch.randn(10, 3, 32, 32)).sum().backward()
    said = [line for line in messages(caplog) if "fallback" in line]
    assert len(said) == 1
    assert re.search(
        r"outgrow.runtime.course: fallback: the step departs from its trace at tick 0 of \d+, op \d+:", said[0]
    )


def test_a_step_that_ends_early_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    with training.session("/var/tmp", allow_tmpfs=True) as session:
        for k in range(3):
            with session.step():
                training.step(k)
        caplog.set_level(logging.INFO, "outgrow")
        with session.step():
            training.forward(4)
    said = [line for line in messages(caplog) if "fallback" in line]
    assert len(said) == 1
    assert "the step ended early, at tick" in said[0]


def test_a_page_fault_is_logged_with_what_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outgrow")
    model = wide_network()
    with outgrow.Session(model, budget="1GiB") as session, session.step():
        Shortage.left = 1
        forward_with(greedy, model)
    said = [line for line in messages(caplog) if "page fault" in line]
    assert len(said) == 1
    assert re.search(
        r"outgrow.runtime.page_faults: page fault: .*greedy.* found no memory for .*, and .* left", said[0]
    )
