"""Ops that need no care run past the dispatch mode: which ones do, and that nobody can tell from the results."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import outgrow
from conftest import RunChild
from outgrow.runtime import fastpath
from outgrow.runtime.calls import Calls
from outgrow.runtime.executor import Executor
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.parked import Parked, ParkedStorages
from outgrow.runtime.runner import Runner
from outgrow.runtime.tiers.arena import find_arena
from outgrow.runtime.tiers.ram import Ram
from outgrow.runtime.watch import Watch
from outgrow.tracing.ops import DETACH, OpFacts
from steps import (
    ParkAll,
    RecomputeAll,
    Training,
    bounds_of,
    budget_for,
    digest,
    momentum,
    rise_of,
    supervised,
    train_in_session,
    train_plain,
    trained_on,
)

MIB = 1 << 20
WIDTH, BATCH, LAYERS = 128, 1024, 8  # each map takes 512 KiB: a block of the arena's
STEPS = 8  # two are recorded, one proves recipes and is the lesson; the others pass

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def has_fast_path() -> None:
    if find_arena() is None or fastpath._library() is None:
        pytest.skip("needs a C++ compiler")


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ops passed in each step that has ended."""
    found: list[int] = []
    end = FastPath.end

    def noted(self: FastPath, *, followed: bool) -> None:
        found.append(self.passed)
        end(self, followed=followed)

    monkeypatch.setattr(FastPath, "end", noted)
    return found


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the ops that the mode was shown in each step."""
    found: list[list[str]] = []
    run, begin = Runner.run, Executor.begin

    def ran(self: Runner, func: Any, facts: OpFacts, *rest: Any) -> Any:
        found[-1].append(facts.name)
        return run(self, func, facts, *rest)

    def begun(self: Executor, *args: Any, **kwargs: Any) -> None:
        found.append([])
        begin(self, *args, **kwargs)

    monkeypatch.setattr(Runner, "run", ran)
    monkeypatch.setattr(Executor, "begin", begun)
    return found


Block = Callable[[torch.Tensor, nn.Module, int, int], torch.Tensor]


def gelu(x: torch.Tensor, layer: nn.Module, number: int, k: int) -> torch.Tensor:
    return F.gelu(layer(x))


class Chain(nn.Module):
    """Linear layers, each in a block of its own kind."""

    def __init__(self, block: Block, batch: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.register_buffer("scratch", torch.ones(batch, WIDTH))
        self.block = block

    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = self.block(x, layer, number, k)
        return x


def chain(
    block: Block = gelu, optimize: Callable[[Any], torch.optim.Optimizer] = momentum, batch: int = BATCH
) -> Callable[[], Training]:
    """Makes the training of a chain."""

    def loss_of(model: nn.Module, k: int) -> torch.Tensor:
        x = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(k))
        loss: torch.Tensor = model(x, k).pow(2).mean()
        return loss

    return trained_on(lambda: Chain(block, batch), loss_of, optimize)


def assert_equal_and_inside(
    make: Callable[[], Training], share: float = 0.75, policy: Any = "vdnn-all", steps: int = STEPS
) -> list[outgrow.Summary]:
    plain = train_plain(make, steps)
    budget = budget_for(make, share)
    ours, summaries = train_in_session(make, steps, budget=budget, policy=policy)
    assert ours == plain
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)
    return summaries


# --- what passes ---


@pytest.mark.parametrize("policy", ["vdnn-all", "auto", "lru", "superneurons"])
def test_most_ops_of_a_planned_step_pass_and_nobody_can_tell(policy: str, passed: list[int]) -> None:
    summaries = assert_equal_and_inside(chain(), policy=policy)
    assert sum(summary.offloaded_bytes for summary in summaries[3:]) > 0 or policy == "superneurons"
    assert passed[:2] == [0, 0]  # recorded
    ops_at_least = LAYERS * 8
    assert max(passed[-3:]) > ops_at_least  # a plan may be set right in the last one, which is its lesson then


@pytest.mark.parametrize("is_native", [True, False])
def test_what_autograd_takes_up_again_is_no_op_of_the_step(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It detaches that, and shows a mode that it does, unless native code handed it out."""
    detached = [0]
    begin, dispatch = Executor.begin, Watch.__torch_dispatch__

    def begun(self: Executor, *args: Any, **options: Any) -> None:
        detached.append(0)
        begin(self, *args, **options)

    def noted(self: Watch, func: Any, *args: Any) -> Any:
        detached[-1] += func is DETACH
        return dispatch(self, func, *args)

    monkeypatch.setattr(Executor, "begin", begun)
    monkeypatch.setattr(Watch, "__torch_dispatch__", noted)
    monkeypatch.setattr(fastpath, "_library", fastpath._library if is_native else lambda: None)
    make, budget = chain(), budget_for(chain(), 0.75)
    training = make()
    with outgrow.Session(training.models, training.optimizers, budget=budget, policy="vdnn-all") as session:
        for k in range(STEPS):
            with session.step():
                training.run(k)
        names = [op.name for op in session.plan.problem.trace.ops]
    training = make()
    step = outgrow.TrainingStep(training.models, training.optimizers, lambda: training.run(0))
    assert names == [op.name for op in outgrow.trace(lambda: step, fake=False).ops]
    parameters = list(training.models[0].parameters())
    assert names.count("aten.detach.default") == len(parameters)  # gradients that become theirs
    saved = len(session.plan.problem.trace.saved)
    assert detached[-1] == 0 if is_native else detached[-1] >= saved


