"""Values that the program holds and nobody reads leave the device and come back; nobody can tell."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import outgrow
import steps
from outgrow.planning.parks import Gap, away, gaps, park, parks_for
from outgrow.planning.plan import Park, Plan, make_plan
from outgrow.planning.policies import Policy
from outgrow.planning.problem import Problem
from outgrow.runtime.parked import Parked, ParkedStorages
from outgrow.runtime.parking import Parking
from outgrow.runtime.tiers.disk import Slot, SpillFile
from outgrow.tracing.ir import Event, Kind, Op, Phase, Saved, Tick, Trace, Value
from outgrow.tracing.ledger import StorageRecord
from outgrow.tracing.ops import OpFacts
from steps import (
    ParkAll,
    ParkToFit,
    Training,
    assert_equal_to_plain,
    bounds_of,
    budget_for,
    momentum,
    train_in_session,
    train_plain,
    with_disk,
)

PARKING = (
    ParkAll(),
    ParkAll("park-all-late", prefetch=False),
    ParkAll("park-and-offload", offload=True),
    ParkToFit(),
)


class Skip(nn.Module):
    """A small U-Net: what goes down waits for what comes up."""

    def __init__(self, depth: int = 3, width: int = 16, *, inplace: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.up = nn.ModuleList(nn.Conv2d(2 * width, width, 3, padding=1) for _ in range(depth))
        self.leave = nn.Conv2d(width, 10, 1)
        self.act = nn.ReLU(inplace=inplace)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        skips = []
        for layer in self.down:
            x = self.act(layer(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        for layer, skip in zip(self.up, reversed(skips), strict=True):
            x = F.interpolate(x, scale_factor=2.0)
            x = self.dropout(self.act(layer(torch.cat([x, skip], 1))))
        return self.leave(x).mean((2, 3))


class Dense(nn.Module):
    """A small DenseNet block: each layer reads all features before it, of which Python holds a list."""

    def __init__(self, layers: int = 5, growth: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, growth, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(growth * (n + 1)), nn.ReLU(), nn.Conv2d(growth * (n + 1), growth, 3, padding=1)
            )
            for n in range(layers)
        )
        self.leave = nn.Linear(growth * (layers + 1), 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [self.enter(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.leave(torch.cat(features, 1).mean((2, 3)))


class Residual(nn.Module):
    """Residual blocks with a projection: a gradient waits for its other half."""

    def __init__(self, blocks: int = 3, width: int = 16, *, inplace: bool = True) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=inplace),
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.shortcuts = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(blocks))
        self.act = nn.ReLU(inplace=inplace)
        self.leave = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block, shortcut in zip(self.blocks, self.shortcuts, strict=True):
            x = self.act(shortcut(x) + block(x))
        return self.leave(x.mean((2, 3)))


class Collect(nn.Module):
    """Every layer's result waits in a list for the end."""

    def __init__(self, layers: int = 10, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(layers))
        self.leave = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        found = []
        for layer in self.layers:
            x = layer(x).tanh()
            found.append(x)
        total = found[0]
        for item in found[1:]:
            total = total + item
        return self.leave(total.mean((2, 3)))


supervised = partial(steps.supervised, optimize=momentum)


class Attention(nn.Module):
    """Self-attention with weights for all pairs of pixels, beside which queries, keys and values are large."""

    def __init__(self, width: int = 64, *, of_torch: bool = False) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 4, stride=4)
        self.of_torch = nn.MultiheadAttention(width, 2, dropout=0.2, batch_first=True) if of_torch else None
        self.three = nn.Linear(width, 3 * width)
        self.leave = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x).flatten(2).transpose(1, 2)
        if self.of_torch is not None:
            mixed, _ = self.of_torch(x, x, x, need_weights=False)
        else:
            q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.three(x).chunk(3, dim=2))
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2).transpose(1, 2).flatten(2)
        return self.leave((x + mixed).mean(1))


