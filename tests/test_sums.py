"""Gradients that come from several sides are summed up in place, as in plain PyTorch, and nobody can tell."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import outgrow
from outgrow.runtime import fastpath
from outgrow.runtime.parked import ParkedStorages
from outgrow.runtime.parking import Parking
from outgrow.runtime.runner import Runner
from outgrow.tracing.ir import Op, Phase
from steps import (
    Make,
    ParkAll,
    RecomputeAll,
    bounds_of,
    budget_for,
    rise_of,
    supervised,
    train_in_session,
    train_plain,
)

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, ROWS, STEPS = 64, 256, 7


@pytest.fixture(autouse=True)
def has_native_code() -> None:
    if fastpath._library() is None:
        pytest.skip("needs a C++ compiler")


class ShortCuts(nn.Module):
    """A chain of blocks, each with a way past it."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def network(forward: Callable[[nn.Module, torch.Tensor, int], torch.Tensor] | None = None) -> Make:
    return supervised(ShortCuts, forward, shape=(ROWS, WIDTH))


def sums_of(make: Make, **options: Any) -> list[Op]:
    """The sums of gradients in the trace of a step, as a session records it."""
    training = make()
    with outgrow.Session(training.models, training.optimizers, **options) as session:
        for k in range(2):
            with session.step():
                training.run(k)
        assert session.plan is not None
        ops = session.plan.problem.trace.ops
    return [op for op in ops if op.phase is Phase.BACKWARD and op.name.startswith("aten.add")]


# --- as in plain PyTorch ---


def test_the_recorded_step_has_the_sums_of_the_plain_one() -> None:
    found = sums_of(network(), budget="1GiB")
    assert [op.name for op in found] == ["aten.add_.Tensor"] * 5  # the first block's input wants no gradient


