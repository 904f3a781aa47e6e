"""Saved tensors that stay by plan never come to Python: which ones do not, and that nobody can tell."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from itertools import cycle, pairwise
from random import Random
from types import MethodType
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.nn import functional as F

import outgrow
from outgrow.runtime import staying
from outgrow.runtime.entry import Entry
from outgrow.runtime.executor import Executor
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.follower import Follower
from outgrow.runtime.handles import Handle, window
from outgrow.runtime.hooks import Hooks
from outgrow.runtime.pool import Pool
from outgrow.runtime.runner import Runner
from outgrow.runtime.staying import Staying
from outgrow.runtime.tiers.ram import Ram
from outgrow.tracing.ir import Event
from steps import (
    Make,
    ParkAll,
    RecomputeAll,
    Training,
    budget_for,
    momentum,
    supervised,
    train_in_session,
    train_plain,
)

MIB = 1 << 20
STEPS = 8

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def has_native_hooks() -> None:
    if staying._native() is None:
        pytest.skip("needs a C++ compiler and Python's headers")


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many packs and unpacks came to Python in each step so far."""
    found: list[int] = []
    begin, pack, unpack = Executor.begin, Hooks._pack, Hooks.unpack

    def begun(self: Executor, *args: Any, **options: Any) -> None:
        found.append(0)
        begin(self, *args, **options)

    def counted(hook: Callable[[Hooks, Any], Any]) -> Callable[[Hooks, Any], Any]:
        def count(self: Hooks, item: Any) -> Any:
            found[-1] += 1
            return hook(self, item)

        return count

    monkeypatch.setattr(Executor, "begin", begun)
    monkeypatch.setattr(Hooks, "_pack", counted(pack))
    monkeypatch.setattr(Hooks, "unpack", counted(unpack))
    return found


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of those that the pool was shown."""
    found: list[int] = []
    show = Staying._show

    def noted(self: Staying, stay: Any, *, is_over: bool) -> bool:
        found.append(stay.number)
        return show(self, stay, is_over=is_over)

    monkeypatch.setattr(Staying, "_show", noted)
    return found


class Net(nn.Module):
    """Convolutions with normalisation and a linear layer: parameters, buffers, statistics, maps large and small."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 16, 16, 32)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.last = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)), inplace=True)
        return self.last(F.dropout(x.mean((2, 3)), 0.3))


net = supervised(Net, optimize=momentum, shape=(8, 3, 48, 48))


def trained_as_plain(
    make: Make, share: float, policy: Any = "auto", steps: int = STEPS, **options: Any
) -> list[outgrow.Summary]:
    plain = train_plain(make, steps)
    budget = 1 << 40 if share > 1 else budget_for(make, share, **options)
    ours, summaries = train_in_session(make, steps, budget=budget, policy=policy, **options)
    assert ours == plain
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)
    return summaries


# --- what stays ---


def test_where_a_plan_keeps_everything_no_saved_tensor_comes_to_python(in_python: list[int]) -> None:
    trained_as_plain(net, 2)
    assert in_python[0] > 50
    assert in_python[-1] == 0


@pytest.mark.parametrize("policy", ["auto", "vdnn-conv", "superneurons", RecomputeAll(), ParkAll()], ids=str)
def test_where_a_plan_moves_some_the_others_do_not(policy: Any, in_python: list[int]) -> None:
    trained_as_plain(net, 0.6, policy)
    assert 0 < in_python[-1] < in_python[0]


def test_of_what_the_cache_could_send_away_only_what_it_will_comes_to_python(
    in_python: list[int], shown: list[int]
) -> None:
    """The pool sends away the least recently used of those that it knows: what is foretold, unless time is short."""
    summaries = trained_as_plain(net, 0.8, "lru", steps=12)
    assert summaries[-1].offloaded_bytes > 0
    assert in_python[-1] < in_python[0] * 2 / 3
    assert not shown