class Mixer(nn.Module):
    """Mixes pixels by a product with what is in another order, and compares features by a function of many ops."""

    def __init__(self, width: int = 64, pixels: int = 64) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 4, stride=4)
        self.mix = nn.Linear(pixels, 2 * pixels)
        self.leave = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x).flatten(2).transpose(1, 2).tanh()
        mixed = self.mix(x.transpose(1, 2)).transpose(1, 2)
        first, second = mixed.chunk(2, dim=1)
        return self.leave((x * F.cosine_similarity(x + first, x - second, dim=2).unsqueeze(2)).mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "skip": Skip,
    "skip-inplace": lambda: Skip(inplace=True),
    "skip-dropout": lambda: Skip(dropout=0.3),
    "dense": Dense,
    "residual": Residual,
    "collect": Collect,
    "attention": Attention,
    "torch-attention": lambda: Attention(of_torch=True),
    "mixer": Mixer,
}


@pytest.mark.parametrize(
    ("network", "policy"),
    [(name, policy) for number, name in enumerate(NETWORKS) for policy in PARKING[number % 2 :: 2]],
    ids=str,
)
def test_networks_with_skips_train_the_same(network: str, policy: Policy) -> None:
    assert_equal_to_plain(supervised(NETWORKS[network]), policy=policy, share=0.5)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_step_parks_the_same(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parked: list[int] = []
    start_out = Parking.start_out

    def starting_out(parking: Parking, value: int, offset: int) -> None:
        before = len(parking.parked.all())
        start_out(parking, value, offset)
        if len(parking.parked.all()) > before:
            parked.append(value)

    monkeypatch.setattr(Parking, "start_out", starting_out)
    torch.manual_seed(0)
    training = supervised(NETWORKS[network])()
    in_steps: list[set[int]] = []
    with outgrow.Session(
        training.models, training.optimizers, budget="1GiB", policy=ParkAll(prefetch=False), least_moved_bytes=1
    ) as session:
        for k in range(8):
            parked.clear()
            with session.step():
                training.run(k)
            in_steps.append(set(parked))
    assert in_steps[2], "in the first step under its plan something leaves"
    for found in in_steps[3:]:
        assert found == in_steps[2], "also once operators pass the mode"


@pytest.mark.parametrize("network", NETWORKS)
def test_just_above_the_least_budget_later_steps_fit_as_the_first_ones_do(network: str) -> None:
    make = supervised(NETWORKS[network])
    budget = int(1.03 * bounds_of(make)[1])
    ours, summaries = train_in_session(make, 8, budget=budget)
    assert ours == train_plain(make, 8)
    assert max(summary.measured_peak_bytes for summary in summaries) <= budget


@pytest.mark.parametrize("network", NETWORKS)
def test_no_plan_parks_what_a_running_function_may_read_unseen(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran_meanwhile: list[str] = []
    ran = Parking.ran

    def running(parking: Parking, number: int, func: Any, facts: OpFacts, *rest: Any) -> None:
        ran(parking, number, func, facts, *rest)
        ran_meanwhile.extend([facts.name] * len(parking._postponed))

    monkeypatch.setattr(Parking, "ran", running)
    make = supervised(NETWORKS[network])
    _, summaries = train_in_session(make, 6, budget=1 << 30, policy=ParkAll(prefetch=False))
    assert summaries[-1].offloaded_bytes > 0
    assert ran_meanwhile == []


def test_a_function_may_be_an_object_that_has_no_hash() -> None:
    class Double:
        __name__ = "double"

        def __eq__(self, other: object) -> bool:
            return self is other

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            if torch.overrides.has_torch_function((x,)):
                doubled: torch.Tensor = torch.overrides.handle_torch_function(self, (x,), x)
                return doubled
            return 2 * x

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        loss: torch.Tensor = Double()(model(x)).pow(2).mean()
        return loss

    assert_equal_to_plain(supervised(Mixer, forward), policy=ParkAll())


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize(
    ("function", "is_held"),
    [
        (lambda x, w: F.linear(x.transpose(1, 2), w.sum(2)), False),
        (lambda x, w: x.transpose(1, 2) @ w, False),
        (lambda x, w: torch.einsum("bij,bik->bjk", x, w), False),
        (lambda x, w: F.scaled_dot_product_attention(x, w, w, dropout_p=0.2), False),
        (lambda x, w: F.cosine_similarity(x, w, dim=2), True),
        (lambda x, w: torch.cdist(x, w), True),
        (lambda x, w: F.pairwise_distance(x, w), True),
    ],
    ids=["linear", "matmul", "einsum", "attention", "cosine", "cdist", "distance"],
)
def test_a_trace_tells_what_functions_may_read_unseen(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], is_held: bool, fake: bool
) -> None:
    def make() -> outgrow.TrainingStep:
        model = nn.Linear(16, 16)
        data, other = torch.randn(4, 16, 16), torch.randn(4, 16, 16)

        def step() -> None:
            x = model(data)
            function(x, other).add(1.0)
            x.sum().backward()

        return outgrow.TrainingStep(model, None, step)

    trace = outgrow.trace(make, fake=fake)
    add = next(now for now, op in enumerate(trace.ops) if op.name == "aten.add.Tensor" and op.phase is Phase.FORWARD)
    last = trace.ops[add - 1]
    born = max(value for op in trace.ops[:4] for value in op.outputs)
    assert (born in (*last.given, *last.inputs)) == is_held


def test_what_is_parked_and_back_counts_as_kept() -> None:
    make = supervised(Collect)
    _, parked = train_in_session(make, 4, budget=1 << 30, policy=ParkAll())
    _, kept = train_in_session(make, 4, budget=1 << 30, policy="keep")
    assert parked[-1].offloaded_bytes > 0
    assert parked[-1].kept_bytes == kept[-1].kept_bytes > 0


def test_autocast() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float()

    assert_equal_to_plain(supervised(Skip, forward), policy=ParkAll())


def test_gradient_accumulation() -> None:
    assert_equal_to_plain(supervised(Residual, passes=2), policy=ParkAll())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_inside(reentrant: bool) -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        assert isinstance(model, Residual)
        h = model.enter(x)
        for block, shortcut in zip(model.blocks, model.shortcuts, strict=True):
            h = model.act(shortcut(h) + checkpoint(block, h, use_reentrant=reentrant))
        return model.leave(h.mean((2, 3)))

    assert_equal_to_plain(supervised(lambda: Residual(inplace=False), forward), policy=ParkAll())


class Marked(torch.Tensor):
    """A class of a program's own that says nothing of what is done to its tensors."""


class Told(torch.Tensor):
    """One that is asked, and does as it likes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(("kind", "parks", "share"), [(Marked, True, 0.6), (Told, False, 1.0)])
def test_tensors_of_a_class_of_the_programs_own(
    kind: type[torch.Tensor], parks: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their backward passes are watched where nobody's own code runs them."""
    given_up: list[bool] = []
    give_up = Parking.give_up

    def noted(self: Parking) -> None:
        given_up.append(True)
        give_up(self)

    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        out: torch.Tensor = model(x.as_subclass(kind))
        assert type(out) is kind
        return out

    monkeypatch.setattr(Parking, "give_up", noted)
    assert_equal_to_plain(supervised(Skip, forward), policy=ParkAll(), share=share)
    assert bool(given_up) != parks


@pytest.mark.parametrize("whole", [True, False])
def test_double_backward(whole: bool) -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        x.requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True, retain_graph=True)
        return out + gradient.pow(2).mean() if whole else out + gradient.mean().detach()

    assert_equal_to_plain(supervised(lambda: Skip(dropout=0.2), forward), policy=ParkAll(), share=0.8)