@pytest.mark.parametrize("policy", ["auto", "vdnn-all", RecomputeAll(), ParkAll()], ids=str)
def test_every_step_of_a_plan_has_them(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum out of place is an op of another name at its number, and makes a storage of its own."""
    names: list[list[str]] = []
    run = Runner.run

    def noted(self: Any, func: Any, facts: Any, args: Any, kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            names[-1].append(facts.name)
        return run(self, func, facts, args, kwargs)

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        names.append([])
        return model(x).pow(2).mean()

    monkeypatch.setattr(Runner, "run", noted)
    make = network(forward)
    train_in_session(make, STEPS, budget=budget_for(make, 0.7), policy=policy)
    assert "aten.add_.Tensor" in names[-STEPS]
    assert not any("aten.add.Tensor" in step for step in names[-STEPS:])


def test_peaks_are_those_of_plain_steps() -> None:
    """Where nothing has to leave, nothing is there besides what plain PyTorch has."""

    def wide(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        for _ in range(4):  # views of nothing, sums of large maps
            x = torch.cat([x, x])
        return model(x).mean()

    make = network(wide)
    training = make()
    training.run(0)
    plain = rise_of(lambda: training.run(1))
    training = make()
    with outgrow.Session(training.models, training.optimizers, budget="1GiB") as session:
        with session.step():
            training.run(0)
        before = session._ledger.live_bytes
        with session.step():
            training.run(1)
        assert session.summary().measured_peak_bytes - before == pytest.approx(plain, rel=0.02)


# --- nobody can tell ---

Keeps = Callable[[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]], torch.Tensor]


def keeping(x: torch.Tensor, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Each gradient of `x` is kept as it comes, and a copy of it."""
    x.register_hook(lambda gradient: kept.append((gradient, gradient.clone())))


class Doubled(torch.autograd.Function):
    """x + x, whose gradient is a sum in Python of what is read again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient + gradient
        return total + 0 * gradient


class Keeping(torch.autograd.Function):
    """The same tensor, for one that keeps its gradient and gives it on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        ctx.kept = kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.kept.append((gradient, gradient.clone()))
        return gradient, None


def gru(x: torch.Tensor) -> torch.Tensor:
    """An op whose formula sums up gradients."""
    state = torch.zeros(ROWS, WIDTH)
    weights = [torch.linspace(-1, 1, 3 * WIDTH * WIDTH).view(3 * WIDTH, WIDTH) for _ in range(2)]
    return torch.gru_cell(x, state + x, *weights)


def nothing_more(x: torch.Tensor) -> torch.Tensor:
    return x


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": nothing_more,
    "twice": lambda x: x + x,
    "a product": lambda x: x * x.sin(),
    "a window": lambda x: F.pad(x[:, : WIDTH // 2], (0, WIDTH // 2)),
    "parts": lambda x: torch.cat([part.tanh() for part in x.chunk(4, 1)], 1),
    "turned": lambda x: x.t().contiguous().t() * 0.5,
    "a mean": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "a python function": Doubled.apply,
    "a cell": gru,
    "norms": lambda x: F.layer_norm(x, (WIDTH,)),
    "checkpointed": lambda x: checkpoint(lambda y: y + y.tanh(), x, use_reentrant=False),
    "checkpointed, in another pass": lambda x: checkpoint(lambda y: y + y.tanh(), x, use_reentrant=True),
    "other precision": lambda x: (x.double() * 0.25).float() + x.bfloat16().float(),
    "complex": lambda x: (torch.complex(x, x) * torch.complex(x, -x)).real,
    "dropout": lambda x: F.dropout(x, 0.3),
}
WATCHED = ("no", "a hook keeps it", "retained", "a function keeps it", "a hook replaces it")


def watched(x: torch.Tensor, how: str, kept: list[Any]) -> torch.Tensor:
    if how == "a hook keeps it":
        keeping(x, kept)
    elif how == "retained":
        x.retain_grad()
        kept.append(x)
    elif how == "a function keeps it":
        return Keeping.apply(x, kept)
    elif how == "a hook replaces it":
        x.register_hook(lambda gradient: gradient * 0.5)
    return x


def gradients_kept(kept: list[Any]) -> list[torch.Tensor]:
    """What was kept; nobody may have written to it."""
    found = []
    for item in kept:
        if isinstance(item, torch.Tensor):
            found += [] if item.grad is None else [item.grad.clone()]  # it leads nowhere
        else:
            gradient, copy = item
            assert torch.equal(gradient, copy)
            found.append(copy)
    return found


@settings(max_examples=4, deadline=None)
@given(
    joints=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 5), st.sampled_from(sorted(WAYS))), min_size=1, max_size=3),
            st.sampled_from(WATCHED),
        ),
        min_size=2,
        max_size=4,
    ),
    policy=st.sampled_from(["auto", "vdnn-all", RecomputeAll(), ParkAll()]),
    share=st.sampled_from([0.6, 0.8, 2.0]),
)
def test_whatever_the_sums_are_of_and_whoever_looks(
    joints: list[tuple[list[tuple[int, str]], str]], policy: Any, share: float
) -> None:
    """Networks of joints, each the sum of ways from some of those before; some gradients are kept, or replaced."""
    seen: list[list[torch.Tensor]] = []

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        kept: list[Any] = []
        made = [model.blocks[0](x)]
        for number, (ways, how) in enumerate(joints):
            joint = sum(WAYS[way](made[-1 - place % len(made)]) for place, way in ways)
            assert isinstance(joint, torch.Tensor)
            made.append(watched(model.blocks[1 + number % 5](torch.tanh(joint)), how, kept))  # or they grow
        loss = made[-1].pow(2).mean() + made[0].mean()
        checks.append(lambda: seen.append(gradients_kept(kept)))
        return loss

    checks: list[Callable[[], None]] = []
    make = network(forward)

    def checked() -> Any:
        training = make()

        def run(k: int) -> torch.Tensor:
            checks.clear()
            loss = training.run(k)
            checks[-1]()
            return loss

        return replace(training, run=run)

    plain = train_plain(checked, STEPS)
    seen_plain, seen[:] = list(seen), []
    budget = 1 << 40 if share > 1 else int(share * bounds_of(make)[0])
    while True:
        seen.clear()
        try:
            ours, _ = train_in_session(checked, STEPS, budget=budget, policy=policy)
            break
        except outgrow.BudgetTooSmall as error:
            budget = int(1.05 * error.least_bytes)
    assert ours == plain
    assert len(seen) == len(seen_plain) == STEPS
    for mine, theirs in zip(seen, seen_plain, strict=True):
        assert len(mine) == len(theirs)
        assert all(map(torch.equal, mine, theirs))


def read_twice(gradient: torch.Tensor) -> torch.Tensor:
    """A sum one half of which is read again."""
    twice = gradient * 2
    thrice = twice + gradient
    return thrice * twice


with warnings.catch_warnings():  # that there are newer compilers
    warnings.simplefilter("ignore")
    # Compiled code holds what it works on as the engine does: by one reference of C++'s.
    read_again = torch.jit.script(read_twice)


