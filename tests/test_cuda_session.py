"""Whole training steps with the CUDA engine and the pinned tier, on CPU tensors and fake streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import outgrow
import outgrow.session.session
from cases import training_of
from fake_streams import FakeStreams
from outgrow.errors import BudgetTooSmall, HostBudgetTooSmall, SessionError
from outgrow.planning.plan import Plan
from outgrow.planning.policies import Policy
from outgrow.planning.problem import Problem
from outgrow.planning.releases import with_releases
from outgrow.runtime.backend import Backend
from outgrow.runtime.cache import Cache
from outgrow.runtime.calls import Calls
from outgrow.runtime.clock import DeviceClock, StepTimes
from outgrow.runtime.copies.cuda import CudaCopies
from outgrow.runtime.copies.strays import StreamStrays
from outgrow.runtime.copies.streams import Stream
from outgrow.runtime.executor import Executor
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.outcome import StepOutcome
from outgrow.runtime.runner import Runner
from outgrow.runtime.tiers import host
from outgrow.runtime.tiers.disk import SpillFile
from outgrow.runtime.tiers.host import HostTier
from outgrow.runtime.tiers.memory import Request, Scattered
from outgrow.runtime.tiers.ram import Ram
from outgrow.runtime.watch import Watch
from outgrow.session.kind import StepKind
from outgrow.session.learning import Planner
from outgrow.tracing.ir import Fit
from outgrow.tracing.ledger import Ledger
from steps import Make, RecomputeAll, Result, budget_for, supervised, train_in_session, train_plain

MiB = 1 << 20


class CountedRam(Ram):
    """Memory whose allocator rounds up and gives some to libraries, as CUDA's does."""

    LIBRARY_BYTES = 300_000

    def __init__(self, ledger: Ledger, budget: int) -> None:
        super().__init__(1 << 40, budget)
        self._ledger = ledger
        self.gates = self.opens = self.stricts = 0

    @property
    def is_counted(self) -> bool:
        return True

    def count(self, nbytes: int) -> None:
        blocks = sum(-(-record.nbytes // 512) * 512 for record in self._ledger.alive())
        self._ledger.settle(blocks + self.LIBRARY_BYTES)

    def gate(self, request: Request) -> AbstractContextManager[None]:
        self.gates += 1
        return nullcontext()

    def gate_for_many(self, nbytes: int) -> AbstractContextManager[None]:
        return self.gate(Request((), nbytes, falls_back=True))

    def highest_bytes(self) -> int | None:
        return None

    def openly(self, nbytes: int) -> AbstractContextManager[None]:
        self.opens += 1
        return nullcontext()

    def strictly(self) -> AbstractContextManager[None]:
        self.stricts += 1
        return nullcontext()


class Fakes:
    """The backends that sessions opened, with what they pinned."""

    def __init__(self, host_bytes: int, luck: float) -> None:
        self.host_bytes = host_bytes
        self.luck = luck
        self.streams: list[FakeStreams] = []
        self.memory: list[CountedRam] = []
        self.pinned = 0

    def open(
        self, device: torch.device, ledger: Ledger, budget: int, host_bytes: int | None, spill: SpillFile
    ) -> Backend:
        streams = FakeStreams(Random(len(self.streams)), self.luck)
        self.streams.append(streams)
        self.pinned = 0
        places = HostTier(self.host_bytes, spill, self._pin)
        copies = CudaCopies(streams, spill, places.bounces)
        self.memory.append(CountedRam(ledger, budget))
        clock = DeviceClock(streams, copies.waits)
        fast_path = FastPath(ledger, budget, None)
        return Backend(self.memory[-1], places, copies, clock, fast_path, StreamStrays(streams))

    def _pin(self, nbytes: int) -> torch.Tensor:
        self.pinned += nbytes
        assert self.pinned <= self.host_bytes
        return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fakes]:
    """Makes sessions stand on the engine of CUDA."""

    def install(host_bytes: int = 256 * MiB, luck: float = 0.1) -> Fakes:
        made = Fakes(host_bytes, luck)
        monkeypatch.setattr(outgrow.session.session, "open_backend", made.open)
        # What else differs: nothing is parked or reused, and the backward pass may run on another thread.
        monkeypatch.setattr(Problem, "on_cpu", False)
        monkeypatch.setattr(Executor, "begin", begin)
        return made

    def begin(executor: Executor, *args: Any, **options: Any) -> None:
        executor._hooks.changes_threads = True
        usual(executor, *args, **options)

    usual = Executor.begin

    return install


POLICIES: tuple[str | Policy, ...] = ("auto", "lru", "vdnn-all", "superneurons", RecomputeAll())


@dataclass(frozen=True)
class Known:
    """A small network, what it trains to, and a budget that binds."""

    make: Make
    plain: Result
    budget: int


@pytest.fixture(scope="module", params=[("resnet-18", 32, 2), ("gpt-2x64", 64, 2)], ids=lambda case: case[0])
def known(request: pytest.FixtureRequest) -> Known:
    make = training_of(*request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Problem, "on_cpu", False)
        return Known(make, train_plain(make, 4), budget_for(make, 0.7) + 2 * CountedRam.LIBRARY_BYTES)


@pytest.mark.parametrize(("policy", "luck"), [("auto", 0.0), *((policy, 0.5) for policy in POLICIES)], ids=str)
def test_training_is_plain_training_to_the_bit(
    fakes: Callable[..., Fakes], known: Known, policy: str | Policy, luck: float
) -> None:
    made = fakes(luck=luck)
    ours, summaries = train_in_session(known.make, 4, budget=known.budget, policy=policy)
    assert ours == known.plain
    assert all(summary.measured_peak_bytes <= known.budget for summary in summaries)
    assert [streams.races for streams in made.streams] == [[]]
    assert made.memory[0].gates > 0


def test_a_backward_pass_on_another_thread_leaves_nothing_behind(fakes: Callable[..., Fakes]) -> None:
    """CUDA's runs on one of autograd's own, while the thread that asked for it waits."""
    made = fakes(luck=0.0)
    make = training_of("resnet-18", 32, 2)
    budget = budget_for(make, 0.7) + 2 * CountedRam.LIBRARY_BYTES

    def elsewhere(function: Callable[[], object], session: outgrow.Session | None) -> None:
        """Autograd takes the modes of the thread that asks along to its own."""
        mode = nullcontext() if session is None else Watch(session._executor._runner, session._executor._table)
        failures: list[BaseException] = []

        def run() -> None:
            try:
                with mode:
                    function()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert not failures

    def losses(training: Any, session: outgrow.Session | None) -> list[float]:
        found = []
        for k in range(5):
            with nullcontext() if session is None else session.step():
                x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(k))
                loss = training.models[0](x).pow(2).mean()
                elsewhere(loss.backward, session)
                training.optimizers[0].step()
                training.optimizers[0].zero_grad()
            found.append(float(loss.detach()))
            if session is not None:
                del loss
                session._executor.come_here()
                session._pool.land()
                session._pool.cache.make_room(1 << 60)
                assert not list(session._pool.entries())
        return found

    torch.manual_seed(0)
    expected = losses(make(), None)
    torch.manual_seed(0)
    training = make()
    with outgrow.Session(
        training.models, training.optimizers, budget=budget, policy="vdnn-all", least_moved_bytes=1
    ) as session:
        assert losses(training, session) == expected
        assert session.summary().offloaded_bytes > 0
        made.memory[0].count(0)
        state = sum(tensor.nbytes for tensor in training.models[0].state_dict().values())
        assert session.live_bytes < 2.1 * state + CountedRam.LIBRARY_BYTES + 1e6
    assert made.streams[0].races == []


