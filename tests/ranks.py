"""What the ranks of `test_distributed` run; `ranks.py FOLDER RANK` trains until somebody ends it.

`torchrun ... ranks.py FOLDER` trains the case "vdnn-all" before, and writes down what it found.

Each case trains twice, by plain DistributedDataParallel and in a session under a budget that binds.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import outgrow
from outgrow.cost import measure
from outgrow.planning.policies import Policy
from outgrow.tracing.ir import Kind
from steps import ParkAll, ParkToFit, RecomputeAll, digest

UNBOUNDED = 1 << 40


class SmallResNet(nn.Module):
    """Residual blocks with batch norm, and a branch that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(inplace=True),
                nn.Conv2d(16, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
            )
            for _ in range(2)
        )
        self.branch = nn.Conv2d(16, 16, 1)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(1024, 128), nn.Linear(128, 10))

    def forward(self, x: torch.Tensor, uses_branch: bool = True) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = F.relu(x + block(x))
        if uses_branch:
            x = x + self.branch(x)
        return self.head(x)


class SmallTransformer(nn.Module):
    """Two layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def images(k: int, rank: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * k + rank)
    return torch.randn(batch, 3, 32, 32, generator=generator), torch.randint(0, 10, (batch,), generator=generator)


def tokens(k: int, rank: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * k + rank)
    text = torch.randint(0, 64, (batch, 65), generator=generator)
    return text[:, :-1].clone(), text[:, 1:].clone()


@dataclass(frozen=True)
class Case:
    """One way to train.

    `share` is the budget's, of the peak that a session measures without one. `policies` are those of the ranks, in
    turns. `accumulation` is how many batches make one update; `step_each` runs each of them as a step of its own.
    `batches` are the sizes of the batches, in turns.
    """

    make: Callable[[], nn.Module]
    policies: Sequence[str | Policy] = ("auto",)
    share: float = 0.6
    ddp: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    step_each: bool = False
    batches: Sequence[int] = (8,)
    steps: int = 4
    set_to_none: bool = True
    autocast: bool = False
    skips_branch: bool = False
    inner: bool = False
    hook: Callable[..., Any] | None = None
    adam: bool = False

    def data(self, k: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.batches[k % len(self.batches)]
        return images(k, rank, batch) if self.make is SmallResNet else tokens(k, rank, batch)


def decaying_hook(state: None, bucket):  # DistributedDataParallel refuses annotations that are strings
    """Averages gradients, and has weights decay: reads them on a thread of its own."""
    exchanged = allreduce_hook(distributed.group.WORLD, bucket)

    def decay(exchanged: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        for weight, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradient.add_(weight.detach(), alpha=1e-3)
        return exchanged.value()

    return exchanged.then(decay)


VIEW = {"gradient_as_bucket_view": True}
SMALL_BUCKETS = {"bucket_cap_mb": 0.25}
VDNN = ("vdnn-all",)

# Planning with auto takes seconds, with the others next to none.
CASES: dict[str, Case] = {
    "auto, small buckets": Case(SmallResNet, ddp=SMALL_BUCKETS),
    "auto, gradients in buckets": Case(SmallTransformer, ddp=VIEW, adam=True),
    "vdnn-all": Case(SmallResNet, VDNN),
    "parks everything, gradients in buckets": Case(
        SmallResNet, (ParkAll(),), 0.8, ddp=VIEW | SMALL_BUCKETS, adam=True
    ),
    "parks what it must": Case(SmallTransformer, (ParkToFit(),), 0.3, adam=True),
    "makes everything anew": Case(SmallResNet, (RecomputeAll(),), 0.7),
    "transformer, superneurons": Case(SmallTransformer, ("superneurons",), 0.8, ddp=VIEW),
    "transformer, autocast": Case(SmallTransformer, ("checkpoint",), 0.7, autocast=True),
    "another policy in each rank": Case(SmallResNet, ("layrub", "vdnn-all"), 0.7),
    "unused parameters": Case(SmallResNet, VDNN, ddp={"find_unused_parameters": True}, skips_branch=True, steps=8),
    "static graph": Case(SmallResNet, VDNN, ddp={"static_graph": True}),
    "a smaller last batch": Case(SmallResNet, VDNN, batches=(8, 8, 4), steps=9),
    "accumulates in one step": Case(SmallResNet, VDNN, accumulation=2, ddp=VIEW),
    "accumulates, a step a batch": Case(SmallResNet, ("layrub",), 0.7, accumulation=2, step_each=True),
    "gradients stay": Case(SmallResNet, ("lru",), set_to_none=False, ddp=VIEW | SMALL_BUCKETS),
    "session over the inner module": Case(SmallResNet, VDNN, inner=True),
    "a hook that reads weights": Case(SmallTransformer, (ParkAll(),), 0.8, hook=decaying_hook, ddp=SMALL_BUCKETS),
    "compressed": Case(SmallResNet, VDNN, hook=fp16_compress_hook, ddp=SMALL_BUCKETS),
}


@dataclass(frozen=True)
class Trained:
    """What training left behind in one rank."""

    losses: list[float]
    state: str
    peaks: list[int]
    moved: int
    live_before: int = 0


def train(case: Case, budget: int | None, policy: str | Policy = "keep", steps: int | None = None) -> Trained:
    """Train a case; without a budget by plain DistributedDataParallel."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    inner = case.make()
    torch.manual_seed(1 + rank)
    model = DistributedDataParallel(inner, **case.ddp)
    if case.hook is not None:
        model.register_comm_hook(None, case.hook)
    optimizer: torch.optim.Optimizer
    if case.adam:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses: list[float] = []
    peaks: list[int] = []
    moved = live = 0
    with ExitStack() as stack:
        session: outgrow.Session | None = None
        if budget is not None:
            session = stack.enter_context(
                outgrow.Session(
                    inner if case.inner else model, optimizer, budget=budget, policy=policy, least_moved_bytes=1024
                )
            )
            live = session.live_bytes

        def step() -> Any:
            return nullcontext() if session is None else session.step()

        def batch(k: int) -> torch.Tensor:
            x, y = case.data(k, rank)
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                out = model(x, uses_branch=k % 3 != 1) if case.skips_branch else model(x)
                loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
            (loss / case.accumulation).backward()
            return loss.detach()

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=case.set_to_none)

        def note() -> None:
            nonlocal moved
            if session is not None:
                summary = session.summary()
                peaks.append(summary.measured_peak_bytes)
                moved += summary.offloaded_bytes + summary.recomputed_bytes

        for k in range(case.steps if steps is None else steps):
            numbers = [k * case.accumulation + i for i in range(case.accumulation)]
            if case.step_each:
                for number in numbers:
                    is_last = number == numbers[-1]
                    with nullcontext() if is_last else model.no_sync(), step():
                        losses.append(batch(number).item())
                        if is_last:
                            update()
                    note()
                continue
            with step():
                for number in numbers:
                    with nullcontext() if number == numbers[-1] else model.no_sync():
                        losses.append(batch(number).item())
                update()
            note()
    return Trained(losses, digest([inner], [optimizer]), peaks, moved, live)


