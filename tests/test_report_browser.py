"""The pages in a real browser: nothing goes wrong there, pointing shows figures, headers sort.

They need Chromium and Python's playwright (`pip install playwright`, which need not install its own browsers), and
are skipped where either is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outgrow.cli.compare import _page
from outgrow.cli.job import make_job
from outgrow.cli.options import Options
from outgrow.cli.points import Pair, predict
from outgrow.reporting.page import write_report
from outgrow.reporting.points import write_points
from outgrow.reporting.subject import Subject
from outgrow.tuning.answer import Candidate, Tuning
from outgrow.tuning.noise import NoiseScale
from outgrow.tuning.page import write_page
from outgrow.tuning.rates import Rule
from plans import CPU_AND_DISK, deep_plan, deep_trace
from test_reporting import EVIL, summary

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

COUNT_INKS = """() => {
  const canvases = document.querySelectorAll('.stage canvas:not(.over), .overview canvas, .small canvas');
  return [...canvases].map((canvas) => {
    const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
    for (let i = 0; i < pixels.length; i += 4) {
      if (pixels[i + 3]) seen.add(`${pixels[i]},${pixels[i + 1]},${pixels[i + 2]}`);
    }
    return seen.size;
  });
}"""

Open = Callable[[Path], Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tool:
        started = tool.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """Opens a page from disk; at the end no page may have complained, or asked for anything but itself."""
    complaints: list[str] = []
    asked: list[str] = []
    pages: list[Any] = []

    def call(path: Path) -> Any:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=20_000)
        pages.append(page)
        return page

    yield call
    for page in pages:
        page.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in asked if url.startswith("file:")]) == len(pages)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "a.html"
    history = (summary(predicted_peak_bytes=None, predicted_step_seconds=None), summary(), summary(step_seconds=1.3))
    write_report(path, Subject("Forty layers", deep_plan(40, policy="auto"), history))
    return path


def box_of(page: Any, selector: str) -> dict[str, float]:
    """Where something is, once all of it can be seen."""
    page.eval_on_selector(selector, "node => node.scrollIntoView({block: 'center'})")
    box: dict[str, float] = page.query_selector(selector).bounding_box()
    return box


def texts(page: Any, selector: str) -> list[str]:
    return [item.inner_text() for item in page.query_selector_all(selector)]


def test_every_section_is_there(opened: Open, report: Path) -> None:
    page = opened(report)
    assert texts(page, "h1") == ["Forty layers"]
    assert texts(page, "h2") == [
        "Memory and lanes over the step",
        "What holds the peak",
        "Decisions by module",
        "Predicted against measured",
        "Settings",
    ]
    assert "Peak, measured" in texts(page, ".card .label")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_something_is_drawn_in_either_color_scheme(opened: Open, report: Path, scheme: str) -> None:
    page = opened(report)
    page.emulate_media(color_scheme=scheme)
    page.wait_for_timeout(100)
    inks = page.evaluate(COUNT_INKS)
    assert len(inks) == 5
    assert min(inks) > 5


def test_pointing_at_memory_and_at_each_lane_shows_figures(opened: Open, report: Path) -> None:
    page = opened(report)
    box = box_of(page, ".stage")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    assert page.is_visible("#tip")
    assert "live bytes" in page.inner_text("#tip")
    assert "conv" in page.inner_text("#tip")
    heads = set()
    for x in range(90, int(box["width"]) - 20, 12):
        for lane in range(3):
            page.mouse.move(box["x"] + x, box["y"] + 270 + 22 + 20 + lane * 58)
            heads.add(page.inner_text("#tip .head"))
    assert {"convolution", "offload", "fetch"} <= heads
    page.mouse.move(5, 5)
    assert not page.is_visible("#tip")


def test_wheel_keys_buttons_and_the_strip_zoom(opened: Open, report: Path) -> None:
    page = opened(report)

    def shown() -> str:
        page.wait_for_timeout(60)
        text: str = page.inner_text(".range")
        return text

    whole = shown()
    assert whole.startswith("the whole step")
    box = box_of(page, ".stage")
    page.mouse.move(box["x"] + 600, box["y"] + 100)
    page.mouse.wheel(0, -240)
    wheeled = shown()
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 100)
    page.mouse.up()
    dragged = shown()
    page.click("[title='Show the whole step']")
    assert shown() == whole
    page.focus(".stage")
    page.keyboard.press("+")
    by_key = shown()
    page.keyboard.press("0")
    assert shown() == whole
    strip = box_of(page, ".overview")
    page.mouse.move(strip["x"] + 300, strip["y"] + 20)
    page.mouse.down()
    page.mouse.move(strip["x"] + 500, strip["y"] + 20)
    page.mouse.up()
    brushed = shown()
    page.click("[title='Zoom to the peak']")
    assert len({whole, wheeled, dragged, by_key, brushed, shown()}) == 6


def test_headers_sort_both_ways_by_mouse_and_by_key(opened: Open, report: Path) -> None:
    page = opened(report)
    table = "table[aria-label='Decisions by module']"
    names = texts(page, f"{table} tbody td:first-child")
    header = f"{table} th:first-child"
    page.click(f"{header} button")
    assert page.get_attribute(header, "aria-sort") == "ascending"
    up = texts(page, f"{table} tbody td:first-child")
    page.focus(f"{header} button")
    page.keyboard.press("Enter")
    assert page.get_attribute(header, "aria-sort") == "descending"
    down = texts(page, f"{table} tbody td:first-child")
    assert sorted(up) != up  # layer9 comes before layer10
    assert up[:3] == ["(outside of modules)", "layer0.conv", "layer1.conv"]
    assert down[0] == "layer39.conv"
    assert len(names) == len(up) == len(down) == 40
    page.fill("input[type=search]", "layer3.")
    assert texts(page, f"{table} tbody td:first-child") == ["layer3.conv"]
    page.fill("input[type=search]", "")
    page.select_option("select", "1")
    assert "layer39" in texts(page, f"{table} tbody td:first-child")


def test_names_are_shown_as_they_are(opened: Open, tmp_path: Path) -> None:
    write_report(tmp_path / "evil.html", Subject(EVIL, deep_plan(3, module=EVIL)))
    page = opened(tmp_path / "evil.html")
    assert texts(page, "h1") == [EVIL]
    assert EVIL.format(2) in texts(page, "table[aria-label='Decisions by module'] tbody td:first-child")


def test_ten_thousand_layers_paint_within_three_seconds(opened: Open, tmp_path: Path) -> None:
    write_report(tmp_path / "deep.html", Subject("deep", deep_plan(10_000, module="stage.{}.convolution")))
    page = opened(tmp_path / "deep.html")
    milliseconds = page.evaluate("performance.now()")
    assert milliseconds < 3000
    assert "more: zoom in" in hovered(page)
    assert len(texts(page, "table[aria-label='Decisions by module'] tbody tr")) <= 40


def hovered(page: Any) -> str:
    box = box_of(page, ".stage")
    page.mouse.move(box["x"] + 700, box["y"] + 310)
    text: str = page.inner_text("#tip")
    return text


def test_a_comparison_shows_its_points(opened: Open, tmp_path: Path) -> None:
    pairs = [Pair(policy, percent) for policy in ("auto", "lru") for percent in (100.0, 60.0)]
    curves = predict(deep_trace(10), CPU_AND_DISK, pairs)
    job = make_job(Options("resnet-50"))
    write_points(tmp_path / "points.html", _page("points", job, CPU_AND_DISK, curves, curves))
    page = opened(tmp_path / "points.html")
    page.hover("svg .mark >> nth=-1", force=True)
    assert page.is_visible("#tip")
    beside = page.inner_text("#tip")
    assert "auto, measured" in beside
    assert "auto, predicted" in beside  # they lie on top of each other
    marks = len(page.query_selector_all("svg .mark"))
    assert marks == 2 * sum(point.fits for point in curves.points)
    page.click(".bar-tools button >> nth=0")
    assert len(page.query_selector_all("svg .mark")) < marks
    page.click("table th:nth-child(5) button")
    assert page.get_attribute("table th:nth-child(5)", "aria-sort") == "descending"


def candidate(batch: int, speed: float, passes: int = 1, run: float | None = None, fits: bool = True) -> Candidate:
    """A batch of so many samples a second, as predicted and as it was run."""
    return Candidate(
        batch_size=batch,
        micro_batch=batch // passes,
        accumulation=passes,
        feasible=fits,
        predicted_peak_bytes=batch * 8 << 20,
        predicted_step_seconds=batch / speed,
        offloaded_bytes=0,
        recomputed_bytes=0,
        efficiency=48 / (16 + batch),
        measured_peak_bytes=None if run is None else batch * 9 << 20,
        measured_step_seconds=None if run is None else batch / run,
    )


@pytest.fixture(scope="module")
def answer() -> Tuning:
    """What the tuner found: 96 samples do not fit, and 64 in two passes are as fast as 48 in one."""
    candidates = (
        candidate(16, 150.0),
        candidate(32, 240.0, run=235.0),
        candidate(48, 300.0, run=310.5),
        candidate(64, 290.0),
        candidate(64, 300.0, passes=2, run=280.0),
        candidate(96, 310.0, fits=False),
    )
    return Tuning(
        objective="goodput",
        budget_bytes=600 << 20,
        chosen=candidates[2],
        learning_rates=(0.0711,),
        base_batch=32,
        base_rates=(0.05,),
        rule=Rule.LINEAR,
        warmup_steps=120,
        noise=NoiseScale(gradient_square=2.0, noise=32.0, measurements=8),
        noise_samples=16.0,
        largest_batch=64,
        plan=deep_plan(3),
        candidates=candidates,
    )


def test_an_answer_of_the_tuner_shows_its_candidates(opened: Open, answer: Tuning, tmp_path: Path) -> None:
    write_page(answer, tmp_path / "tune.html")
    page = opened(tmp_path / "tune.html")
    assert texts(page, "h1") == ["The batch that is worth it: 48"]
    legend = texts(page, ".bar-tools [aria-pressed]")
    assert [text.strip() for text in legend] == ["chosen", "predicted", "run", "goodput"]
    cards = dict(zip(texts(page, ".card .label"), texts(page, ".card .value"), strict=True))
    assert cards["learning rate"] == "0.0711"
    assert "linear rule, from 0.05 at batch 32" in page.inner_text(".cards")
    assert cards["noise scale"] == "16 samples"
    rows = texts(page, "table tbody tr")
    assert len(rows) == len(answer.candidates)
    assert "310.5" in rows[2]


def test_pointing_at_the_chosen_batch_shows_what_was_predicted_and_what_was_run(
    opened: Open, answer: Tuning, tmp_path: Path
) -> None:
    write_page(answer, tmp_path / "tune.html")
    page = opened(tmp_path / "tune.html")
    page.hover("svg polygon.mark", force=True)
    beside = page.inner_text("#tip")
    assert "chosen" in beside
    assert "run" in beside
    assert "predicted: peak 384.0 MiB, step 160.0 ms" in beside
    assert "run: peak 432.0 MiB, step 154.6 ms" in beside
    page.mouse.move(5, 5)
    assert not page.is_visible("#tip")


def test_the_tuners_figures_sort_and_leave_out_what_a_batch_that_does_not_fit_would_take(
    opened: Open, answer: Tuning, tmp_path: Path
) -> None:
    write_page(answer, tmp_path / "tune.html")
    page = opened(tmp_path / "tune.html")
    speeds = "table th:nth-child(8)"
    assert texts(page, speeds) == ["samples/s"]
    page.click(f"{speeds} button")
    assert page.get_attribute(speeds, "aria-sort") == "descending"
    assert texts(page, "table td:nth-child(8)") == ["300", "300", "290", "240", "150", "–"]  # noqa: RUF001
    batches = texts(page, "table td:nth-child(1)")
    assert batches[-1] == "96"
    page.click(f"{speeds} button")
    assert texts(page, "table td:nth-child(1)") != batches


def test_groups_of_the_tuners_marks_hide_and_come_back(opened: Open, answer: Tuning, tmp_path: Path) -> None:
    write_page(answer, tmp_path / "tune.html")
    page = opened(tmp_path / "tune.html")
    marks = len(page.query_selector_all("svg .mark"))
    assert marks == 2 * (5 + 3) + 1  # predicted and run, each as samples a second and as goodput; the chosen one
    assert len(page.query_selector_all("svg polyline")) == 2  # one curve of batches of one pass each
    page.click("text=goodput >> nth=0")
    assert len(page.query_selector_all("svg .mark")) == marks - 8
    page.click("text=goodput >> nth=0")
    assert len(page.query_selector_all("svg .mark")) == marks