# --- memory ---


@pytest.mark.parametrize(("network", "share"), [("skip", 0.98), ("dense", 0.96), ("collect", 0.99)])
def test_the_peak_falls_and_is_what_was_predicted(network: str, share: float) -> None:
    make = supervised(NETWORKS[network])
    plain = train_plain(make, 4)
    measured: dict[bool, int] = {}
    for parks in (True, False):
        policy = ParkAll(parks=parks, prefetch=False, offload=True)
        torch.manual_seed(0)
        training = make()
        torch.manual_seed(1)
        losses = []
        budget = budget_for(make, 1.0)
        with outgrow.Session(
            training.models, training.optimizers, budget=budget, policy=policy, least_moved_bytes=1
        ) as session:
            session._copies.close()  # copies are made on the spot
            for k in range(4):
                with session.step():
                    losses.append(float(training.run(k)))
            assert session.plan is not None
            measured[parks] = session.summary().measured_peak_bytes
            # Beside a disk that takes no time, what is alive at each op hangs on the plan alone.
            plan = replace(session.plan, problem=with_disk(session.plan.problem, 1e15))
            assert abs(measured[parks] / plan.simulate().peak_bytes - 1) < 0.02
        assert tuple(losses) == plain.losses
    assert measured[True] < share * measured[False]


