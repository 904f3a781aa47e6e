"""Modules that `torch.compile` compiled stay compiled in a session, train to the same bits and inside the budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import outgrow
from outgrow.errors import BudgetTooSmall
from outgrow.runtime.compiled import CompiledCode
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.tiers.arena import find_arena
from outgrow.runtime.tiers.disk import Slot, SpillFile
from outgrow.tracing.compiled import COMPILED, compiled_modules
from outgrow.tracing.ir import Phase
from outgrow.tracing.probe import probing
from steps import (
    Make,
    ParkAll,
    RandomDecisions,
    Training,
    bounds_of,
    budget_for,
    digest,
    momentum,
    train_in_session,
    train_plain,
)
from test_cuda_session import CountedRam, Fakes, fakes

__all__ = ["fakes"]  # a fixture

MiB = 1 << 20
WIDTH, BATCH, BLOCKS = 64, 512, 4

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    if find_arena() is None:
        pytest.skip("needs a C++ compiler")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A transformer's, without attention."""

    def __init__(self, dropout: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Breaking(Block):
    """One that a compiler takes for two functions, with an op in between that it leaves alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x.tanh())


Compile = Callable[[nn.Module], nn.Module]


def compiled(block: nn.Module, backend: Any) -> nn.Module:
    block.compile(backend=backend)
    return block


def in_place(block: nn.Module) -> nn.Module:
    return compiled(block, "aot_eager")


def around(block: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
    return compiled


def training(make: Callable[[], nn.Module] = Block, compile: Compile = in_place, passes: int = 1) -> Make:
    """Steps of a chain of blocks, each compiled, and an op in between that is not."""

    def made() -> Training:
        torch.manual_seed(0)
        model = nn.ModuleList(compile(make()) for _ in range(BLOCKS))
        optimizer = momentum(model.parameters())

        def run(k: int) -> torch.Tensor:
            total = torch.zeros(())
            for part in range(passes):
                x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(passes * k + part))
                for block in model:
                    x = F.gelu(block(x))
                loss = x.square().mean()
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

        return Training([model], [optimizer], run)

    return made


def graphs() -> int:
    """How many the compiler has made."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def least_budget_of(make: Make, policy: str = "auto") -> int:
    """Found as a user would: the error says how much more is needed."""
    budget = 1 * MiB
    for _ in range(20):
        try:
            train_in_session(make, 3, budget=budget, policy=policy)
        except BudgetTooSmall as error:
            budget = max(error.least_bytes, budget + 4096)
        else:
            return budget
    raise AssertionError("no budget was ever enough")


KINDS: dict[str, tuple[Callable[[], nn.Module], Compile, int]] = {
    "blocks": (Block, in_place, 1),
    "as modules": (Block, around, 1),
    "dropout": (partial(Block, dropout=0.2), in_place, 1),
    "batch norm": (partial(Block, batch_norm=True), in_place, 1),
    "graph breaks": (Breaking, in_place, 1),
    "accumulation": (Block, in_place, 3),
}


CASES = [
    *(("blocks", policy) for policy in ("auto", "lru", "superneurons", "checkpoint")),
    *((kind, "vdnn-all") for kind in KINDS),
]


@pytest.mark.parametrize(("kind", "policy"), CASES)
def test_training_is_plain_compiled_training_to_the_bit(kind: str, policy: str) -> None:
    make = training(*KINDS[kind])
    plain = train_plain(make, 6)
    compiled = graphs()
    budget = budget_for(make, 0.7)
    ours, summaries = train_in_session(make, 6, budget=budget, policy=policy)
    assert ours == plain
    assert graphs() <= 2 * compiled, "the same graphs again, for the model that was built anew"
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)
    assert summaries[-1].offloaded_bytes + summaries[-1].recomputed_bytes > 0


@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_what_the_program_recomputes_stays_compiled(policy: str) -> None:
    """It recomputes where a formula takes up what it saved, while the step's mode is hidden."""

    def made() -> Training:
        torch.manual_seed(0)
        model = nn.ModuleList(in_place(Block()) for _ in range(BLOCKS))
        optimizer = momentum(model.parameters())

        def run(k: int) -> torch.Tensor:
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(k))
            for block in model:
                x = checkpoint(lambda given, block=block: block(given).sigmoid(), x, use_reentrant=False)
            loss = x.pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Training([model], [optimizer], run)

    plain = train_plain(made, 5)
    compiled = graphs()
    for share in (4.0, 1.1):
        ours, _ = train_in_session(made, 5, budget=int(bounds_of(made)[0] * share), policy=policy)
        assert ours == plain
    assert graphs() <= 4 * compiled


