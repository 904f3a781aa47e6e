"""At a real wall, where the allocator refuses memory, a session trains on and the result is the same to the bit."""

from __future__ import annotations

import gc
import re
import resource
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outgrow
from conftest import RunChild
from outgrow.planning.plan import Plan
from outgrow.planning.problem import Problem
from outgrow.runtime.care import OpNeeds
from outgrow.runtime.copies.cpu import CpuCopies
from outgrow.runtime.threads import run_on_new_thread
from outgrow.runtime.tiers.disk import SpillFile
from outgrow.runtime.tiers.reserve import Reserve
from outgrow.session.learning import Planner
from outgrow.tracing.ops import facts_of
from outgrow.tracing.probe import probing
from steps import digest

STEPS = 3
SIZE = 128  # height = width of images: with smaller ones Python's own objects fill too much of what a wall leaves


class Dropout(nn.Module):
    """Draws its numbers before it asks for the memory of its result: run again, it must draw the same again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, 0.1, True)[0]


def network(depth: int) -> nn.Module:
    """Large activations and few parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.BatchNorm2d(16), nn.ReLU(), Dropout(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def data_bytes() -> int:
    """What RLIMIT_DATA counts: the addresses of the heap, of private mappings and of stacks, used or not."""
    kib = re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
    assert kib is not None
    return int(kib[1]) << 10


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, size: int, session: outgrow.Session | None
) -> dict[str, Any]:
    """Losses as hexadecimal floats, a hash of all parameters and buffers, and the page faults until each step."""
    torch.manual_seed(1)
    losses, faults = [], []
    for _ in range(STEPS):
        with nullcontext() if session is None else session.step():
            x, y = torch.randn(8, 3, size, size), torch.randint(0, 10, (8,))
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item().hex())
        faults.append(0 if session is None else session.summary().oom_retries)
    return {"losses": losses, "state": digest([model]), "faults": faults}


def warm_up() -> None:
    """Load what is loaded when it is first used, so that it does not count as the training's memory."""
    model = network(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    budget = 1 << 30
    for policy in ("keep", "vdnn-all"):
        with outgrow.Session(model, optimizer, budget=budget, policy=policy) as session:
            train(model, optimizer, 16, session)
            budget = session.peak_bytes * 3 // 4
    assert session.summary().offloaded_bytes > 0


def unlimited() -> dict[str, Any]:
    """What plain PyTorch computes where there is no wall, and the live bytes that it needs for that."""
    found = train_at_wall(None, None)
    return {**found, "peak": train_at_wall(1 << 40, None)["peak"]}


def train_at_wall(budget: int | None, slack: int | None) -> dict[str, Any]:
    """Train; `slack` bytes are all that the process may grow by once the model is there."""
    warm_up()
    torch.manual_seed(0)
    model = network(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    before = parameters_of(model)
    if slack is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + slack, resource.RLIM_INFINITY))
    session = None if budget is None else outgrow.Session(model, optimizer, budget=budget)
    found: dict[str, Any] = {"error": "", "kind": ""}
    try:
        found |= train(model, optimizer, SIZE, session)
    except (RuntimeError, MemoryError, outgrow.OutgrowError) as error:
        found["error"], found["kind"] = str(error), type(error).__name__
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found["parameters_untouched"] = all(map(torch.equal, before, parameters_of(model)))
    if session is not None:
        found["peak"] = session.peak_bytes
        session.close()
    return found


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["error"] == ""
    assert (found["losses"], found["state"]) == (plain["losses"], plain["state"])


@pytest.fixture(scope="module")
def plain(run_child: RunChild) -> dict[str, Any]:
    return run_child(unlimited)


