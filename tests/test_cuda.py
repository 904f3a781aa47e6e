"""Training on a CUDA device: equal to plain PyTorch to the bit, inside the budget. Skipped where there is none.

Peaks are those of PyTorch's own statistic, and networks are large enough that the workspaces of cuBLAS are not most
of them.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from outgrow.cli.main import run
from outgrow.cost.measure import measure_gpu
from outgrow.cost.workspaces import Workspace
from outgrow.errors import BudgetTooSmall
from outgrow.networks import find
from outgrow.networks.resnet import _Bottleneck
from outgrow.networks.transformer import Block
from outgrow.papers.trial import Trial, measurer_here
from outgrow.planning.policies import Policy
from outgrow.runtime.frontend import Frontend
from outgrow.runtime.hooks import Hooks
from steps import RandomDecisions, RecomputeAll

# Before the first product: cuBLAS adds up in the same order each time only with workspaces of its own.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

DEVICE = torch.device("cuda", 0)
# Machines with GPUs often have no disk but RAM; what goes there is not what is tested here.
PLACE: dict[str, Any] = {"spill_dir": tempfile.gettempdir(), "allow_tmpfs": True}
STEPS = 20
# Name, input size, batch.
NETWORKS = (
    ("resnet-50", 224, 16),
    ("vgg-16", 224, 16),
    ("densenet-121", 128, 16),
    ("unet", 128, 4),
    ("gpt-12x384", 256, 8),
    ("vit-b16", 224, 8),
)
POLICIES: tuple[str | Policy, ...] = ("auto", "lru", "vdnn-all", "superneurons", "checkpoint", RecomputeAll())


@dataclass
class Outcome:
    """What training left behind, on the CPU, and its peak in bytes."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    peak_bytes: int
    offloaded_bytes: int = 0
    recomputed_bytes: int = 0
    faults: int = 0  # what was refused memory, libraries that keep quiet too


