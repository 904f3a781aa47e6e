"""Small training steps that the tests run twice: plain, and under a budget."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import outgrow
from outgrow.planning.parks import gaps, park, parks_for
from outgrow.planning.plan import Offload, Plan, Recompute, Replay, make_plan
from outgrow.planning.policies import Policy
from outgrow.planning.prefetch import dropped_early, may_be_dropped, with_prefetch
from outgrow.planning.problem import Problem
from outgrow.planning.reuse import reusable_ops
from outgrow.tracing.liveness import plain_profile


@dataclass(frozen=True)
class Result:
    """What training left behind: `state` is a hash of parameters, buffers and the optimizers' state."""

    losses: tuple[float, ...]
    state: str


@dataclass(frozen=True)
class Training:
    """A model, its optimizer, and a function that runs step number `k` and returns the loss."""

    models: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    run: Callable[[int], Any]


Make = Callable[[], Training]


@dataclass(frozen=True)
class RecomputeAll:
    """Drops every value that has a recipe; what is left, the cache sends away."""

    replay: Replay = Replay.SPEED
    name: str = "recompute-all"

    def plan(self, problem: Problem) -> Plan:
        chosen = [item for item in problem.candidates if may_be_dropped(problem, item)]
        dropped = tuple(replace(item, replay=self.replay) for item in dropped_early(problem, chosen))
        return make_plan(self.name, problem, (), dropped)

    def __str__(self) -> str:
        return self.name


Forward = Callable[[torch.nn.Module, torch.Tensor, int], torch.Tensor]
Optimize = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def supervised(
    build: Callable[[], torch.nn.Module],
    forward: Forward | None = None,
    optimize: Optimize = sgd,
    *,
    shape: tuple[int, ...] = (8, 3, 32, 32),
    passes: int = 1,
    after_backward: Callable[[torch.nn.Module], float] | None = None,
    set_to_none: bool = True,
    autocast: bool = False,
) -> Make:
    """Classification of random data that differs from step to step.

    `forward` gets the model, a batch and its number, and gives the classes' scores, or the loss itself. `passes`
    batches are accumulated before each update. What `after_backward` finds is part of the loss that is told.
    """

    def make() -> Training:
        model = build()
        optimizer = optimize(model.parameters())

        def run(k: int) -> torch.Tensor:
            total = torch.zeros(())
            for part in range(passes):
                generator = torch.Generator().manual_seed(passes * k + part)
                x = torch.randn(shape, generator=generator)
                y = torch.randint(0, 10, shape[:1], generator=generator)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    out = model(x) if forward is None else forward(model, x, k)
                    loss = F.cross_entropy(out.float(), y) if out.dim() == 2 else out
                loss.backward()
                total += loss.detach()
            if after_backward is not None:
                total += after_backward(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            return total

        return Training([model], [optimizer], run)

    return make


def trained_on(
    build: Callable[[], torch.nn.Module],
    loss_of: Callable[[Any, int], torch.Tensor],
    optimize: Optimize = momentum,
) -> Make:
    """Trains a model by its loss in each step."""

    def make() -> Training:
        model = build()
        optimizer = optimize(model.parameters())

        def run(k: int) -> torch.Tensor:
            loss = loss_of(model, k)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Training([model], [optimizer], run)

    return make


def digest(models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer] = ()) -> str:
    """A hash of all parameters and buffers, and of what optimizers keep from step to step."""
    total = hashlib.sha256()

    def add(name: str, item: Any) -> None:
        total.update(name.encode())
        if isinstance(item, torch.Tensor):
            total.update(item.detach().contiguous().view(-1).view(torch.uint8).numpy())
        else:
            total.update(repr(item).encode())

    for model in models:
        for name, tensor in sorted(model.state_dict().items()):
            add(name, tensor)
    for optimizer in optimizers:
        for number, state in sorted(optimizer.state_dict()["state"].items()):
            for name, item in sorted(state.items()):
                add(f"{number} {name}", item)
    return total.hexdigest()


@cache
def train_plain(make: Make, steps: int) -> Result:
    """Train with plain PyTorch; once, where several tests compare with the same."""
    torch.manual_seed(0)
    training = make()
    torch.manual_seed(1)
    losses = tuple(float(training.run(k)) for k in range(steps))
    return Result(losses, digest(training.models, training.optimizers))


def train_in_session(
    make: Make, steps: int, *, budget: int | str, policy: str | Policy = "auto", **options: Any
) -> tuple[Result, list[outgrow.Summary]]:
    """Train the same in a session; also the summary of each step."""
    torch.manual_seed(0)
    training = make()
    torch.manual_seed(1)
    losses: list[float] = []
    summaries: list[outgrow.Summary] = []
    options.setdefault("least_moved_bytes", 1)
    with outgrow.Session(training.models, training.optimizers, budget=budget, policy=policy, **options) as session:
        for k in range(steps):
            with session.step():
                loss = training.run(k)
            losses.append(float(loss))
            summaries.append(session.summary())
    return Result(tuple(losses), digest(training.models, training.optimizers)), summaries


def budget_for(make: Make, share: float, *, least_moved_bytes: int = 1) -> int:
    """A share of the plain peak, or the least feasible budget where that is more; in bytes."""
    plain_peak, least = bounds_of(make, least_moved_bytes=least_moved_bytes)
    return int(max(plain_peak * share, least))


