"""A step without a plan parks what the program holds when an op would not fit otherwise; nobody can tell."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import outgrow
from outgrow import BudgetTooSmall, SpillError
from outgrow.planning.floor import least_budget
from outgrow.planning.parks import gaps, park
from outgrow.planning.plan import Plan, make_plan
from outgrow.planning.prefetch import with_prefetch
from outgrow.planning.problem import Problem
from outgrow.runtime.demand import Demand
from outgrow.runtime.need import Need
from outgrow.runtime.outcome import StepOutcome
from outgrow.runtime.parking import Parking
from outgrow.runtime.room import Room
from outgrow.runtime.tiers.disk import Slot, SpillFile
from outgrow.session.kind import StepKind
from outgrow.session.recorded import Recorded
from outgrow.tracing.ir import Trace
from outgrow.tracing.ledger import StorageRecord
from steps import Make, ParkAll, Training, train_in_session, train_plain
from test_parks import LOOKS, NETWORKS, Attention, Dense, Looked, Residual, supervised

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Seen:
    """What steps without a plan did: storages that were parked, and the traces that were recorded."""

    parked: list[StorageRecord] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Takes down what is parked on demand, and each trace."""
    found = Seen()
    park, learn = Parking.park, Recorded.learn

    def parking(self: Parking, records: Sequence[StorageRecord]) -> None:
        found.parked.extend(records)
        park(self, records)

    def learning(self: Recorded, outcome: StepOutcome, trace: Trace, *arguments: Any, **named: Any) -> StepKind:
        found.traces.append(trace)
        return learn(self, outcome, trace, *arguments, **named)

    monkeypatch.setattr(Parking, "park", parking)
    monkeypatch.setattr(Recorded, "learn", learning)
    return found


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> Seen:
    """In a step without a plan all that may leave leaves before each op."""
    prepare = Room.prepare

    def parking_all(self: Room, need: Need, where: str) -> None:
        if self._demand is not None and self._demand.on:
            self._demand.make_room(1 << 50)
        prepare(self, need, where)

    monkeypatch.setattr(Room, "prepare", parking_all)
    return seen


def in_first_step(make: Make, **options: Any) -> Any:
    """Train one step in a session with room enough."""
    return train_in_session(make, 1, budget="1GiB", policy="lru", **options)[0]


# --- the budget ---