@pytest.mark.parametrize("compile", [in_place, around])
def test_nothing_is_compiled_anew_in_a_session(compile: Compile) -> None:
    make = training(compile=compile)
    made = make()
    for k in range(2):
        made.run(k)
    compiled = graphs()
    with outgrow.Session(made.models, made.optimizers, budget=budget_for(make, 0.7), policy="vdnn-all") as session:
        for k in range(2, 8):
            with session.step():
                made.run(k)
        assert session.plan is not None
        ops = [op for op in session.plan.problem.trace.ops if op.name == "outgrow.compiled"]
    assert graphs() == compiled
    assert [op.module for op in ops] == [*map(str, range(BLOCKS)), *map(str, reversed(range(BLOCKS)))]
    assert all(op.outputs and op.seconds > 0 for op in ops)
    assert not session.plan.parks, "nobody sees what compiled code reads"


def test_modules_are_as_they_were_after_each_step_even_one_that_fails() -> None:
    made = training()()
    block = made.models[0][0]  # type: ignore[index]
    usual = block._compiled_call_impl
    with outgrow.Session(made.models, made.optimizers, budget="64MiB", policy="vdnn-all") as session:
        with session.step():
            made.run(0)
            assert block._compiled_call_impl is not usual
        assert block._compiled_call_impl is usual

        def fail() -> None:
            with session.step():
                block(torch.randn(BATCH, WIDTH + 1))

        with pytest.raises(RuntimeError):
            fail()
        assert block._compiled_call_impl is usual
        assert torch._C._len_torch_dispatch_stack() == 0
        with session.step():
            made.run(1)


def test_what_compiled_code_asked_for_counts_until_it_is_over() -> None:
    built = training()()
    with outgrow.Session(built.models, built.optimizers, budget="1GiB") as session:
        for k in range(3):
            with session.step():
                built.run(k)
        assert session.plan is not None
        trace = session.plan.problem.trace
    asked = [saved for saved in trace.saved if saved.unpacked and trace.ops[saved.unpacked[-1]].name == COMPILED.name]
    assert len({saved.unpacked[-1] for saved in asked}) == BLOCKS
    assert all(saved.released > saved.unpacked[-1] for saved in asked)