def test_where_a_session_begins_with_a_plan_ops_pass_from_its_fourth_step_on(passed: list[int]) -> None:
    """Nobody has measured what they need before the first: a lesson that ended there would let none pass, ever.

    The second is the first to use the optimizer's state.
    """
    make, budget = chain(), budget_for(chain(), 0.75)
    training = make()
    with outgrow.Session(training.models, training.optimizers, budget=budget, policy="vdnn-all") as session:
        for k in range(STEPS):
            with session.step():
                training.run(k)
        plan = session.plan
    in_the_first = passed[-1]
    passed.clear()
    ours, _ = train_in_session(make, 5, budget=budget, policy="vdnn-all", plan=plan)
    assert ours == train_plain(make, 5)
    assert passed == [0, 0, 0, in_the_first, in_the_first]


def test_where_an_op_has_another_number_in_each_step_the_others_pass_all_the_same(passed: list[int]) -> None:
    def rolled(x: torch.Tensor, layer: nn.Module, number: int, k: int) -> torch.Tensor:
        x = F.gelu(layer(x))
        return x.roll(k, dims=0) if number == LAYERS // 2 else x

    assert_equal_and_inside(chain(rolled), steps=STEPS + 2)
    assert passed[-1] > LAYERS * 8


def test_numbers_that_an_optimizer_reads_pass(shown: list[list[str]]) -> None:
    """Adam asks each parameter's counter of steps for its number."""
    assert_equal_and_inside(chain(optimize=lambda parameters: torch.optim.Adam(parameters, foreach=False)))
    read = [names.count("aten._local_scalar_dense.default") for names in shown]
    assert read[0] >= 2 * LAYERS
    assert read[-1] <= 1  # the loss


def test_ops_that_draw_from_the_cpus_generator_pass(shown: list[list[str]]) -> None:
    """Not those that draw from one of the program's; and all draw what they draw in plain PyTorch."""
    own = torch.Generator().manual_seed(3)

    def block(x: torch.Tensor, layer: nn.Module, number: int, k: int) -> torch.Tensor:
        if number == 0:
            own.manual_seed(k)
        y = F.dropout(layer(x), 0.2)
        y = y + 0.01 * torch.randn(y.shape) + 0.01 * torch.rand_like(y)
        return y + torch.empty_like(y).normal_(0, 0.01, generator=own)

    plain = train_plain(chain(block), STEPS)
    after_plain = torch.get_rng_state()
    ours, _ = train_in_session(chain(block), STEPS, budget=budget_for(chain(block), 0.8), policy="vdnn-all")
    assert ours == plain
    assert torch.equal(torch.get_rng_state(), after_plain)
    for name in ("aten.bernoulli_.float", "aten.randn.default", "aten.rand_like.default"):
        assert shown[-1].count(name) <= LAYERS // 2 < shown[-STEPS].count(name)  # of some the mode has to hear a bell
    assert shown[-1].count("aten.normal_.default") == shown[-STEPS].count("aten.normal_.default") == LAYERS