class Hourglass(nn.Module):
    """A U-Net without pooling: all skips are as large as what they wait for."""

    def __init__(self, depth: int = 4, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.up = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.leave = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        skips = []
        for layer in self.down:
            x = layer(x).relu()
            skips.append(x)
        for layer, skip in zip(self.up, reversed(skips), strict=True):
            x = layer(x + skip).relu()
        return self.leave(x.mean((2, 3)))


class Curve(torch.autograd.Function):
    """Keeps what its backward pass wants by itself, as reversible networks and checkpoints of people's own do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.y = torch.tanh(x)
        return 2 * ctx.y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        y, ctx.y = ctx.y, None
        return 2 * gradient * (1 - y * y)


class Curves(nn.Module):
    """Layers between such functions, or functions alone."""

    def __init__(self, *, alone: bool = False) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.layers = nn.ModuleList(nn.Identity() if alone else nn.Conv2d(16, 16, 1) for _ in range(8))
        self.leave = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = Curve.apply(layer(x))
        return self.leave(x.mean((2, 3)))


def least_of(make: Make) -> int:
    """The least budget of any plan, in bytes."""

    def step() -> outgrow.TrainingStep:
        torch.manual_seed(0)
        training = make()
        return outgrow.TrainingStep(training.models, training.optimizers, lambda: training.run(0))

    hardware = outgrow.Hardware("any", 1 << 40, 1e11, 1e10, 1e9, 1e9)
    return least_budget(Problem(outgrow.trace(step, fake=False), hardware, 1, least_moved_bytes=1)).bytes


@pytest.mark.parametrize(
    "build",
    [
        lambda: Dense(8),
        Hourglass,
        Residual,
        lambda: Looked(None, None),
        Attention,
        lambda: Attention(of_torch=True),
        Curves,
        lambda: Curves(alone=True),
    ],
    ids=["dense", "hourglass", "residual", "looked", "attention", "torch-attention", "curves", "curves-alone"],
)
def test_the_first_step_fits_the_least_budget(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = supervised(build)
    budget = int(least_of(make) * 1.02) + 4096  # a few scalars, and the batch of the step before
    ours, summaries = train_in_session(make, 3, budget=budget)
    assert ours == train_plain(make, 3)
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)
    monkeypatch.setattr(Demand, "make_room", lambda self, need: None)
    with suppress(BudgetTooSmall):
        _, summaries = train_in_session(make, 1, budget=budget, policy="lru")  # a plan comes after that step
        assert summaries[0].measured_peak_bytes > budget  # a workspace that nobody guessed


@dataclass(frozen=True)
class CopyAll:
    """Copies every saved value out, and parks one: a recorded step must find the rest of its room by itself."""

    name: str = "copy-all"

    def plan(self, problem: Problem) -> Plan:
        parks = (item for gap in gaps(problem) if (item := park(problem, gap)) is not None)
        return make_plan(
            self.name, problem, with_prefetch(problem, problem.candidates), parks=tuple(islice(parks, 1))
        )


@pytest.mark.usefixtures("one_by_one")
def test_what_a_plan_still_copies_out_leaves_where_the_program_holds_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    write = SpillFile.write

    def slow(self: SpillFile, slot: Slot, address: int) -> None:
        time.sleep(0.05)
        write(self, slot, address)

    monkeypatch.setattr(SpillFile, "write", slow)
    make = supervised(Hourglass)
    budget = int(least_of(make) * 1.05) + 4096
    ours, summaries = train_in_session(make, 2, budget=budget, policy=CopyAll())
    assert ours == train_plain(make, 2)
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)


# --- values, traces ---


def shape_of(trace: Trace) -> tuple[Any, ...]:
    """What a trace says of a step, but for times and the names of storages."""
    names: dict[int, int] = {}
    values = [(names.setdefault(value.storage, len(names)), replace(value, storage=0)) for value in trace.values]
    ops = [(op.name, op.phase, op.module, op.inputs, op.outputs, op.workspace_bytes) for op in trace.ops]
    return ops, values, trace.saved, trace.ticks


@pytest.mark.parametrize("network", NETWORKS)
def test_the_trace_is_that_of_the_plain_step(network: str, seen: Seen, request: pytest.FixtureRequest) -> None:
    make = supervised(NETWORKS[network])
    in_first_step(make)
    assert not seen.parked
    request.getfixturevalue("eager")
    assert in_first_step(make) == train_plain(make, 1)
    assert seen.parked
    assert shape_of(seen.traces[0]) == shape_of(seen.traces[1])


def penalised(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
    x.requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True, retain_graph=True)
    return out + gradient.pow(2).mean()


def written(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
    assert isinstance(model, Looked)
    aside = model.enter(x) * 2
    window = aside[1:]
    h = model.enter(x).sigmoid()
    for number, layer in enumerate(model.layers):
        h = layer(h).tanh()
        if number in (2, 4):
            window.add_(h[1:], alpha=0.5)
            aside.data.mul_(1.5)
    return model.leave((h + aside).mean((2, 3)))


def checkpointed(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
    assert isinstance(model, Looked)
    skip = model.enter(x).sigmoid()
    h = skip
    for layer in model.layers:
        h = checkpoint(lambda h, layer=layer: layer(h).tanh() + skip, h, use_reentrant=False)
    return model.leave((h + skip).mean((2, 3)))


@pytest.mark.parametrize("forward", [penalised, written, checkpointed])
def test_unusual_steps(forward: Callable[[nn.Module, torch.Tensor, int], torch.Tensor], eager: Seen) -> None:
    make = supervised(lambda: Looked(None, None), forward)
    assert in_first_step(make) == train_plain(make, 1)
    assert eager.parked


def test_a_recorded_step_that_leaves_its_plan(eager: Seen) -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        assert isinstance(model, Looked)
        skip = model.enter(x).sigmoid()
        h = skip
        for layer in model.layers[: 3 if k == 1 else 5]:
            h = layer(h).tanh()
        return model.leave((h + skip).mean((2, 3)))

    make = supervised(lambda: Looked(None, None), forward)
    ours, _ = train_in_session(make, 4, budget="1GiB", policy=ParkAll(speed=1e9))
    assert ours == train_plain(make, 4)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_past_the_dispatcher_sees_the_value(look: str, when: str, eager: Seen) -> None:
    before, after = (LOOKS[look] if when == moment else None for moment in ("before", "after"))
    make = supervised(lambda: Looked(before, after))
    assert in_first_step(make) == train_plain(make, 1)
    assert eager.parked


def read_unseen(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, as a kernel reads them that was bound past PyTorch's dispatcher."""
    with torch._C.DisableTorchFunction():
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def test_a_function_hands_kernels_of_its_own_what_it_made_and_kept(eager: Seen) -> None:
    found: list[bytes] = []

    class Bound(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.kept = [x.sin()]
            made = x.cos()
            out = torch.zeros_like(x)  # all that may leave leaves for this
            found.append(read_unseen(made))
            return out.add_(made)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(gradient)
            found.append(read_unseen(ctx.kept[0]))
            return out.sub_(ctx.kept[0] * gradient)

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        x = model.enter(x)
        for _ in range(3):
            x = Bound.apply(x)
        return model.leave(x.mean((2, 3)))

    make = supervised(Curves, forward)
    plain = train_plain(make, 1)
    read, found[:] = list(found), []
    assert in_first_step(make) == plain
    assert eager.parked
    assert found == read


def test_what_was_shown_stays(eager: Seen) -> None:
    arrays: list[tuple[np.ndarray[Any, Any], int]] = []

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        assert isinstance(model, Looked)
        skip = model.enter(x).sigmoid()
        arrays.append((skip.detach().numpy(), skip.data_ptr()))
        h = skip
        for layer in model.layers:
            h = layer(h).tanh()
            ((array, address),) = arrays
            assert skip.untyped_storage().nbytes() == array.nbytes
            assert (array.ctypes.data, skip.data_ptr()) == (address, address)
        arrays.clear()
        return model.leave((h + skip).mean((2, 3)))

    make = supervised(lambda: Looked(None, None), forward)
    assert in_first_step(make) == train_plain(make, 1)
    assert eager.parked


@pytest.mark.parametrize("look", ["numpy", "data_ptr", "dlpack"])
def test_hooks_in_the_backward_pass_see_a_gradient_that_waits(look: str, eager: Seen) -> None:
    numbers: list[float] = []

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        def forward_hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            out.register_hook(lambda gradient: numbers.append(LOOKS[look](gradient.detach())()))

        hooks = [layer.register_forward_hook(forward_hook) for layer in model.modules()]
        out = model(x)
        for hook in hooks:
            hook.remove()
        assert isinstance(out, torch.Tensor)
        return out

    make = supervised(lambda: Residual(inplace=False), forward)
    ours, mine = in_first_step(make), numbers[:]
    numbers.clear()
    assert ours == train_plain(make, 1)
    assert mine == numbers
    assert eager.parked


def test_training_state_stays(eager: Seen) -> None:
    states: list[torch.UntypedStorage | None] = []

    def make() -> Training:
        model = Residual()
        opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))

        def run(k: int) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            with torch._C.DisableTorchFunction():
                states.extend(parameter.grad.untyped_storage() for parameter in model.parameters())  # type: ignore[union-attr]
                states.extend(state["momentum_buffer"].untyped_storage() for state in opt.state.values())
            return loss.detach()

        return Training([model], [opt], run)

    in_first_step(make)
    assert eager.parked
    assert not {id(storage) for storage in states} & {id(record.storage()) for record in eager.parked}