def test_what_does_not_come_is_counted_among_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for share in (0.6, 2):
        ours = trained_as_plain(net, share, "vdnn-conv")[-1]
        with monkeypatch.context() as patch:
            patch.setattr(staying, "_native", lambda: None)
            theirs = trained_as_plain(net, share, "vdnn-conv")[-1]
        assert ours.kept_bytes == pytest.approx(theirs.kept_bytes, rel=0.01)
        assert ours.offloaded_bytes == pytest.approx(theirs.offloaded_bytes, rel=0.01)
        assert ours.measured_peak_bytes == pytest.approx(theirs.measured_peak_bytes, rel=0.02)


@pytest.mark.parametrize("policy", ["auto", "vdnn-all", RecomputeAll(), ParkAll()], ids=str)
def test_ops_keep_the_numbers_that_they_have_in_the_trace(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans name ops by those, and autograd shows an op for most of what it unpacks."""
    numbers: list[int] = []
    end = FastPath.end

    def noted(self: FastPath, *, followed: bool) -> None:
        numbers.append(self.number)
        end(self, followed=followed)

    monkeypatch.setattr(FastPath, "end", noted)
    trained_as_plain(net, 0.6, policy)
    assert len(set(numbers[2:])) == 1


def test_without_a_compiler_all_of_them_come(monkeypatch: pytest.MonkeyPatch, in_python: list[int]) -> None:
    monkeypatch.setattr(staying, "_native", lambda: None)
    trained_as_plain(net, 2)
    assert len(set(in_python)) == 1


# --- what happens to them ---


@pytest.mark.parametrize("in_vain", [False, True])
@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_when_memory_runs_short_they_leave_all_the_same(
    policy: str, in_vain: bool, shown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that begins to hold more, between its passes, than its plan knows of.

    Where what the pool was shown is `in_vain`, as the program holds it, it is shown more.
    """
    show, turns = Staying.show, cycle((in_vain, False))
    monkeypatch.setattr(Staying, "show", lambda self, nbytes: next(turns) or show(self, nbytes))

    def hungry(extra: int) -> Make:
        def make() -> Training:
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
            optimizer = momentum(model.parameters())

            def run(k: int) -> torch.Tensor:
                x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(k))
                loss = model(x).pow(2).mean()
                if k >= 5 and extra:
                    beside = [torch.ones(extra // 8) for _ in range(2)]
                    loss = loss + 0 * beside[0].sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            return Training([model], [optimizer], run)

        return make

    plain = train_plain(hungry(4 * MIB), STEPS)
    budget = int(budget_for(hungry(0), 0.85))
    ours, summaries = train_in_session(hungry(4 * MIB), STEPS, budget=budget, policy=policy)
    assert ours == plain
    assert shown
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)


@pytest.mark.parametrize(
    ("policy", "share", "often"),
    [
        *(("auto", share, often) for share, often in ((0.6, 0.05), (0.6, 0.9), (2, 0.9))),
        ("lru", 0.6, 0.9),
        ("checkpoint", 0.6, 0.05),
        (ParkAll(), 0.6, 0.9),
        (ParkAll(), 2, 0.9),
    ],
    ids=str,
)
def test_whenever_that_is_results_are_the_same(
    share: float, policy: Any, often: float, monkeypatch: pytest.MonkeyPatch, shown: list[int]
) -> None:
    """While an op runs, between what an unpack gives and its use, or while something is made anew."""
    coins = Random(0)

    def before(part: type, name: str) -> None:
        act = getattr(part, name)

        def acted(self: Any, *args: Any, **options: Any) -> Any:
            hooks: Hooks = self if isinstance(self, Hooks) else self._hooks
            if coins.random() < often:
                hooks.staying.show(coins.choice((1, 64 << 10, 1 << 40)))
            return act(self, *args, **options)

        monkeypatch.setattr(part, name, acted)

    for name in ("run", "run_inside", "pass_view"):
        before(Runner, name)
    for name in ("_pack", "unpack", "released"):
        before(Hooks, name)
    trained_as_plain(net, share, policy)
    assert shown or policy == "checkpoint"  # which moves, or makes others from, all that could leave


def test_a_graph_that_outlives_its_step_is_no_secret(shown: list[int]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    x = torch.randn(512, 64)
    wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with outgrow.Session(model, budget=1 << 30) as session:
        for k in range(6):
            with session.step():
                loss = model(x).sum()
                if k < 5:
                    loss.backward(retain_graph=k == 4)
                    model.zero_grad()
            if k < 4:
                assert not shown
        assert shown
        assert sum(record.nbytes for record in session._pool.spare()) >= 2 * x.nbytes
        found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("share", [0.6, 2])
def test_what_was_changed_in_place_is_refused_as_in_plain_pytorch(share: float) -> None:
    def make() -> Training:
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

        def run(k: int) -> torch.Tensor:
            x = torch.randn(256, 64)
            inner = model[:4](x)
            loss = model[4](inner).sum()
            if k == 6:
                with torch.no_grad():
                    inner.add_(1)
            loss.backward()
            model.zero_grad()
            return loss.detach()

        return Training([model], [], run)

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as plain:
        train_plain(make, STEPS)
    budget = 1 << 40 if share > 1 else budget_for(make, share)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as ours:
        train_in_session(make, STEPS, budget=budget)
    assert "is at version 1; expected version 0 instead" in str(plain.value)
    assert "is at version 1; expected version 0 instead" in str(ours.value)


@pytest.mark.parametrize("over_lists", [False, True])
def test_an_update_between_two_backward_passes_is_refused_as_in_plain_pytorch(over_lists: bool) -> None:
    """Whoever watches: ops over lists lose count of their writes beneath a dispatch mode."""
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=over_lists)

    def step(session: outgrow.Session) -> None:
        with session.step():
            first, second = (model(torch.randn(16, 32)).square().mean() for _ in range(2))
            first.backward()
            optimizer.step()
            second.backward()

    with outgrow.Session(model, optimizer, budget="1GiB", policy="lru") as session:
        for _ in range(STEPS):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                step(session)


def scale_after_the_fact(written: list[torch.Tensor]) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_(written, torch.zeros(1), torch.ones(1))


@pytest.mark.parametrize(
    "write",
    [
        scale_after_the_fact,  # counts nothing
        lambda written: torch._foreach_mul_(written, 2),
        lambda written: torch.ops.aten.unbind_copy.int_out(torch.ones(2, 32), 0, out=written),
        lambda written: torch.split_with_sizes_copy(torch.ones(64), [32, 32], out=written),
    ],
    ids=["unscale", "foreach", "unbind_copy", "split_with_sizes_copy"],
)
def test_writes_to_lists_are_counted_as_in_plain_pytorch(write: Callable[[list[torch.Tensor]], object]) -> None:
    written = [torch.ones(32), torch.ones(32)]
    model = nn.Linear(32, 32)

    def step() -> list[int]:
        before = [tensor._version for tensor in written]
        write(written)
        model(torch.ones(4, 32)).sum().backward()
        return [tensor._version - count for tensor, count in zip(written, before, strict=True)]

    plain = step()
    with outgrow.Session(model, budget="1GiB", policy="lru") as session:
        for _ in range(STEPS):
            with session.step():
                assert step() == plain


@pytest.mark.parametrize("share", [0.9, 2])
def test_a_write_past_autograd_changes_gradients_as_in_plain_pytorch(share: float) -> None:
    def make() -> Training:
        model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))

        def run(k: int) -> torch.Tensor:
            inner = model[:4](torch.randn(512, 128, generator=torch.Generator().manual_seed(k)))
            loss = model[4](inner).pow(2).mean()
            if k >= 5:
                inner.data.mul_(0.5)
                model[0].weight.data.mul_(0.5)
            if k == 6:
                model[4].weight.data = model[4].weight.data * 2
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
            model.zero_grad()
            return loss.detach()

        return Training([model], [], run)

    trained_as_plain(make, share)