def test_updates_pass(passed: list[int]) -> None:
    assert_equal_and_inside(chain(optimize=lambda parameters: torch.optim.SGD(parameters, lr=0.01)))
    without = passed[-1]
    assert_equal_and_inside(chain())
    # Each parameter's momentum takes an op of its own, and its step one more.
    assert passed[-1] >= without + 2 * LAYERS


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_updates_over_lists_pass(way: str, shown: list[list[str]]) -> None:
    """Each is one op over all parameters; what takes next to no memory cannot run out of it half way."""
    assert_equal_and_inside(chain(optimize=lambda parameters: torch.optim.AdamW(parameters, **{way: True})))
    over_lists = [sum(name.startswith(("aten._foreach_", "aten._fused_")) for name in names) for names in shown]
    assert over_lists[0] >= 1
    assert over_lists[-1] == 0


class Waiting(nn.Module):
    """Every layer's result waits for the end, where one op reads all, or an op each, that no function mode sees."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.at_once = at_once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            found.append(x)
        with torch._C.DisableTorchFunction():
            if self.at_once:
                return torch.cat(found[::-1], 1)
            for item in found[-2::-1]:
                x = x * item
            return x


def waiting(at_once: bool) -> Callable[[], Training]:
    def make() -> Training:
        model = Waiting(at_once)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def run(k: int) -> torch.Tensor:
            loss = model(torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(k))).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Training([model], [optimizer], run)

    return make


@pytest.mark.parametrize("policy", [ParkAll(), ParkAll("park-all-late", prefetch=False)], ids=str)
@pytest.mark.parametrize("at_once", [False, True])
def test_while_values_are_parked_ops_on_others_pass(at_once: bool, policy: Any, passed: list[int]) -> None:
    seen: list[bool] = []
    run_op = Runner.run

    def noted(self: Runner, *given: Any) -> Any:
        seen.append(self._parking.parked.busy)
        return run_op(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", noted)
        summaries = assert_equal_and_inside(waiting(at_once), share=0.6, policy=policy)
    assert summaries[-1].offloaded_bytes > 0
    assert any(seen)
    assert max(passed[-3:]) > 5 * LAYERS


@pytest.mark.parametrize("at_once", [False, True])
def test_a_parked_storage_that_lies_where_another_lay_is_away_though_that_one_has_ended(
    at_once: bool, monkeypatch: pytest.MonkeyPatch, passed: list[int]
) -> None:
    add = ParkedStorages._add

    def adding(storages: ParkedStorages, parked: Parked) -> Parked:
        fast = storages._pool.fast_path
        fast.parked(parked.record, is_parked=True)  # the other one, whose end nobody has noticed yet
        add(storages, parked)
        fast.parked(parked.record, is_parked=False)
        return parked

    monkeypatch.setattr(ParkedStorages, "_add", adding)
    assert_equal_and_inside(waiting(at_once), share=0.6, policy=ParkAll(prefetch=False))
    assert max(passed) > 0


@pytest.mark.parametrize("policy", [RecomputeAll(), "superneurons", ParkAll()], ids=str)
def test_what_writes_passes_while_something_is_made_anew_or_parked(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As counters of batch norms do: nobody makes anything anew from them."""
    seen: list[int] = []
    begin, run_op = Executor.begin, Runner.run

    def begun(self: Executor, *given: Any, **options: Any) -> None:
        seen.append(0)
        begin(self, *given, **options)

    def noted(self: Runner, func: Any, *given: Any) -> Any:
        seen[-1] += func is torch.ops.aten.mul_.Scalar or func is torch.ops.aten.mul_.Tensor
        return run_op(self, func, *given)

    models: list[Chain] = []

    def noting(x: torch.Tensor, layer: nn.Module, number: int, k: int) -> torch.Tensor:
        models[-1].scratch.mul_(1.5)
        return F.gelu(layer(x))

    def make() -> Training:
        training = chain(noting, lambda parameters: torch.optim.SGD(parameters, lr=0.01))()
        models[:] = training.models  # type: ignore[assignment]
        return training

    monkeypatch.setattr(Executor, "begin", begun)
    monkeypatch.setattr(Runner, "run", noted)
    monkeypatch.setattr(FastPath, "ring", lambda fast: None)  # how often copies end in a step depends on the disk
    assert_equal_and_inside(make, policy=policy)
    assert seen[0] == LAYERS
    assert min(seen) <= LAYERS // 2  # a plan may be set right