class Training:
    """A network with SGD and momentum, and its data."""

    def __init__(self, name: str, size: int, batch: int) -> None:
        self.network = find(name)
        self.size, self.batch = size, batch
        self.classes = self.network.classes if self.network.kind == "text" else 10
        torch.manual_seed(0)
        self.model = self.network.build(size, self.classes).to(DEVICE)
        if name == "vgg-16" and size == 224:
            self.model.avgpool = nn.Identity()  # maps of 7 x 7 are pooled to 7 x 7, by additions in any order
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def step(self, k: int) -> torch.Tensor:
        generator = torch.Generator(DEVICE).manual_seed(k)
        x, y = self.network.sample(self.batch, self.size, self.classes, generator, DEVICE)
        output = self.model(x)
        if self.network.kind == "segmentation":  # a loss of pixels in a row adds in order
            output, y = output.flatten(2).mT.flatten(0, 1), y.flatten()
        loss = self.network.loss(output, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self) -> dict[str, torch.Tensor]:
        found = {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {
                f"{number} {name}": item.cpu() for name, item in state.items() if isinstance(item, torch.Tensor)
            }
        return found


def fresh() -> None:
    """Give back what other training left."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def train_plain(make: Callable[[], Training], steps: int = STEPS) -> Outcome:
    fresh()
    training = make()
    torch.manual_seed(1)
    losses = [training.step(k) for k in range(steps)]
    torch.cuda.synchronize()
    return Outcome([float(loss) for loss in losses], training.state(), torch.cuda.max_memory_allocated())


def train_in_session(
    make: Callable[[], Training], budget: int, policy: str | Policy = "auto", steps: int = STEPS, **options: Any
) -> Outcome:
    fresh()
    training = make()
    torch.manual_seed(1)
    losses = []
    torch.cuda.reset_peak_memory_stats()
    options = {"budget": budget, "policy": policy, **PLACE, **options}
    with outgrow.Session(training.model, training.optimizer, **options) as session:
        for k in range(steps):
            with session.step():
                loss = training.step(k)
            losses.append(loss)
        summary = session.summary()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    return Outcome(
        [float(loss) for loss in losses],
        training.state(),
        peak,
        summary.offloaded_bytes,
        summary.recomputed_bytes,
        summary.oom_retries,
    )


def assert_equal(ours: Outcome, plain: Outcome) -> None:
    """Losses, parameters, buffers and optimizer state, to the bit."""
    assert ours.losses == plain.losses, f"{ours.faults} page faults"
    assert ours.state.keys() == plain.state.keys()
    different = [name for name, item in plain.state.items() if not same_bits(item, ours.state[name])]
    assert not different


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Algorithms that give the same bits twice. Blank memory stays as it is: what is read too early shows."""
    torch.use_deterministic_algorithms(True)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(False)
    settings.fill_uninitialized_memory = True
    fresh()


@pytest.fixture(scope="module")
def plain_runs() -> dict[tuple[str, int, int], Outcome]:
    """Plain training of each network, once it was asked for."""
    return {}


def plain_of(runs: dict[tuple[str, int, int], Outcome], name: str, size: int, batch: int) -> Outcome:
    key = (name, size, batch)
    if key not in runs:
        runs[key] = train_plain(lambda: Training(*key))
        again = train_plain(lambda: Training(*key), steps=3)
        assert again.losses == runs[key].losses[:3], f"plain PyTorch trains {name} differently each time"
        # cuDNN tries algorithms that want much memory before the first step, and then takes others.
        runs[key].peak_bytes = again.peak_bytes
    return runs[key]


def budget_or_least(make: Callable[[], Training], budget: int, policy: str | Policy) -> int:
    """The budget, or the least that the policy can hold where that is more."""
    for _ in range(6):
        try:
            train_in_session(make, budget, policy, steps=3)
        except BudgetTooSmall as error:
            budget = int(max(error.least_bytes, budget) * 1.05)
        else:
            return budget
    pytest.skip("no budget was found that this policy can hold")


@pytest.mark.parametrize("share", [0.75, 0.55])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(("name", "size", "batch"), NETWORKS, ids=lambda item: str(item))
def test_training_is_plain_training_to_the_bit(
    plain_runs: dict[tuple[str, int, int], Outcome],
    name: str,
    size: int,
    batch: int,
    policy: str | Policy,
    share: float,
) -> None:
    plain = plain_of(plain_runs, name, size, batch)

    def make() -> Training:
        return Training(name, size, batch)

    budget = budget_or_least(make, int(plain.peak_bytes * share), policy)
    ours = train_in_session(make, budget, policy)
    assert_equal(ours, plain)
    assert ours.peak_bytes <= budget
    assert ours.offloaded_bytes + ours.recomputed_bytes > 0 or budget > 0.9 * plain.peak_bytes


@pytest.mark.parametrize("seed", range(12))
def test_random_plans_change_no_bit(plain_runs: dict[tuple[str, int, int], Outcome], seed: int) -> None:
    name, size, batch = ("resnet-50", 224, 16) if seed % 2 else ("gpt-12x384", 256, 8)
    plain = plain_of(plain_runs, name, size, batch)

    def make() -> Training:
        return Training(name, size, batch)

    policy = RandomDecisions(seed)
    budget = budget_or_least(make, int(plain.peak_bytes * (0.6 + 0.05 * (seed % 5))), policy)
    ours = train_in_session(make, budget, policy, steps=6)
    assert ours.losses == plain.losses[:6]
    assert ours.peak_bytes <= budget


def test_what_does_not_fit_into_pinned_memory_goes_by_way_of_the_disk(
    plain_runs: dict[tuple[str, int, int], Outcome],
) -> None:
    name, size, batch = "resnet-50", 224, 16
    plain = plain_of(plain_runs, name, size, batch)
    budget = int(plain.peak_bytes * 0.6)
    ours = train_in_session(lambda: Training(name, size, batch), budget, "vdnn-all", steps=6, host_budget="96MiB")
    assert ours.losses == plain.losses[:6]
    assert ours.offloaded_bytes > 96 << 20
    assert ours.peak_bytes <= budget


def test_most_ops_of_a_step_run_past_the_mode_and_most_saved_tensors_past_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_python: list[int] = []
    pack = Hooks._pack

    def packed(self: Hooks, tensor: torch.Tensor) -> Any:
        in_python[-1] += 1
        return pack(self, tensor)

    monkeypatch.setattr(Hooks, "_pack", packed)
    training = Training("gpt-12x384", 256, 8)
    plain = train_plain(lambda: Training("gpt-12x384", 256, 8), 8)
    fresh()
    losses = []
    budget = int(plain.peak_bytes * 0.8)
    with outgrow.Session(training.model, training.optimizer, budget=budget, **PLACE) as session:
        torch.manual_seed(1)
        for k in range(8):
            in_python.append(0)
            with session.step():
                losses.append(float(training.step(k)))
        plan, fast_path = session.plan, session._pool.fast_path
        assert plan is not None
        assert fast_path.passed > 0.5 * len(plan.problem.trace.ops)
        assert session._executor._staying._stays is not None, "saved tensors that stay go through Python"
        assert 2 * in_python[-1] < len(plan.problem.trace.saved)
    assert losses == plain.losses
    assert torch.cuda.max_memory_allocated() <= budget


def test_dropout_draws_the_same_numbers() -> None:
    """Masks are made anew with the state that the GPU's generator had."""

    class Dropping(Training):
        def __init__(self) -> None:
            self.network, self.size, self.batch, self.classes = find("vit-b16"), 8, 64, 10
            torch.manual_seed(0)
            layers = [layer for _ in range(8) for layer in (nn.Linear(4096, 4096), nn.GELU(), nn.Dropout(0.3))]
            self.model = nn.Sequential(*layers).to(DEVICE)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

        def step(self, k: int) -> torch.Tensor:
            x = torch.randn(8192, 4096, generator=torch.Generator(DEVICE).manual_seed(k), device=DEVICE)
            loss = self.model(x).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

    plain = train_plain(Dropping, 8)
    ours = train_in_session(Dropping, int(plain.peak_bytes * 0.75), RecomputeAll(), 8)
    assert_equal(ours, plain)
    assert ours.recomputed_bytes > 0


@pytest.mark.parametrize("kind", [None, "memory", "speed", "dynamic"])
def test_workspaces_stay_inside_the_budget_and_change_last_bits_at_most(
    plain_runs: dict[tuple[str, int, int], Outcome], kind: str | None
) -> None:
    name, size, batch = "vgg-16", 224, 16
    plain = plain_of(plain_runs, name, size, batch)

    def make() -> Training:
        return Training(name, size, batch)

    budget = int(plain.peak_bytes * 0.96)
    ours = train_in_session(make, budget, steps=8, workspace=kind)
    assert torch.backends.cudnn.benchmark is False
    assert ours.peak_bytes <= budget
    if kind is None:
        assert ours.losses == plain.losses[:8]
    else:
        assert ours.losses == pytest.approx(plain.losses[:8], rel=1e-3)


@pytest.mark.parametrize("policy", ["auto", "vdnn-all", "lru"])
@pytest.mark.parametrize(("name", "size", "batch"), [("resnet-50", 224, 16), ("gpt-12x384", 256, 8)])
def test_compiled_blocks_stay_compiled_and_train_to_the_same_bits(
    name: str, size: int, batch: int, policy: str
) -> None:
    torch._dynamo.reset()

    def make() -> Training:
        training = Training(name, size, batch)
        for module in training.model.modules():
            if isinstance(module, Block | _Bottleneck):
                module.compile(backend="aot_eager", dynamic=False)
        return training

    with torch._dynamo.config.patch(recompile_limit=64):
        plain = train_plain(make, 8)
        budget = int(train_plain(make, 3).peak_bytes * 0.7)
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        ours = train_in_session(make, budget, policy, steps=8)
        assert_equal(ours, plain)
        assert ours.peak_bytes <= budget
        assert ours.offloaded_bytes > 0
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * compiled


FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


def frontend_of(kind: Workspace, free_bytes: int) -> Frontend:
    pytest.importorskip("cudnn", reason="cuDNN's frontend is not installed")
    return Frontend(DEVICE, kind, lambda: free_bytes)


@dataclass
class Case:
    """A convolution and its gradients."""

    sizes: tuple[int, ...] = (4, 32, 20, 20)
    channels_out: int = 48
    window: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1
    bias: bool = False
    dtype: torch.dtype = torch.float32
    last: bool = False

    def calls(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arguments of the op and of the one that works out its gradients."""
        generator = torch.Generator(DEVICE).manual_seed(0)
        space = len(self.sizes) - 2

        def draw(*sizes: int) -> torch.Tensor:
            drawn = torch.randn(sizes, generator=generator, device=DEVICE).to(self.dtype)
            formats = (torch.channels_last, torch.channels_last_3d)
            return drawn.contiguous(memory_format=formats[space - 2]) if self.last and drawn.dim() > 3 else drawn

        images = draw(*self.sizes)
        weight = draw(self.channels_out, self.sizes[1] // self.groups, *(self.window,) * space)
        bias = draw(self.channels_out) if self.bias else None
        where = [[size] * space for size in (self.stride, self.padding, self.dilation)]
        rest = (False, [0] * space, self.groups)
        forward = (images, weight, bias, *where, *rest)
        gradient = draw(*FORWARD(*forward).shape)
        sizes = [self.channels_out] if self.bias else None
        return forward, (gradient, images, weight, sizes, *where, *rest, [True, True, self.bias])


@pytest.mark.parametrize("kind", Workspace)
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(last=True),
        Case(bias=True, stride=2, window=5, padding=2),
        Case(groups=4, dilation=2, padding=2),
        Case(dtype=torch.float16, last=True),
        Case(dtype=torch.bfloat16),
        Case(sizes=(2, 16, 6, 10, 10), channels_out=16),
        Case(window=1, padding=0, last=True),
    ],
    ids=str,
)
def test_the_frontend_works_out_what_pytorch_does(case: Case, kind: Workspace) -> None:
    forward, backward = case.calls()
    frontend = frontend_of(kind, 4 << 30)
    bound = 1e-5 if case.dtype is torch.float32 else 1e-2
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for func, args in ((FORWARD, forward), (BACKWARD, backward)):
            ours, plain = frontend.run(func, *args), func(*args)
            pairs = [(ours, plain)] if func is FORWARD else zip(ours, plain, strict=True)
            for left, right in pairs:
                assert (left is None) == (right is None)
                if left is not None:
                    assert left.stride() == right.stride()
                    assert left.dtype == right.dtype
                    assert float((left - right).norm() / right.norm()) < bound
            again = frontend.run(func, *args)
            assert frontend.settled is None, "what is known is not tried again"
            assert torch.equal(again, ours) if func is FORWARD else again[0].equal(ours[0])
    frontend.close()


def test_the_frontend_takes_no_more_than_what_is_free() -> None:
    """In the usual order of images VGG's convolutions hold gigabytes where they may, for a third of the time."""
    images, weight = torch.randn(32, 64, 224, 224, device=DEVICE), torch.randn(64, 64, 3, 3, device=DEVICE)
    call = (images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    seconds = []
    for free in (2 << 30, 600 << 20, 8 << 20):
        frontend = frontend_of(Workspace.DYNAMIC, free)
        result = frontend.run(FORWARD, *call)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        result = frontend.run(FORWARD, *call)
        ended.record()
        ended.synchronize()
        seconds.append(began.elapsed_time(ended))
        assert torch.cuda.max_memory_allocated() - before <= free + result.nbytes
        frontend.close()
    assert seconds[0] < seconds[2]


def test_a_convolution_without_room_for_any_way_is_out_of_memory() -> None:
    forward, _ = Case(sizes=(32, 64, 56, 56), channels_out=64).calls()
    frontend = frontend_of(Workspace.DYNAMIC, -(1 << 30))
    with pytest.raises(torch.OutOfMemoryError, match="workspace"):
        frontend.run(FORWARD, *forward)
    frontend.close()


@pytest.mark.parametrize("kind", ["speed", "dynamic"])
def test_a_search_for_algorithms_is_no_page_fault(kind: str) -> None:
    """cuDNN is refused memory while it looks for what fits; that is no sign that the plan holds too much."""
    torch.use_deterministic_algorithms(False)  # VGG's pooling of small maps has no others
    training = Training("vgg-16", 96, 16)
    fresh()
    with outgrow.Session(training.model, training.optimizer, budget="2GiB", workspace=kind, **PLACE) as session:
        for k in range(8):
            with session.step():
                training.step(k)
        assert session.summary().oom_retries == 0


def test_a_model_trains_on_the_gpu_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("train", "resnet-18", "--device", "cuda", "--image-size", "64", "--batch", "16", "--steps", "4")
    results = []
    for more in ((), ("--budget", "2GiB", "--spill-dir", tempfile.gettempdir(), "--allow-tmpfs")):
        assert run((*arguments, *more, "--json")) == 0
        results.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    plain, ours = results
    assert ours["losses"] == plain["losses"]
    assert 0 < ours["device_peak_bytes"] <= 2 << 30
    assert plain["device_peak_bytes"] > 0


def test_a_figure_of_a_paper_is_measured_here() -> None:
    measurer = measurer_here()
    assert measurer is not None
    found = measurer(Trial("resnet-18", 16, 2 << 30, against_plain=True))
    assert found is not None
    assert found.peak_bytes <= 2 << 30
    assert found.slower is not None


def test_the_link_is_measured_each_way() -> None:
    hardware = measure_gpu(DEVICE)
    assert hardware.device_type == "cuda"
    assert hardware.memory_bytes == torch.cuda.mem_get_info(DEVICE)[1]
    # PCIe 2.0 at the least, NVLink to the host at the most.
    assert all(1e9 < speed < 1e12 for speed in (hardware.copy_out_bandwidth, hardware.copy_in_bandwidth))


def test_the_wall_goes_with_the_session() -> None:
    model = nn.Linear(1024, 1024).to(DEVICE)
    before = torch.cuda.get_per_process_memory_fraction(DEVICE)
    with outgrow.Session(model, budget="512MiB", **PLACE):
        assert torch.cuda.get_per_process_memory_fraction(DEVICE) < before
    assert torch.cuda.get_per_process_memory_fraction(DEVICE) == before


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    training = Training("resnet-18", 64, 8)
    with outgrow.Session(training.model, training.optimizer, budget="2GiB", policy="vdnn-all", **PLACE) as session:
        for k in range(3):
            with session.step():
                training.step(k)

        def fail() -> None:
            with session.step():
                x, y = training.network.sample(8, 64, 10, device=DEVICE)
                loss = training.network.loss(training.model(x), y)
                raise RuntimeError(f"after a forward pass of loss {loss.shape}")

        with pytest.raises(RuntimeError, match="after a forward pass"):
            fail()
        with session.step():
            training.step(4)
        gc.collect()
        torch.cuda.synchronize()
        session._pool.land()
        assert not list(session._pool.entries())


def test_no_budget_without_bounds() -> None:
    training = Training("resnet-50", 224, 16)
    with (
        pytest.raises(BudgetTooSmall),
        outgrow.Session(training.model, training.optimizer, budget="300MiB", policy="auto", **PLACE) as session,
        session.step(),
    ):
        training.step(0)