def test_parameters_that_move_between_steps_are_found_again(in_python: list[int]) -> None:
    def make() -> Training:
        training = net()
        model, run = training.models[0], training.run

        def moved(k: int) -> torch.Tensor:
            if k == 5:
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.data = tensor.data.clone()
            return run(k)

        return Training(training.models, training.optimizers, moved)

    trained_as_plain(make, 2)
    assert in_python[4] == 0 < in_python[5]
    assert in_python[-1] == 0


def test_hooks_of_the_programs_own_take_what_is_theirs() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            x = model.convs[0](x).relu()
        for conv in model.convs[1:]:
            x = torch.utils.checkpoint.checkpoint(lambda x, conv=conv: conv(x).relu(), x, use_reentrant=False)
        return model.last(x.mean((2, 3)))

    trained_as_plain(supervised(Net, forward, momentum, shape=(8, 3, 48, 48)), 2)


@pytest.mark.parametrize("native", [True, False], ids=["native", "in Python"])
@pytest.mark.parametrize("saved", ["an activation", "a weight", "an alias of a weight"])
@pytest.mark.parametrize("share", [0.6, 2])
def test_a_graph_of_gradients_sees_what_is_changed_in_place(
    share: float, saved: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves what the first backward pass was given."""
    if not native:
        monkeypatch.setattr(staying, "_native", lambda: None)

    def make() -> Training:
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False), nn.Tanh())
        scale = nn.Parameter(torch.ones(64))

        def run(k: int) -> torch.Tensor:
            x = torch.randn(256, 64, generator=torch.Generator().manual_seed(k), requires_grad=True)
            inner = model[:2](x)
            out = model[2](inner) * scale
            start = torch.ones_like(out).requires_grad_()
            (slope,) = torch.autograd.grad(out, x, start, create_graph=True)
            if k == 6:
                with torch.no_grad():
                    {"an activation": inner, "a weight": scale, "an alias of a weight": model[2].weight}[saved].mul_(
                        2
                    )
            loss = slope.pow(2).sum()
            torch.autograd.grad(loss, start)  # which the graph of the gradient alone leads to
            return loss.detach()

        return Training([model], [], run)

    budget = 1 << 40 if share > 1 else budget_for(make, share)
    for train in (lambda: train_plain(make, STEPS), lambda: train_in_session(make, STEPS, budget=budget)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            train()


def test_who_has_parameters_in_a_graph_that_is_kept_is_known() -> None:
    """A plan lends only those that nobody else has."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def others() -> list[int]:
        storages = [parameter.untyped_storage() for parameter in model.parameters()]
        records = map(session._ledger.see_storage, storages)
        return [record.other_holders() for record in records]

    with outgrow.Session(model, budget=1 << 30) as session:
        for k in range(6):
            with session.step():
                loss = model(torch.randn(8, 64)).sum()
                if k < 5:
                    loss.backward()
        assert set(others()) == {1}
        assert any(record.aliases for record in session._ledger.alive())
        del loss
        assert not any(record.aliases for record in session._ledger.alive())
        assert set(others()) == {1}


def test_what_another_thread_lets_go_of_is_gone_at_the_next_step() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    kept: list[torch.Tensor] = []
    with outgrow.Session(model, budget=1 << 30) as session:
        for k in range(8):
            with session.step():
                assert k != 6 or not list(session._pool.entries())
                loss = model(torch.randn(512, 64)).sum()
                loss.backward(retain_graph=k == 5)
                model.zero_grad()
            if k == 5:
                kept.append(loss)
                del loss
                assert list(session._pool.spare())
                thread = threading.Thread(target=kept.clear)
                thread.start()
                thread.join()


def test_a_signal_that_finds_code_of_ours_does_not_wait_for_the_end_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = net()
    heard: list[int] = []
    make_room = Ram.make_room

    def at_a_look(self: Ram, nbytes: int) -> None:
        if steps[-1:] == [5] and not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGUSR1)
        make_room(self, nbytes)

    monkeypatch.setattr(Ram, "make_room", at_a_look)
    sent: list[bool] = []
    steps: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with outgrow.Session(training.models, training.optimizers, budget=1 << 40) as session:
            for k in range(6):
                with session.step():
                    steps.append(k)
                    training.run(k)
                    assert bool(sent) == bool(heard)
        assert heard
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_no_compiler_looks_at_code_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is compiled by itself runs compiled where no op is watched."""
    compiled = torch.compile(lambda x: torch.tanh(x) * torch.sigmoid(x), backend="aot_eager")
    looks: list[bool] = []
    look = Hooks._look

    def looked(self: Hooks) -> None:
        looks.append(bool(get_eval_frame_callback()))
        look(self)

    monkeypatch.setattr(Hooks, "_look", looked)
    model = nn.Linear(64, 64)
    with outgrow.Session(model, budget=1 << 30) as session:
        for _ in range(6):
            with session.step():
                x = model(torch.randn(256, 64))
                for _layer in range(8):
                    x = compiled(x)
                x.sum().backward()
                model.zero_grad()
    assert looks
    assert not any(looks)


def test_nothing_is_left_of_them() -> None:
    model = Net()

    def references() -> int:
        return sum(sys.getrefcount(item) for item in (*model.parameters(), *model.buffers()))

    before = references()
    session = outgrow.Session(model, budget=1 << 30)
    held: list[int] = []
    for k in range(7):
        with session.step():
            loss = model(torch.randn(4, 3, 48, 48)).sum()
            if k < 6:
                loss.backward()
                model.zero_grad()
        held.append(references())
        assert not session._executor._staying._stays.all()
    assert held[4] == held[5] < held[6]
    session.close()
    loss.backward()  # a graph whose session is over
    gone = weakref.ref(session)
    del session, loss
    gc.collect()
    assert gone() is None
    model.zero_grad()
    assert references() == before


def test_ticks_that_the_plan_acts_at_come_to_python() -> None:
    """All codes of a plan, against the trace and what the plan does."""
    training = net()
    with outgrow.Session(training.models, training.optimizers, budget=budget_for(net, 0.6)) as session:
        for k in range(3):
            with session.step():
                training.run(k)
        plan = session.plan
        assert plan is not None
        expected, codes = staying._expected(plan)
        trace = plan.problem.trace
        acts = {item.out_tick for item in plan.offloads} | {item.in_tick for item in plan.offloads}
        for number, (tick, code) in enumerate(zip(trace.ticks, codes, strict=True)):
            assert code >> 2 == tick.saved
            assert bool(code & 1) == (tick.event is Event.UNPACK)
            assert code & 2 or number not in acts
        moved = {item.value for items in (plan.offloads, plan.recomputes, plan.parks) for item in items}
        for number, saved in enumerate(trace.saved):
            role = expected[staying._COLUMNS * number]
            assert (role == staying._MOVES) >= (saved.value in moved)


# --- what left and is back ---


@pytest.fixture
def handed_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of those that Python handed out though they were there, at ticks at which nothing is to be done."""
    found: list[int] = []
    unpack = Hooks._unpack

    def noted(self: Hooks, handle: Handle) -> torch.Tensor:
        stays, entry = self.staying._stays, handle.entry
        executor = cast(Executor, cast(MethodType, self._tick).__self__)
        is_there = entry is not None and entry.storage is not None and (entry.reading is None or entry.reading.done)
        if stays.on and is_there and not (stays.waits or stays.tick in executor._follower._actions):
            found.append(handle.number)
        return unpack(self, handle)

    monkeypatch.setattr(Hooks, "_unpack", noted)
    return found