def test_measured_peaks_are_those_that_the_mode_would_see(monkeypatch: pytest.MonkeyPatch) -> None:
    make, budget = chain(), budget_for(chain(), 0.75)
    _, summaries = train_in_session(make, STEPS, budget=budget, policy="vdnn-all")
    monkeypatch.setattr(fastpath, "_library", lambda: None)
    _, watched = train_in_session(make, STEPS, budget=budget, policy="vdnn-all")
    for ours, theirs in zip(summaries[3:], watched[3:], strict=True):
        # Memory of a copy out may be there for one op more or less.
        assert abs(ours.measured_peak_bytes - theirs.measured_peak_bytes) <= BATCH * WIDTH * 4


def test_without_a_compiler_all_is_the_same(monkeypatch: pytest.MonkeyPatch, passed: list[int]) -> None:
    monkeypatch.setattr(fastpath, "_library", lambda: None)
    assert_equal_and_inside(chain())
    assert not any(passed)


class Gated(nn.Module):
    """Dilated convolutions with gates, as in WaveNet: the gradient of all skips is one, and written over another."""

    def __init__(self) -> None:
        super().__init__()
        norm = torch.nn.utils.parametrizations.weight_norm
        self.first, self.last = nn.Conv1d(1, 32, 1), nn.Conv1d(32, 16, 1)
        self.gates = nn.ModuleList(norm(nn.Conv1d(32, 64, 2, dilation=2**i)) for i in range(5))
        self.mixes = nn.ModuleList(nn.Conv1d(32, 32, 1) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, skips = self.first(x), torch.zeros(())
        for i, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            a, b = gate(F.pad(h, (2**i, 0))).chunk(2, 1)
            g = mix(torch.tanh(a) * torch.sigmoid(b))
            h, skips = h + g, skips + g
        return self.last(F.relu(skips)).logsumexp(1).mean()


@pytest.mark.parametrize("above", [1.02, 1.08, 1.15, 1.2])
def test_who_makes_what_a_parked_value_writes_over_does_not_pass(above: float) -> None:
    """Else nobody knows the storage for one of this step's, and the value stays where it is."""
    make = supervised(Gated, shape=(4, 1, 1024), optimize=lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    _, least = bounds_of(make)
    budget = int(least * above)
    ours, summaries = train_in_session(make, STEPS, budget=budget)
    assert ours == train_plain(make, STEPS)
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)


# --- what must not pass ---


def test_ops_that_a_library_may_run_in_another_way_pass_only_where_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, passed: list[int]
) -> None:
    """Convolutions on a GPU; here, activations stand in for them."""
    gelus = 2 * LAYERS  # forward and backward
    monkeypatch.setattr(Calls, "wants_gate", lambda calls, facts: "gelu" in facts.name)
    most = []
    for open_bytes in (1, 0):
        monkeypatch.setattr(Ram, "open_bytes", open_bytes)
        assert_equal_and_inside(chain())
        most.append(max(passed[-3:]))
    assert most[0] == most[1] + gelus


def test_after_a_page_fault_gated_ops_need_care(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calls, "wants_gate", lambda calls, facts: "gelu" in facts.name)
    training = chain()()
    opened: list[int] = []
    with outgrow.Session(training.models, training.optimizers, budget=budget_for(chain(), 0.75)) as session:
        for k in range(STEPS):
            with session.step():
                opened.append(session._pool.fast_path._state.open)
                if k == STEPS - 1:
                    monkeypatch.setattr(session._pool.page_faults, "_evict", lambda nbytes: True)
                    session._pool.page_faults.meet(MemoryError("can't allocate memory"), 0, "a test")
                    assert session._pool.fast_path._state.open == 0
                training.run(k)
    assert all(opened)


def halve(written: torch.Tensor) -> None:
    written.mul_(0.5)


def halve_over_a_list(written: torch.Tensor) -> None:
    torch._foreach_mul_([written], 0.5)