def test_plain_pytorch_fails_at_the_wall(run_child: RunChild, plain: dict[str, Any]) -> None:
    found = run_child(train_at_wall, None, plain["peak"] * 6 // 10)
    assert "can't allocate memory" in found["error"]


def test_a_budget_below_the_wall_trains_the_same(run_child: RunChild, plain: dict[str, Any]) -> None:
    wall = plain["peak"] * 4 // 10
    budget = wall * 7 // 10
    found = run_child(train_at_wall, budget, wall)
    assert_same(found, plain)
    assert found["peak"] <= budget


def test_a_budget_beyond_the_wall_trains_the_same_by_page_faults(run_child: RunChild, plain: dict[str, Any]) -> None:
    found = run_child(train_at_wall, 1 << 40, int(plain["peak"] * 0.4))
    assert_same(found, plain)
    assert found["faults"][0] > 0
    # The session learns where the wall is: its plans stay below.
    assert found["faults"][-1] - found["faults"][-2] < found["faults"][0]


class Crowd(nn.Module):
    """Once, in a forward pass: takes all that is left of the memory in small blocks, the holes of the heap too.

    What is left are holes of two KiB, for Python's own objects.
    """

    def __init__(self) -> None:
        super().__init__()
        self.comes = False
        self.blocks: list[np.ndarray | None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.comes:
            self.comes = False
            for kib in (256, 64, 16, 4, 2):
                larger = len(self.blocks)
                with suppress(MemoryError):
                    while True:
                        self.blocks.append(np.empty(kib << 10, np.uint8))
            for position in range(larger, len(self.blocks), 2):
                self.blocks[position] = None
        return x


def build_a_kernel_where_large_blocks_took_all() -> str:
    warm_up()
    x, weight = torch.ones(4, 5, 9, 9), torch.ones(7, 5, 3, 3)
    blocks: list[np.ndarray] = []
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (8 << 20), resource.RLIM_INFINITY))
    reserve = Reserve()
    reserve.hold(anew=True)
    for kib in (1024, 256, 64, 33):
        with suppress(MemoryError):
            while True:
                blocks.append(np.empty(kib << 10, np.uint8))
    try:
        F.conv2d(x, weight)
    except RuntimeError as error:
        return str(error)
    finally:
        blocks.clear()
    return ""


def test_the_reserve_stays_for_small_blocks_where_large_ones_took_all(run_child: RunChild) -> None:
    """Else the process ends here: oneDNN does not look whether it got the memory for a kernel's description."""
    assert run_child(build_a_kernel_where_large_blocks_took_all) == "could not create a primitive"