# --- access past the dispatcher ---


# Looks at a tensor, and gives what looks again through what it took then: a number that hangs on each element.
Look = Callable[[torch.Tensor], Callable[[], float]]


class Looked(nn.Module):
    """A value waits while others are computed; `before` and `after` that somebody looks at it past the dispatcher."""

    def __init__(self, before: Look | None, after: Look | None) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(5))
        self.leave = nn.Linear(16, 10)
        self.before, self.after = before, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.enter(x).sigmoid()
        early = None if self.before is None else self.before(skip.detach())
        x = skip
        for layer in self.layers:
            x = layer(x).tanh()
        seen = 0.0 if early is None else early()
        if self.after is not None:
            seen += self.after(skip.detach())()
        return self.leave((x + skip).mean((2, 3))) * (1.0 + seen)


def weigh(numbers: Any) -> float:
    flat = np.asarray(numbers, dtype=np.float64).ravel()
    return float(flat @ np.linspace(0.5, 1.5, flat.size) / flat.size)


def by_address(tensor: torch.Tensor) -> Callable[[], float]:
    memory = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return lambda: weigh(np.ctypeslib.as_array(memory))


def by_storage(tensor: torch.Tensor) -> Callable[[], float]:
    storage = tensor.untyped_storage()
    return lambda: weigh(np.ctypeslib.as_array((ctypes.c_float * tensor.numel()).from_address(storage.data_ptr())))


def by_saving(tensor: torch.Tensor) -> Callable[[], float]:
    file = io.BytesIO()
    torch.save(tensor, file)
    return lambda: weigh(torch.load(io.BytesIO(file.getvalue())).numpy())


def by_window(tensor: torch.Tensor) -> Callable[[], float]:
    array = tensor[1:, 2:].transpose(1, 2).numpy()
    return lambda: weigh(array)


def by_hash_of_text(tensor: torch.Tensor) -> Callable[[], float]:
    text = repr(tensor)
    return lambda: sum(map(ord, text)) * 1e-9


def keeping(take: Callable[[torch.Tensor], Any]) -> Look:
    def look(tensor: torch.Tensor) -> Callable[[], float]:
        taken = take(tensor)
        return lambda: weigh(taken)

    return look


LOOKS: dict[str, Look] = {
    "numpy": keeping(lambda tensor: tensor.numpy()),
    "asarray": keeping(np.asarray),
    "window": by_window,
    "tolist": keeping(lambda tensor: tensor.tolist()),
    "data_ptr": by_address,
    "storage": by_storage,
    "dlpack": keeping(np.from_dlpack),
    "torch.save": by_saving,
    "print": by_hash_of_text,
    "deepcopy": keeping(lambda tensor: copy.deepcopy(tensor).numpy()),
    "pickle": keeping(lambda tensor: pickle.loads(pickle.dumps(tensor)).numpy()),
    "item": keeping(lambda tensor: [tensor[0, 0, 0, 0].item()]),
}


