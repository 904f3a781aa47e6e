"""The tuner: what it knows of a step at any batch, what it answers, and what it says to nonsense."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import outgrow
from outgrow.cli.job import make_job
from outgrow.cli.main import run
from outgrow.cli.options import Options
from outgrow.cost.estimate import estimate
from outgrow.networks import find
from outgrow.tuning import race
from outgrow.tuning import runs as real_runs
from outgrow.tuning import trial as trial_module
from outgrow.tuning.builder import Builder
from outgrow.tuning.calibration import Calibration, Sample
from outgrow.tuning.limits import largest_within
from outgrow.tuning.pace import FixedWork, Run
from outgrow.tuning.rates import Rule, rate_factor, rule_for, warmup_steps
from outgrow.tuning.scaling import StepFamily
from outgrow.tuning.steps import synthetic_step
from outgrow.tuning.survey import sizes_between
from outgrow.tuning.trial import Terms, Trial, run_trial
from steps import digest

INFINITE = float("inf")


def trace_of(name: str, image_size: int, batch: int) -> outgrow.Trace:
    return outgrow.trace(lambda: synthetic_step(find(name), batch, image_size))


# --- a step as a function of its batch ---


@pytest.mark.parametrize(("name", "image_size"), [("resnet-18", 32), ("gpt-2x64", 32), ("unet", 32)])
def test_two_traces_tell_all_others(name: str, image_size: int) -> None:
    traced: list[int] = []

    def trace_at(batch: int) -> outgrow.Trace:
        traced.append(batch)
        return trace_of(name, image_size, batch)

    family = StepFamily(trace_at)
    for batch in (3, 16):
        found, true = family.at(batch), trace_of(name, image_size, batch)
        assert [value.nbytes for value in found.values] == [value.nbytes for value in true.values]
        assert found.saved == true.saved
        assert [op.flops for op in found.ops] == pytest.approx([op.flops for op in true.ops], rel=0.01)
        assert [op.moved_bytes for op in found.ops] == [op.moved_bytes for op in true.ops]
    assert set(traced) == {2, 4, 8}


def test_a_step_that_compares_all_samples_with_all_is_traced_at_each_batch() -> None:
    def trace_at(batch: int) -> outgrow.Trace:
        def make() -> outgrow.TrainingStep:
            model = torch.nn.Linear(16, 16)
            data = torch.randn(batch, 16)

            def step() -> None:
                out = model(data)
                (out @ out.T).logsumexp(1).sum().backward()  # as contrastive losses do

            return outgrow.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.1), step)

        return outgrow.trace(make)

    family = StepFamily(trace_at)
    assert not family.is_straight
    assert family.at(32) == trace_at(32)


# --- learning rates ---


@cache
def estimated_traces() -> dict[int, outgrow.Trace]:
    """A step at five batches, as estimated."""
    device = outgrow.find_hardware("k40c")
    family = StepFamily(partial(trace_of, "gpt-2x64", 32))
    return {batch: estimate(family.at(batch), device) for batch in (2, 4, 8, 16, 32)}


def calibrated(*batches: int, moves: bool = False) -> tuple[Calibration, dict[int, outgrow.Trace]]:
    """What such steps say whose ops took 0.1 ms and three times their estimate, and held 10 bytes a sample."""
    estimated = estimated_traces()
    samples = [sampled(batch, estimated[batch], moves=moves) for batch in batches]
    return Calibration(outgrow.find_hardware("k40c"), samples), estimated


def sampled(batch: int, estimated: outgrow.Trace, *, moves: bool = False) -> Sample:
    ops = [replace(op, seconds=1e-4 + 3 * op.seconds, workspace_bytes=10 * batch) for op in estimated.ops]
    return Sample(batch, moves, estimated, estimated.with_ops(ops))


def slow(batch: int, estimated: outgrow.Trace) -> Sample:
    """A step that kept everything, and whose ops took a second each."""
    return Sample(batch, False, estimated, estimated.with_ops([replace(op, seconds=1.0) for op in estimated.ops]))


def test_between_measured_batches_an_op_takes_what_lies_on_a_line() -> None:
    calibration, estimated = calibrated(4, 16)
    for batch in (4, 8, 16):
        expected = [1e-4 + 3 * op.seconds for op in estimated[batch].ops]
        found = calibration.timed(batch, estimated[batch], moves=False)
        assert [op.seconds for op in found.ops] == pytest.approx(expected)
        assert {op.workspace_bytes for op in calibration.sized(batch, estimated[batch]).ops} == {10 * batch}


def test_beyond_them_it_lies_on_the_same_line_and_holds_no_less() -> None:
    calibration, estimated = calibrated(4, 8, 16)
    for batch in (2, 32):
        found = calibration.timed(batch, estimated[batch], moves=False)
        expected = [1e-4 + 3 * op.seconds for op in estimated[batch].ops]
        assert [op.seconds for op in found.ops] == pytest.approx(expected)
    assert {op.workspace_bytes for op in calibration.sized(2, estimated[2]).ops} == {40}
    assert {op.workspace_bytes for op in calibration.sized(32, estimated[32]).ops} == {320}


def test_one_measured_batch_says_how_many_times_its_estimate_an_op_takes() -> None:
    calibration, estimated = calibrated(8)
    found = calibration.timed(32, estimated[32], moves=False)
    for op, guess, beside in zip(found.ops, estimated[32].ops, estimated[8].ops, strict=True):
        if beside.seconds:
            assert op.seconds / guess.seconds == pytest.approx((1e-4 + 3 * beside.seconds) / beside.seconds)


def test_an_op_that_was_slower_in_a_smaller_batch_does_not_get_faster_for_ever() -> None:
    estimated = estimated_traces()
    samples = slow(4, estimated[4]), sampled(16, estimated[16])
    calibration = Calibration(outgrow.find_hardware("k40c"), samples)
    found = calibration.timed(32, estimated[32], moves=False)
    assert all(op.seconds >= 1e-4 for op in found.ops)


def test_steps_of_other_ops_than_those_that_were_estimated_tell_of_the_step_as_a_whole() -> None:
    estimated = estimated_traces()
    samples = []
    for batch in (4, 16):
        whole = 0.01 + 3 * estimated[batch].seconds
        ops = [replace(op, name="own::op", seconds=whole / len(estimated[batch].ops)) for op in estimated[batch].ops]
        samples.append(Sample(batch, False, estimated[batch], estimated[batch].with_ops(ops)))
    calibration = Calibration(outgrow.find_hardware("k40c"), samples)
    for batch in (2, 4, 8, 16, 32):
        found = calibration.timed(batch, estimated[batch], moves=False)
        assert found.seconds == pytest.approx(0.01 + 3 * estimated[batch].seconds)


@settings(deadline=None)  # the first makes the traces
@given(st.sets(st.sampled_from((2, 4, 8, 16, 32)), min_size=1), st.sampled_from((2, 4, 8, 16, 32)), st.booleans())
def test_no_op_ever_takes_less_than_nothing(batches: set[int], batch: int, moves: bool) -> None:
    calibration, estimated = calibrated(*batches)
    found = calibration.timed(batch, estimated[batch], moves=moves)
    assert found.measured
    assert all(op.seconds >= 0 for op in found.ops)
    if batch in batches:
        assert [op.seconds for op in found.ops] == pytest.approx(
            [1e-4 + 3 * op.seconds for op in estimated[batch].ops]
        )


def test_steps_that_move_something_tell_of_such_steps_as_far_as_there_are_any() -> None:
    estimated = estimated_traces()
    moving = [sampled(batch, estimated[batch], moves=True) for batch in (4, 16)]
    calibration = Calibration(outgrow.find_hardware("k40c"), [*moving, slow(8, estimated[8])])
    kept = calibration.timed(8, estimated[8], moves=False)
    moved = calibration.timed(8, estimated[8], moves=True)
    assert {op.seconds for op in kept.ops} == {1.0}
    assert [op.seconds for op in moved.ops] == pytest.approx([1e-4 + 3 * op.seconds for op in estimated[8].ops])


def test_the_rule_is_the_optimizers() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    assert rule_for(torch.optim.SGD(parameters, lr=0.1, momentum=0.9)) is Rule.LINEAR
    for optimizer in (
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.NAdam,
    ):
        assert rule_for(optimizer(parameters, lr=0.1)) is Rule.SQUARE_ROOT


@given(st.sampled_from(Rule), st.integers(1, 10**5), st.integers(1, 10**5), st.floats(0, 1e7))
def test_rates_follow_the_batch_and_saturate_at_the_noise_scale(
    rule: Rule, batch: int, base: int, noise: float
) -> None:
    factor = rate_factor(rule, batch, base, noise)
    power = 1 if rule is Rule.LINEAR else 0.5
    assert factor <= max(1.0, (batch / base) ** power) * (1 + 1e-9)
    assert factor <= (1 + noise / base) ** power * (1 + 1e-9)
    assert rate_factor(rule, base, base, noise) == pytest.approx(1)
    assert rate_factor(rule, 2 * batch, base, noise) >= factor * (1 - 1e-12)
    assert rate_factor(rule, batch, base, INFINITE) == pytest.approx((batch / base) ** power)
    steps = warmup_steps(factor, batch, base, 10_000)
    assert steps == (0 if factor <= 1 else -(-50_000 // batch))


def test_the_scheduler_climbs_from_the_base_rates_to_the_new_ones(small_answer: outgrow.Tuning) -> None:
    model = torch.nn.Linear(4, 4)
    answer = replace(small_answer, base_rates=(0.01,), learning_rates=(0.025,), warmup_steps=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=answer.base_rates[0], momentum=0.9)
    scheduler = answer.scheduler(optimizer)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    rates = []
    for _ in range(answer.warmup_steps + 2):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[-1] == pytest.approx(answer.learning_rate)
    assert rates[0] == pytest.approx(answer.base_rates[0])
    assert rates == sorted(rates)
    with pytest.raises(outgrow.TuningError, match="parameter groups"):
        answer.scheduler(torch.optim.SGD([{"params": [item]} for item in model.parameters()], lr=0.1))


# --- the search ---


@given(st.integers(1, 500), st.integers(1, 5000))
def test_sizes_are_powers_of_two_and_one_and_a_half_times_those(least: int, most: int) -> None:
    found = sizes_between(least, most)
    wanted = [
        size
        for size in range(least, most + 1)
        if size & (size - 1) == 0 or (size % 3 == 0 and (size // 3) & (size // 3 - 1) == 0)
    ]
    assert found == wanted


@given(st.integers(0, 1000), st.integers(1, 100), st.integers(1, 10**6), st.integers(1, 16))
def test_the_largest_size_within_a_budget_is_found_to_a_hundredth(
    fixed: int, each: int, budget: int, least: int
) -> None:
    found = largest_within(lambda size: fixed + each * size, budget, least)
    true = (budget - fixed) // each
    if true < least:
        assert found is None
    else:
        assert found is not None
        assert least <= found <= true
        assert true - found <= max(1, 0.01 * found)


def make_mlp(
    batch: int, accumulation: int = 1, *, width: int = 256, depth: int = 6, seed: int = 0
) -> outgrow.TrainingStep:
    """A step over random samples, new ones each time."""
    torch.manual_seed(seed)
    layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(samples: Sequence[torch.Tensor]) -> None:
        for x in samples:
            (model(x).square().mean() / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()

    def batches() -> Iterator[Sequence[torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield [torch.randn(batch, width, generator=generator) for _ in range(accumulation)]

    return outgrow.TrainingStep(model, optimizer, step, batches())


def make_mlp_whole(batch: int) -> outgrow.TrainingStep:
    return make_mlp(batch)


# The state takes some 4.2 MB, a sample some 14 kB.
SMALL_BUDGET = 8_000_000


@pytest.fixture(scope="module")
def small_answer() -> outgrow.Tuning:
    return outgrow.tune(
        make_mlp_whole,
        budget=SMALL_BUDGET,
        objective="throughput",
        base_batch=16,
        max_batch=96,
        noise_scale=1e4,
        epoch_samples=999,
    )


def test_the_answer_was_run_inside_the_budget(small_answer: outgrow.Tuning) -> None:
    chosen = small_answer.chosen
    assert chosen in small_answer.candidates
    assert chosen.measured_peak_bytes is not None
    assert chosen.measured_peak_bytes <= SMALL_BUDGET
    assert small_answer.batch_size <= small_answer.largest_batch
    run = [item for item in small_answer.candidates if item.measured_step_seconds is not None]
    assert len(run) >= 5
    assert all(0 < (item.measured_peak_bytes or 0) <= SMALL_BUDGET for item in run)


def with_times_of(
    seconds_of: Callable[[list[int]], float],
    monkeypatch: pytest.MonkeyPatch,
    pace_of: Callable[[int], float] = lambda batch: 1.0,
) -> tuple[Callable[[int], outgrow.TrainingStep], list[int]]:
    """Steps for the tuner whose runs take what `seconds_of` says of the batches run so far; and those batches.

    `pace_of` a batch says how many times as long all work takes on the machine when it is run.
    """
    built: list[int] = []
    runs: list[int] = []

    def make(batch: int) -> outgrow.TrainingStep:
        built.append(batch)
        return make_mlp(batch)

    def timed(*arguments: Any, **options: Any) -> Trial:
        trial = run_trial(*arguments, **options)
        runs.append(built[-1])
        pace = pace_of(built[-1])
        return replace(trial, runs=(Run(pace * seconds_of(runs), stall_seconds=0.0, fixed_seconds=0.01 * pace),))

    monkeypatch.setattr(real_runs, "run_trial", timed)
    return make, runs


def test_a_batch_whose_first_run_was_lucky_is_not_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    make, runs = with_times_of(lambda runs: 0.1 if runs == [16] else 1.0, monkeypatch)
    answer = outgrow.tune(
        make, budget="1GiB", objective="throughput", base_batch=16, max_batch=32, noise_scale=1e4, trials=9
    )
    assert runs[:15] == [16, 1, 2, 6, 32] * 3, "what predictions rest on runs in turns"
    assert answer.batch_size == 32


def test_a_rival_that_is_close_is_run_as_often_as_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {16: 0.2, 24: 0.2424, 32: 0.32}
    make, runs = with_times_of(lambda runs: times.get(runs[-1], 1.0), monkeypatch)
    answer = outgrow.tune(
        make, budget="1GiB", objective="throughput", base_batch=16, max_batch=32, noise_scale=1e4, trials=9
    )
    assert set(runs[15:]) == {24, 32}
    assert runs.count(24) + runs.count(32) == 3 + 9
    assert abs(runs.count(24) - runs.count(32)) <= 1
    assert answer.batch_size == 32


def test_a_batch_that_is_run_while_the_machine_is_slow_is_not_the_worse_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds_of(runs: list[int]) -> float:
        return 0.1 + 0.001 * runs[-1]

    make, _ = with_times_of(seconds_of, monkeypatch, lambda batch: 2.0 if batch == 32 else 1.0)
    answer = outgrow.tune(make, budget="1GiB", objective="throughput", base_batch=16, max_batch=32, noise_scale=1e4)
    assert answer.batch_size == 32
    measured = {item.batch_size: item.measured_step_seconds for item in answer.candidates}
    assert measured[32] / measured[16] == pytest.approx(0.132 / 0.116)


def test_nor_where_there_are_no_more_runs_to_be_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    make, _ = with_times_of(lambda runs: 1e-3 if runs[-1] == 24 else 0.1 + 0.01 * runs[-1], monkeypatch)
    monkeypatch.setattr(race, "_DOUBT", 1e6)  # all are run, as far as runs go
    answer = outgrow.tune(
        make, budget="1GiB", objective="throughput", base_batch=16, max_batch=32, noise_scale=1e4, trials=1
    )
    once = [item for item in answer.candidates if item.measured_step_seconds is not None and item.foretold]
    assert [item.batch_size for item in once] == [24]
    assert answer.batch_size == 32


def test_a_batch_that_finds_no_memory_is_out_of_the_race(caplog: pytest.LogCaptureFixture) -> None:
    def make(batch: int) -> outgrow.TrainingStep:
        made = make_mlp(batch)
        parameter = next(iter(made.model.parameters()))
        if batch == 32 and type(parameter) is torch.nn.Parameter:
            raise RuntimeError("can't allocate memory: you tried to allocate 12345 bytes")
        return made

    answer = outgrow.tune(
        make, budget="1GiB", objective="throughput", base_batch=16, max_batch=32, noise_scale=1e4, trials=1
    )
    assert answer.batch_size < 32
    assert "32 samples in 1 passes are out of the race: can't allocate memory" in caplog.text
    assert not next(item for item in answer.candidates if item.batch_size == 32).feasible


def test_what_is_larger_than_a_batch_that_did_not_fit_is_out_of_the_race_too() -> None:
    tried: list[int] = []

    def make(batch: int) -> outgrow.TrainingStep:
        made = make_mlp(batch)
        if type(next(iter(made.model.parameters()))) is torch.nn.Parameter:
            tried.append(batch)
            if batch >= 32:
                raise RuntimeError("can't allocate memory: you tried to allocate 12345 bytes")
        return made

    answer = outgrow.tune(
        make, budget="1GiB", objective="throughput", base_batch=16, max_batch=128, noise_scale=1e4, trials=2
    )
    failed = [batch for batch in tried if batch >= 32]
    assert failed
    assert failed == sorted(set(failed), reverse=True), "nothing as large is tried again"
    assert max(item.batch_size for item in answer.candidates) == 128
    assert answer.largest_batch < min(failed)
    assert all(item.feasible == (item.batch_size < min(failed)) for item in answer.candidates)


def test_the_base_rates_are_those_of_the_base_batch() -> None:
    def make(batch: int) -> outgrow.TrainingStep:
        made = make_mlp(batch)
        made.optimizer.param_groups[0]["lr"] = 0.001 * batch
        return made

    answer = outgrow.tune(
        make, budget="1GiB", objective="throughput", base_batch=8, max_batch=16, noise_scale=1e4, trials=1
    )
    assert answer.base_rates == (pytest.approx(0.008),)


def test_a_budget_without_room_for_the_noise_is_tuned_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> float:
        raise outgrow.BudgetTooSmall(1, 2, {})

    monkeypatch.setattr(real_runs, "run_step", refused)
    answer = outgrow.tune(make_mlp_whole, budget="1GiB", base_batch=8, max_batch=8, trials=1, trial_steps=1)
    assert answer.noise is None
    assert answer.noise_samples == INFINITE
    assert {candidate.efficiency for candidate in answer.candidates} == {1.0}


def test_a_run_is_foretold_from_itself_with_its_stalls_as_they_were() -> None:
    terms = Terms(SMALL_BUDGET, "vdnn-all")
    trial = run_trial(partial(make_mlp, 96), terms, 3, FixedWork())
    slower = replace(trial, runs=(Run(3.0, stall_seconds=1.0, fixed_seconds=1.0),))
    prediction = slower.plan.simulate()
    own = prediction.step_seconds - prediction.stall_seconds
    paced = slower.trace_of(3.0).seconds / slower.plan.problem.trace.seconds
    assert paced == pytest.approx(2.0 / own)


@pytest.mark.parametrize(("at_least", "counted"), [(2, 2), (4, 4)])
def test_long_steps_are_run_less_often(monkeypatch: pytest.MonkeyPatch, at_least: int, counted: int) -> None:
    monkeypatch.setattr(trial_module, "_ENOUGH_SECONDS", 0.0)  # as if these were
    monkeypatch.setattr(trial_module, "_LEAST_SECONDS", 0.0)
    made = make_mlp(8)
    steps: list[None] = []
    reported: list[None] = []

    def step(drawn: object) -> None:
        steps.append(None)
        made.step(drawn)

    terms = Terms(1 << 30, "auto")
    make = partial(made._replace, step=step)
    run_trial(make, terms, 6, FixedWork(), at_least=at_least, on_step=lambda: reported.append(None))
    assert len(steps) == 3 + counted
    assert len(reported) == 6


def test_every_size_that_fits_is_a_candidate(small_answer: outgrow.Tuning) -> None:
    sizes = [item.batch_size for item in small_answer.candidates]
    assert set(sizes_between(1, small_answer.largest_batch)) <= set(sizes)
    assert sizes == sorted(sizes)
    assert all(item.predicted_peak_bytes <= SMALL_BUDGET for item in small_answer.candidates if item.feasible)


def test_what_lies_on_both_sides_of_where_plans_begin_to_move_was_run() -> None:
    answer = outgrow.tune(
        make_mlp_whole,
        budget=5_000_000,
        objective="throughput",
        base_batch=48,
        max_batch=192,
        noise_scale=1e4,
        trials=1,
        trial_steps=1,
    )
    sizes = set(sizes_between(1, 192))
    regular = [item for item in answer.candidates if item.batch_size in sizes]
    kept = [item for item in regular if not item.offloaded_bytes + item.recomputed_bytes]
    moved = [item for item in regular if item.offloaded_bytes + item.recomputed_bytes]
    assert len(kept) > 2
    assert len(moved) > 2
    for item in (*kept[:2], kept[-1], moved[0]):
        assert item.measured_step_seconds is not None, item.batch_size


def test_the_rate_goes_with_the_batch(small_answer: outgrow.Tuning) -> None:
    factor = rate_factor(Rule.LINEAR, small_answer.batch_size, 16, 1e4)
    assert small_answer.rule is Rule.LINEAR
    assert "Goyal" in small_answer.rule.source
    assert small_answer.learning_rates == (pytest.approx(0.01 * factor),)
    assert small_answer.warmup_steps == warmup_steps(factor, small_answer.batch_size, 16, 999)


def test_its_plan_is_followed_from_the_first_step(small_answer: outgrow.Tuning) -> None:
    plain, managed = (make_mlp(small_answer.micro_batch, seed=3) for _ in range(2))
    for _ in range(4):
        plain.drawn()()
    with outgrow.Session(managed.model, managed.optimizer, budget=SMALL_BUDGET, plan=small_answer.plan) as session:
        assert session.plan is not None
        for _ in range(4):
            with session.step():
                managed.drawn()()
            assert session.summary().predicted_peak_bytes is not None, "the step followed a plan"
            assert session.summary().measured_peak_bytes <= SMALL_BUDGET
            assert session.summary().replans == 0
            assert 0 < session.peak_bytes <= SMALL_BUDGET
    assert digest([plain.model], [plain.optimizer]) == digest([managed.model], [managed.optimizer])


def test_a_plan_of_another_step_costs_nothing_but_time(small_answer: outgrow.Tuning) -> None:
    plain, managed = (make_mlp(small_answer.micro_batch + 3, seed=3) for _ in range(2))
    for _ in range(4):
        plain.drawn()()
    with outgrow.Session(
        managed.model, managed.optimizer, budget=2 * SMALL_BUDGET, plan=small_answer.plan
    ) as session:
        for _ in range(4):
            with session.step():
                managed.drawn()()
    assert digest([plain.model], [plain.optimizer]) == digest([managed.model], [managed.optimizer])


def test_a_plan_from_a_fake_trace_is_followed_while_the_step_is_recorded() -> None:
    plan = outgrow.plan(outgrow.trace(partial(make_mlp, 128)), budget=SMALL_BUDGET)
    plain, managed = (make_mlp(128, seed=3) for _ in range(2))
    for _ in range(4):
        plain.drawn()()
    with outgrow.Session(managed.model, managed.optimizer, budget=SMALL_BUDGET, plan=plan) as session:
        for _ in range(4):
            with session.step():
                managed.drawn()()
        assert session.plan is not None
        assert session.plan.problem.trace.measured
    assert digest([plain.model], [plain.optimizer]) == digest([managed.model], [managed.optimizer])


def test_a_plan_for_a_larger_budget_is_refused(small_answer: outgrow.Tuning) -> None:
    made = make_mlp(16)
    with pytest.raises(outgrow.SessionError, match="raise the budget"):
        outgrow.Session(made.model, made.optimizer, budget=SMALL_BUDGET - 1, plan=small_answer.plan)


def test_goodput_asks_the_gradients() -> None:
    answer = outgrow.tune(make_mlp_whole, budget=SMALL_BUDGET, base_batch=16, max_batch=64, trials=2, trial_steps=2)
    assert answer.noise is not None
    assert answer.noise_samples == answer.noise.samples
    assert 0 < answer.noise.samples < INFINITE
    base = next(item for item in answer.candidates if item.batch_size == 16)
    assert base.efficiency == 1
    efficiencies = [item.efficiency for item in answer.candidates if item.batch_size >= 16]
    assert efficiencies == sorted(set(efficiencies), reverse=True), "a sample is worth less, the more there are"
    assert all(item.efficiency == 1 for item in answer.candidates if item.batch_size < 16)


def test_a_step_may_be_divided_where_the_function_knows_how() -> None:
    budget = 1_500_000  # 1 MB of it for the state; 1024 samples do not fit in one pass, whatever the plan
    answer = outgrow.tune(
        partial(make_mlp, width=64, depth=20),
        budget=budget,
        objective="throughput",
        base_batch=1024,
        policy="lru",  # it plans at once, so near the least budget too
        noise_scale=INFINITE,
        trials=2,
        trial_steps=2,
    )
    divided = [item for item in answer.candidates if item.accumulation > 1]
    assert answer.largest_batch < 1024
    assert any(item.batch_size == 1024 and item.feasible for item in divided)
    assert all(item.micro_batch * item.accumulation == item.batch_size for item in divided)
    assert answer.chosen.measured_peak_bytes is not None
    assert answer.chosen.measured_peak_bytes <= budget


def test_the_answer_is_plain_data_and_a_picture(small_answer: outgrow.Tuning, tmp_path: Path) -> None:
    document = json.loads(json.dumps(small_answer.to_document()))
    assert document["batch_size"] == small_answer.batch_size
    assert len(document["candidates"]) == len(small_answer.candidates)
    assert f"{small_answer.batch_size}" in str(small_answer)
    small_answer.plot(tmp_path / "answer.png")
    assert (tmp_path / "answer.png").read_bytes().startswith(b"\x89PNG")
    small_answer.report(tmp_path / "answer.html")
    assert "The batch that is worth it" in (tmp_path / "answer.html").read_text()
    with pytest.raises(outgrow.TuningError, match="cannot be written"):
        small_answer.plot(tmp_path / "nowhere" / "answer.png")


def test_the_least_batch_is_what_the_network_takes() -> None:
    job = make_job(Options("resnet-18", image_size=32, data="synthetic"))  # its last batch norm sees one pixel
    assert Builder(job.sized_step).least_batch() == 2
    assert Builder(make_mlp).least_batch() == 1


# --- nonsense ---


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"base_batch": 0}, "base_batch is 0: it must be a whole number of 1 or more"),
        ({"base_batch": 1.5}, "base_batch is 1.5"),
        ({"max_batch": -1}, "max_batch is -1"),
        ({"trials": 0}, "trials is 0"),
        ({"noise_scale": float("nan")}, "noise_scale is nan"),
        ({"objective": "speed"}, "goodput, throughput"),
    ],
)
def test_nonsense_is_refused_at_once(options: dict[str, object], says: str) -> None:
    with pytest.raises(outgrow.TuningError, match=says):
        outgrow.tune(make_mlp_whole, budget="1GB", **options)


def test_a_largest_batch_below_what_the_network_takes_is_refused() -> None:
    job = make_job(Options("resnet-18", image_size=32, data="synthetic"))
    with pytest.raises(outgrow.TuningError, match="max_batch is 1, and the network takes 2 samples at least"):
        outgrow.tune(job.sized_step, budget="1GiB", max_batch=1)


def test_a_budget_below_one_sample_names_the_least_one() -> None:
    with pytest.raises(outgrow.BudgetTooSmall, match="the least budget is") as caught:
        outgrow.tune(make_mlp_whole, budget=1_000_000)
    least = caught.value.least_bytes
    answer = outgrow.tune(
        make_mlp_whole,
        budget=int(least * 1.05),
        objective="throughput",
        noise_scale=INFINITE,
        trials=1,
        trial_steps=1,
    )
    assert answer.batch_size >= 1


def no_optimizer(batch: int) -> outgrow.TrainingStep:
    return make_mlp(batch)._replace(optimizer=None)


def frozen(batch: int) -> outgrow.TrainingStep:
    made = make_mlp(batch)
    parameter = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    return made._replace(optimizer=torch.optim.SGD([parameter], lr=0.1))


def elsewhere(batch: int) -> outgrow.TrainingStep:
    model = torch.nn.Linear(4, 4, device="meta")
    return outgrow.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: None)


def broken(batch: int) -> outgrow.TrainingStep:
    raise KeyError("data")


def nothing(batch: int) -> None:
    return None


@pytest.mark.parametrize(
    ("make_step", "says"),
    [
        (no_optimizer, "gives no optimizer"),
        (frozen, "no parameter that is trained"),
        (elsewhere, "the model is on meta: batches are tuned on the CPU"),
        (broken, r"make_step\(1\) failed: KeyError"),
        (nothing, "must give an outgrow.TrainingStep"),
        (3, "give a function of the batch size"),
    ],
)
def test_what_cannot_be_trained_is_refused(make_step: object, says: str) -> None:
    with pytest.raises(outgrow.TuningError, match=says):
        outgrow.tune(make_step, budget="1GB")


# --- the command ---


def test_the_command_answers_in_json_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        *("tune", "gpt-2x64", "--image-size", "32", "--budget", "6MB"),
        *("--batch", "8", "--objective", "throughput", "--noise-scale", "1000", "--trials", "1", "--json"),
        *("--max-batch", "12"),
        *("--plot", str(tmp_path / "tune.png"), "--report", str(tmp_path / "tune.html")),
        *("--save-plan", str(tmp_path / "plan.json"), "--spill-dir", str(tmp_path)),
    ]
    code = run(command)
    said = capsys.readouterr()
    assert code == 0, said.err
    answer = json.loads(said.out.splitlines()[-1])
    assert answer["chosen"]["measured_peak_bytes"] <= 6_000_000
    assert answer["network"] == "gpt-2x64"
    assert {path.name for path in tmp_path.iterdir()} == {"tune.png", "tune.html", "plan.json"}
    assert "noise scale" in said.err
    batch, passes = answer["micro_batch"], answer["accumulation"]
    followed = ["train", "gpt-2x64", "--image-size", "32", "--budget", "6MB", "--steps", "2", "--batch", str(batch)]
    code = run([*followed, "--accumulate", str(passes), "--plan", str(tmp_path / "plan.json"), "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    trained = json.loads(said.out.splitlines()[-1])
    assert trained["accumulation"] == passes
    assert trained["predicted_peak_bytes"] is not None
    assert trained["highest_peak_bytes"] <= 6_000_000


def test_the_command_says_what_budget_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "gpt-2x64", "--image-size", "32", "--budget", "100KB"]) == 2
    assert "the least budget is" in capsys.readouterr().err
    assert run(["tune", "gpt-2x64"]) == 2
    assert "--budget" in capsys.readouterr().err
