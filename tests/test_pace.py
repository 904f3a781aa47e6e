"""The machine's own pace is taken out of what runs took."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outgrow.tuning.pace import FixedWork, Run, at_usual_pace

PACES = st.floats(0.5, 2.0)


def runs_of(base: float, slope: float, paces: list[float], stall: float = 0.0) -> list[Run]:
    """Runs of a step of `base` seconds, beside fixed work of 10 ms, where the machine takes so many times as long."""
    return [Run(base * pace**slope + stall, stall, 0.01 * pace) for pace in paces]


@given(st.lists(st.tuples(st.floats(0.01, 10.0), st.lists(PACES, min_size=1, max_size=5)), min_size=1, max_size=6))
def test_runs_that_follow_the_fixed_work_are_alike_however_fast_the_machine_was(
    candidates: list[tuple[float, list[float]]],
) -> None:
    found = at_usual_pace({place: runs_of(base, 1.0, paces) for place, (base, paces) in enumerate(candidates)})
    for place, (base, _) in enumerate(candidates):
        ratios = [seconds / base for seconds in found[place]]
        assert ratios == pytest.approx([next(iter(found[0])) / candidates[0][0]] * len(ratios))


@given(st.floats(0.0, 3.0), st.floats(0.0, 5.0))
def test_how_much_steps_follow_it_is_asked_of_runs_of_the_same_batch(slope: float, stall: float) -> None:
    paces = [0.5, 1.0, 2.0] * 20
    found = at_usual_pace({"a": runs_of(1.0, slope, paces, stall), "b": runs_of(5.0, slope, paces[::-1])})
    assert found["a"] == pytest.approx([1.0 + stall] * len(paces), rel=0.01), "the disk's time is its own"
    assert found["b"] == pytest.approx([5.0] * len(paces), rel=0.01)


def test_single_runs_at_different_paces_are_compared_at_one() -> None:
    found = at_usual_pace({8: runs_of(1.0, 1.0, [0.8]), 16: runs_of(1.9, 1.0, [1.25])})
    assert found[16][0] / found[8][0] == pytest.approx(1.9)


def test_a_step_that_does_not_follow_the_machine_stays_as_it_was_run() -> None:
    paces = [0.7, 1.0, 1.4] * 20
    found = at_usual_pace({"a": runs_of(1.0, 0.0, paces)})
    assert found["a"] == pytest.approx([1.0] * len(paces), rel=0.01)


@contextmanager
def unusual_defaults() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_fixed_work_takes_time_whatever_the_defaults_are_and_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    with unusual_defaults():
        assert 1e-5 < FixedWork().seconds() < 10
    assert torch.equal(torch.get_rng_state(), before)


def test_the_fixed_work_runs_for_as_long_as_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    work = FixedWork()
    times: list[None] = []
    run = work._run

    def counted() -> None:
        times.append(None)
        run()

    monkeypatch.setattr(work, "_run", counted)
    one = work.seconds()
    assert len(times) == 3
    work.seconds(at_least=20 * one)
    assert len(times) > 3 + 5