def run_case(case: Case, known: dict[str, tuple[Trained, int]]) -> dict[str, Any]:
    """Plain, and under a budget that is a share of the peak. `known` is what plain training gave other cases."""
    rank = distributed.get_rank()
    bare = repr(replace(case, policies=(), share=0.0, inner=False))
    if bare not in known:
        known[bare] = (train(case, None), max(train(case, UNBOUNDED, steps=2).peaks))
    plain, peak = known[bare]
    budget = int(case.share * peak)
    ours = train(case, budget, case.policies[rank % len(case.policies)])
    return {"plain": asdict(plain), "ours": asdict(ours), "budget": budget, "peak": peak}


# --- what is known of buckets ---


def bucket_accounting(view: bool) -> dict[str, int]:
    """Bytes of the buckets, as DistributedDataParallel shows them to a hook, and what a session counts."""
    sizes: dict[int, int] = {}

    def hook(state, bucket):  # DistributedDataParallel refuses annotations that are strings
        storage = bucket.buffer().untyped_storage()
        sizes[bucket.index()] = storage.nbytes()
        return allreduce_hook(distributed.group.WORLD, bucket)

    # No buffers, whose broadcast's memory ends on another thread, some time after the step.
    model = DistributedDataParallel(SmallTransformer(), bucket_cap_mb=0.25, gradient_as_bucket_view=view)
    model.register_comm_hook(None, hook)
    parameters = sum(item.untyped_storage().nbytes() for item in [*model.parameters(), *model.buffers()])
    with outgrow.Session(model, budget=UNBOUNDED, policy="keep") as session:
        before = session.live_bytes
        afterwards = []
        for k in range(4):
            sizes.clear()
            x, y = tokens(k, distributed.get_rank(), 2)
            with session.step():
                F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
                model.zero_grad()
            del x, y
            afterwards.append(session.live_bytes - parameters)
        assert session.plan is not None
        values = session.plan.problem.trace.values
    # By storage: each write to one makes another value.
    stays = {value.storage: value.nbytes for value in values if value.kind is Kind.SHARED}
    counted = {"before": before - parameters, "after": max(afterwards), "stays": sum(stays.values())}
    return counted | {"buckets": sum(sizes.values())}