@dataclass
class Watched:
    """What `ParkedStorages` did, taken down."""

    emptied: int = 0


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Counts the storages that are emptied."""
    seen = Watched()
    empty = ParkedStorages._empty

    def counting(self: ParkedStorages, parked: Parked) -> None:
        empty(self, parked)
        seen.emptied += parked.record.nbytes == 0

    monkeypatch.setattr(ParkedStorages, "_empty", counting)
    return seen


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_past_the_dispatcher_sees_the_value(look: str, when: str, watched: Watched) -> None:
    before, after = (LOOKS[look] if when in (moment, "both") else None for moment in ("before", "after"))
    make = supervised(lambda: Looked(before, after))
    # The cache has room enough: what leaves is parked.
    ours, _ = train_in_session(make, 4, budget="1GiB", policy=ParkAll(speed=1e9))
    assert ours == train_plain(make, 4)
    assert watched.emptied > 0


@pytest.mark.parametrize("look", ["numpy", "data_ptr", "dlpack"])
def test_hooks_in_the_backward_pass_see_a_gradient_that_waits(look: str, watched: Watched) -> None:
    def make() -> Training:
        model = Residual(inplace=False)
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(8, 3, 32, 32, generator=generator), torch.randint(0, 10, (8,), generator=generator)

        def run(k: int) -> torch.Tensor:
            seen = []

            def forward_hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
                out.register_hook(lambda gradient: seen.append(LOOKS[look](gradient.detach())()))

            hooks = [layer.register_forward_hook(forward_hook) for layer in model.modules()]
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for hook in hooks:
                hook.remove()
            opt.step()
            opt.zero_grad()
            return loss.detach() + sum(seen)

        return Training([model], [opt], run)

    ours, _ = train_in_session(make, 4, budget="1GiB", policy=ParkAll(prefetch=False, speed=1e9))
    assert ours == train_plain(make, 4)
    assert watched.emptied > 0


# --- steps that are not as planned ---


def test_after_an_error_everything_is_back(watched: Watched) -> None:
    torch.manual_seed(0)
    model = Looked(None, None)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    fails = False

    def waits(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        kept.append((out.sigmoid(), out.detach().clone()))

    def stops(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if fails:
            raise ZeroDivisionError

    model.enter.register_forward_hook(waits)
    model.layers[-1].register_forward_hook(stops)
    x = torch.randn(8, 3, 32, 32)
    with outgrow.Session(model, budget="1GiB", policy=ParkAll(prefetch=False, speed=1e9)) as session:
        session._copies.close()  # copies are made on the spot
        for k in range(4):
            kept.clear()
            fails = k == 3
            try:
                with session.step():
                    model(x).sum().backward()
            except ZeroDivisionError:
                assert fails
            (held, true) = kept[0]
            with torch.no_grad():
                assert np.array_equal(held.detach().numpy(), true.sigmoid().numpy())
    assert watched.emptied > 0


def test_a_step_that_leaves_its_plan() -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        assert isinstance(model, Looked)
        skip = model.enter(x).sigmoid()
        h = skip
        for layer in model.layers[: 3 if k == 4 else 5]:
            h = layer(h).tanh() if k != 5 else layer(h).sin().tanh()
        return model.leave((h + skip).mean((2, 3)))

    assert_equal_to_plain(supervised(lambda: Looked(None, None), forward), policy=ParkAll(), steps=7)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("pause", [0.0, 0.01], ids=["copied", "copy under way"])
@pytest.mark.parametrize("late", [True, False])
def test_writes_to_what_is_parked_or_leaving(pause: float, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        assert isinstance(model, Looked)
        with torch.no_grad():
            aside = model.enter(x) * 2
            window = aside[1:]
        h = model.enter(x).sigmoid()
        for number, layer in enumerate(model.layers):
            h = layer(h).tanh()
            if number in (2, 4):
                with torch.no_grad():
                    window.add_(h[1:], alpha=0.5)
                    aside.data.mul_(1.5)
        return model.leave((h + aside).mean((2, 3)))

    write = SpillFile.write

    def slow(self: SpillFile, slot: Slot, address: int) -> None:
        time.sleep(pause)
        write(self, slot, address)

    followed: list[StorageRecord] = []
    settle = ParkedStorages._settle_out

    def settled(self: ParkedStorages, parked: Parked) -> None:
        settle(self, parked)
        if parked in self._cancelled:  # the copy goes on
            assert parked.record.followers > 0, "who writes to it has to wait"
            followed.append(parked.record)

    monkeypatch.setattr(SpillFile, "write", slow)
    monkeypatch.setattr(ParkedStorages, "_settle_out", settled)
    make = supervised(lambda: Looked(None, None), forward)
    ours, _ = train_in_session(make, 4, budget="1GiB", policy=ParkAll(prefetch=not late, speed=1e9))
    assert ours == train_plain(make, 4)
    assert not any(record.followers for record in followed)
    assert followed or not pause


@pytest.mark.usefixtures("one_by_one")
def test_a_wrong_byte_on_the_disk_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    read = SpillFile.read

    def spoil(self: SpillFile, slot: Slot, address: int) -> None:
        read(self, slot, address)
        if slot.nbytes > 4096:  # not a label
            ctypes.memset(address + slot.nbytes - 1, 0x3F, 1)

    monkeypatch.setattr(SpillFile, "read", spoil)
    make = supervised(lambda: Looked(None, None))
    ours, _ = train_in_session(make, 4, budget="1GiB", policy=ParkAll(speed=1e9))
    assert ours != train_plain(make, 4)


@dataclass(frozen=True)
class ParkSome:
    """Parks some gaps, at ticks that have little to do with them."""

    draws: tuple[int, ...]
    name: str = "park-some"

    def plan(self, problem: Problem) -> Plan:
        ticks = len(problem.trace.ticks)
        chosen = []
        for number, gap in enumerate(gaps(problem)):
            draw = self.draws[number % len(self.draws)]
            item = park(problem, gap)
            if item is None or draw % 3 == 0:
                continue
            if draw % 3 == 1:
                out = (item.out_tick + draw % 5) % ticks
                item = Park(item.value, out, draw % ticks, 0)
            chosen.append(item)
        return make_plan(self.name, problem, (), parks=tuple(chosen))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    draws=st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    links=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from(["add", "cat", "mul_"])), max_size=5
    ),
)
def test_random_skips_and_random_parks(draws: list[int], links: list[tuple[int, int, str]]) -> None:
    def forward(model: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        assert isinstance(model, Looked)
        x = model.enter(x).sigmoid()
        found = [x]
        for number, layer in enumerate(model.layers):
            x = layer(x).tanh()
            for start, end, how in links:
                if end == number and start < len(found):
                    if how == "add":
                        x = x + found[start]
                    elif how == "cat":
                        x = torch.cat([x, found[start]], 1)[:, 8:24]
                    else:
                        x = x * 2
                        x.mul_(found[start])
            found.append(x)
        return model.leave((x + found[0]).mean((2, 3)))

    assert_equal_to_plain(
        supervised(lambda: Looked(None, None), forward), policy=ParkSome(tuple(draws)), share=0.7, steps=3
    )


# --- plans ---


def chain(names: list[str], kind: Kind = Kind.TEMPORARY, birth: int = 0) -> Problem:
    """Ops, of which the first and the last use value 0 (1000 bytes); a tick before each; little else is alive."""
    last = len(names) - 1
    ops = tuple(
        Op(name, Phase.FORWARD, "", (0,) if n == last else (1,), (0,) if n == birth else (), 0, 0, 100, 1.0, True)
        for n, name in enumerate(names)
    )
    values = (Value(1, 0, 1000, kind, birth, last + 1, last + 1), Value(2, 0, 10, Kind.INPUT, -1, last, last))
    saved = tuple(Saved(1, 10, "", "", n, (), last) for n in range(len(names)))
    ticks = tuple(Tick(Event.PACK, n, n) for n in range(len(names)))
    trace = Trace(ops, values, saved, ticks, "cpu", True, "")
    return Problem(trace, outgrow.Hardware("any", 1 << 40, 1e11, 1e10, 1e6, 1e6), 1 << 20, 0, 1)


def test_a_gap_lies_between_two_uses() -> None:
    problem = chain(["aten.a", "aten.b", "aten.c", "aten.d"])
    assert gaps(problem) == (Gap(0, 1000, 0, 3, is_last=False),)
    assert away(problem, gaps(problem)[0]) == (1, 3)
    assert park(problem, gaps(problem)[0]) == Park(0, 1, 2, 0)


@pytest.mark.parametrize("kind", [Kind.PARAMETER, Kind.BUFFER, Kind.GRADIENT, Kind.OPTIMIZER, Kind.INPUT])
def test_training_state_and_inputs_are_not_parked(kind: Kind) -> None:
    assert gaps(chain(["aten.a", "aten.b", "aten.c", "aten.d"], kind)) == ()


def test_what_was_there_before_the_step_is_not_parked() -> None:
    assert gaps(chain(["aten.a", "aten.b", "aten.c", "aten.d"], birth=-1)) == ()


@pytest.mark.parametrize("place", [1, 2, 3])
def test_nothing_is_parked_across_ops_of_other_libraries(place: int) -> None:
    names = ["aten.a", "aten.b", "aten.c", "aten.d"]
    names[place] = "mine.op"
    assert gaps(chain(names)) == ()


@pytest.mark.parametrize("place", [1, 2, 3])
def test_processes_that_exchange_other_tensors_do_not_matter(place: int) -> None:
    names = ["aten.a", "aten.b", "aten.c", "aten.d"]
    names[place] = "c10d.allreduce_.default"
    assert gaps(chain(names)) == (Gap(0, 1000, 0, 3, is_last=False),)


def test_what_other_processes_may_be_sent_is_not_parked_from_then_on() -> None:
    problem = chain(["aten.a", "aten.b", "aten.c", "aten.d", "aten.e", "aten.f"])
    ops = list(problem.trace.ops)
    assert gaps(problem) == (Gap(0, 1000, 0, 5, is_last=False),)
    ops[2] = replace(ops[2], name="c10d.allreduce_.default", inputs=(0, 1))
    handed = Problem(**{**vars_of(problem), "trace": problem.trace.with_ops(ops)})
    assert gaps(handed) == (Gap(0, 1000, 0, 2, is_last=False),)


def test_blank_memory_that_nobody_is_seen_to_fill_is_not_parked() -> None:
    assert gaps(chain(["aten.empty.memory_format", "aten.b", "aten.c", "aten.d"])) == ()


def test_parks_to_fit_reach_the_least_budget() -> None:
    problem = chain(["aten.a", "aten.b", "aten.c", "aten.d"])
    curve = make_plan("none", problem, (), evicts=False).prediction.curve
    assert curve == (1110, 1110, 1110, 1100)
    assert parks_for(problem, 1110) == ()
    (item,) = parks_for(problem, 500)
    plan = make_plan("some", problem, (), parks=(item,), evicts=False)
    assert plan.prediction.curve == (1110, 1110, 110, 1100)
    tight = make_plan("some", Problem(**{**vars_of(problem), "budget_bytes": 500}), (), parks=(item,))
    assert tight.prediction.curve == (1110, 110, 110, 1100)


def vars_of(problem: Problem) -> dict[str, Any]:
    names = ("trace", "hardware", "budget_bytes", "base_bytes", "least_moved_bytes")
    return {name: getattr(problem, name) for name in names}


def test_parks_survive_a_file(tmp_path: Path) -> None:
    problem = chain(["aten.a", "aten.b", "aten.c", "aten.d"])
    plan = make_plan("some", problem, (), parks=parks_for(problem, 500))
    plan.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan") == plan
