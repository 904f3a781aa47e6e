"""Workspaces for convolutions: cuDNN's algorithms as a model, plans under them, and what a session tells cuDNN."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import outgrow
import outgrow.session.session
from cases import training_of
from outgrow.cli.main import run
from outgrow.cost.estimate import op_seconds
from outgrow.cost.workspaces import Workspace, choices, find_workspace
from outgrow.errors import UnknownWorkspace
from outgrow.networks import find
from outgrow.planning.plan import Plan
from outgrow.planning.workspaces import costed
from outgrow.runtime.calls import Calls
from outgrow.runtime.care import OpNeeds
from outgrow.runtime.convolutions import Convolutions
from outgrow.runtime.need import Need
from outgrow.runtime.room import Room
from outgrow.runtime.tiers.memory import Request
from outgrow.tracing.convolution import Convolution
from outgrow.tracing.ir import Op, Phase
from outgrow.tracing.liveness import plain_profile
from outgrow.tracing.ops import facts_of
from outgrow.tuning.limits import largest
from outgrow.tuning.steps import synthetic_step
from steps import budget_for, train_in_session, train_plain
from test_cuda_session import CountedRam, Fakes, fakes

__all__ = ["fakes"]  # a fixture

TITAN_X = outgrow.find_hardware("titan x")
KINDS = ("memory", "dynamic", "speed")


@cache
def fake(name: str, batch: int, size: int | None = None) -> outgrow.Trace:
    return outgrow.trace(lambda: synthetic_step(find(name), batch, size))


@cache
def vgg() -> outgrow.Trace:
    """VGG-16's convolutions on images of a quarter of the pixels: workspaces are large beside the rest."""
    return fake("vgg-16", 64, 112)


def convolutions(trace: outgrow.Trace) -> list[Op]:
    return [op for op in trace.ops if "convolution" in op.name]


def planned(budget: int, workspace: str | None, policy: str = "auto") -> Plan:
    return outgrow.plan(vgg(), budget=budget, policy=policy, hardware=TITAN_X, workspace=workspace)


# --- what a trace knows of convolutions ---


def test_a_trace_has_the_shapes_of_its_convolutions() -> None:
    ops = convolutions(fake("resnet-18", 2, 64))
    first = Convolution(*ops[0].shape)
    assert first == Convolution(2, 3, 64, 64, 64, 32, 32, 7, 7, stride=2, dilation=1, groups=1, passes=1)
    forward = [op for op in ops if op.phase is Phase.FORWARD]
    backward = [op for op in ops if op.phase is Phase.BACKWARD]
    assert len(forward) == len(backward) == 20
    # Nobody wants the gradient of the images that came in.
    assert [Convolution(*op.shape).passes for op in backward] == [6] * 19 + [4]


def test_what_is_no_convolution_over_images_has_no_shape() -> None:
    def make() -> outgrow.TrainingStep:
        up, line = nn.ConvTranspose2d(3, 4, 2, 2), nn.Conv1d(3, 4, 3)

        def step() -> None:
            (up(torch.randn(1, 3, 8, 8)).sum() + line(torch.randn(1, 3, 8)).sum()).backward()

        return outgrow.TrainingStep([up, line], None, step)

    ops = convolutions(outgrow.trace(make))
    assert len(ops) == 4
    assert all(op.shape == () for op in ops)


def test_shapes_survive_json_and_impossible_ones_are_refused(tmp_path: Path) -> None:
    trace = fake("resnet-18", 2, 64)
    trace.save(tmp_path / "trace.json")
    assert outgrow.Trace.load(tmp_path / "trace.json") == trace
    document = json.loads((tmp_path / "trace.json").read_text())
    place = next(index for index, shape in enumerate(document["ops"]["shape"]) if shape)
    for wrong in ([1, 2, 3], [0] * 13, [-1] * 13, [1] * 12 + [7]):
        document["ops"]["shape"][place] = wrong
        with pytest.raises(outgrow.TraceMismatch):
            outgrow.Trace.from_document(document)


# --- the model of cuDNN's algorithms ---


@pytest.mark.parametrize("device", ["k40c", "titan x", "v100", "h200"])
def test_more_workspace_is_less_time_and_the_fastest_takes_what_the_profile_says(device: str) -> None:
    hardware = outgrow.find_hardware(device)
    several = 0
    for op in (*vgg().ops, *fake("resnet-18", 2, 64).ops):
        ways = choices(op, hardware)
        assert ways[0].nbytes == 0
        assert ways[-1].seconds == op_seconds(op, hardware)
        assert all(a.nbytes < b.nbytes and a.seconds > b.seconds for a, b in pairwise(ways))
        several += len(ways) > 1
    assert several >= len(convolutions(vgg()))