def plans_that_exchange() -> list[bool]:
    """For steps of which every third exchanges gradients: whether the plan that each follows reckons with that."""
    model = DistributedDataParallel(SmallResNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    told = []
    with outgrow.Session(model, optimizer, budget=UNBOUNDED, policy="lru") as session:
        for k in range(15):
            x, y = images(k, distributed.get_rank(), 2)
            is_last = k % 3 == 2
            with nullcontext() if is_last else model.no_sync(), session.step():
                plan = session.plan
                told.append(plan is not None and any("c10d.allreduce_" in op.name for op in plan.problem.trace.ops))
                F.cross_entropy(model(x), y).backward()
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()
    return told


class _CountsExchanges(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).startswith("c10d.allreduce_")
        return func(*args, **(kwargs or {}))


def exchanges_in_an_epoch(batch: int, samples: int, budget: int) -> int:
    """How often gradients are exchanged while each rank sees so many samples; one bucket, so once a step."""
    model = DistributedDataParallel(SmallResNet(), bucket_cap_mb=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = images(0, distributed.get_rank(), samples)
    counter = _CountsExchanges()
    with (
        outgrow.Session(model, optimizer, budget=budget, policy="vdnn-all", least_moved_bytes=1024) as session,
        counter,
    ):
        for rows in torch.arange(samples).split(batch):
            with session.step():
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert session.peak_bytes <= budget
    return counter.count


# --- the ends of ranks ---


def train_for_ever(folder: Path) -> None:
    """Train in a session that spills to `folder`; after some steps a file says which process this is."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(SmallResNet(), **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    spill = folder / "spill"
    session = outgrow.Session(
        model, optimizer, budget="6MiB", policy="vdnn-all", spill_dir=spill, allow_tmpfs=True, least_moved_bytes=1024
    )
    for k in range(1_000_000):
        x, y = images(k, rank, 8)
        with session.step():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if k == 4:
            assert session.summary().offloaded_bytes > 0
            (folder / f"pid-{rank}.partial").write_text(str(os.getpid()))
            os.replace(folder / f"pid-{rank}.partial", folder / f"pid-{rank}")


def join(folder: Path, rank: int | None = None) -> None:
    """Become one of two processes that train together, and measure the machine as a new user would.

    Without a rank torchrun started this one, and tells it how in its environment.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # What `outgrow doctor` found on this machine is the user's.
    measure.remembered = lambda: None
    if rank is None:
        distributed.init_process_group("gloo")
    else:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def cases_of_rank(rank: int, folder: str) -> dict[str, Any]:
    """What one of two processes finds."""
    join(Path(folder), rank)
    known: dict[str, tuple[Trained, int]] = {}
    found: dict[str, Any] = {"cases": {name: run_case(case, known) for name, case in CASES.items()}}
    found["accounting"] = {str(view): bucket_accounting(view) for view in (False, True)}
    found["plans"] = plans_that_exchange()
    found["exchanges"] = {str(batch): exchanges_in_an_epoch(batch, 32, 6 << 20) for batch in (4, 8)}
    distributed.destroy_process_group()
    return found


def main(folder: Path, rank: int | None = None) -> None:
    join(folder, rank)
    if rank is None:
        found = run_case(CASES["vdnn-all"], {})
        (folder / f"found-{distributed.get_rank()}.json").write_text(json.dumps(found))
    train_for_ever(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