@pytest.mark.parametrize("policy", ["vdnn-all", "auto", "superneurons"])
def test_a_value_that_is_there_is_handed_out_past_python(policy: str, handed_out: list[str]) -> None:
    trained_as_plain(net, 0.7, policy)
    assert not handed_out


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("shares", [False, True])
def test_it_is_the_last_used_of_all_from_then_on(
    shares: bool, is_known: bool, handed_out: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Entry] = []
    init = Staying.__init__

    class Recent:
        """What the pool has in memory, for native code."""

        def __init__(self, pool: Pool) -> None:
            self._pool = pool

        def move_to_end(self, entry: Entry) -> None:
            used.append(entry)
            if not is_known:
                raise KeyError(entry)
            self._pool.cache.recent.move_to_end(entry)

    def made(self: Staying, owner: Any, hooks: Any, ledger: Any, pool: Pool, *args: Any, **options: Any) -> None:
        init(self, owner, hooks, ledger, pool, *args, **options)
        self._stays.recent = Recent(pool)

    monkeypatch.setattr(Staying, "__init__", made)
    if shares:
        trained_as_plain(network_in_parts(), 0.9, "vdnn-all", **LARGE)
    else:
        trained_as_plain(net, 0.7, "vdnn-all")
    assert used
    assert bool(handed_out) != is_known