def test_only_a_plain_convolution_in_single_precision_has_transforms() -> None:
    op = next(op for op in convolutions(vgg()) if op.shape[1] == 256)
    large = 1 << 20

    def most(other: Op) -> int:
        return choices(other, TITAN_X)[-1].nbytes

    def changed(**what: int) -> Op:
        return replace(op, shape=tuple(Convolution(*op.shape)._replace(**what)))

    assert most(op) > large
    for other in (changed(stride=2), changed(dilation=2), changed(groups=4), replace(op, dtype="bfloat16")):
        assert 0 < most(other) < large
    assert choices(replace(op, shape=()), TITAN_X)[0].seconds == op_seconds(op, TITAN_X)
    assert len(choices(replace(op, shape=()), TITAN_X)) == 1


def test_losses_without_workspace_are_near_the_published_ones() -> None:
    """vDNN, section V-C: 2.2 to 2.4 times as long on average; micro-cuDNN, figure 1: 4.5 for AlexNet's second."""
    slow = sum(op.seconds for op in costed(vgg(), TITAN_X, Workspace.MEMORY).ops)
    fast = sum(op.seconds for op in costed(vgg(), TITAN_X, Workspace.SPEED).ops)
    assert 2.0 < slow / fast < 2.6
    second = convolutions(fake("alexnet", 256))[1]
    ways = choices(second, outgrow.find_hardware("p100"))
    assert 3.5 < ways[0].seconds / ways[-1].seconds < 6
    assert 100 < ways[-1].nbytes / 2**20 < 500


# --- plans ---


def test_without_a_kind_nothing_changes() -> None:
    peak = plain_profile(costed(vgg(), TITAN_X)).peak_bytes
    plan = planned(peak, None)
    assert all(op.workspace_bytes == 0 for op in plan.problem.trace.ops)
    assert plan.simulate().step_seconds == pytest.approx(sum(op_seconds(op, TITAN_X) for op in vgg().ops))


@pytest.mark.parametrize("policy", ["auto", "vdnn-dyn", "vdnn-all", "superneurons"])
def test_dynamic_workspaces_are_as_good_as_either_end_at_every_budget(policy: str) -> None:
    peak = plain_profile(costed(vgg(), TITAN_X)).peak_bytes
    seconds: list[float] = []
    for share in (3.0, 1.2, 1.0, 0.85):
        ends = [planned(int(peak * share), kind, policy).simulate() for kind in ("memory", "speed")]
        dynamic = planned(int(peak * share), "dynamic", policy).simulate()
        assert dynamic.feasible
        assert dynamic.peak_bytes <= peak * share
        assert all(not end.feasible or dynamic.step_seconds <= end.step_seconds * 1.001 for end in ends)
        assert dynamic.plain_step_seconds == pytest.approx(sum(op_seconds(op, TITAN_X) for op in vgg().ops))
        seconds.append(dynamic.step_seconds)
    assert seconds == sorted(seconds)
    assert seconds[-1] > seconds[0]


def test_a_workspace_is_taken_of_free_bytes_alone() -> None:
    peak = plain_profile(costed(vgg(), TITAN_X)).peak_bytes
    plan = planned(peak, "dynamic", "vdnn-all")
    curve = plan.simulate().curve
    taken = 0
    for number, op in enumerate(plan.problem.trace.ops):
        ways = choices(replace(op, seconds=0.0), TITAN_X)
        larger = [way.nbytes for way in ways if way.nbytes > op.workspace_bytes]
        taken += op.workspace_bytes > 0
        # The next faster way would not have fitted.
        assert not larger or curve[number] - op.workspace_bytes + min(larger) > peak
    assert taken


def test_a_plan_with_workspaces_says_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    plan = planned(plain_profile(costed(vgg(), TITAN_X)).peak_bytes, "dynamic")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").simulate() == plan.simulate()


def test_the_largest_batch_depends_on_what_convolutions_hold() -> None:
    sizes: dict[str, int] = {}
    for kind in KINDS:
        found = largest(
            lambda batch: fake("resnet-18", batch, 64),
            budget_bytes=256 << 20,
            hardware=TITAN_X,
            policy="keep",
            workspace=find_workspace(kind),
        )
        assert found is not None
        sizes[kind] = found.size
    assert sizes["speed"] < sizes["dynamic"] == sizes["memory"]


def test_workspaces_of_another_kind_or_device_are_refused() -> None:
    cpu = outgrow.Hardware("cpu", 1 << 34, 1e11, 1e10, 1e9, 1e9)
    with pytest.raises(UnknownWorkspace, match='one of "memory", "speed", "dynamic"'):
        outgrow.plan(vgg(), budget="50%", hardware=TITAN_X, workspace="fast")
    with pytest.raises(UnknownWorkspace, match="plan for a GPU"):
        outgrow.plan(vgg(), budget="50%", hardware=cpu, workspace="speed")
    measured = replace(vgg(), device="cuda", measured=True)
    with pytest.raises(outgrow.TraceMismatch, match="was measured"):
        outgrow.plan(measured, budget="50%", hardware=TITAN_X, workspace="speed")