@pytest.mark.parametrize(("policy", "write"), [("vdnn-all", halve), ("lru", halve), ("vdnn-all", halve_over_a_list)])
def test_a_write_past_autograd_to_a_value_that_was_saved_does_not_pass(
    policy: str, write: Callable[[torch.Tensor], None]
) -> None:
    """The lesson sees the very same op at the same place, writing to a buffer that nobody saved."""
    models: list[Chain] = []

    def block(x: torch.Tensor, layer: nn.Module, number: int, k: int) -> torch.Tensor:
        y = layer(x)  # saves x
        if number == 3:
            time.sleep(0.02)  # what is copied out at once is copied by now
            written = models[-1].scratch if k < 6 else x
            write(written.data)
        return F.gelu(y)

    def make() -> Training:
        training = chain(block)()
        models[:] = training.models  # type: ignore[assignment]
        return training

    assert_equal_and_inside(make, policy=policy)


@pytest.mark.parametrize("policy", [RecomputeAll(), "superneurons"], ids=str)
@pytest.mark.parametrize("what", ["result", "buffer", "weight"])
def test_a_write_past_autograd_to_what_something_is_made_anew_from_does_not_pass(
    what: str, policy: Any, passed: list[int]
) -> None:
    """The lesson sees the very same op at the same place, writing to a buffer that nobody reads."""
    models: list[Chain] = []

    def block(x: torch.Tensor, layer: nn.Module, number: int, k: int) -> torch.Tensor:
        model = models[-1]
        y = layer(x) * model.scale  # what gelu saves is made anew by these
        written = {"result": y, "buffer": model.scale, "weight": model.scale}[what]
        if what == "weight":
            written = layer.weight if k >= 6 else model.weight
        elif k < 6:
            written = model.scratch
        if number == 3 and what == "result":
            written.data.mul_(0.5)
        y = F.gelu(y)
        if number == 3 and what != "result":
            written.data.mul_(0.5)
        return y

    def make() -> Training:
        training = chain(block)()
        (model,) = training.models
        model.register_buffer("scale", torch.full((BATCH, WIDTH), 1.5))
        model.register_buffer("weight", torch.ones(WIDTH, WIDTH))
        models[:] = [model]  # type: ignore[list-item]
        return training

    summaries = assert_equal_and_inside(make, policy=policy)
    assert passed[-1] > LAYERS
    assert any(summary.recomputed_bytes for summary in summaries)


def test_what_values_of_an_earlier_step_are_made_anew_from_is_followed_in_later_ones() -> None:
    late = STEPS - 1  # the step before has no backward pass of its own

    def make() -> Training:
        (model,) = chain(lambda x, layer, number, k: F.gelu(layer(x) * model.scale))().models
        model.register_buffer("scale", torch.full((BATCH, WIDTH), 1.5))
        losses: list[torch.Tensor] = []

        def run(k: int) -> torch.Tensor:
            written = model.scale if k == late else model.scratch
            written.data.mul_(0.5)
            losses.append(model(torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(k)), k).mean())
            last = losses[-1].detach()
            if k != late - 1:
                torch.stack(losses).sum().backward()
                losses.clear()
            return last

        return Training([model], [], run)

    followed: list[list[bool]] = []
    begin = Executor.begin

    def begun(self: Executor, *given: Any, **options: Any) -> None:
        begin(self, *given, **options)
        recipes = [entry.recipe for entry in self._pool.dropped if entry.recipe is not None]
        followed.append([record.followers > 0 for recipe in recipes for record in recipe.states])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "begin", begun)
        assert_equal_and_inside(make, policy=RecomputeAll())
    assert followed[late]
    assert all(followed[late])


