"""Ragged batches: steps that save what a known one saves, in other sizes, go by the plan of a larger one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outgrow
from outgrow.planning.agenda import ops_to_see
from outgrow.planning.floor import least_for_cache
from outgrow.planning.plan import Plan, make_plan
from outgrow.planning.policies.auto import Auto
from outgrow.planning.policies.cache import Lru
from outgrow.planning.problem import Problem
from outgrow.runtime.care import Precedent
from outgrow.runtime.executor import Executor
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.need import Need
from outgrow.runtime.outcome import StepOutcome
from outgrow.runtime.recompute import Recomputer
from outgrow.session.kind import StepKind
from outgrow.session.kinds import Kinds
from outgrow.session.recorded import Recorded
from outgrow.tracing.ir import Fit, Trace
from outgrow.tracing.liveness import plain_profile
from sized import WORDS, Reader, images, on_batches, sequences, traced
from steps import (
    Make,
    ParkAll,
    RandomDecisions,
    RecomputeAll,
    Training,
    bounds_of,
    budget_for,
    train_in_session,
    train_plain,
)

pytestmark = pytest.mark.usefixtures("one_thread")

HARDWARE = outgrow.Hardware("any", 1 << 40, 1e11, 1e10, 1e9, 1e9)


def ragged(least: int, most: int, steps: int, seed: int = 0) -> list[int]:
    """Sizes of which none comes again, the largest among the first."""
    sizes = Random(seed).sample(range(least, most + 1), steps)
    sizes.remove(max(sizes))
    return [sizes[0], most, *sizes[1:]]


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[StepOutcome]:
    """What was measured of each step of the sessions."""
    found: list[StepOutcome] = []
    end = Executor.end

    def noted(self: Executor) -> StepOutcome:
        found.append(end(self))
        return found[-1]

    monkeypatch.setattr(Executor, "end", noted)
    return found


def assert_equal_and_inside(make: Make, steps: int, budget: int, policy: Any = "auto") -> None:
    plain = train_plain(make, steps)
    ours, summaries = train_in_session(make, steps, budget=budget, policy=policy)
    assert ours == plain
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)


# --- whole steps ---


@pytest.mark.parametrize(
    ("make", "largest", "policy"),
    [
        (sequences(ragged(20, 64, 20)), sequences([64]), "auto"),
        (sequences(ragged(20, 64, 20)), sequences([64]), RecomputeAll()),
        (images(ragged(12, 40, 20)), images([40]), "auto"),
        (images(ragged(12, 40, 20)), images([40]), "vdnn-all"),
        (images(ragged(12, 40, 20)), images([40]), ParkAll()),
    ],
    ids=["sequences", "sequences-made-anew", "images", "images-offloaded", "images-parked"],
)
def test_ragged_batches_follow_the_plan_of_a_larger_one(
    make: Make, largest: Make, policy: Any, outcomes: list[StepOutcome]
) -> None:
    budget = budget_for(largest, 0.7)
    outcomes.clear()
    assert_equal_and_inside(make, 16, budget, policy)
    late = outcomes[-8:]
    assert sum(outcome.followed and outcome.fit is Fit.SMALLER for outcome in late) >= 5


@pytest.mark.parametrize("seed", range(3))
def test_ragged_batches_under_random_plans(seed: int, outcomes: list[StepOutcome]) -> None:
    """Values leave, come back, are made anew and parked, in sizes that no plan knows."""
    make = sequences(ragged(20, 64, 16, seed)) if seed % 2 else images(ragged(12, 40, 16, seed))
    peak, least = bounds_of(sequences([64]) if seed % 2 else images([40]))
    outcomes.clear()
    budget = int(max(1.1 * least, peak * Random(seed).choice([0.5, 0.7, 0.9])))
    assert_equal_and_inside(make, 16, budget, RandomDecisions(seed, parks=True))
    assert any(outcome.followed and outcome.fit is Fit.SMALLER for outcome in outcomes)


def test_two_lengths_that_differ_on_their_own_follow_plans_too(outcomes: list[StepOutcome]) -> None:
    """There may be no step as large in both: those go by the largest, and the cache does the rest."""
    pairs = list(zip(ragged(8, 40, 20, 1), Random(2).sample(range(8, 41), 20), strict=True))

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, 32)
            self.inner = nn.Transformer(32, 2, 1, 1, 64, 0.1, batch_first=True)
            self.out = nn.Linear(32, WORDS)

        def forward(self, both: torch.Tensor) -> torch.Tensor:
            k = int(both[0, -1])
            source, target = both[:, : pairs[k][0]], both[:, : pairs[k][1]]
            said = self.out(self.inner(self.words(source % WORDS), self.words(target % WORDS)))
            return F.cross_entropy(said.flatten(0, 1), (target % WORDS).flatten())

    def batch(k: int, generator: torch.Generator) -> torch.Tensor:
        both = torch.randint(0, WORDS, (4, 41), generator=generator)
        both[:, -1] = k
        return both

    make = on_batches(Translator, batch)
    peak, least = bounds_of(make)
    outcomes.clear()
    assert_equal_and_inside(make, 20, int(max(1.3 * least, 0.6 * peak)))
    assert sum(outcome.followed for outcome in outcomes[-12:]) >= 5
    assert {outcome.fit for outcome in outcomes if outcome.followed} >= {Fit.SMALLER, Fit.OTHER}


def test_batches_that_grow_are_planned_for_as_they_come(outcomes: list[StepOutcome]) -> None:
    lengths = list(range(12, 64, 3))
    budget = budget_for(sequences([64]), 0.4)
    outcomes.clear()
    assert_equal_and_inside(sequences(lengths), len(lengths), budget)
    assert sum(outcome.followed for outcome in outcomes) >= 4  # more than half of those that do not fit as they are


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ops of each step ran past Python."""
    found: list[int] = []
    end = FastPath.end

    def noted(self: FastPath, *, followed: bool) -> None:
        found.append(self.passed)
        end(self, followed=followed)

    monkeypatch.setattr(FastPath, "end", noted)
    return found