def train_towards_the_wall(slack: int | None, folder: str, crowded: bool = False) -> dict[str, Any]:
    """Train on small images, then on large ones; in between `slack` more bytes become all that there are.

    In a crowd these are gone when kernels are built for the deeper layers on large images.
    """
    warm_up()
    torch.manual_seed(0)
    layers, crowd = network(6), Crowd()
    model = nn.Sequential(*layers[:12], crowd, *layers[12:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session = None if slack is None else outgrow.Session(model, optimizer, budget=1 << 40, spill_dir=folder)
    train(model, optimizer, SIZE // 2, session)
    if slack is not None:
        crowd.comes = crowded
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + slack, resource.RLIM_INFINITY))
    found = {"error": "", **train(model, optimizer, SIZE, session)}
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if session is not None:
        session.close()
    return found


@pytest.fixture(scope="module")
def towards(run_child: RunChild, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_child(train_towards_the_wall, None, str(tmp_path_factory.mktemp("spill")))


def test_a_wall_that_comes_up_in_a_session_is_met_by_page_faults(
    run_child: RunChild, plain: dict[str, Any], towards: dict[str, Any], tmp_path: Path
) -> None:
    found = run_child(train_towards_the_wall, plain["peak"] * 4 // 10, str(tmp_path))
    assert_same(found, towards)
    assert found["faults"][0] > 0


def test_kernels_are_built_where_the_heap_has_no_room_left(
    run_child: RunChild, towards: dict[str, Any], tmp_path: Path
) -> None:
    found = run_child(train_towards_the_wall, 60 << 20, str(tmp_path), True)
    assert_same(found, towards)
    assert found["faults"][0] > 0


def test_where_nothing_is_left_to_evict_the_error_says_what_holds_the_memory(
    run_child: RunChild, plain: dict[str, Any]
) -> None:
    found = run_child(train_at_wall, 1 << 40, plain["peak"] // 40)
    assert found["kind"] == "DeviceOutOfMemory"
    assert "nothing is left to evict" in found["error"]
    assert "are alive" in found["error"]
    said = ("allocate memory", "could not create a primitive", "can't start new thread")
    assert any(text in found["error"] for text in said)
    assert found["parameters_untouched"]


def copy_without_room_for_a_thread(folder: str) -> list[bool]:
    spill = SpillFile(folder, allow_tmpfs=True)
    copies = CpuCopies(spill)
    source, room = torch.arange(10_000.0), torch.zeros(12_000)
    slot = spill.reserve(source.nbytes)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (64 << 10), resource.RLIM_INFINITY))
    out = copies.out.submit(slot, source.data_ptr())
    alone = out.done and threading.active_count() == 1
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    target = room[(slot.phase - room.data_ptr()) % spill.alignment // 4 :][:10_000]
    back = copies.back.submit(slot, target.data_ptr())
    back.wait()
    helped = threading.active_count() == 2
    copies.close()
    return [alone, helped, out.error is None, back.error is None, torch.equal(source, target)]


def test_where_there_is_no_memory_for_a_thread_copies_are_made_without(run_child: RunChild, tmp_path: Path) -> None:
    assert all(run_child(copy_without_room_for_a_thread, str(tmp_path)))


def start_a_thread_without_room() -> list[str]:
    said = []
    for mib in (4, 64):
        limit = data_bytes() + (mib << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        try:
            said.append(run_on_new_thread(lambda: "it ran"))
        except MemoryError as error:
            said.append(str(error))
    return said


def test_a_thread_for_which_there_is_no_room_is_not_started(run_child: RunChild) -> None:
    """Else glibc ends the process, or Python waits for it without end."""
    no_room, room = run_child(start_a_thread_without_room)
    assert no_room == "can't allocate memory for the stacks of threads"
    assert room == "it ran"


def test_an_error_of_a_new_thread_does_not_hold_what_its_work_had() -> None:
    def fail(values: list[torch.Tensor]) -> None:
        raise RuntimeError("could not create a primitive")

    value = torch.ones(3)
    seen = weakref.ref(value)
    gc.disable()  # it must go now: memory is short
    try:
        with suppress(RuntimeError):
            run_on_new_thread(partial(fail, [value]))
        del value
        assert seen() is None
    finally:
        gc.enable()


# --- single ops that run out of memory ---


class Shortage:
    """How often the ops below still find no memory, and where they ran."""

    left = 0
    threads: ClassVar[list[int]] = []


@torch.library.custom_op("outgrow_test::greedy", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def greedy(x: torch.Tensor) -> torch.Tensor:
    """Draws a number for each element, and only then may find no memory for the result."""
    drawn = torch.rand_like(x)
    if Shortage.left:
        Shortage.left -= 1
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate a lot")
    return drawn + x


@torch.library.custom_op("outgrow_test::kernel", mutates_args=())
def kernel(x: torch.Tensor) -> torch.Tensor:
    """As oneDNN: a thread that had no memory for a kernel's code once can build no kernels any more."""
    Shortage.threads.append(threading.get_ident())
    if threading.current_thread() is threading.main_thread():
        raise RuntimeError("could not create a primitive")
    return x + 1


def forward_with(op: Any, model: nn.Module) -> torch.Tensor:
    """The op runs while saved values are there that can leave."""
    loss = model(torch.ones(256, 64)).square().mean()
    return torch.stack([loss.detach(), op(torch.ones(8)).sum()])


def wide_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))


@pytest.mark.parametrize("shortages", [1, 3])
def test_a_random_op_that_is_run_again_draws_the_same_numbers(shortages: int) -> None:
    model = wide_network()
    Shortage.left = 0
    plain = forward_with(greedy, model)
    state = torch.get_rng_state()
    model = wide_network()
    with outgrow.Session(model, budget="1GiB") as session, session.step():
        Shortage.left = shortages
        ours = forward_with(greedy, model)
    assert Shortage.left == 0
    assert session.summary().oom_retries == shortages
    assert torch.equal(ours, plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_step_that_nobody_watched_fails_but_the_next_one_is_watched() -> None:
    model = wide_network()
    Shortage.left = 0
    with outgrow.Session(model, budget="1GiB") as session:

        def step() -> None:
            with session.step():
                forward_with(greedy, model)

        for _ in range(20):  # until the plan, which keeps everything, is not made anew any more
            step()
        Shortage.left = 1
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            step()
        Shortage.left = 1
        step()
        assert session.summary().oom_retries == 1


def test_where_there_is_no_memory_for_a_value_on_its_way_back_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(session: outgrow.Session | None, model: nn.Module) -> list[torch.Tensor]:
        with nullcontext() if session is None else session.step():
            early, late = (model(torch.full((1024, 64), number)).square().mean() for number in (1.0, 2.0))
            early.backward()  # its values were sent away for those of `late`, which are there
            late.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients(None, wide_network())
    model = wide_network()
    with outgrow.Session(model, budget=1 << 30) as session:
        gradients(session, model)
        budget = session.peak_bytes * 6 // 10

    asked = 0

    def refuse_at_first(*size: Any, **options: Any) -> torch.Tensor:
        nonlocal asked
        if options.get("dtype") is torch.uint8:  # bytes for a value
            asked += 1
            if asked == 1:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return really_empty(*size, **options)

    really_empty = torch.empty
    monkeypatch.setattr(torch, "empty", refuse_at_first)
    model = wide_network()
    with outgrow.Session(model, budget=budget, policy="lru") as session:
        ours = gradients(session, model)
        assert session.summary().oom_retries == 1
    assert asked > 1
    assert all(map(torch.equal, ours, plain))


def train_with_batch_norm(budget: str | None = None, steps: int = 3) -> list[torch.Tensor]:
    """Parameters after some steps, and running statistics, which each forward pass writes over."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    session = None if budget is None else outgrow.Session(model, optimizer, budget=budget)
    for _ in range(steps):
        with nullcontext() if session is None else session.step():
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if session is not None:
        session.close()
    return [tensor.clone() for tensor in model.state_dict().values()]


class NoMemoryToRead:
    """What a profiler saw, and Python has no room for."""

    def kind(self) -> str:
        raise MemoryError


@pytest.mark.parametrize(
    "error", [MemoryError("std::bad_alloc"), RuntimeError("Could not allocate list object!"), None]
)
def test_an_op_that_is_done_does_not_run_again_for_want_of_memory_to_tell_what_it_held(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    plain = train_with_batch_norm()
    really_stop, stops = torch.autograd._disable_profiler_legacy, 0

    def stop_without_memory() -> Any:
        nonlocal stops
        stops += 1
        really_stop()
        if error is not None:
            raise error
        return [[NoMemoryToRead()]]

    monkeypatch.setattr(torch.autograd, "_disable_profiler_legacy", stop_without_memory)
    ours = train_with_batch_norm("1GiB")
    assert stops > 10
    assert all(map(torch.equal, ours, plain))


def test_where_there_is_no_memory_to_start_the_profiler_the_op_runs_and_it_is_not_left_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = train_with_batch_norm()
    really_start, starts = torch.autograd._enable_profiler_legacy, 0

    def start_without_memory(config: Any) -> None:
        nonlocal starts
        assert not torch.autograd._profiler_enabled()
        really_start(config)
        starts += 1
        if starts % 5 == 1:
            raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(torch.autograd, "_enable_profiler_legacy", start_without_memory)
    ours = train_with_batch_norm("1GiB")
    assert starts > 10
    assert not torch.autograd._profiler_enabled()
    assert all(map(torch.equal, ours, plain))


def test_an_op_whose_need_depends_on_data_counts_as_seen_once_it_ran() -> None:
    func, needs = torch.ops.aten.nonzero.default, OpNeeds()
    signature, need = needs.before(func, facts_of(func), (torch.ones(4),), {})
    assert not need.seen
    needs.ran(signature)
    assert needs.before(func, facts_of(func), (torch.ones(4),), {})[1].seen
    needs.measured(signature, 64)
    _, need = needs.before(func, facts_of(func), (torch.ones(4),), {})
    assert need.seen
    assert not need.measured


def test_of_what_depends_on_data_only_what_was_seen_counts() -> None:
    func, needs = torch.ops.aten.index.Tensor, OpNeeds()
    flags, mask = torch.zeros(10_000, dtype=torch.bool), torch.ones(10_000, dtype=torch.bool)
    signature, need = needs.before(func, facts_of(func), (flags, [mask]), {})
    needs.measured(signature, 5 * need.likely_bytes)
    rows = torch.ones(10_000, 64)
    guessed = OpNeeds().before(func, facts_of(func), (rows, [mask]), {})
    assert needs.before(func, facts_of(func), (rows, [mask]), {}) == guessed


def test_what_took_more_than_was_guessed_is_guessed_higher_at_other_sizes() -> None:
    func, needs = torch.ops.aten.masked_scatter_backward.default, OpNeeds()

    def need(rows: int) -> tuple[Any, int]:
        mask = torch.ones(256, 1, dtype=torch.bool)
        signature, found = needs.before(func, facts_of(func), (torch.ones(256, 64), mask, (rows, 64)), {})
        return signature, found.likely_bytes

    _, before = need(80)
    signature, guess = need(100)
    needs.measured(signature, 3 * guess)
    assert need(120)[1] > 3 * before
    assert need(100)[1] == 3 * guess  # it was seen
    func = torch.ops.aten.add.Tensor  # others are guessed as before
    assert needs.before(func, facts_of(func), (torch.ones(64, 64), torch.ones(64, 64)), {})[1].likely_bytes < guess


CHANNELS_LAST = torch.randn(8, 16, 32, 32).contiguous(memory_format=torch.channels_last)


def strided(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, x), -1)[..., : x.shape[-1]]


@pytest.mark.parametrize(
    ("x", "lay_out", "has_scratch"),
    [
        (torch.randn(8, 16, 32, 32), torch.Tensor.contiguous, True),
        (torch.randn(8, 16, 4, 16, 16), torch.Tensor.contiguous, True),
        (torch.randn(4096, 64), torch.Tensor.contiguous, True),
        (torch.randn(8, 16, 32, 32).bfloat16(), torch.Tensor.contiguous, True),
        (CHANNELS_LAST, torch.Tensor.clone, True),
        (CHANNELS_LAST, torch.Tensor.contiguous, False),
        (torch.randn(8, 16, 32, 32), strided, False),
    ],
)
def test_what_batch_norm_takes_beside_its_gradients_is_known_beforehand(
    x: torch.Tensor, lay_out: Callable[[torch.Tensor], torch.Tensor], has_scratch: bool
) -> None:
    func, ones = torch.ops.aten.native_batch_norm_backward.default, torch.ones(x.shape[1])
    args = (lay_out(x), x, ones, ones, ones, ones, ones, True, 1e-5, [True] * 3)
    need = OpNeeds().before(func, facts_of(func), args, {})[1]
    assert need.certain_bytes == (1 + has_scratch) * x.nbytes + 2 * ones.nbytes
    found: list[int | None] = []
    with probing("cpu", found):
        func(*args)
    assert found[0] == pytest.approx(need.certain_bytes, abs=x.nbytes // 16)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc")], ids=repr)
def test_a_step_that_went_well_does_not_fail_for_want_of_memory_to_plan(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    plain = train_with_batch_norm(steps=5)
    really_plan, searches = Planner.plan, 0

    def plan_with_memory_at_last(planner: Planner, problem: Problem, **options: Any) -> Plan:
        nonlocal searches
        searches += 1
        if searches < 3:
            raise error
        return really_plan(planner, problem, **options)

    monkeypatch.setattr(Planner, "plan", plan_with_memory_at_last)
    ours = train_with_batch_norm("1GiB", steps=5)
    assert searches >= 3
    assert "no memory to plan with" in caplog.text
    assert all(map(torch.equal, ours, plain))


def test_an_op_whose_kernel_this_thread_cannot_build_runs_on_another() -> None:
    model = wide_network()
    Shortage.threads.clear()
    with outgrow.Session(model, budget="1GiB") as session, session.step():
        _, result = forward_with(kernel, model)
    assert float(result) == 16
    assert threading.get_ident() == Shortage.threads[0] != Shortage.threads[1]


def test_other_errors_of_an_op_reach_the_user_as_they_are() -> None:
    model = wide_network()
    with outgrow.Session(model, budget="1GiB") as session:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), session.step():
            model(torch.ones(256, 63))
        with session.step():
            model(torch.ones(256, 64)).sum().backward()
        assert session.summary().oom_retries == 0