# --- code that nobody sees ---


def unseen(take: Callable[[], float]) -> float:
    """Call what neither Python functions nor the dispatcher show, as a kernel bound by pybind would be."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return take()


def kernel(given: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        out = torch.empty_like(given)

    def fill() -> float:
        assert kept.untyped_storage().nbytes() > 0
        out.detach().numpy()[...] = given.detach().numpy() + kept.detach().numpy()
        return 0.0

    unseen(fill)
    return out


def by_python(given: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(given)
    address = unseen(kept.data_ptr)
    assert address
    numbers = np.ctypeslib.as_array((ctypes.c_float * kept.numel()).from_address(int(address)))
    out.copy_(torch.from_numpy(numbers.copy()).view_as(kept) + given)
    return out


def sparse(given: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    values = (kept[0] * 2).reshape(-1)
    where = torch.arange(values.numel())[None]
    matrix = torch.sparse_coo_tensor(where, values, (values.numel(),))
    for _ in range(3):
        given = given * 1.5
    return given + matrix.to_dense().view_as(kept[0])


@pytest.mark.parametrize("strange", [kernel, by_python, sparse])
def test_nothing_is_away_where_strangers_run(
    strange: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], eager: Seen
) -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        assert isinstance(model, Looked)
        skip = model.enter(x).sigmoid()
        h = skip
        for layer in model.layers:
            h = layer(h).tanh()
        with torch.no_grad():
            aside = strange(h, skip)
        return model.leave((h + skip + aside).mean((2, 3)))

    make = supervised(lambda: Looked(None, None), forward)
    assert in_first_step(make) == train_plain(make, 1)
    assert eager.parked


@torch.library.custom_op("outgrow_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_nothing_is_away_while_an_op_of_another_library_runs(eager: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    away: list[bool] = []
    prepare = Room.prepare

    def looking(self: Room, need: Need, where: str) -> None:
        prepare(self, need, where)
        if where.startswith("outgrow_tests"):
            assert self._parked is not None
            away.append(self._parked.busy)

    monkeypatch.setattr(Room, "prepare", looking)

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        assert isinstance(model, Looked)
        skip = model.enter(x).sigmoid()
        h = skip
        for layer in model.layers:
            h = layer(h).tanh()
            with torch.no_grad():
                doubled = twice(h)
            h = h + doubled
        return model.leave((h + skip).mean((2, 3)))

    make = supervised(lambda: Looked(None, None), forward)
    assert in_first_step(make) == train_plain(make, 1)
    assert eager.parked
    assert away == [False] * 5


# --- when something goes wrong ---


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("what", ["error", "write", "read"])
def test_after_a_fault_everything_is_back_and_the_file_is_empty(
    what: str, eager: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Looked(None, None)
    kept: list[torch.Tensor] = []
    true: list[torch.Tensor] = []
    fails = True

    def waits(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        kept.append(out.sigmoid())
        true.append(out.detach().clone())

    def stops(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if fails and what == "error":
            raise ZeroDivisionError

    def broken(self: SpillFile, slot: Slot, address: int) -> None:
        if fails and len(eager.parked) > 4:
            raise SpillError(5, "no luck")
        move(self, slot, address)

    if what != "error":
        move = getattr(SpillFile, what)
        monkeypatch.setattr(SpillFile, what, broken)
    model.enter.register_forward_hook(waits)
    model.layers[-1].register_forward_hook(stops)
    x = torch.randn(8, 3, 32, 32)
    with outgrow.Session(model, budget="1GiB", policy="lru") as session:
        with pytest.raises(ZeroDivisionError if what == "error" else SpillError), session.step():
            model(x).sum().backward()
        assert eager.parked
        assert session._spill._end == session._spill._planned_end
        if what != "read":  # else the value is lost
            assert torch.equal(kept[0].detach(), true[0].sigmoid())
        kept.clear()
        true.clear()
        fails = False
        with session.step():
            F.cross_entropy(model(x), torch.zeros(8, dtype=torch.int64)).backward()
        assert torch.equal(kept[0].detach(), true[0].sigmoid())
        assert session._spill._end == session._spill._planned_end


def test_a_second_step_that_holds_more_than_the_first_fits_all_the_same(seen: Seen) -> None:
    """It is recorded, too, but under a plan: one that knows nothing of what the program holds from here on."""
    extra = 1 << 17  # numbers in each of what it holds

    def make() -> Training:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def run(k: int) -> torch.Tensor:
            held = [torch.full((extra,), float(i)).sin() for i in range(4)] if k else []
            loss = model(torch.randn(1024, 128, generator=torch.Generator().manual_seed(k))).sum() * 1e-3
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach() + sum(float(item.sum()) for item in held)

        return Training([model], [optimizer], run)

    plain = train_plain(make, 6)
    budget = 3_200_000
    ours, summaries = train_in_session(make, 6, budget=budget)
    assert ours == plain
    assert max(summary.measured_peak_bytes for summary in summaries) <= budget
    assert seen.parked