# --- commands ---


def test_plan_compare_and_limits_take_a_workspace(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--batch", "16", "--image-size", "64", "--hardware", "titan x", "--json")

    def said(*arguments: str) -> dict[str, Any]:
        assert run(arguments) == 0, capsys.readouterr().err
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found

    seconds = {kind: said("plan", "vgg-16", *sizes, "--workspace", kind) for kind in KINDS}
    assert [seconds[kind]["workspace"] for kind in KINDS] == list(KINDS)
    assert seconds["memory"]["predicted_step_seconds"] > seconds["dynamic"]["predicted_step_seconds"]
    assert len({seconds[kind]["plain_step_seconds"] for kind in ("memory", "speed")}) == 1
    ratios = {
        kind: said("compare", "vgg-16", "--budgets", "100", "--policies", "vdnn-all", *sizes, "--workspace", kind)
        for kind in ("memory", "dynamic")
    }
    slow, quick = (ratios[kind]["predicted"]["points"][0]["time_ratio"] for kind in ("memory", "dynamic"))
    assert slow > quick
    found = said("limits", "vgg-16", "--budget", "2GiB", *sizes, "--workspace", "memory", "--policy", "keep")
    assert found["workspace"] == "memory"
    assert found["batch"] > 16


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plan", "vgg-16", "--workspace", "dynamic"), "plan for a GPU"),
        (("compare", "vgg-16", "--workspace", "dynamic"), "--hardware"),
        (("limits", "vgg-16", "--workspace", "dynamic"), "--hardware"),
        (("plan", "vgg-16", "--workspace", "fast", "--hardware", "k40c"), "memory"),
        (("train", "vgg-16", "--workspace", "speed", "--budget", "1GiB"), "--device cuda"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert says in capsys.readouterr().err


# --- sessions ---


@pytest.fixture
def benchmark() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = before


@pytest.mark.usefixtures("benchmark")
@pytest.mark.parametrize("usual", [False, True])
@pytest.mark.parametrize(("kind", "inside"), [(None, None), ("memory", False), ("speed", True), ("dynamic", True)])
def test_the_flag_is_set_in_the_step_and_back_after_it(kind: str | None, inside: bool | None, usual: bool) -> None:
    torch.backends.cudnn.benchmark = usual
    asked = Convolutions(find_workspace(kind))
    with asked.flags():
        assert torch.backends.cudnn.benchmark is (usual if inside is None else inside)
    assert torch.backends.cudnn.benchmark is usual

    def fail() -> None:
        with asked.flags():
            raise RuntimeError("of the program")

    with pytest.raises(RuntimeError, match="of the program"):
        fail()
    assert torch.backends.cudnn.benchmark is usual


def test_a_model_on_the_cpu_has_no_workspaces_to_choose() -> None:
    model = nn.Conv2d(3, 3, 3)
    with pytest.raises(UnknownWorkspace, match="on the CPU"):
        outgrow.Session(model, budget="1GiB", workspace="dynamic")
    with pytest.raises(UnknownWorkspace, match='one of "memory"'):
        outgrow.Session(model, budget="1GiB", workspace="lots")
    outgrow.Session(model, budget="1GiB").close()


class Watched(CountedRam):
    """Counts gates by what was asked for inside, and refuses some memory to each convolution that searches."""

    refused = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gated: list[int] = []

    def gate(self, request: Request) -> AbstractContextManager[None]:
        self.gated.append(request.nbytes)
        return nullcontext()

    def refusals(self) -> int:
        refused, Watched.refused = Watched.refused, 0
        return refused


@pytest.fixture
def on_gpu(fakes: Callable[..., Fakes], monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Sessions stand on the engine of CUDA, and cuDNN is refused memory wherever it looks for an algorithm."""
    made = fakes(luck=0.0)
    monkeypatch.setattr("test_cuda_session.CountedRam", Watched)
    monkeypatch.setattr(outgrow.session.session, "workspace_of", lambda device, workspace: find_workspace(workspace))
    usual = Calls._measured_call

    def refusing(calls: Calls, func: Any, *rest: Any) -> Any:
        if "convolution" in str(func) and torch.backends.cudnn.benchmark:
            Watched.refused += 1
        return usual(calls, func, *rest)

    monkeypatch.setattr(Calls, "_measured_call", refusing)
    Watched.refused = 0
    return made


@pytest.mark.usefixtures("benchmark")
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_training_is_the_same_and_a_search_is_no_page_fault(on_gpu: Fakes, kind: str | None) -> None:
    """On CPU tensors there is one algorithm: what the kinds change is who makes room for whom."""
    make = training_of("resnet-18", 32, 2)
    plain = train_plain(make, 4)
    budget = budget_for(make, 0.7) + 2 * CountedRam.LIBRARY_BYTES
    ours, summaries = train_in_session(make, 4, budget=budget, workspace=kind)
    assert ours == plain
    assert summaries[-1].oom_retries == 0
    assert torch.backends.cudnn.benchmark is False
    memory = on_gpu.memory[0]
    assert isinstance(memory, Watched)
    # Under "dynamic" no convolution gets room beyond the budget; other ops that nobody knows yet do.
    assert memory.gated or kind == "dynamic"


def test_what_a_search_takes_is_not_what_the_algorithm_takes() -> None:
    """PyTorch gives the workspace of the largest candidate out while it tries them all."""
    func, x, weight = torch.ops.aten.convolution.default, torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
    call = (x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    needs = OpNeeds(searched_convolutions=True)
    signature, guess = needs.before(func, facts_of(func), call, {})
    needs.measured(signature, 100 << 20)
    assert needs.before(func, facts_of(func), call, {})[1] == guess
    needs.measured(signature, 1 << 20)
    known = needs.before(func, facts_of(func), call, {})[1]
    assert known == Need(1 << 20, 1 << 20, measured=True, seen=True, made=(4 * 6 * 6 * 4,))
    relu = torch.ops.aten.relu.default
    signature, _ = needs.before(relu, facts_of(relu), (x,), {})
    needs.measured(signature, 768)
    assert needs.before(relu, facts_of(relu), (x,), {})[1].measured


def test_first_sights_on_a_gpu_get_room_for_transforms_where_tensor_cores_are_not_to_be_used() -> None:
    """Of many channels on small maps these are many times the operands; others than plain convolutions have none."""
    func = torch.ops.aten.convolution.default

    def guess(*, tf32: bool, channels: int = 512, groups: int = 1, stride: int = 1) -> Need:
        with FakeTensorMode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
            x = torch.empty(64, channels, 28, 28, device="cuda")
            weight = torch.empty(channels, channels // groups, 3, 3, device="cuda")
            call = (x, weight, None, [stride, stride], [1, 1], [1, 1], False, [0, 0], groups)
            return OpNeeds("cuda").before(func, facts_of(func), call, {})[1]

    images = 64 * 512 * 28 * 28 * 4
    assert guess(tf32=True).likely_bytes < 10 * images < 2_400_000_000 < guess(tf32=False).likely_bytes
    assert guess(tf32=True).certain_bytes == guess(tf32=False).certain_bytes == images
    assert guess(tf32=False, groups=512) == guess(tf32=True, groups=512)
    assert guess(tf32=False, stride=2) == guess(tf32=True, stride=2)
    assert guess(tf32=False, channels=2048).likely_bytes < 4 * images + (4 << 30)


@pytest.mark.usefixtures("benchmark", "on_gpu")
def test_dynamic_convolutions_ask_for_their_results_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    needs: dict[str, dict[str, int]] = {}
    usual = Room.prepare
    kinds = ("speed", "dynamic")

    make = training_of("resnet-18", 32, 2)
    for kind in kinds:
        seen = needs.setdefault(kind, {})

        def noted(room: Room, need: Any, where: str, seen: dict[str, int] = seen) -> None:
            seen[where] = max(seen.get(where, 0), need.likely_bytes)
            usual(room, need, where)

        monkeypatch.setattr(Room, "prepare", noted)
        train_in_session(make, 3, budget=budget_for(make, 1.5), workspace=kind)
    name = "aten.convolution.default"
    assert needs["dynamic"][name] < needs["speed"][name]  # oneDNN holds copies of its operands
    assert needs["dynamic"]["aten.relu_.default"] == needs["speed"]["aten.relu_.default"]


@pytest.mark.usefixtures("benchmark", "on_gpu")
def test_a_convolution_that_finds_no_room_for_any_algorithm_is_a_page_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []
    usual = Calls._measured_call

    def failing(calls: Calls, func: Any, *rest: Any) -> Any:
        if "convolution" in str(func) and not failed and len(calls._pool._entries) > 10:
            failed.append(str(func))
            Watched.refused += 1
            raise RuntimeError("FIND was unable to find an engine to execute this computation")
        return usual(calls, func, *rest)

    monkeypatch.setattr(Calls, "_measured_call", failing)
    make = training_of("resnet-18", 32, 2)
    plain = train_plain(make, 3)
    ours, summaries = train_in_session(make, 3, budget=budget_for(make, 1.0), workspace="dynamic")
    assert failed
    assert ours == plain
    assert summaries[-1].oom_retries == 1
