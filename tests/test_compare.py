"""`outgrow compare`: what it predicts and measures, what it draws, and what it says to a mistake."""

from __future__ import annotations

import builtins
import io
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import outgrow
from outgrow.cli import interleave as interleaving
from outgrow.cli import plot
from outgrow.cli.interleave import HEAP_KEPT, Failure, Row, Setup, SetupFailed, Worker, interleave, live_bounds, ratio
from outgrow.cli.main import run
from outgrow.cli.options import Options
from outgrow.cli.processes import forking

TINY = ("gpt-2x64", "--batch", "8", "--image-size", "64", "--data", "synthetic")
TINY_OPTIONS = Options("gpt-2x64", batch=8, image_size=64, data="synthetic")
PNG = b"\x89PNG\r\n\x1a\n"

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `outgrow compare` in this process; gives its exit code, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(("compare", *arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def result(command: Command) -> Callable[..., dict[str, Any]]:
    """Runs it with --json, and gives the object on its only line."""

    def call(*arguments: str) -> dict[str, Any]:
        code, out, err = command(*arguments, "--json")
        assert code == 0, err
        assert err == ""  # no terminal: no progress bar
        (line,) = out.splitlines()
        found: dict[str, Any] = json.loads(line)
        return found

    return call


# --- predictions ---


def test_each_policy_meets_each_budget_once_and_in_order(result: Callable[..., dict[str, Any]]) -> None:
    found = result(*TINY, "--budgets", "250, 100%,60,60", "--policies", "lru,auto,lru")
    assert found["measured"] is None
    points = found["predicted"]["points"]
    pairs = [(point["policy"], point["budget_percent"]) for point in points]
    assert pairs == [(name, percent) for name in ("lru", "auto") for percent in (250, 100, 60)]
    plain = found["predicted"]["plain_peak_bytes"]
    for point in points:
        assert point["budget_bytes"] == int(plain * point["budget_percent"] / 100)
        assert point["fits"]
        assert point["peak_bytes"] <= point["budget_bytes"]
        assert point["peak_ratio"] == pytest.approx(point["peak_bytes"] / plain)
        assert point["time_ratio"] == pytest.approx(
            point["step_seconds"] / found["predicted"]["plain_step_seconds"], rel=1e-6
        )
        moves = point["offloaded_bytes"] + point["recomputed_bytes"]
        assert (moves == 0) == (point["budget_percent"] >= 100)


def test_all_policies_and_seven_budgets_are_the_default(result: Callable[..., dict[str, Any]]) -> None:
    points = result(*TINY)["predicted"]["points"]
    assert tuple(dict.fromkeys(point["policy"] for point in points)) == outgrow.policies()
    assert [point["budget_percent"] for point in points[:7]] == [100, 80, 60, 50, 40, 33, 25]
    assert len(points) == 7 * len(outgrow.policies())


def test_what_does_not_fit_is_shown_with_the_least_that_does(
    command: Command, result: Callable[..., dict[str, Any]]
) -> None:
    arguments = (*TINY, "--budgets", "60,1", "--policies", "keep,auto")
    found = result(*arguments)["predicted"]
    keep, hopeless_keep, auto, hopeless = found["points"]
    assert not keep["fits"]
    assert not hopeless_keep["fits"]
    assert keep["least_budget_bytes"] == hopeless_keep["least_budget_bytes"] == found["plain_peak_bytes"]
    assert auto["fits"]
    assert not hopeless["fits"]
    assert hopeless["budget_bytes"] < hopeless["least_budget_bytes"] < auto["budget_bytes"]
    assert hopeless["time_ratio"] is None
    code, out, _ = command(*arguments)
    assert code == 0
    assert out.count("does not fit") == 3
    assert out.count("(least ") == 3


def test_the_least_budget_that_is_named_fits(result: Callable[..., dict[str, Any]]) -> None:
    found = result(*TINY, "--budgets", "1", "--policies", "auto")["predicted"]
    least = found["points"][0]["least_budget_bytes"]
    percent = 100 * (least + 4096) / found["plain_peak_bytes"]
    (point,) = result(*TINY, "--budgets", f"{percent:.6f}", "--policies", "auto")["predicted"]["points"]
    assert point["fits"]


def test_the_step_is_traced_once(result: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    trace = outgrow.trace

    def counted(*arguments: Any, **options: Any) -> outgrow.Trace:
        calls.append(options)
        return trace(*arguments, **options)

    monkeypatch.setattr(outgrow, "trace", counted)
    result(*TINY, "--budgets", "100,60", "--policies", "keep,lru,checkpoint")
    assert calls == [{"fake": True}]


# --- measurements ---


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What a comparison of two policies says that trains for real, and the folder that it was given for its files.

    The process of one pair is killed in its first step.
    """
    folder = tmp_path_factory.mktemp("measured")
    original = Worker.step

    def step(worker: Worker, limit_seconds: float | None = None) -> Any:
        if worker.setup.name == "keep at 100%":
            worker._process.kill()
        return original(worker, limit_seconds)

    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setattr(Worker, "step", step)
        options = (*TINY, "--budgets", "100,60", "--policies", "lru,keep", "--measure", "--steps", "2", "--json")
        code = run(("compare", *options, "--plot", str(folder / "time.png"), "--spill-dir", str(folder)))
    assert code == 0
    return json.loads(out.getvalue()), folder


def test_measured_pairs_train_for_real_within_their_budgets(measured: tuple[dict[str, Any], Path]) -> None:
    found, folder = measured
    said = found["measured"]
    assert said["plain_step_seconds"] > 0
    whole, tight, _, hopeless = said["points"]
    for point in (whole, tight):
        assert point["fits"], point
        assert point["peak_bytes"] <= point["budget_bytes"]
        assert point["budget_bytes"] == int(said["plain_peak_bytes"] * point["budget_percent"] / 100)
        assert point["step_seconds"] > 0
        assert point["predicted_peak_bytes"] > 0
    assert whole["offloaded_bytes"] == 0
    assert tight["offloaded_bytes"] > 0
    assert not hopeless["fits"]
    assert hopeless["problem"] is None
    assert hopeless["budget_bytes"] < hopeless["least_budget_bytes"]
    # What a fake trace says of a plain step is near to what a real one takes.
    assert said["plain_peak_bytes"] == pytest.approx(found["predicted"]["plain_peak_bytes"], rel=0.1)
    picture = folder / "time.png"
    assert picture.read_bytes().startswith(PNG)
    assert list(folder.iterdir()) == [picture]


def test_what_goes_wrong_in_one_pair_does_not_end_the_others(measured: tuple[dict[str, Any], Path]) -> None:
    killed = measured[0]["measured"]["points"][2]
    assert not killed["fits"]
    assert "ended with -9" in killed["problem"]
    others = [point for point in measured[0]["measured"]["points"] if point is not killed]
    assert [point["problem"] for point in others] == [None] * 3


# --- plots ---


def test_a_plot_is_written_in_the_format_of_its_suffix(command: Command, tmp_path: Path) -> None:
    for name, start in (("a.png", PNG), ("b.PDF", b"%PDF"), ("c.svg", b"<?xml")):
        code, _, err = command(
            *TINY, "--budgets", "100,60,1", "--policies", "lru,keep", "--plot", str(tmp_path / name)
        )
        assert code == 0, err
        assert (tmp_path / name).read_bytes().startswith(start)


def test_measured_and_predicted_lines_differ_and_share_the_color_of_their_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig

    def saved(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    points = ((0.6, 1.2), (1.0, 1.0))
    plot.draw(
        tmp_path / "a.png",
        "title",
        [
            plot.Line("auto, predicted", "auto", points, measured=False),
            plot.Line("auto, measured", "auto", points, measured=True),
            plot.Line("lru, measured", "lru", points, measured=True),
            plot.Line("nothing fits", "keep", (), measured=True),
        ],
    )
    predicted, measured, other = figures[0].axes[0].get_lines()[:3]
    assert predicted.get_color() == measured.get_color() != other.get_color()
    assert predicted.get_linestyle() != measured.get_linestyle()
    assert predicted.get_markerfacecolor() != measured.get_markerfacecolor()
    assert [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()] == [
        "auto, predicted",
        "auto, measured",
        "lru, measured",
    ]


# --- mistakes ---


@pytest.fixture
def refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs it with a mistake; gives its one line of complaint, which came before any work."""

    def too_late(*_: Any, **__: Any) -> None:
        raise AssertionError("work began before the mistake was found")

    monkeypatch.setattr(outgrow, "trace", too_late)

    def call(*arguments: str) -> str:
        code, out, err = command(*arguments)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1, err
        assert err.startswith("outgrow: ")
        return err

    return call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[
            (("--budgets", text), "above 0")
            for text in ("0", "-5", "abc", "nan", "inf", "1e9", "80,,60", "", "80;60")
        ],
        (("--policies", "magic"), "vdnn-dyn"),
        (("--policies", "auto,"), "no policy"),
        (("--steps", "0"), "--steps"),
        (("--plot", "/no/such/folder/a.png"), "/no/such/folder/a.png"),
        (("--plot", "/"), "must end in"),
        (("--plot", "time"), "must end in"),
        (("--plot", "time.doc"), ".png"),
        (("--measure", "--spill-dir", "/no/such/folder"), "/no/such/folder"),
        (("--measure", "--data", "digits"), "takes text"),
        (("--budget", "1GiB"), "--budget"),
    ],
)
def test_a_mistake_is_one_line_before_any_work(
    refused: Callable[..., str], arguments: tuple[str, ...], message: str
) -> None:
    assert message in refused(*TINY, *arguments)


def test_a_folder_is_no_place_for_a_plot(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    assert "cannot be written" in refused(*TINY, "--plot", str(tmp_path / "a.png"))


def test_a_mistake_leaves_no_empty_plot_and_spares_an_old_one(tmp_path: Path) -> None:
    plot.check_plot_path(tmp_path / "new.png")
    (tmp_path / "old.png").write_bytes(b"old")
    plot.check_plot_path(tmp_path / "old.png")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"old.png": b"old"}


def test_without_matplotlib_it_says_what_to_install(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    original = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert 'pip install "outgrow[plot]"' in refused(*TINY, "--plot", str(tmp_path / "a.png"))


# --- steps that take turns ---


def double_loss(model: Any, factor: str) -> None:
    """A `prepare` for a worker: everything that the model says counts more."""
    forward = model.forward
    model.forward = lambda x: forward(x) * float(factor)


def raise_at_once(model: Any) -> None:
    """A `prepare` that fails."""
    raise LookupError("not\nthis one")


def test_set_ups_take_turns_and_those_that_fail_drop_out() -> None:
    plain = Setup("plain", TINY_OPTIONS)
    seen: list[str] = []
    found = interleave(
        [
            plain,
            Setup("kept", TINY_OPTIONS, environment=HEAP_KEPT),
            Setup("changed", TINY_OPTIONS, prepare=(__name__, double_loss.__name__, "2.5")),
            Setup("broken", TINY_OPTIONS, prepare=(__name__, raise_at_once.__name__)),
        ],
        rounds=3,
        steps={"plain": 2, "kept": 2, "changed": 1, "broken": 2},
        on_step=lambda setup: seen.append(setup.name),
    )
    assert [len(run.rows) for run in found.values()] == [6, 6, 3, 0]
    assert seen[plain.warmup * 3 :] == ["plain"] * 2 + ["kept"] * 2 + ["changed"] * 2 + ["kept"] * 2 + [
        *["plain"] * 4,
        *["kept"] * 2,
        "changed",
    ]
    assert found["plain"].losses == found["kept"].losses != found["changed"].losses
    assert len(found["plain"].losses) == plain.warmup + 6
    assert ratio(found, "kept", "plain") == found["kept"].seconds / found["plain"].seconds
    failure = found["broken"].failure
    assert failure is not None
    assert (failure.kind, failure.message) == ("LookupError", "not this one")


def test_processes_are_started_in_another_way_where_a_socket_would_have_too_long_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert forking().get_start_method() == "forkserver"
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + 80 * "x")
    assert forking().get_start_method() == "spawn"


class Idle(Worker):
    """A worker without a process."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def ready(self, limit_seconds: float | None = None) -> None:
        pass

    def step(self, limit_seconds: float | None = None) -> Row:
        return Row(1.0, 1.0, 0.0, 0, 0.5, None)

    def plan(self) -> None:
        return None

    def close(self) -> None:
        pass


@pytest.mark.parametrize("answer", [False, True])
def test_in_doubt_all_take_more_turns_once(answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaving, "Worker", Idle)
    asked: list[dict[str, int]] = []

    def in_doubt(rows: Mapping[str, Sequence[Row]]) -> bool:
        asked.append({name: len(found) for name, found in rows.items()})
        return answer

    found = interleave([Setup("plain", TINY_OPTIONS)], rounds=2, in_doubt=in_doubt, doubt_rounds=3)
    assert asked == [{"plain": 2}]
    assert len(found["plain"].rows) == (5 if answer else 2)


def test_bounds_are_those_of_a_session_that_nothing_limits() -> None:
    bounds = live_bounds(Setup("any", replace(TINY_OPTIONS, budget="1", policy="lru")))
    assert bounds.least_budget_bytes < bounds.plain_peak_bytes

    def answers(budget: int) -> list[object]:
        """What the process of a set-up that keeps all says of three steps: here, as a process takes its time."""
        setup, said = Setup("any", replace(TINY_OPTIONS, policy="keep", budget=str(budget))), list[object]()
        interleaving._work(setup, ["step"] * 3, said.append)
        return said

    assert not any(isinstance(answer, Failure) for answer in answers(bounds.plain_peak_bytes))
    *_, last = answers(bounds.plain_peak_bytes - 4096)
    assert isinstance(last, Failure)
    assert last.kind == "BudgetTooSmall"


def test_a_worker_that_takes_too_long_is_ended() -> None:
    worker = Worker(Setup("slow", TINY_OPTIONS))
    try:
        with pytest.raises(SetupFailed, match="took longer than"):
            worker.ready(limit_seconds=0.01)
        assert worker._process.exitcode is not None
    finally:
        worker.close()