# --- further ones on what moves ---

PARTS = 24
LARGE = {"least_moved_bytes": 16 << 10}  # of what is moved, so that states stay


def in_parts(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
    """A sequence, part by part: autograd saves a window on two large tensors for each."""
    gates, inputs = torch.sigmoid(model[0](x)), torch.tanh(model[1](x))
    state = torch.zeros(x.shape[0], 48)
    for part in range(PARTS):
        state = state * gates[:, part] + inputs[:, part]
        state = state * inputs[:, part]
    return model[2](state).pow(2).mean()


def network_in_parts(forward: Callable[[nn.Module, torch.Tensor, int], torch.Tensor] = in_parts) -> Make:
    return supervised(
        lambda: nn.ModuleList([nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 8)]),
        forward,
        momentum,
        shape=(16, PARTS, 32),
    )


@pytest.mark.parametrize(("policy", "share"), [("vdnn-all", 0.9), ("auto", 0.75), (RecomputeAll(), 0.9)], ids=str)
def test_of_many_windows_on_what_moves_few_come_to_python(
    policy: Any, share: float, in_python: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_as_plain(network_in_parts(), share, policy, **LARGE)
    ours = in_python[-1]
    monkeypatch.setattr(Staying, "has_entry", lambda self, handle: None)
    trained_as_plain(network_in_parts(), share, policy, **LARGE)
    assert ours < in_python[-1] - PARTS


@pytest.mark.parametrize(("policy", "share"), [("vdnn-all", 0.9), ("auto", 0.8), (RecomputeAll(), 0.9)], ids=str)
def test_where_a_step_leaves_its_plan_they_get_handles(
    policy: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    coins, given, steps = Random(0), set(), [0]
    advance, handle_of = Follower.advance, Staying.handle_of

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        steps.append(k)
        return in_parts(model, x, k)

    def goes_on(self: Follower, event: Event, *args: Any) -> bool:
        often = 0.01 if event is Event.PACK else 0.9
        return advance(self, event, *args) and (steps[-1] < 6 or coins.random() > often)

    def gives(self: Staying, kept: Any) -> Any:
        handle = handle_of(self, kept)
        given.add(type(kept).__name__ if handle is not None else "")
        return handle

    monkeypatch.setattr(Follower, "advance", goes_on)
    monkeypatch.setattr(Staying, "handle_of", gives)
    trained_as_plain(network_in_parts(forward), share, policy, steps=20, **LARGE)
    assert "Share" in given


@pytest.mark.parametrize("written", ["all of it", "a window", "past autograd", "past autograd, a window"])
def test_what_is_written_to_a_value_with_many_windows(written: str) -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        inputs = torch.tanh(model[1](x))
        state = torch.sigmoid(model[0](x)).mean(1)
        for part in range(PARTS):
            state = state * inputs[:, part]
            if k >= 5 and part == PARTS // 2:
                target = inputs[:, 3] if "window" in written else inputs
                if "past" in written:
                    target.data.mul_(0.5)
                else:
                    with torch.no_grad():
                        target.mul_(0.5)
        return model[2](state).pow(2).mean()

    make = network_in_parts(forward)
    if "past" in written:
        trained_as_plain(make, 0.8, "vdnn-all", **LARGE)
        return
    budget = budget_for(network_in_parts(), 0.8, **LARGE)
    words = []
    for train in (
        lambda: train_plain(make, STEPS),
        lambda: train_in_session(make, STEPS, budget=budget, policy="vdnn-all", **LARGE),
    ):
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            train()
        words.append(str(error.value))
    for text in words:
        assert "is at version 1; expected version 0 instead" in text


def test_graphs_with_many_windows_outlive_their_steps() -> None:
    training = network_in_parts()()
    model = training.models[0]
    wanted: list[torch.Tensor] = []
    with outgrow.Session(
        model, budget=budget_for(network_in_parts(), 0.8, **LARGE), policy="vdnn-all", **LARGE
    ) as session:
        for k in range(7):
            with session.step():
                x = torch.randn(16, PARTS, 32, generator=torch.Generator().manual_seed(k))
                loss = in_parts(model, x, k)
                if k < 6:
                    loss.backward()
                    model.zero_grad()
        wanted = list(torch.autograd.grad(in_parts(model, x, k), list(model.parameters())))
        with session.step():
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        assert all(map(torch.equal, found, wanted))
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, found, wanted))