def test_ops_of_smaller_steps_run_past_python(passed: list[int]) -> None:
    budget = budget_for(sequences([64]), 0.8)
    passed.clear()
    assert_equal_and_inside(sequences(ragged(40, 64, 22)), 22, budget)
    assert sum(count > 150 for count in passed[-8:]) >= 6


@dataclass
class Way:
    """How a step went past Python.

    It began, and ended, by parking on demand or not.
    """

    fast: FastPath
    recorded: bool
    on_demand: bool
    ended_on_demand: bool = False
    passed: int = 0


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[Way]:
    """Of each step of the sessions."""
    found: list[Way] = []
    begin, end, end_fast = Executor.begin, Executor.end, FastPath.end

    def noted_begin(self: Executor, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        found.append(Way(self._fast, self._current.recording is not None, self._demand.on))

    def noted_end(self: Executor) -> StepOutcome:
        found[-1].ended_on_demand = self._demand.on
        return end(self)

    def noted_pass(self: FastPath, *, followed: bool) -> None:
        found[-1].passed = self.passed
        end_fast(self, followed=followed)

    monkeypatch.setattr(Executor, "begin", noted_begin)
    monkeypatch.setattr(Executor, "end", noted_end)
    monkeypatch.setattr(FastPath, "end", noted_pass)
    return found


@pytest.mark.parametrize("make", [sequences, images])
def test_of_batches_of_all_sizes_most_run_past_python_from_their_begin(
    make: Callable[[Sequence[int]], Make], ways: list[Way]
) -> None:
    dice = Random(1)
    least, most = (24, 64) if make is sequences else (16, 40)
    sizes = [dice.randint(least, most) for _ in range(90)]
    budget = budget_for(make([most]), 0.7)
    ways.clear()
    assert_equal_and_inside(make(sizes), len(sizes), budget)
    late = [way for way in ways[-40:] if not way.recorded]
    enough = 0.85 * max(way.passed for way in late)
    assert sum(way.passed > enough for way in late) >= 28
    assert sum(way.on_demand for way in late) <= 10
    # In the first step the optimizer runs other ops.
    assert len(late[0].fast._loose) <= 2, "plans for the same ops share what was learned of them"


@pytest.mark.parametrize("part", [1, 2], ids=["as large", "half as large"])
def test_a_step_that_is_larger_than_what_its_plan_held_parks_on_demand_from_there_on(
    part: int, ways: list[Way], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, steps = Executor.begin, 8

    def told(self: Executor, plan: Plan, *args: Any, **kwargs: Any) -> None:
        if len(ways) == steps - 1:
            trace = plan.problem.trace
            sizes = zip(trace.saved, trace.saves_whole_state, strict=True)
            kwargs |= {"fits": False, "limits": [saved.nbytes // (1 if whole else part) for saved, whole in sizes]}
        begin(self, plan, *args, **kwargs)

    budget = budget_for(sequences([64]), 0.7)
    ways.clear()
    monkeypatch.setattr(Executor, "begin", told)
    assert_equal_and_inside(sequences([64]), steps, budget)
    assert not ways[-1].on_demand
    assert ways[-1].ended_on_demand == (part > 1)
    assert ways[-1].passed > 100 if part == 1 else ways[-1].passed < 10


def test_a_smaller_step_that_teaches_has_larger_ones_unlearn_nothing(
    passed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [24, *(size for size in ragged(25, 64, 28) if size not in (48, 61, 62, 63)), 63, 62, 48, 61]
    budget = budget_for(sequences([64]), 0.8)
    turn_to = FastPath.turn_to

    def turned(self: FastPath, plan: Plan, fit: Fit, *, may_pass: bool) -> None:
        turn_to(self, plan, fit, may_pass=may_pass and len(passed) != len(sizes) - 2)

    passed.clear()
    monkeypatch.setattr(FastPath, "turn_to", turned)
    assert_equal_and_inside(sequences(sizes), len(sizes), budget)
    before, smaller, after = passed[-3:]
    assert smaller < 10
    assert after >= 0.87 * before > 100


def test_what_one_plan_makes_anew_is_seen_though_its_ops_passed_under_another(ways: list[Way]) -> None:
    """Half of the kinds make nothing anew, and all share what was learned."""
    turns = count()

    class Sometimes:
        name = "sometimes"

        def plan(self, problem: Problem) -> Plan:
            return (RecomputeAll() if next(turns) % 2 else Lru()).plan(problem)

    dice = Random(5)
    sizes = [dice.randint(24, 64) for _ in range(60)]
    _, summaries = train_in_session(sequences(sizes), 60, budget=budget_for(sequences([64]), 0.8), policy=Sometimes())
    assert len(ways[-1].fast._loose) <= 2
    made_anew = [summary.recomputed_bytes for summary in summaries[-30:] if summary.recomputed_bytes]
    assert len(made_anew) >= 5
    assert min(made_anew) > 100_000, "or some of it was not seen"


@pytest.mark.parametrize(("make", "seed"), [(sequences, 1), (images, 2)])
def test_steps_of_some_sizes_in_no_order_come_to_run_past_python(
    make: Callable[[Sequence[int]], Make], seed: int, passed: list[int]
) -> None:
    """Though each is thought to be of another size when it begins: each plan learns whether it fits, and its ops."""
    dice = Random(seed)
    sizes = [64, *(dice.choice((46, 50, 55, 59, 64)) for _ in range(69))]
    budget = budget_for(make([64]), 0.7)
    passed.clear()
    assert_equal_and_inside(make(sizes), len(sizes), budget)
    assert sum(count > 0.9 * max(passed) for count in passed[-30:]) >= 22


def test_a_size_that_comes_often_gets_a_plan_of_its_own(outcomes: list[StepOutcome]) -> None:
    sizes = Random(3).sample(range(16, 56), 38)
    for place in range(8, 38, 2):
        sizes[place] = 64
    budget = budget_for(sequences([64]), 0.7)
    outcomes.clear()
    assert_equal_and_inside(sequences(sizes), 38, budget)
    often = outcomes[28:38:2]
    assert sum(outcome.followed and outcome.fit is Fit.EXACT for outcome in often) >= 3


@pytest.mark.parametrize(("make", "least", "most"), [(sequences, 20, 64), (images, 12, 40)])
def test_sizes_that_nobody_recorded_are_planned_for(
    make: Callable[[Sequence[int]], Make], least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that were recorded show how all else grows, in steps that are larger than both, too."""
    recorded, foreseen = [], []
    learn, foresee = Recorded.learn, Recorded.foresee

    def learnt(self: Recorded, outcome: StepOutcome, trace: Trace, *rest: Any, **options: Any) -> StepKind:
        recorded.append(trace)
        return learn(self, outcome, trace, *rest, **options)

    def foresaw(self: Recorded, *asked: Any) -> StepKind | None:
        kind = foresee(self, *asked)
        foreseen.append(kind)
        return kind

    monkeypatch.setattr(Recorded, "learn", learnt)
    monkeypatch.setattr(Recorded, "foresee", foresaw)
    middle = (least + most) // 2
    dice = Random(6)
    sizes = [middle, middle + 2, middle - 4, *(dice.randint(least, most) for _ in range(40)), most]
    budget = budget_for(make([most]), 0.7)
    recorded.clear()
    assert_equal_and_inside(make(sizes), len(sizes), budget)
    assert len(recorded) <= 6
    kinds = [kind for kind in foreseen if kind is not None]
    assert max(kind.saved_bytes for kind in kinds) > max(trace.saved_bytes for trace in recorded)
    assert len(kinds) >= 2


def test_sizes_that_go_by_the_plan_of_the_very_first_step_get_one_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though its optimizer made its state in that one, as it did in no other."""
    foreseen = []
    foresee = Recorded.foresee

    def foresaw(self: Recorded, followed: StepKind, *asked: Any) -> StepKind | None:
        foreseen.append((followed.saved_bytes, foresee(self, followed, *asked)))
        return foreseen[-1][1]

    monkeypatch.setattr(Recorded, "foresee", foresaw)
    monkeypatch.setattr(Kinds, "fared", lambda kinds, kind, packs, lost: lost > 0 and not kind.is_good_for(packs))
    sizes = [48, 64, 62, *ragged(20, 32, 12)]
    assert_equal_and_inside(sequences(sizes), len(sizes), budget_for(sequences([64]), 0.7), "vdnn-all")
    first = traced(sequences([48])).saved_bytes
    assert any(kind is not None for followed, kind in foreseen if followed == first)


def test_a_size_that_no_plan_holds_gets_one_though_it_comes_late_and_seldom(outcomes: list[StepOutcome]) -> None:
    """And though many are known by then."""
    dice, usual = Random(4), (30, 34, 38, 42, 46, 50)
    sizes = [64 if k > 50 and dice.random() < 1 / 10 else dice.choice(usual) for k in range(140)]
    budget = budget_for(sequences([64]), 0.7)
    outcomes.clear()
    assert_equal_and_inside(sequences(sizes), len(sizes), budget)
    late = [outcome.followed for outcome, size in zip(outcomes, sizes, strict=True) if size == 64]
    assert len(late) == 8
    assert all(late[5:])


def test_a_batch_larger_than_the_budget_holds_is_refused_with_what_it_takes() -> None:
    lengths = [24, 20, 22, 18, 23, 19, 128]
    budget = int(0.8 * bounds_of(sequences([128]))[1])
    assert budget > bounds_of(sequences([24]))[0]
    training = sequences(lengths)()
    with outgrow.Session(training.models, training.optimizers, budget=budget, least_moved_bytes=1) as session:
        for k in range(6):
            with session.step():
                training.run(k)
        with pytest.raises(outgrow.BudgetTooSmall), session.step():
            training.run(6)
        assert session.live_bytes <= budget


# --- which sizes go by which plan ---


@pytest.fixture(scope="module")
def traces() -> dict[int, Trace]:
    return {length: traced(sequences([length])) for length in (16, 24, 32)}


def test_a_trace_tells_how_the_sizes_of_a_step_compare(traces: dict[int, Trace]) -> None:
    large, small = traces[32], traces[16]
    assert large.fit_of(large.packs) is Fit.EXACT
    assert large.fit_of(small.packs) is Fit.SMALLER
    assert small.fit_of(large.packs) is Fit.OTHER
    assert large.fit_of(small.packs[:3]) is Fit.SMALLER
    assert large.fit_of([*large.packs, 8]) is None, "more is saved"
    weight = large.saves_whole_state.index(True)
    other = [*large.packs[:weight], large.packs[weight] // 2, *large.packs[weight + 1 :]]
    assert large.fit_of(other) is None, "a parameter is as large with any batch"


def kind_of(trace: Trace) -> StepKind:
    plan = make_plan("cache", Problem(trace, HARDWARE, 1), ())
    return StepKind(trace.packs, plan, True, 0, 0.0)


def kinds_of(traces: Sequence[Trace], *, are_ragged: bool) -> Kinds:
    kinds = Kinds((), lambda _: None)
    for trace in traces:
        kind = kind_of(trace)
        kind.is_resized = are_ragged
        kinds.learnt(kind)
        kinds.count()
        kinds.seen(kind, kind, trace.packs)
    return kinds


def test_the_smallest_plan_that_holds_a_step_is_taken(traces: dict[int, Trace]) -> None:
    kinds = kinds_of([traces[24], traces[32], traces[24]], are_ragged=True)
    found = kinds.find(traces[16].packs[:1])
    assert found is not None
    assert found.packs == traces[24].packs
    between = traced(sequences([28]))
    found = kinds.find(between.packs[:1])
    assert found is not None
    assert found.packs == traces[32].packs


def test_a_larger_step_goes_by_a_smaller_plan_only_where_batches_are_ragged(traces: dict[int, Trace]) -> None:
    small = [traces[16], traced(sequences([17])), traced(sequences([18]))]
    found = kinds_of(small, are_ragged=True).find(traces[32].packs[:1])
    assert found is not None
    assert found.packs == small[-1].packs, "the largest"
    assert kinds_of(small, are_ragged=False).find(traces[32].packs[:1]) is None


def test_a_step_that_is_little_larger_than_a_plan_that_held_it_goes_by_that(traces: dict[int, Trace]) -> None:
    kinds = kinds_of([traces[32]], are_ragged=False)
    larger, much_larger = traced(sequences([34])), traced(sequences([40]))
    assert kinds.find(larger.packs[:1]) is None
    (known,) = kinds._all
    known.largest_held = much_larger.packs
    assert kinds.find(larger.packs[:1]) is known
    assert kinds.find(larger.packs[:1], is_watched=False) is None
    assert kinds.find(much_larger.packs[:1]) is None, "another plan would move more"
    assert kinds.find(traced(sequences([41])).packs[:1]) is None


def test_of_a_plan_for_too_much_and_one_for_too_little_the_nearer_is_taken(traces: dict[int, Trace]) -> None:
    kinds = kinds_of([traces[32], traced(sequences([40]))], are_ragged=False)
    larger, smaller = kinds._all
    step = traced(sequences([34])).packs[:1]
    assert kinds.find(step) is larger, "nobody knows whether the other holds it"
    smaller.largest_held = step_of_34 = traced(sequences([34])).packs
    assert kinds.find(step) is larger, "what is missing is waited for"
    kinds = kinds_of([traces[32], traced(sequences([60]))], are_ragged=False)
    _, smaller = kinds._all
    smaller.largest_held = step_of_34
    assert kinds.find(step) is smaller, "the other moves twice as much"


def foreseen(trace: Trace) -> StepKind:
    kind = kind_of(trace)
    kind.is_foreseen = kind.is_resized = True
    return kind


def test_a_kind_that_nobody_recorded_is_forgotten_once_two_of_its_steps_were_others(traces: dict[int, Trace]) -> None:
    kinds, kind, packs = kinds_of([traces[24], traces[32]], are_ragged=True), foreseen(traces[16]), traces[16].packs
    kinds.foresaw(kind)
    kinds.expected = kind
    kinds.departed(packs[:1])  # it saved something else
    for _ in range(2):
        assert kinds.of(packs) is kind
        kinds.expected = kind
        kinds.departed(packs)
        kinds.seen(None, kind, packs)
    assert kinds.of(packs) is None
    assert kinds.expected is not kind


def test_where_there_are_too_many_kinds_those_that_were_recorded_stay(traces: dict[int, Trace]) -> None:
    """Others are made from them."""
    kinds = kinds_of([traces[24], traces[32]], are_ragged=True)
    for _ in range(40):
        kinds.foresaw(foreseen(traces[16]))
    assert kinds.recorded_like(foreseen(traces[16]), traces[16].packs) == [
        kinds.of(traces[24].packs),
        kinds.of(traces[32].packs),
    ]
    for _ in range(40):
        kinds.learnt(kind_of(traces[16]))
    last = foreseen(traces[16])
    kinds.foresaw(last)
    assert kinds._all[0] is last


def test_a_step_is_like_those_that_ran_as_many_ops(traces: dict[int, Trace]) -> None:
    """The first step's plan may serve others, but its optimizer made its state."""

    longer = replace(traces[32], ops=(*traces[32].ops, *traces[32].ops[-2:]))
    small, middle = traced(sequences([12])), traces[24]
    kinds = kinds_of([longer, small, middle], are_ragged=True)
    first = kinds.of(traces[32].packs)
    assert first is not None
    ops = len(middle.ops)
    assert kinds.recorded_like(first, traces[16].packs, ops) == [kinds.of(small.packs), kinds.of(middle.packs)]
    assert kinds.recorded_like(first, traces[16].packs, ops + 1) == [first], "as nobody ran so many"
    assert kinds.recorded_like(first, traces[16].packs) == [first], "as nobody counted"


@pytest.mark.parametrize("more", [1.05, 1.12, 2.0])
def test_where_the_cache_alone_could_hold_a_step_it_is_known_to_fit(more: float, traces: dict[int, Trace]) -> None:
    trace = traces[32]
    least = least_for_cache(Problem(trace, HARDWARE, 1))
    kind = StepKind(trace.packs, Auto().plan(Problem(trace, HARDWARE, int(more * least))), True, 0, 0.0)
    assert kind.plan.evicts
    if more == 1.05:  # copies that are late need room, too
        assert kind.held is None
        return
    assert kind.holds(trace.packs)
    assert kind.holds(traced(sequences([34])).packs) == (more == 2.0)
    larger = traced(sequences([64])).packs
    assert not kind.holds(larger)
    kind.largest_held = (larger[0], *trace.packs[1:])
    assert kind.holds((larger[0], *trace.packs[1:])), "though it saves less in all than the cache could hold"
    assert kind.holds(trace.packs)
    assert least <= plain_profile(trace).peak_bytes


def test_what_is_there_beyond_what_a_plan_reckons_with_takes_the_caches_room(traces: dict[int, Trace]) -> None:
    trace = traces[32]
    budget = 2 * least_for_cache(Problem(trace, HARDWARE, 1))
    kind = StepKind(trace.packs, Auto().plan(Problem(trace, HARDWARE, budget)), True, 0, 0.0)
    kinds = kinds_of([], are_ragged=False)
    kinds.learnt(kind)
    kinds.begin((), trace.bytes_before)
    assert kind.holds(trace.packs)
    kinds.begin((), trace.bytes_before + budget // 2)
    assert kind.held is None


def test_after_a_step_was_refused_nothing_is_known_to_fit(traces: dict[int, Trace]) -> None:
    trace = traces[32]
    budget = 2 * least_for_cache(Problem(trace, HARDWARE, 1))
    before, after = (
        StepKind(
            trace.packs, Auto().plan(Problem(trace, HARDWARE, budget)), True, 0, 0.0, fits=True, largest_held=(1,)
        )
        for _ in range(2)
    )
    kinds = kinds_of([], are_ragged=False)
    kinds.learnt(before)
    assert before.held is not None
    kinds.refused(is_strange=False)
    after.fits, after.largest_held = False, ()
    kinds.learnt(after)
    assert before.held is None
    assert after.held is None


@pytest.mark.parametrize("size", [4, 64])
def test_who_makes_anything_before_it_saves_something_begins_by_parking_on_demand(size: int) -> None:
    class Taught(Reader):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hint = torch.ones(size, size)  # nobody saves it
            loss: torch.Tensor = super().forward(x)
            return loss + float(hint.mean())

    make = on_batches(Taught, lambda k, generator: torch.randint(0, WORDS, (4, 32), generator=generator))
    trace = traced(make)
    kind = StepKind(trace.packs, Auto().plan(Problem(trace, HARDWARE, 1 << 40)), True, 0, 0.0, fits=True)
    assert kind.held is not None
    assert (kind.held_from_begin is None) == (size == 64)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_state_that_comes_after_the_plans_were_made_fits_all_the_same(optimizers: int) -> None:
    """An optimizer steps in each fourth step only, or a second one from the seventh on; little room is left."""
    lengths = ragged(20, 64, 20, 1)

    def make() -> Training:
        model = Reader()
        parameters = list(model.parameters())
        own = [
            torch.optim.Adam(part) for part in ([parameters[:5], parameters[5:]] if optimizers == 2 else [parameters])
        ]

        def run(k: int) -> torch.Tensor:
            words = torch.randint(0, WORDS, (4, lengths[k]), generator=torch.Generator().manual_seed(k))
            loss: torch.Tensor = model(words)
            loss.backward()  # type: ignore[no-untyped-call]
            if optimizers == 1 and k % 4 == 3:
                own[0].step()
            if optimizers == 2:
                own[0].step()
                if k >= 6:
                    own[1].step()
            if optimizers == 2 or k % 4 == 3:
                model.zero_grad()
            return loss.detach()

        return Training([model], own, run)

    assert_equal_and_inside(make, 20, 796235 if optimizers == 1 else 707764)


def test_python_sees_what_a_plan_makes_something_of(traces: dict[int, Trace]) -> None:
    problem = Problem(traces[32], HARDWARE, 1 << 40)
    assert not ops_to_see(Lru().plan(problem))
    recomputes = RecomputeAll().plan(problem)
    recipes = [problem.recipes.find(item.value) for item in recomputes.recomputes]
    assert ops_to_see(recomputes) == {op for recipe in recipes if recipe is not None for op in recipe.ops}
    parks = ParkAll().plan(problem)
    births = {problem.trace.values[item.value].birth for item in parks.parks} - {-1}
    assert births
    assert births <= ops_to_see(parks)


def recorded_of_small_ones(traces: dict[int, Trace], *, lost: float, fit: Fit = Fit.SMALLER) -> list[bool]:
    """Of 40 steps much smaller than all plans, of which each loses so much of a recording: which are recorded."""
    kinds = kinds_of([traces[32], traced(sequences([31])), traced(sequences([30]))], are_ragged=True)
    assert kinds.are_ragged
    recorded = []
    for length in range(40):
        kinds.turn_to(kinds.find(traces[16].packs[:1]), Fit.SMALLER)
        packs = tuple(nbytes - length % 4 for nbytes in traces[16].packs)
        kinds.count()
        packs = (*packs[:-1], length)
        kind = kinds.expected
        assert kind is not None
        wants_plan = kinds.resembled(packs, fit)
        kinds.seen(kind, kind, packs)
        if wants_plan or (fit is Fit.SMALLER and kinds.fared(kind, packs, lost)):
            kinds.record_for_want_of_plan(packs)
        recorded.append(kinds.should_record)
    return recorded


def test_where_no_plan_is_good_steps_are_recorded_but_ever_more_seldom(traces: dict[int, Trace]) -> None:
    for recorded in (
        recorded_of_small_ones(traces, lost=1),
        recorded_of_small_ones(traces, lost=0, fit=Fit.OTHER),  # they go through Python
    ):
        assert 3 <= sum(recorded) <= 6
        assert sum(recorded[20:]) <= 1


def test_no_step_is_recorded_before_steps_have_lost_what_that_takes(traces: dict[int, Trace]) -> None:
    assert not any(recorded_of_small_ones(traces, lost=0))
    recorded = recorded_of_small_ones(traces, lost=0.125)
    assert [step for step, is_recorded in enumerate(recorded) if is_recorded] == [7, 23]


def test_a_session_tells_what_smaller_steps_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    fared = Kinds.fared

    def noted(self: Kinds, kind: StepKind, packs: tuple[int, ...], lost: float) -> bool:
        assert sum(packs) < kind.saved_bytes
        told.append(lost)
        return fared(self, kind, packs, lost)

    sizes = [64, *ragged(20, 60, 11)]
    budget = budget_for(sequences([64]), 0.7)
    monkeypatch.setattr(Kinds, "fared", noted)
    train_in_session(sequences(sizes), len(sizes), budget=budget, policy="vdnn-all")
    assert any(0 < lost < 1 for lost in told)


def test_where_there_are_many_sizes_one_more_that_goes_well_is_not_recorded(traces: dict[int, Trace]) -> None:
    """However often it comes; where there are two, it is."""
    recorded = []
    for known in (2, 5):
        kinds = kinds_of([traced(sequences([32 - k])) for k in range(known)], are_ragged=True)
        for kind in list(kinds._all):
            kind.met = 2  # no strangers any more
        between = traced(sequences([29 + known // 5]))
        records = []
        for _ in range(8):
            kinds.turn_to(kinds.find(traces[24].packs[:1]), Fit.SMALLER)
            kinds.count()
            wants_plan = kinds.resembled(between.packs, Fit.SMALLER)
            kind = kinds.expected
            assert kind is not None
            kinds.seen(kind, kind, between.packs)
            if wants_plan or kinds.fared(kind, between.packs, lost=1):
                kinds.record_for_want_of_plan(between.packs)
            records.append(kinds.should_record)
        recorded.append(any(records))
    assert recorded == [True, False]


# --- what is known of ops ---


def test_what_an_op_takes_on_a_larger_batch_bounds_what_it_takes_on_a_smaller_one(traces: dict[int, Trace]) -> None:
    trace = traces[32]
    number = next(number for number, op in enumerate(trace.ops) if op.name == "aten.gelu.default")
    op, precedent = trace.ops[number], Precedent(trace)
    given = sum(trace.values[index].nbytes for index in op.inputs)
    made = sum(trace.values[index].nbytes for index in op.outputs)
    guess = Need(certain_bytes=100, likely_bytes=1 << 20, measured=False)
    assert precedent.bound(guess, number, op.name, given).likely_bytes == made + op.workspace_bytes
    larger = replace(guess, certain_bytes=made + 100)
    assert precedent.bound(larger, number, op.name, given).likely_bytes == made + 100 + op.workspace_bytes
    assert precedent.bound(guess, number, "aten.relu.default", given) == guess, "another op"
    assert precedent.bound(guess, number, op.name, given + 1) == guess, "it is given more"
    assert precedent.bound(guess, len(trace.ops), op.name, 0) == guess, "the larger step is over by then"


def test_a_recipe_that_was_proved_on_a_small_batch_is_proved_anew_on_a_larger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: dict[tuple[int, int], list[int]] = {}  # by kind of step and value
    verify = Recomputer._verify

    def noted(self: Recomputer, items: Any) -> bool:
        for item in items:
            sizes.setdefault((id(self._verdicts), item.first_save), []).append(item.entry.nbytes)
        return verify(self, items)

    lengths = [64, 30, 31, 29, 28, 30, 27, 50, 33, 49, 35, 26]
    budget = budget_for(sequences([64]), 0.7)
    monkeypatch.setattr(Recomputer, "_verify", noted)
    assert_equal_and_inside(sequences(lengths), len(lengths), budget, RecomputeAll())
    assert all(proved == sorted(set(proved)) for proved in sizes.values()), "none that is no larger"
    assert sum(len(proved) > 1 for proved in sizes.values()) > 8


@pytest.mark.parametrize("share", [0.95, 1.2])
@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_what_nobody_saves_may_be_larger_than_ever_before(policy: str, share: float) -> None:
    """A teacher's batch has nothing to do with the student's, of which alone saved tensors tell."""
    few, many, first_large = 96, 1600, 24

    class Lesson(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = (
                nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
                for _ in range(2)
            )
            self.teacher.requires_grad_(False)

        def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            given, shown = both
            loss = self.student(given).square().mean()
            with torch.no_grad():
                target = self.teacher(shown).mean(0)
            return loss + (self.student[4].bias - target).square().mean()

    def rows(k: int) -> tuple[int, int]:
        draw = Random(k)
        given = 1024 if k < 4 else draw.randint(900, 1023)
        return given, many if k >= first_large and k % 3 == 0 else draw.randint(few - 32, few)

    def batch(k: int, generator: torch.Generator) -> Any:
        return tuple(torch.randn(size, 64, generator=generator) for size in rows(k))

    make = on_batches(Lesson, batch)
    assert_equal_and_inside(make, first_large + 7, budget_for(make, share, least_moved_bytes=4096), policy)
