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
