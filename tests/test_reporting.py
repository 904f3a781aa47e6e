"""The page, the picture and the trace for viewers: whole, harmless, small, and with the simulator's own figures."""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import re
import stat
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outgrow
from conftest import SOURCE, TESTS
from outgrow.errors import ReportError
from outgrow.planning.plan import Plan
from outgrow.planning.simulate import timeline
from outgrow.reporting.figure import draw_plan, most_by_slice, shares_by_slice
from outgrow.reporting.files import check_writable, write_whole
from outgrow.reporting.page import plan_page, write_report
from outgrow.reporting.perfetto import perfetto_document, write_perfetto
from outgrow.reporting.points import Column, Mark, PointsPage, Series, points_page
from outgrow.reporting.subject import Subject
from outgrow.summary import Summary
from outgrow.tracing.liveness import plain_profile
from plans import CPU_AND_DISK, deep_plan, deep_trace

MIB = 1 << 20
EVIL = "</script><script>alert('{}')</script><!--&amp;{{DATA}}"
PNG = b"\x89PNG\r\n\x1a\n"


class Parsed(HTMLParser):
    """Tags with their attributes, and the text of scripts and of the title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


def data_of(page: str) -> dict[str, Any]:
    """What a page shows, as the page itself reads it."""
    packed = re.search(r'<script id="data" type="application/octet-stream">([A-Za-z0-9+/=]*)</script>', page)
    assert packed is not None
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return data


def summary(**changed: Any) -> Summary:
    usual = Summary(
        policy="auto",
        budget_bytes=64 * MIB,
        predicted_peak_bytes=60 * MIB,
        measured_peak_bytes=61 * MIB,
        predicted_step_seconds=1.0,
        step_seconds=1.1,
        kept_bytes=20 * MIB,
        offloaded_bytes=30 * MIB,
        recomputed_bytes=10 * MIB,
        stall_seconds=0.1,
        recompute_seconds=0.2,
        plan_seconds=0.3,
        oom_retries=1,
        replans=2,
    )
    return replace(usual, **changed)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return deep_plan(12)


@pytest.fixture(scope="module")
def data(plan: Plan) -> dict[str, Any]:
    history = (summary(predicted_peak_bytes=None, predicted_step_seconds=None), summary())
    return data_of(plan_page(Subject("A step", plan, history, 7, {"network": "deep"}, budget_bytes=999)))


# --- the page as a file ---


def test_a_page_is_one_well_formed_document_that_asks_nobody_for_anything(plan: Plan) -> None:
    text = plan_page(Subject("A step", plan))
    page = Parsed(text)
    assert page.open == []
    assert [tag for tag, _ in page.tags if tag in ("html", "head", "body", "main")] == [
        "html",
        "head",
        "body",
        "main",
    ]
    assert page.texts["title"] == ["A step"]
    addresses = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href")]
    assert addresses == ["data:,"]
    policy = next(
        attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", text)
    assert "{{" not in re.sub(r"<script>.*", "", text, flags=re.DOTALL)


def test_no_name_becomes_html() -> None:
    plan = deep_plan(4, module=EVIL)
    page = plan_page(Subject(EVIL, plan, settings={EVIL: EVIL}))
    parsed = Parsed(page)
    assert EVIL not in page
    assert "<script>alert" not in page
    assert len([tag for tag, _ in parsed.tags if tag == "script"]) == 2
    assert "".join(parsed.texts["title"]) == EVIL
    data = data_of(page)
    assert data["title"] == EVIL
    assert EVIL.format(3) in data["modules"]
    assert [EVIL, EVIL] in data["settings"]


def test_the_same_plan_makes_the_same_page(plan: Plan) -> None:
    assert plan_page(Subject("A step", plan)) == plan_page(Subject("A step", plan))


def test_ten_thousand_layers_stay_small(tmp_path: Path) -> None:
    plan = deep_plan(10_000, module="stage.{}.block.convolution")
    path = tmp_path / "deep.html"
    write_report(path, Subject("10,000 layers", plan))
    assert len(plan.problem.trace.ops) == 50_000
    assert path.stat().st_size < 2_500_000
    assert len(data_of(path.read_text())["ops"]["name"]) == 50_000  # and nothing is left out


def test_a_page_of_a_step_without_ops_can_be_made() -> None:
    trace = outgrow.Trace((), (), (), (), "cpu", True, "2.11.0")
    plan = outgrow.plan(trace, budget=100, hardware=CPU_AND_DISK)
    assert data_of(plan_page(Subject("nothing", plan)))["peak"]["span"] == -1


def test_pages_are_made_where_there_is_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"sys.path[:0] = [{str(SOURCE)!r}, {str(TESTS)!r}]\n"
        "import outgrow\n"
        "from plans import deep_plan\n"
        f"outgrow.report(deep_plan(5), {str(tmp_path / 'a.html')!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert data_of((tmp_path / "a.html").read_text())["title"] == "A plan by vdnn-all"


# --- the figures on it ---


def test_figures_are_those_of_the_prediction(plan: Plan, data: dict[str, Any]) -> None:
    prediction, profile = plan.simulate(), plain_profile(plan.problem.trace)
    for name, shown in data["prediction"].items():
        assert shown == getattr(prediction, name)
    assert data["budget_bytes"] == 999
    assert data["peak"]["bytes"] == prediction.peak_bytes
    assert data["peak"]["where"] == plan.problem.trace.describe_op(prediction.peak_op)
    assert data["plain"]["peak_bytes"] == profile.peak_bytes
    assert data["plain"]["where"] == plan.problem.trace.describe_op(profile.peak_op)
    assert data["decisions"] == plan.decisions_summary()
    assert sum(data["holders"]["plan"]["kinds"].values()) == prediction.peak_bytes
    assert sum(data["holders"]["plain"]["kinds"].values()) == profile.peak_bytes


def test_columns_unfold_to_the_spans_of_the_timeline(plan: Plan, data: dict[str, Any]) -> None:
    shown = timeline(plan)
    for key, spans in (("compute", shown.compute), ("out", shown.out), ("back", shown.back)):
        lane = data[key]
        assert list(accumulate(lane["start"])) == [round(span.start * 1e9) for span in spans]
        assert list(accumulate(lane["end"])) == [round(span.end * 1e9) for span in spans]
        assert list(accumulate(lane["op"])) == [span.op for span in spans]
        assert [data["activities"][number] for number in lane["activity"]] == [span.activity for span in spans]
        values = plan.problem.trace.values
        assert [data["values"]["bytes"][number] for number in lane["value"] if number >= 0] == [
            values[span.value].nbytes for span in spans if span.value >= 0
        ]
    assert list(accumulate(data["compute"]["live"])) == [span.live_bytes for span in shown.compute]
    assert list(accumulate(data["ops"]["plain_live"])) == list(plain_profile(plan.problem.trace).curve)
    names = [data["names"][number] for number in data["ops"]["name"]]
    assert names == [op.name.split(".")[1] for op in plan.problem.trace.ops]
    assert [data["modules"][number] for number in data["ops"]["module"]] == [
        op.module for op in plan.problem.trace.ops
    ]


def test_measured_steps_are_shown_as_they_were(data: dict[str, Any]) -> None:
    assert data["history"]["first_step"] == 7
    assert [Summary(**step) for step in data["history"]["steps"]] == [
        summary(predicted_peak_bytes=None, predicted_step_seconds=None),
        summary(),
    ]
    assert ["network", "deep"] in data["settings"]
    assert ["torch", "2.11.0"] in data["settings"]


def test_a_plan_that_does_not_fit_says_what_would(plan: Plan) -> None:
    tight = outgrow.plan(deep_trace(12), budget=10 * MIB, policy="vdnn-all", hardware=CPU_AND_DISK)
    assert not tight.simulate().feasible
    assert data_of(plan_page(Subject("tight", tight)))["least_budget_bytes"] == tight.least_budget_bytes
    assert data_of(plan_page(Subject("wide", plan)))["least_budget_bytes"] is None


# --- points ---


def page_of_points(**changed: Any) -> PointsPage:
    usual = PointsPage(
        title="Points",
        subtitle="of a search",
        facts=(("best", "1.0", "of two"),),
        x_label="peak",
        y_label="time",
        series=(Series("auto", "auto", (Mark(0.5, 1.2, ("a note",)), Mark(1.0, 1.0)), starred=True),),
        columns=(Column("policy"), Column("peak", "bytes")),
        rows=(("auto", 5), ("lru", None)),
    )
    return replace(usual, **changed)


def test_points_keep_their_figures() -> None:
    data = data_of(points_page(page_of_points()))
    assert data["kind"] == "points"
    assert data["rows"] == [["auto", 5], ["lru", None]]
    assert data["series"][0]["marks"][0] == {"x": 0.5, "y": 1.2, "notes": ["a note"]}


def test_rows_must_have_as_many_cells_as_there_are_columns_and_numbers_must_be_finite() -> None:
    with pytest.raises(ValueError, match="3 cells for 2 columns"):
        points_page(page_of_points(rows=(("auto", 5, 6),)))
    with pytest.raises(ValueError, match="JSON"):
        points_page(page_of_points(rows=(("auto", math.inf),)))


# --- files ---


def test_a_file_appears_whole_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    check_writable(path)
    assert list(tmp_path.iterdir()) == []
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert [item.name for item in tmp_path.iterdir()] == ["a.html"]
    assert path.read_bytes() == b"two"


def test_a_new_file_has_the_usual_rights_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    path, usual = tmp_path / "a.html", tmp_path / "usual"
    usual.touch()
    write_whole(path, b"one")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)
    path.chmod(0o640)
    write_whole(path, b"two")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "true.html")
    write_whole(tmp_path / "link.html", b"one")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "true.html").read_bytes() == b"one"
    check_writable("/dev/null")
    write_whole("/dev/null", b"one")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_what_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path / "no" / "a.html", "there is no folder"),
        (tmp_path, "it is a folder"),
        (tmp_path / "file" / "a.html", "Not a directory"),
        ("/proc/a.html", "cannot be written"),
        ("a\0b", "cannot be written"),
    ):
        for act in (check_writable, lambda path: write_whole(path, b"one")):
            with pytest.raises(ReportError, match=reason):
                act(path)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.html"
    write_whole(path, b"old")

    def full(descriptor: int, mode: str) -> Any:
        os.close(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(ReportError, match="No space left on device"):
        write_whole(path, b"new")
    assert {item.name: item.read_bytes() for item in tmp_path.iterdir()} == {"a.html": b"old"}


# --- the trace for viewers ---


def test_the_trace_is_a_chrome_trace(plan: Plan) -> None:
    events = perfetto_document(Subject("A step", plan))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        assert event["name"]
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert isinstance(event["tid"], int)
        if event["ph"] == "C":
            assert all(isinstance(number, int) for number in event["args"].values())
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 1}
    assert threads == {"compute", "copy out", "copy in"}


def test_spans_of_a_thread_follow_each_other_and_end_with_the_step(plan: Plan) -> None:
    events = perfetto_document(Subject("A step", plan))["traceEvents"]
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    assert len(threads) == 4
    for spans in threads.values():
        assert all(a["dur"] > 0 for a in spans)
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(spans))  # or viewers nest them
    prediction = plan.simulate()
    for thread, end in (((1, 1), prediction.step_seconds), ((2, 1), prediction.plain_step_seconds)):
        last = threads[thread][-1]
        assert last["ts"] + last["dur"] == pytest.approx(end * 1e6, abs=1e-2)
    waits = sum(event["dur"] for event in threads[1, 1] if event["cat"] == "wait")
    assert waits == pytest.approx(prediction.stall_seconds * 1e6, abs=1e-3 * len(threads[1, 1]))


def test_counters_have_the_peaks_and_the_budget(plan: Plan) -> None:
    events = perfetto_document(Subject("A step", plan, budget_bytes=99))["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    live = {process: [] for process in (1, 2)}
    for event in counters:
        if event["name"] == "live bytes":
            live[event["pid"]].append(event["args"]["live bytes"])
    assert max(live[1]) == plan.simulate().peak_bytes
    assert max(live[2]) == plain_profile(plan.problem.trace).peak_bytes
    assert [event["args"] for event in counters if event["name"] == "budget"] == [{"budget": 99}] * 2


def test_a_trace_is_compressed_where_its_name_says_so(plan: Plan, tmp_path: Path) -> None:
    for name in ("a.json", "a.json.gz"):
        write_perfetto(tmp_path / name, Subject("A step", plan))
    plain = (tmp_path / "a.json").read_bytes()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == plain
    assert json.loads(plain)["otherData"]["policy"] == "vdnn-all"


# --- the picture ---


def test_a_picture_is_written_in_the_format_of_its_suffix(plan: Plan, tmp_path: Path) -> None:
    for name, start in (("a.png", PNG), ("b.PDF", b"%PDF")):
        draw_plan(tmp_path / name, Subject("A step", plan, (summary(),)))
        assert (tmp_path / name).read_bytes().startswith(start)


def test_slices_keep_the_highest_level_however_short_it_was() -> None:
    spans = [(0.0, 1.0, 5), (1.0, 1.001, 90), (1.001, 3.0, 7)]
    assert most_by_slice(spans, 4.0, 4)[:3].tolist() == [5, 90, 7]
    assert np.isnan(most_by_slice(spans, 4.0, 4)[3])
    assert np.nanmax(most_by_slice(spans, 4.0, 2)) == 90


def test_shares_of_slices_are_those_of_the_spans() -> None:
    assert shares_by_slice([(0.5, 1.5), (2.0, 2.25), (3.5, 4.0)], 4.0, 4) == pytest.approx([0.5, 0.5, 0.25, 0.5])
    assert shares_by_slice([(0.0, 4.0)], 4.0, 4) == pytest.approx([1, 1, 1, 1])
    assert shares_by_slice([], 4.0, 2).tolist() == [0, 0]