@pytest.mark.parametrize("policy", ["auto", RecomputeAll()], ids=str)
def test_batches_of_ever_other_sizes_go_by_the_plans_of_larger_ones(
    fakes: Callable[..., Fakes], policy: str | Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [12, 16, *Random(0).sample(range(4, 16), 10)]

    def loss_of(model: torch.nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        loss: torch.Tensor = model(x[: rows[k]].clone()).pow(2).mean()
        return loss

    def build() -> torch.nn.Module:
        layers = [torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.GELU())] * 4
        return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), *layers)

    make = supervised(build, loss_of, shape=(16, 3, 24, 24))
    plain = train_plain(make, len(rows))
    budget = int(budget_for(make, 0.8) * 1.1) + 2 * CountedRam.LIBRARY_BYTES
    followed = []
    end = Executor.end

    def noted(executor: Executor) -> StepOutcome:
        followed.append(end(executor))
        return followed[-1]

    monkeypatch.setattr(Executor, "end", noted)
    made = fakes()
    ours, summaries = train_in_session(make, len(rows), budget=budget, policy=policy)
    assert ours == plain
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)
    assert sum(outcome.followed and outcome.fit is Fit.SMALLER for outcome in followed) >= 5
    assert [race for streams in made.streams for race in streams.races] == []