@cache
def bounds_of(make: Make, *, least_moved_bytes: int = 1) -> tuple[int, int]:
    """The plain peak, and the least feasible budget; in bytes. Asked for once, as above.

    Measured on a real step, so that workspaces count; a little more than the least, since the first step guesses.
    """

    def step() -> outgrow.TrainingStep:
        torch.manual_seed(0)
        training = make()
        return outgrow.TrainingStep(training.models, training.optimizers, lambda: training.run(0))

    trace = outgrow.trace(step, fake=False)
    hardware = outgrow.Hardware("any", 1 << 40, 1e11, 1e10, 1e9, 1e9)
    problem_plan = outgrow.plan(trace, budget=1, policy="lru", hardware=hardware)
    from outgrow.planning.floor import needed_curve
    from outgrow.planning.problem import Problem

    problem = Problem(trace, hardware, problem_plan.budget_bytes, least_moved_bytes=least_moved_bytes)
    # The tests hold on to a few scalars and to the batch of the step before.
    # Not every policy parks: what the program holds counts as if it stayed.
    least = int(max(needed_curve(problem)) * 1.02 + 4096)
    return plain_profile(trace).peak_bytes, least


def assert_equal_to_plain(make: Make, *, share: float = 0.6, policy: str | Policy = "auto", steps: int = 4) -> None:
    """Train plain and in a session at a share of the plain peak: losses and state must be equal to the bit."""
    plain = train_plain(make, steps)
    budget = budget_for(make, share)
    ours, summaries = train_in_session(make, steps, budget=budget, policy=policy)
    assert ours == plain
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)


def rise_of(act: Callable[[], object]) -> int:
    """How far `act` lifts live bytes on the CPU at its highest, by the allocator's own word to PyTorch's profiler.

    It knows of what is freed only if it saw that being made: so ask of the step before, too.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        act()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))


def with_disk(problem: Problem, speed: float) -> Problem:
    """The same problem beside a disk that moves `speed` bytes a second, whatever was measured."""
    hardware = replace(problem.hardware, copy_latency_seconds=0.0, copy_out_bandwidth=speed, copy_in_bandwidth=speed)
    return replace(problem, hardware=hardware)


@dataclass(frozen=True)
class ParkAll:
    """Parks every value in every gap in which the program holds it unread; what else is over, the cache sends away.

    `prefetch` says whether copies back start ahead of the ops that want them, `offload` whether saved values leave by
    plan too. `speed` is what the plan takes the disk for, in bytes a second, if it does not ask.
    """

    name: str = "park-all"
    parks: bool = True
    prefetch: bool = True
    offload: bool = False
    speed: float = 0.0

    def plan(self, problem: Problem) -> Plan:
        if self.speed:
            problem = with_disk(problem, self.speed)
        found = [item for gap in gaps(problem) if (item := park(problem, gap)) is not None] if self.parks else []
        offloads = list(with_prefetch(problem, problem.candidates)) if self.offload else []
        if not self.prefetch:
            found = [replace(item, in_tick=-1) for item in found]
            offloads = [replace(item, in_tick=-1) for item in offloads]
        return make_plan(self.name, problem, tuple(offloads), parks=tuple(found))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class ParkToFit:
    """Parks what must be parked to fit the budget; what else is over, the cache sends away."""

    name: str = "park-to-fit"

    def plan(self, problem: Problem) -> Plan:
        return make_plan(self.name, problem, (), parks=parks_for(problem, problem.budget_bytes))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class RandomDecisions:
    """Keeps, offloads or drops each value, and reuses memory, at random; copies, waits and drops at random ticks.

    What is made anew for another's sake stays or goes, at random too. If it `parks`, what does is given places in the
    next tier in no order; each kind of step has other decisions then.
    """

    seed: int
    name: str = "random"
    parks: bool = False

    def plan(self, problem: Problem) -> Plan:
        kind = sum(saved.nbytes for saved in problem.trace.saved) if self.parks else 0
        draw = random.Random(self.seed + kind)
        offloads = [
            Offload(
                value=item.value,
                out_tick=draw.randint(item.first_pack, item.first_unpack - 1),
                release_tick=draw.choice([-1, draw.randint(item.first_pack, item.first_unpack)]),
                in_tick=draw.choice([-1, draw.randint(item.first_pack, item.first_unpack)]),
                offset=0,
            )
            for item in problem.candidates
            if draw.random() < 0.4
        ]
        gone = {item.value for item in offloads}
        recomputes = [
            Recompute(
                item.value,
                draw.randint(item.first_pack, item.first_unpack - 1),
                draw.choice([Replay.SPEED, Replay.MEMORY]),
            )
            for item in problem.candidates
            if item.value not in gone and problem.recipes.find(item.value) is not None and draw.random() < 0.7
        ]
        reuses = tuple(op for op in reusable_ops(problem) if draw.random() < 0.7)
        gone |= {item.value for item in recomputes}
        parks = [
            item
            for gap in (gaps(problem) if self.parks else ())
            if gap.value not in gone and draw.random() < 0.5 and (item := park(problem, gap)) is not None
        ]
        if self.parks:
            draw.shuffle(parks)
            draw.shuffle(offloads)
        return make_plan(self.name, problem, tuple(offloads), tuple(recomputes), parks=tuple(parks), reuses=reuses)