def test_what_compiled_code_makes_counts() -> None:
    """Live bytes are looked at after every op of the compiled code, in all steps, the first one too."""
    seen: list[int] = []
    opened: list[outgrow.Session] = []

    class Looking(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if opened:
                seen.append(opened[0].live_bytes)
            return result

    def look(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return make_boxed_func(lambda *args: Looking(graph).run(*args))

    backend = aot_autograd(fw_compiler=look)

    def compile(block: nn.Module) -> nn.Module:
        block.compile(backend=backend)
        return block

    make = training(compile=compile)
    plain = train_plain(make, 5)
    budget = budget_for(make, 0.6)
    made = make()
    torch.manual_seed(1)
    losses = []
    with outgrow.Session(made.models, made.optimizers, budget=budget) as session:
        opened.append(session)
        for k in range(5):
            with session.step():
                losses.append(float(made.run(k)))
        peaks = [summary.measured_peak_bytes for summary in session.history]
    assert tuple(losses) == plain.losses
    assert max(seen) <= budget
    assert max(seen) > 0.8 * budget, "they are seen, indeed"
    assert max(seen) <= max(peaks) <= budget


def test_a_plan_for_the_model_before_it_was_compiled_is_not_followed() -> None:
    """It may have parameters leave while compiled code reads them."""
    eager = training(compile=lambda block: block)

    def step() -> outgrow.TrainingStep:
        made = eager()
        return outgrow.TrainingStep(made.models, made.optimizers, lambda: made.run(0))

    budget = budget_for(eager, 0.8)
    hardware = outgrow.Hardware("any", 1 << 40, 1e11, 1e10, 1e9, 1e9)
    plan = outgrow.plan(outgrow.trace(step, fake=True), budget=budget, policy=ParkAll(), hardware=hardware)
    assert plan.parks
    make = training()
    ours, summaries = train_in_session(make, 4, budget=budget, policy="vdnn-all", plan=plan)
    assert ours == train_plain(make, 4)
    assert summaries[0].predicted_peak_bytes is None


@pytest.mark.parametrize("compile", [in_place, around])
def test_where_everything_fits_compiled_code_is_let_alone(compile: Compile) -> None:
    """Nobody watches such steps, and the compiler does not look into what the hooks do."""
    make = training(compile=compile)
    plain = train_plain(make, 5)
    compiled = graphs()
    ours, summaries = train_in_session(make, 5, budget="1GiB")
    assert ours == plain
    assert summaries[-1].offloaded_bytes == 0
    assert graphs() <= 2 * compiled


def test_functions_that_were_compiled_train_to_the_same_bits() -> None:
    feed_forward = torch.compile(lambda x, block: block.down(F.gelu(block.up(x))), backend="aot_eager")

    class Calling(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = feed_forward(self.norm(x), self)
            return result

    make = training(Calling, compile=lambda block: block)
    plain = train_plain(make, 5)
    for budget in (budget_for(make, 0.7), "1GiB"):
        ours, _ = train_in_session(make, 5, budget=budget, policy="vdnn-all")
        assert ours == plain


def test_a_batch_of_another_size_spoils_nothing() -> None:
    """In steps that nobody watched so far, which then leave their plan."""

    def make() -> Training:
        torch.manual_seed(0)
        # The first, which is not compiled, is where such a step is found out.
        model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), *(in_place(Block()) for _ in range(3))])
        optimizer = momentum(model.parameters())

        def run(k: int) -> torch.Tensor:
            x = torch.randn(BATCH // (3 if k in (4, 7) else 1), WIDTH, generator=torch.Generator().manual_seed(k))
            for block in model:
                x = F.gelu(block(x))
            loss = x.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Training([model], [optimizer], run)

    plain = train_plain(make, 10)
    torch._dynamo.reset()
    made = make()
    torch.manual_seed(1)
    losses = []
    with outgrow.Session(made.models, made.optimizers, budget="1GiB") as session:
        for k in range(10):
            with session.step():
                losses.append(float(made.run(k)))
    assert (tuple(losses), digest(made.models, made.optimizers)) == (plain.losses, plain.state)
    block = made.models[0][1]  # type: ignore[index]
    for batch in (BATCH, BATCH // 3):
        assert "CompiledFunction" in block(torch.randn(batch, WIDTH)).grad_fn.name()


class Dense(nn.Module):
    """A layer that reads what all before it have made, as DenseNet's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH * (number + 1))
        self.down = nn.Linear(WIDTH * (number + 1), WIDTH)

    def forward(self, *made: torch.Tensor) -> torch.Tensor:
        return F.relu(self.down(F.relu(self.norm(torch.cat(made, 1)))))


def dense(compile: Compile = in_place) -> Training:
    torch.manual_seed(0)
    model = nn.ModuleList(compile(Dense(number)) for number in range(BLOCKS))
    optimizer = momentum(model.parameters())

    def run(k: int) -> torch.Tensor:
        made = [torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(k))]
        for layer in model:
            made.append(layer(*made))
        loss = torch.cat(made, 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training([model], [optimizer], run)


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_change_no_bit(seed: int) -> None:
    plain = train_plain(dense, 4)
    budget = budget_for(dense, 0.75 + 0.06 * seed)
    ours, summaries = train_in_session(dense, 4, budget=budget, policy=RandomDecisions(seed))
    assert ours == plain
    assert max(summary.measured_peak_bytes for summary in summaries) <= budget


@pytest.mark.parametrize("counts_blocks", [True, False])
def test_what_comes_back_ahead_of_time_leaves_compiled_code_its_room(
    monkeypatch: pytest.MonkeyPatch, counts_blocks: bool
) -> None:
    """Nor does what a plan brings back while it is measured: on GPUs, in the second step."""
    plain = train_plain(dense, 6)
    least = least_budget_of(dense, "vdnn-all")
    if not counts_blocks:
        monkeypatch.setattr(FastPath, "most_bytes", property(lambda fast: None))
    for share in (1.0, 1.15):
        budget = int(least * share)
        ours, summaries = train_in_session(dense, 6, budget=budget, policy="vdnn-all")
        assert ours == plain
        assert max(summary.measured_peak_bytes for summary in summaries) <= budget, f"{share:.0%}"


@pytest.mark.parametrize("counts_blocks", [True, False])
def test_compiled_code_that_seemed_to_take_less_is_left_its_room(
    monkeypatch: pytest.MonkeyPatch, counts_blocks: bool
) -> None:
    """As its first run, or its compiler's, let go of what the program had before: of an earlier training, say."""
    rubbish: list[torch.Tensor] = []

    def compile_backward(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            rubbish.clear()
            return graph(*args)

        return make_boxed_func(run)

    def littered() -> Training:
        with probing("cpu", []):  # what it saw allocated it sees freed
            rubbish.append(torch.empty(MiB // 8))
        return clean()

    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=compile_backward)
    clean = partial(dense, partial(compiled, backend=backend))
    least = least_budget_of(clean, "vdnn-all")
    plain = train_plain(littered, 6)
    if not counts_blocks:
        monkeypatch.setattr(FastPath, "most_bytes", property(lambda fast: None))
    for share in (1.0, 1.15):
        budget = int(least * share)
        ours, summaries = train_in_session(littered, 6, budget=budget, policy="vdnn-all")
        assert ours == plain
        assert max(summary.measured_peak_bytes for summary in summaries) <= budget, f"{share:.0%}"


class Failing:
    """A compiler whose code fails when it is told to, forward or backward."""

    def __init__(self) -> None:
        self.now = ""
        self.backend = aot_autograd(fw_compiler=self._compiled("forward"), bw_compiler=self._compiled("backward"))

    def _compiled(self, direction: str) -> Callable[..., Any]:
        def compile(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                if self.now == direction:
                    raise ArithmeticError(f"in the {direction} pass")
                return graph(*args)

            return make_boxed_func(run)

        return compile


@pytest.mark.parametrize("step", [0, 4])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_program_may_go_on_after_compiled_code_that_failed(direction: str, step: int) -> None:
    """In the same step: a batch that is skipped."""

    def train(budget: int | None) -> tuple[list[float], str]:
        failing = Failing()

        def compile(block: nn.Module) -> nn.Module:
            block.compile(backend=failing.backend)
            return block

        torch._dynamo.reset()
        made = training(compile=compile)()
        session = None
        if budget is not None:
            options = {"budget": budget, "policy": "vdnn-all", "least_moved_bytes": 1}
            session = outgrow.Session(made.models, made.optimizers, **options)
        losses = []
        for k in range(6):
            with nullcontext() if session is None else session.step():
                if k == step:
                    failing.now = direction
                    with pytest.raises(ArithmeticError, match=direction):
                        made.run(100)
                    failing.now = ""
                    made.optimizers[0].zero_grad()
                losses.append(float(made.run(k)))
        if session is not None:
            assert all(summary.measured_peak_bytes <= session.budget_bytes for summary in session.history)
            session.close()
        assert torch._C._len_torch_dispatch_stack() == 0
        return losses, digest(made.models, made.optimizers)

    plain = train(None)
    assert train(budget_for(training(), 0.9)) == plain


class Nothing(TorchDispatchMode):
    """A mode of the user's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("why", ["another mode", "nobody counts"])
def test_where_compiled_code_cannot_be_let_alone_it_runs_op_by_op_for_the_while(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "nobody counts":
        monkeypatch.setattr(FastPath, "counts", property(lambda fast: False))
    make = training()
    made = make()
    made.run(0)
    compiled = graphs()
    with outgrow.Session(made.models, made.optimizers, budget=budget_for(make, 0.7), policy="lru") as session:
        for k in range(1, 4):
            with session.step(), Nothing() if why == "another mode" else nullcontext():
                made.run(k)
        assert session.plan is not None
        assert "outgrow.compiled" not in [op.name for op in session.plan.problem.trace.ops]
    # And is compiled again afterwards.
    block, x = made.models[0][0], torch.randn(BATCH, WIDTH)  # type: ignore[index]
    assert "CompiledFunction" in block(x).grad_fn.name()
    assert graphs() == compiled


def test_a_budget_below_what_one_module_needs_is_refused() -> None:
    make = training()
    least = least_budget_of(make)
    assert least < budget_for(make, 0.6)
    ours, summaries = train_in_session(make, 5, budget=least)
    assert ours == train_plain(make, 5)
    assert max(summary.measured_peak_bytes for summary in summaries) <= least


def test_what_belongs_to_a_compiled_module_is_not_compiled_by_itself() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3))
    assert compiled_modules([model]) == ()
    model[0][0].compile(backend="eager")
    model[0].compile(backend="eager")
    assert compiled_modules([model]) == (model[0],)
    whole = torch.compile(model, backend="eager")
    assert compiled_modules([whole]) == (whole,)


def test_compiled_code_by_inductor_trains_to_the_same_bits() -> None:
    def compile(block: nn.Module) -> nn.Module:
        block.compile()
        return block

    make = training(compile=compile)
    plain = train_plain(make, 5)
    ours, summaries = train_in_session(make, 5, budget=budget_for(make, 0.7), policy="vdnn-all")
    assert ours == plain
    assert summaries[-1].offloaded_bytes > 0


class Checkpointed(Block):
    """One whose compiled backward pass draws its dropout once more, by an operator that is given another one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return made


def test_checkpoints_may_be_compiled_too() -> None:
    make = training(partial(Checkpointed, 0.2))
    plain = train_plain(make, 5)
    ours, summaries = train_in_session(make, 5, budget="1GiB", policy="vdnn-all")
    assert ours == plain
    assert summaries[-1].offloaded_bytes > 0


@pytest.mark.parametrize("luck", [0.0, 0.5])
def test_on_the_engine_of_gpus_too(
    fakes: Callable[..., Fakes],
    monkeypatch: pytest.MonkeyPatch,
    luck: float,
) -> None:
    """Where the backward pass may run on another thread, and copies are ordered by events alone."""
    made = fakes(luck=luck)
    monkeypatch.setattr(FastPath, "counts", property(lambda fast: True))
    make = training()
    plain = train_plain(make, 5)
    budget = budget_for(make, 0.8) + 2 * CountedRam.LIBRARY_BYTES
    ours, summaries = train_in_session(make, 5, budget=budget, policy="vdnn-all")
    assert ours == plain
    assert summaries[-1].offloaded_bytes > 0
    assert [streams.races for streams in made.streams] == [[]]
    assert made.memory[0].gates > 0


def test_what_comes_back_twice_for_compiled_code_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the budget a value that came back leaves again for the next one, and comes back once more."""
    make = training()
    _, free = train_in_session(make, 3, budget="1GiB")
    budget = int(free[-1].measured_peak_bytes * 0.6)

    def rises() -> list[int]:
        built = make()
        with outgrow.Session(built.models, built.optimizers, budget=budget, policy="lru") as session:
            for k in range(3):
                with session.step():
                    built.run(k)
            return sorted(session._executor._compiled._rises.values())

    once = rises()
    arrived = CompiledCode.arrived

    def twice(self: CompiledCode, nbytes: int) -> None:
        arrived(self, nbytes)
        arrived(self, nbytes)

    monkeypatch.setattr(CompiledCode, "arrived", twice)
    assert rises() == once


@pytest.mark.usefixtures("one_by_one")
def test_waiting_for_copies_is_not_the_time_of_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    make = training()
    read = SpillFile.read

    def slow(self: SpillFile, slot: Slot, address: int) -> None:
        time.sleep(0.04)
        read(self, slot, address)

    monkeypatch.setattr(SpillFile, "read", slow)
    _, free = train_in_session(make, 3, budget="1GiB")
    budget = int(free[-1].measured_peak_bytes * 0.6)
    built = make()
    with outgrow.Session(built.models, built.optimizers, budget=budget, policy="lru") as session:
        for k in range(2):
            with session.step():
                built.run(k)
        assert session.plan is not None
        ops = session.plan.problem.trace.ops
    backward = [op.seconds for op in ops if op.phase is Phase.BACKWARD and op.name == COMPILED.name]
    assert len(backward) == BLOCKS
    assert median(backward) < 0.04
