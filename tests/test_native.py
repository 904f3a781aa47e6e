"""Our own C++: compiled once, and again where what is there is not what was compiled."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from outgrow.progress import say
from outgrow.runtime.native import Code, build_ahead, built


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Code:
    """A function that answers, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    return Code(source, ())


def test_code_is_compiled_once(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not code.target.exists()
    assert ctypes.CDLL(str(built(code))).answer() == 42
    monkeypatch.setenv("CXX", "none")
    monkeypatch.setenv("PATH", "")
    assert built(code) == code.target


@pytest.mark.parametrize("left", [0, 100, -1])
def test_what_a_crash_of_the_machine_left_is_compiled_again(code: Code, left: int) -> None:
    whole = built(code).read_bytes()
    code.target.write_bytes(whole[:left])
    assert ctypes.CDLL(str(built(code))).answer() == 42
    assert code.target.read_bytes()[: len(whole) // 2] == whole[: len(whole) // 2]


def test_who_waits_at_a_terminal_is_told_what_for(
    code: Code, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Code(code.source.with_name("other.cpp"), ())
    other.source.write_text('extern "C" int other() { return 1; }')
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        build_ahead(code, other)
        assert ("compiling" in capsys.readouterr().err) == is_terminal
        for built_before in (code, other):
            built_before.target.unlink()
    build_ahead(code, other)
    capsys.readouterr()
    build_ahead(code, other)  # it is there
    assert not capsys.readouterr().err


@pytest.mark.parametrize("stderr", [None, object()])
def test_where_there_is_nobody_to_tell_nothing_fails(stderr: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    say("something")