@pytest.mark.parametrize("lifts_peak", [True, False])
def test_who_rings_has_the_mode_see_the_next_op_that_lifts_the_peak(lifts_peak: bool, passed: list[int]) -> None:
    def block(x: torch.Tensor, layer: nn.Module, number: int, k: int) -> torch.Tensor:
        y = layer(x)
        if k == STEPS - 1 and sessions:
            fast = sessions[0]._executor._fast
            fast._state.level = 0 if lifts_peak else fast._state.budget
            fast.ring()
        return F.gelu(y)

    sessions: list[outgrow.Session] = []
    make = chain(block)
    training = make()
    with outgrow.Session(
        training.models, training.optimizers, budget=budget_for(make, 0.75), policy="lru"
    ) as session:
        sessions.append(session)
        for k in range(STEPS):
            with session.step():
                training.run(k)
    assert (passed[-1] <= passed[-2] - LAYERS // 2) is lifts_peak


def test_an_op_that_grew_does_not_pass_and_the_budget_holds() -> None:
    def block(x: torch.Tensor, layer: nn.Module, number: int, k: int) -> torch.Tensor:
        y = F.gelu(layer(x))
        if number == LAYERS - 1:
            time.sleep(0.02)  # copies are over
            torch.zeros(8 * BATCH)  # and the bell is heard
            torch.ones(BATCH * (6 * WIDTH if k >= 6 else 8)).sum()
        return y

    assert_equal_and_inside(chain(block), policy="lru")


def test_an_op_that_grew_by_the_order_of_its_list_does_not_pass() -> None:
    """Which dimension an index is for is said by where there is none."""
    picked, table = torch.arange(48), torch.randn(64, 8 * BATCH)

    def block(x: torch.Tensor, layer: nn.Module, number: int, k: int) -> torch.Tensor:
        y = F.gelu(layer(x))
        if number == LAYERS - 1:
            index = [picked, None] if k >= 6 else [None, picked]
            y = y + torch.ops.aten.index.Tensor(table, index)[0, 0]
        return y

    assert_equal_and_inside(chain(block), policy="lru")


def test_where_a_step_is_another_one_its_results_are_too() -> None:
    def block(x: torch.Tensor, layer: nn.Module, number: int, k: int) -> torch.Tensor:
        y = F.gelu(layer(x))
        if number == 3 and k >= 5:  # from a step on that was to pass
            y = torch.cat([y, y[: BATCH // 2]]).sin()[:BATCH] + y
        return y

    assert_equal_and_inside(chain(block), share=0.9)


def test_who_else_watches_the_step_sees_every_op() -> None:
    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def names(session: outgrow.Session | None, training: Training, *, inside: bool) -> list[str]:
        found: list[str] = []
        for k in range(STEPS):
            counter = Counter()
            with stepping(session, around=None if inside else counter), counter if inside else nothing():
                training.run(k)
            found = counter.names
        return found

    budget = budget_for(chain(), 0.75)
    plain = names(None, chain()(), inside=True)
    for inside in (True, False):
        training = chain()()
        with outgrow.Session(training.models, training.optimizers, budget=budget, policy="vdnn-all") as session:
            ours = names(session, training, inside=inside)
        assert [name for name in ours if "detach" not in name] == [name for name in plain if "detach" not in name]


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def stepping(session: outgrow.Session | None, around: TorchDispatchMode | None) -> Iterator[None]:
    with around or nothing(), nothing() if session is None else session.step():
        yield


def test_an_op_that_fails_says_the_same_as_in_plain_pytorch() -> None:
    def block(x: torch.Tensor, layer: nn.Module, number: int, k: int) -> torch.Tensor:
        y = layer(x)
        return y.index_select(0, torch.arange(BATCH) + (BATCH if k == 6 and number == 5 else 0))

    def words(step: Callable[[int], Any]) -> tuple[str, str]:
        for k in range(6):
            step(k)
        with pytest.raises((IndexError, RuntimeError)) as caught:
            step(6)
        return type(caught.value).__name__, str(caught.value)

    budget = budget_for(chain(block), 0.75)
    plain = words(chain(block)().run)
    training = chain(block)()
    with outgrow.Session(training.models, training.optimizers, budget=budget, policy="vdnn-all") as session:

        def step(k: int) -> None:
            with session.step():
                training.run(k)

        assert words(step) == plain
        with session.step():  # and the session goes on
            training.run(7)


@settings(max_examples=8, deadline=None)
@given(
    surprises=st.lists(
        st.tuples(st.integers(4, 9), st.integers(0, LAYERS - 1), st.integers(0, 5)), min_size=1, max_size=4
    ),
    policy=st.sampled_from(["vdnn-all", "lru", "auto", RecomputeAll()]),
)
@example(surprises=[(4, 0, 2)], policy=RecomputeAll())  # a weight that a recipe reads, and that nobody saved
def test_whatever_a_later_step_does_otherwise_its_result_is_plain_pytorchs(
    surprises: list[tuple[int, int, int]], policy: Any
) -> None:
    planned = {(k, number): kind for k, number, kind in surprises}

    def block(x: torch.Tensor, layer: nn.Module, number: int, k: int) -> torch.Tensor:
        kind = planned.get((k, number))
        y = layer(x)
        if kind == 0:
            y.data.mul_(0.5)  # nothing saved it yet
        z = F.gelu(y)
        if kind == 1:
            y.data.mul_(0.5)  # saved, and perhaps on its way out
        elif kind == 2:
            with torch.no_grad():
                layer.weight.mul_(0.9)  # raises in plain PyTorch: the backward pass wants it
        elif kind == 3:
            z = z.relu_()
        elif kind == 4:
            z = z + torch.zeros(BATCH, WIDTH).normal_(generator=torch.Generator().manual_seed(k))
        elif kind == 5:
            z = z.detach() if number == 0 else z.clone()
        return z

    def trained(run: Callable[[int], Any], training: Training) -> list[str]:
        found: list[str] = []
        for k in range(10):
            try:
                found.append(f"{float(run(k)):.17g}")
            except RuntimeError as error:
                found.append(str(error).split(",")[0].split("[")[0])
                training.optimizers[0].zero_grad()
        return [*found, digest(training.models, training.optimizers)]

    torch.manual_seed(0)
    training = chain(block)()
    plain = trained(training.run, training)
    torch.manual_seed(0)
    training = chain(block)()
    budget = budget_for(chain(), 0.8)
    with outgrow.Session(training.models, training.optimizers, budget=budget, policy=policy) as session:

        def run(k: int) -> Any:
            with session.step():
                return training.run(k)

        assert trained(run, training) == plain


# --- memory that runs out ---


def in_little_memory(at: int, draws: bool) -> list[Any]:
    """Train; in layer `at` of the seventh step there is no memory for a map but what saved values leave behind.

    Maps are larger here than all that Python and libraries take, so that these find theirs.

    What finds none there is an op that `draws` random numbers, or a GELU.

    Tells which ops passed in each step, how many page faults there were, and whether losses and state are plain's.
    """

    def block(x: torch.Tensor, layer: nn.Module, number: int, k: int) -> torch.Tensor:
        if k == 6 and number == at and is_limited:
            arena = find_arena()
            assert arena is not None
            arena.give_back()
            status = Path("/proc/self/status").read_text().splitlines()
            data = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
            resource.setrlimit(resource.RLIMIT_DATA, ((data << 10) + 4 * map_bytes,) * 2)
            cushion = mmap(-1, map_bytes - MIB, MAP_PRIVATE | MAP_ANONYMOUS)  # for Python and libraries
            with torch._C._DisableTorchDispatch():
                for nbytes in (map_bytes, 64 << 10):
                    with suppress(RuntimeError):
                        while True:
                            ballast.append(torch.empty(nbytes, dtype=torch.uint8))
            cushion.close()
        y = layer(x)
        return F.gelu(y + torch.rand_like(y) if draws else y)

    ballast: list[Any] = []
    batch = 16 * BATCH
    map_bytes = 4 * batch * WIDTH
    make, is_limited = chain(block, batch=batch), False
    plain = train_plain(make, STEPS)
    budget = budget_for(make, 0.95)
    torch.manual_seed(0)
    training = make()
    torch.manual_seed(1)  # as for the plain steps
    losses, ops, faults = [], [], 0
    is_limited = True
    with outgrow.Session(training.models, training.optimizers, budget=budget, policy="lru") as session:
        for k in range(STEPS):
            with session.step():
                losses.append(float(training.run(k)))
            ops.append(session._executor._fast.passed)
            faults += session.summary().oom_retries
    return [ops, faults, tuple(losses) == plain.losses, digest(training.models, training.optimizers) == plain.state]


@pytest.mark.parametrize(("at", "draws"), [(3, True), (4, False)])
def test_where_memory_runs_out_in_an_op_that_passes_it_runs_again(at: int, draws: bool, run_child: RunChild) -> None:
    ops, faults, same_losses, same_state = run_child(in_little_memory, at, draws)
    assert same_losses
    assert same_state
    assert ops[5] > 0
    assert faults > 0


# --- sessions ---


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x * 2,
        lambda x: x.view(-1).flip(0).view(BATCH, -1),
        lambda x: x.bfloat16().float(),
        lambda x: torch.cat([x[: BATCH // 2], x[BATCH // 2 :]]),
    ],
    ids=["scaled", "flipped", "cast", "parts"],
)
@pytest.mark.parametrize("is_kept", [False, True], ids=["let-go", "buffer"])
def test_a_batch_that_comes_between_steps_counts_though_nothing_saves_it(
    read: Callable[[torch.Tensor], torch.Tensor], is_kept: bool, passed: list[int]
) -> None:
    """Be it the model's own in the end."""

    def train(budget: int | None) -> None:
        layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        model = nn.Sequential(nn.LazyLinear(WIDTH), *layers)
        model(torch.zeros(1, read(torch.zeros(BATCH, 1024)).shape[1]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with nullcontext() if budget is None else outgrow.Session(model, optimizer, budget=budget) as session:
            for _ in range(STEPS):
                x = None
                x = torch.randn(BATCH, 1024)
                with nullcontext() if session is None else session.step():
                    if is_kept:
                        model.register_buffer("latest", x)
                    model(read(x)).pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()

    budget = rise_of(lambda: train(None)) - (3 << 20)
    assert rise_of(lambda: train(budget)) <= budget
    assert max(passed[-3:]) > 0


def test_a_large_batch_counts_in_a_step_that_began_as_a_small_one_unwatched() -> None:
    """It was read before anything showed what kind of step that is."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(nn.Linear(1024, WIDTH), *layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(size: int, session: outgrow.Session | None) -> None:
        x = torch.randn(size, 1024)
        with nullcontext() if session is None else session.step():
            model(x * 2).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    parameters = sum(parameter.nbytes for parameter in model.parameters())
    budget = int(0.85 * (parameters + rise_of(partial(step, BATCH, None))))
    with outgrow.Session(model, optimizer, budget=budget, least_moved_bytes=1) as session:
        for size in [BATCH] * 4 + [BATCH // 2] * 8 + [BATCH, BATCH // 2, BATCH // 2]:
            step(size, session)
        assert parameters + rise_of(partial(step, BATCH, session)) <= budget


def test_two_sessions_in_turn_count_their_own_bytes_alone() -> None:
    budget = budget_for(chain(), 0.75)
    plain = train_plain(chain(), STEPS)
    torch.manual_seed(0)
    first = chain()()
    torch.manual_seed(0)
    second = chain()()
    with (
        outgrow.Session(first.models, first.optimizers, budget=budget, policy="vdnn-all") as one,
        outgrow.Session(second.models, second.optimizers, budget=budget, policy="vdnn-all") as other,
    ):
        for k in range(STEPS):
            for session, training in ((one, first), (other, second)):
                with session.step():
                    training.run(k)
                assert session.summary().measured_peak_bytes <= budget
        assert abs(one.live_bytes - other.live_bytes) <= BATCH * WIDTH * 4  # one has the last batch, too
    assert digest(first.models, first.optimizers) == digest(second.models, second.optimizers) == plain.state


def test_after_a_session_nothing_is_counted_and_no_op_is_seen() -> None:
    make = chain()
    budget = budget_for(make, 0.75)
    for _ in range(2):  # what the first one leaves must not count in the second
        training = make()
        live: list[int] = []
        with outgrow.Session(training.models, training.optimizers, budget=budget, policy="vdnn-all") as session:
            for k in range(STEPS):
                with session.step():
                    training.run(k)
                live.append(session.live_bytes)
            own = session.live_bytes
        assert session.live_bytes == 0
        assert len(set(live[3:])) == 1  # nothing that passed is forgotten when it goes
        state = sum(p.nbytes for p in training.models[0].parameters())
        assert own <= 2 * state + 3 * BATCH * WIDTH * 4
    key = torch._C._parse_dispatch_key(fastpath.KEY)
    assert key is not None
    assert not torch._C._dispatch_tls_local_include_set().has(key)