class Scripted(torch.autograd.Function):
    """A formula that calls another node, and then adds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.node = (x.detach().requires_grad_() * 1.5).grad_fn
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return read_again(ctx.node(gradient)[0])


@pytest.mark.parametrize("where", ["a node's hook", "a module's hook", "a tensor's hook", "a formula"])
def test_sums_of_compiled_code_in_the_backward_pass_are_its_own(where: str) -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        inner = model.blocks[0](x)
        outer = inner + torch.tanh(model.blocks[1](inner))
        if where == "a node's hook":
            outer.grad_fn.register_hook(lambda made, given: (read_again(made[0]), made[1]))
        elif where == "a tensor's hook":
            outer.register_hook(read_again)
        elif where == "a formula":
            outer = Scripted.apply(outer)
        return model.blocks[2](outer).pow(2).mean()

    def build() -> nn.Module:
        model = ShortCuts()
        if where == "a module's hook":
            model.blocks[2].register_full_backward_hook(lambda module, made, given: (read_again(made[0]),))
        return model

    make = supervised(build, forward, shape=(ROWS, WIDTH))
    ours, _ = train_in_session(make, STEPS, budget=budget_for(make, 0.8))
    assert ours == train_plain(make, STEPS)


@pytest.mark.parametrize("how", ["compiled", "profiled"])
def test_no_step_leaves_anybody_looking_at_nodes(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    """PyTorch says so when somebody leaves who is not there; who came for him stays then."""
    training = network()()
    if how == "compiled":
        for block in training.models[0].blocks:
            block.compile(backend="aot_eager")
    with outgrow.Session(training.models, training.optimizers, budget=budget_for(network(), 0.8)) as session:
        for k in range(4):
            with session.step(), torch.profiler.profile() if how == "profiled" else nullcontext():
                training.run(k)
    assert "callback" not in capfd.readouterr().err


def test_a_signal_that_arrives_before_a_sum_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a value that the plan parks is waited for, as native code asked for it."""
    asked: list[int] = []
    start_out, before_write = Parking.start_out, ParkedStorages.before_write

    def started(self: Parking, value: int, offset: int) -> None:
        start_out(self, value, offset)
        if self.parked.all() and not asked:
            asked.append(1)
            self._pool.fast_path._let_go_of(self.parked.all()[0].record.address)
            asked.append(2)

    def interrupted(self: ParkedStorages, record: Any) -> None:
        if len(asked) == 1:
            signal.raise_signal(signal.SIGINT)
            with self._pool._interrupts.let_in():  # as where a copy is waited for
                pass
        before_write(self, record)

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        x = far = torch.tanh(model.blocks[0](x))
        for block in model.blocks[1:]:
            x = torch.tanh(block(x))
        return (x + far * 2).pow(2).mean()

    monkeypatch.setattr(Parking, "start_out", started)
    monkeypatch.setattr(ParkedStorages, "before_write", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            train_in_session(network(forward), 6, budget="1GiB", policy=ParkAll(prefetch=False))
    finally:
        signal.signal(signal.SIGINT, before)
    assert asked == [1, 2]


def test_graphs_of_gradients_sum_up_out_of_place() -> None:
    def twice(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).pow(2).mean(), x, create_graph=True)
        return slope.pow(2).sum()

    make = network(twice)
    ours, _ = train_in_session(make, STEPS, budget=budget_for(make, 0.8))
    assert ours == train_plain(make, STEPS)


def test_gradients_that_are_asked_for_stay_what_they_are() -> None:
    """Of a tensor whose own gradient goes on to be summed up with others."""

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        inner = model.blocks[0](x)
        outer = inner + torch.tanh(model.blocks[1](inner))
        loss: torch.Tensor = (outer + inner).pow(2).mean()
        asked = torch.autograd.grad(loss, (inner, outer), retain_graph=True)
        again = torch.autograd.grad(loss, (inner, outer), retain_graph=True)
        assert all(map(torch.equal, asked, again))
        return loss + sum(gradient.sum() for gradient in asked)

    make = network(forward)
    ours, _ = train_in_session(make, STEPS, budget=budget_for(make, 0.8))
    assert ours == train_plain(make, STEPS)


def test_a_step_with_a_mode_of_the_users_on_shows_it_the_sums() -> None:
    """Autograd itself sums up out of place then."""

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.sums = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.sums += str(func) == "aten.add.Tensor" and torch._C._current_graph_task_id() != -1
            return func(*args, **(kwargs or {}))

    training = network()()
    with outgrow.Session(training.models, training.optimizers, budget=budget_for(network(), 0.8)) as session:
        for k in range(STEPS):
            with session.step(), Names() as names:
                training.run(k)
            assert names.sums == 5