def test_a_part_of_a_graph_that_goes_early_leaves_the_value_to_the_others() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        inputs = torch.tanh(model[1](x))
        gone = inputs[:, 0] * inputs[:, 1]  # the handle that the others hold on to is this one's
        state = inputs[:, 2] * inputs[:, 3]
        del gone
        for part in range(4, PARTS):
            state = state * inputs[:, part]
        return model[2](state).pow(2).mean()

    trained_as_plain(network_in_parts(forward), 0.8, "vdnn-all", **LARGE)


def test_nothing_is_left_of_their_entries() -> None:
    training = network_in_parts()()
    with outgrow.Session(
        training.models,
        training.optimizers,
        budget=budget_for(network_in_parts(), 0.8, **LARGE),
        policy="vdnn-all",
        **LARGE,
    ) as session:
        for k in range(STEPS):
            with session.step():
                training.run(k)
            assert not session._pool.has_entries


# --- what left and came back ---


@pytest.mark.parametrize("make", [staying._native().window if staying._native() else window, window])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int8, torch.bool]
)
def test_a_window_is_the_tensor_that_was_saved(make: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    memory = (
        torch.arange(240, dtype=torch.uint8).repeat(dtype.itemsize).view(torch.bool if dtype is torch.bool else dtype)
    )
    for saved in (
        memory,
        memory[3:],
        memory.view(4, 60)[1:, ::7].t(),
        memory[:1].expand(5, 1),
        memory[:0],
        memory[7],
    ):
        counter = torch.ones(1).requires_grad_().detach()
        shape = saved.dtype, saved.storage_offset(), saved.shape, saved.stride()
        made = make(counter, saved.untyped_storage(), *shape)
        assert type(made) is torch.Tensor
        assert (made.dtype, made.storage_offset(), made.shape, made.stride()) == shape
        assert made.untyped_storage().data_ptr() == saved.untyped_storage().data_ptr()
        assert torch.equal(made, saved)
        assert not made.requires_grad
        assert made.is_leaf
        before = made._version
        counter.add_(1)
        assert made._version == before + 1 == counter._version
        with torch.no_grad():
            made.fill_(1)
        assert counter._version == before + 2


@pytest.mark.parametrize("native", [True, False], ids=["native", "in Python"])
def test_a_backward_pass_in_inference_mode(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(staying, "_native", lambda: None)

    def looking(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        loss: torch.Tensor = model(x).pow(2).mean()
        with torch.inference_mode():
            slopes = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return loss * (1 + slopes[0].sum().item())

    make = supervised(
        lambda: nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]),
        looking,
        shape=(256, 64),
    )
    trained_as_plain(make, 0.8, "vdnn-all")