@pytest.mark.parametrize("policy", ["auto", "lru", "vdnn-all", RecomputeAll()], ids=str)
def test_programs_may_use_streams_of_their_own_inside_a_step(
    fakes: Callable[..., Fakes], policy: str | Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies and what is made anew keep to the step's: each stream has memory of its own, and nothing orders them."""
    made = fakes(luck=0.0)

    class Elsewhere(torch.autograd.Function):
        """Reads what it saved on a stream of its own, as a kernel beside others may."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            with made.streams[-1].elsewhere() if made.streams else nullcontext():
                (x,) = ctx.saved_tensors
                return 2 * x * grad

    def loss_of(model: torch.nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        for layer in model:  # type: ignore[attr-defined]
            x = Elsewhere.apply(torch.tanh(layer(x)))
            with made.streams[-1].elsewhere() if made.streams else nullcontext():
                x.sum().item()
        loss: torch.Tensor = x.pow(2).mean()
        return loss

    def at_home() -> bool:
        return not made.streams or made.streams[-1].current() == made.streams[-1].home

    def noted(name: str) -> Callable[..., Any]:
        usual = getattr(CountedRam if name == "allocate" else Runner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name].append(at_home())
            return usual(*args, **kwargs)

        return call

    seen: dict[str, list[bool]] = {"allocate": [], "run_inside": []}
    make = supervised(
        lambda: torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))), loss_of, shape=(4096, 64)
    )
    plain = train_plain(make, 5)
    budget = budget_for(make, 0.7) + 2 * CountedRam.LIBRARY_BYTES
    made.streams.clear()
    monkeypatch.setattr(CountedRam, "allocate", noted("allocate"))
    monkeypatch.setattr(Runner, "run_inside", noted("run_inside"))
    ours, summaries = train_in_session(make, 5, budget=budget, policy=policy)
    assert ours == plain
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)
    assert made.streams[-1].races == []
    assert sum(map(len, seen.values())) > 0
    assert all(map(all, seen.values()))
    assert (Stream.ELSEWHERE, Stream.COMPUTE) in made.streams[-1].waits


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[StepTimes]:
    """The steps whose times were read, which waits for the device."""
    found: list[StepTimes] = []
    usual = StepTimes.read

    def noted(times: StepTimes) -> tuple[float, float, float]:
        found.append(times)
        return usual(times)

    monkeypatch.setattr(StepTimes, "read", noted)
    return found


def test_the_host_waits_for_no_step_before_the_next_one_is_under_way(
    fakes: Callable[..., Fakes], known: Known, reads: list[StepTimes]
) -> None:
    fakes(luck=0.0)
    training = known.make()
    with outgrow.Session(training.models, training.optimizers, budget=known.budget) as session:
        for k in range(6):
            with session.step():
                training.run(k)
        read = len(reads)
        with session.step():
            training.run(6)
            assert len(reads) == read
        assert len(reads) == read + 1
        assert len(session.history) == 7  # who asks for figures waits
        assert len(reads) == read + 2
        assert session.summary().step_seconds > 0
        assert len(reads) == read + 2


def test_a_device_that_fails_at_a_step_takes_nothing_of_ours_along(
    fakes: Callable[..., Fakes], known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes(luck=0.0)
    training = known.make()
    session = outgrow.Session(training.models, training.optimizers, budget=known.budget)
    for k in range(5):
        with session.step():
            training.run(k)

    def fail(times: StepTimes) -> tuple[float, float, float]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def failing_step() -> None:
        with session.step():
            training.run(5)

    with monkeypatch.context() as patch:
        patch.setattr(StepTimes, "read", fail)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            failing_step()
    assert torch._C._len_torch_dispatch_stack() == 0
    training.run(6)
    session.close()


def test_an_op_whose_size_is_data_gets_no_more_than_the_budget_has(fakes: Callable[..., Fakes]) -> None:
    """Every time: what it took the last time says nothing."""
    made = fakes(luck=0.0)
    model = torch.nn.Linear(64, 64)
    found = []
    with outgrow.Session(model, budget="64MiB", policy="vdnn-all") as session:
        for k in range(5):
            with session.step():
                y = model(torch.randn(256, 64, generator=torch.Generator().manual_seed(k)))
                y[y > 0].sum().backward()
            model.zero_grad()
            found.append(made.memory[0].stricts)
            made.memory[0].stricts = 0
    assert all(found)


def test_what_a_library_took_beyond_the_budget_is_not_passed_over(
    fakes: Callable[..., Fakes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused nothing at first sight, as it would then do something else, with other bits."""
    made = fakes(luck=0.0)
    usual = Calls._measured_call

    def greedy(calls: Calls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, rise = usual(calls, func, args, kwargs)
        is_last = "convolution_backward" in str(func) and args[1].shape[1] == 3  # that of the images
        return result, 1 << 30 if is_last else rise

    monkeypatch.setattr(Calls, "_measured_call", greedy)
    training = training_of("resnet-18", 32, 2)()
    session = outgrow.Session(training.models, training.optimizers, budget="900MiB")
    with pytest.raises(BudgetTooSmall, match=r"convolution_backward") as caught, session.step():
        training.run(0)
    assert caught.value.least_bytes > 1 << 30
    assert made.memory[0].opens > 0
    session.close()


def test_memory_that_is_refused_although_the_budget_has_it_is_had_all_the_same(
    fakes: Callable[..., Fakes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess of what an op takes beside its results may be far too high; what it is sure to take counts."""
    made = fakes(luck=0.0)
    usual, refused, stretched = Calls._measured_call, [0], []

    def refusing(calls: Calls, func: Any, *rest: Any) -> Any:
        if "max_pool2d_with_indices" in str(func) and refused[0] < 2:
            refused[0] += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return usual(calls, func, *rest)

    def stretch(memory: CountedRam, nbytes: int) -> bool:
        stretched.append(nbytes)
        return True

    monkeypatch.setattr(Calls, "_measured_call", refusing)
    monkeypatch.setattr(CountedRam, "stretch", stretch)
    monkeypatch.setattr(Cache, "evict", lambda cache, nbytes: False)
    training = training_of("resnet-18", 32, 2)()
    with outgrow.Session(training.models, training.optimizers, budget="900MiB") as session, session.step():
        training.run(0)
    pooled = 2 * 64 * 8 * 8 * 4  # 64 maps of 8 x 8 for two images
    assert stretched == [pooled * 3] * 2, "the maxima, and where they were as 8-byte numbers"
    assert made.memory


@pytest.mark.parametrize("begins", [0, 2], ids=["from the first step on", "from the third"])
def test_what_only_ends_of_pieces_keep_out_has_saved_values_leave(
    fakes: Callable[..., Fakes], known: Known, begins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where none is left that can, the wall gives way."""
    dice, steps, stretched = Random(0), [0], [False]
    gate, begin_step = CountedRam.gate, CountedRam.begin_step

    def begun(memory: CountedRam, *, planned: bool, again: bool) -> None:
        steps[0] += 1
        stretched[0] = False
        begin_step(memory, planned=planned, again=again)

    def stretch(memory: CountedRam, nbytes: int) -> bool:
        stretched[0] = True
        return True

    def scattered(memory: CountedRam, request: Request) -> AbstractContextManager[None]:
        if steps[0] > begins and not stretched[0] and dice.random() < 0.2:
            raise Scattered("CUDA out of memory")
        return gate(memory, request)

    monkeypatch.setattr(CountedRam, "begin_step", begun)
    monkeypatch.setattr(CountedRam, "stretch", stretch)
    monkeypatch.setattr(CountedRam, "gate", scattered)
    monkeypatch.setattr(CountedRam, "open_bytes", 0)
    fakes()
    ours, summaries = train_in_session(known.make, 4, budget=known.budget)
    assert ours == known.plain
    assert all(summary.measured_peak_bytes <= known.budget for summary in summaries)
    assert (summaries[0].offloaded_bytes > 0) or begins


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For which budgets plans are made since an allocator gave free blocks back, where they are taken."""
    found: list[int] = []
    wants_room, leave_room = Planner.wants_room, Planner.leave_room

    def wants(planner: Planner, kind: StepKind, outcome: StepOutcome) -> bool:
        kind.plan_seconds = 0.0  # steps need not take as long as planning did
        return wants_room(planner, kind, outcome)

    def leave(planner: Planner, kind: StepKind, budget_bytes: int) -> bool:
        has_left = leave_room(planner, kind, budget_bytes)
        if has_left:
            found.append(budget_bytes - kind.room_bytes)
            assert kind.plan.expected_peak_bytes <= found[-1]
        return has_left

    monkeypatch.setattr(Planner, "wants_room", wants)
    monkeypatch.setattr(Planner, "leave_room", leave)
    return found


@pytest.mark.parametrize(("enough", "times"), [(0.975, 2), (0.5, 4)], ids=["that is enough", "nothing is enough"])
def test_plans_leave_room_where_the_allocator_gives_free_blocks_back_in_step_after_step(
    fakes: Callable[..., Fakes], rooms: list[int], enough: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 64th of the budget more each time, and a sixteenth at the most; not where that makes no other plan."""
    fakes()
    make = training_of("gpt-2x64", 64, 2)
    budget = budget_for(make, 0.7) + 2 * CountedRam.LIBRARY_BYTES
    gave_back = property(lambda memory: min([budget, *rooms]) > enough * budget)
    monkeypatch.setattr(CountedRam, "gave_back", gave_back)
    ours, summaries = train_in_session(make, 36, budget=budget)
    assert ours == train_plain(make, 36)
    assert rooms[-1] == budget - times * (budget // 64)
    assert rooms == sorted(set(rooms), reverse=True)
    assert summaries[-1].kept_bytes < summaries[3].kept_bytes


def test_where_no_plan_leaves_room_plans_stay_as_they_are(
    fakes: Callable[..., Fakes], rooms: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other kinds of step, too, which are made later; and nobody looks for ever."""
    fakes()
    make = training_of("gpt-2x64", 64, 2)
    budget = budget_for(make, 0.7) + 2 * CountedRam.LIBRARY_BYTES
    monkeypatch.setattr(CountedRam, "gave_back", True)
    planned: list[int] = []
    plan = Planner.plan

    def none_smaller(planner: Planner, problem: Problem, **options: Any) -> Plan:
        planned.append(problem.budget_bytes)
        found = plan(planner, problem.with_budget(budget), **options)
        if planned[-1] == budget:
            return found
        other = replace(found, offloads=found.offloads[1:], recomputes=found.recomputes[1:])
        return replace(other, problem=problem.with_budget(problem.budget_bytes // 2))

    monkeypatch.setattr(Planner, "plan", none_smaller)
    _, summaries = train_in_session(make, 60, budget=budget)
    assert not rooms
    assert [nbytes for nbytes in planned if nbytes < budget] == [budget - k * (budget // 64) for k in range(1, 5)]
    assert summaries[-1].kept_bytes == summaries[5].kept_bytes


def test_a_plan_of_the_users_is_not_made_fuller_nor_emptier(
    fakes: Callable[..., Fakes], rooms: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes()
    make = training_of("gpt-2x64", 64, 2)
    budget = budget_for(make, 0.7) + 2 * CountedRam.LIBRARY_BYTES
    torch.manual_seed(0)
    training = make()
    with outgrow.Session(training.models, training.optimizers, budget=budget, least_moved_bytes=1) as session:
        for k in range(3):
            with session.step():
                training.run(k)
        given = session.plan
    monkeypatch.setattr(CountedRam, "gave_back", True)
    _, summaries = train_in_session(make, 24, budget=budget, plan=given)
    assert summaries[-1].offloaded_bytes + summaries[-1].recomputed_bytes > 0
    assert not rooms


@pytest.mark.parametrize("place", ["an op", "what comes back"])
def test_a_step_without_a_wall_goes_astray_where_the_allocator_comes_to_hold_more(
    fakes: Callable[..., Fakes], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeps, astray, careful = [True], [0], [0]

    def go_astray(memory: CountedRam) -> None:
        astray[0] += 1
        keeps[0] = True

    def take_care(fast_path: FastPath) -> None:
        careful[0] += 1

    monkeypatch.setattr(CountedRam, "keeps_bounds", lambda memory: keeps[0])
    monkeypatch.setattr(CountedRam, "go_astray", go_astray)
    monkeypatch.setattr(FastPath, "go_astray", take_care)
    fakes()
    training = training_of("gpt-2x64", 64, 2)()
    with outgrow.Session(training.models, training.optimizers, budget="1GiB") as session, session.step():
        x = torch.ones(64)
        assert (astray, careful) == ([0], [0])
        keeps[0] = False
        if place == "an op":
            x.exp()
        else:
            session._pool._allocate(512, may_evict=False)
        assert (astray, careful) == ([1], [1])


def test_a_plan_under_which_nothing_leaves_stays_though_the_allocator_gives_free_blocks_back(
    fakes: Callable[..., Fakes], rooms: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes()
    monkeypatch.setattr(CountedRam, "gave_back", True)
    train_in_session(training_of("gpt-2x64", 64, 2), 12, budget="1GiB")
    assert not rooms


def test_what_rounding_takes_is_planned_for_where_it_is_taken(
    fakes: Callable[..., Fakes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all through the step: where few values are alive, little is lost between them."""
    block = 4 * MiB
    fakes(luck=0.0)

    def count(memory: CountedRam, nbytes: int) -> None:
        blocks = sum(-(-record.nbytes // block) * block for record in memory._ledger.alive() if record.nbytes > 4096)
        memory._ledger.settle(blocks + CountedRam.LIBRARY_BYTES)

    monkeypatch.setattr(CountedRam, "count", count)
    model = torch.nn.Sequential(*(layer for _ in range(12) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())))
    with outgrow.Session(model, budget="1GiB") as session:
        with session.step():
            model(torch.randn(256, 64)).sum().backward()
            model.zero_grad()
        assert session.plan is not None
        problem = session.plan.problem
        lost = block - 64 * 64 * 4
        assert 12 * lost <= problem.base_bytes <= 12 * lost + CountedRam.LIBRARY_BYTES, "the weights'"
        tanh = [op.workspace_bytes for op in problem.trace.ops if op.name == "aten.tanh.default"]
        assert tanh[-1] >= tanh[0] + 11 * (block - 256 * 64 * 4)
        assert 11 * lost < problem.trace.ops[-1].workspace_bytes < 12 * block, "the gradients'"


def test_plans_for_a_host_that_runs_ahead_say_when_values_are_gone() -> None:
    torch.manual_seed(0)

    def step() -> outgrow.TrainingStep:
        training = training_of("resnet-18", 32, 2)()
        return outgrow.TrainingStep(training.models, training.optimizers, lambda: training.run(0))

    trace = outgrow.trace(step, fake=True)
    hardware = outgrow.Hardware("any", 1 << 40, 1e11, 1e10, 5e8, 5e8)
    plan = outgrow.plan(trace, budget="1GiB", policy="vdnn-all", hardware=hardware)
    loose = replace(plan, offloads=tuple(replace(item, release_tick=-1) for item in plan.offloads))
    tight = with_releases(loose)
    assert any(item.release_tick >= 0 for item in tight.offloads)
    assert all(item.release_tick < 0 or item.release_tick >= item.out_tick for item in tight.offloads)
    assert tight.simulate() == loose.simulate()  # nobody waits for what is done


def test_what_has_no_room_in_pinned_memory_goes_to_the_disk_and_comes_back_equal(
    fakes: Callable[..., Fakes], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = SpillFile.write

    def count(spill: SpillFile, slot: object, address: int) -> None:
        written.append(address)
        write(spill, slot, address)  # type: ignore[arg-type]

    monkeypatch.setattr(SpillFile, "write", count)
    monkeypatch.setattr(host, "_LEAST_BOUNCE_BYTES", 64 << 10)
    monkeypatch.setattr(host, "LEAST_HOST_BYTES", 128 << 10)
    made = fakes(host_bytes=MiB // 2)
    make = training_of("resnet-18", 32, 2)
    plain = train_plain(make, 4)
    ours, summaries = train_in_session(make, 4, budget=budget_for(make, 0.6), policy="vdnn-all")
    assert ours == plain
    assert summaries[-1].offloaded_bytes > MiB // 2
    assert written
    assert 0 < made.pinned <= MiB // 2
    assert [streams.races for streams in made.streams] == [[]]


def test_a_host_budget_that_does_not_hold_the_buffers_is_refused(fakes: Callable[..., Fakes], tmp_path: Path) -> None:
    fakes(host_bytes=MiB)
    with pytest.raises(HostBudgetTooSmall, match=r"2\.00 MiB at least") as caught:
        outgrow.Session(torch.nn.Linear(8, 8), budget="1GiB", spill_dir=tmp_path, allow_tmpfs=True)
    assert caught.value.least_bytes == 2 * MiB
    assert "host_budget" in str(caught.value)


def test_a_host_budget_for_a_model_on_the_cpu_is_refused() -> None:
    with pytest.raises(SessionError, match="host_budget is for models on a GPU"):
        outgrow.Session(torch.nn.Linear(8, 8), budget="1GiB", host_budget="1GiB")
