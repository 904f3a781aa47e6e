"""Profiles of devices, estimates on them, limits, the papers' figures, and what `outgrow doctor` remembers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import outgrow
from outgrow.cli.main import run
from outgrow.cost import measure
from outgrow.cost.estimate import estimate, op_class, op_seconds
from outgrow.cost.hardware import OpClass
from outgrow.cost.profiles import profiles
from outgrow.errors import UnknownHardware, UnknownPaper
from outgrow.networks import find
from outgrow.papers import figures_of, papers
from outgrow.papers.figure import Unit, in_words
from outgrow.papers.lab import Lab, network_wide_bytes, resnet_depth, without_state
from outgrow.papers.trial import Measured, Trial, measurer_here, train
from outgrow.tracing.ir import Kind, Phase
from outgrow.tracing.liveness import plain_profile
from outgrow.tuning.limits import largest, least_budget_of
from outgrow.tuning.steps import synthetic_step
from steps import rise_of

# Milliseconds of a forward and backward pass, batch 16: github.com/jcjohnson/cnn-benchmarks.
PUBLISHED = {
    ("K40c", "vgg-16"): 920.21,
    ("K40c", "resnet-50"): 449.90,
    ("Titan X", "vgg-16"): 262.42,
    ("Titan X", "resnet-50"): 171.02,
}

Json = Callable[..., dict[str, Any]]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def result(capsys: pytest.CaptureFixture[str]) -> Json:
    """Runs a command with --json, and gives the object on its last line."""

    def call(*arguments: str) -> dict[str, Any]:
        code = run((*arguments, "--json"))
        captured = capsys.readouterr()
        assert code == 0, captured.err
        found: dict[str, Any] = json.loads(captured.out.splitlines()[-1])
        return found

    return call


@cache
def fake(name: str, batch: int, size: int | None = None, *, momentum: float = 0.0) -> outgrow.Trace:
    return outgrow.trace(lambda: synthetic_step(find(name), batch, size, momentum=momentum))


# --- profiles and estimates ---


@pytest.mark.parametrize("profile", profiles(), ids=lambda profile: profile.hardware.name)
def test_a_profile_survives_json_and_says_where_each_number_comes_from(profile: Any) -> None:
    document = json.loads(json.dumps(profile.hardware.to_document()))
    assert outgrow.Hardware.from_document(document) == profile.hardware
    assert {"copy_bandwidth", "efficiency"} <= set(profile.sources)
    assert all(profile.sources.values())


@pytest.mark.parametrize("name", ["K40c", "k40c", "K-40 c", "titan_x", "A100 80GB", "a100-40gb", "h200"])
def test_a_device_is_found_however_its_name_is_written(name: str) -> None:
    squeezed = name.lower().translate({ord(letter): None for letter in " -_"})
    assert outgrow.find_hardware(name).name.lower().replace(" ", "") == squeezed


def test_an_unknown_device_is_an_error_that_names_close_ones() -> None:
    with pytest.raises(UnknownHardware, match=r"A100 40 GB.*A100 80 GB|A100 80 GB.*A100 40 GB"):
        outgrow.find_hardware("a100")


@pytest.mark.parametrize(("device", "name"), PUBLISHED, ids=str)
def test_estimates_are_near_published_measurements(device: str, name: str) -> None:
    hardware = outgrow.find_hardware(device)
    ops = [op for op in fake(name, 16).ops if op.phase is not Phase.UPDATE]
    milliseconds = 1e3 * sum(op_seconds(op, hardware) for op in ops)
    assert milliseconds == pytest.approx(PUBLISHED[device, name], rel=0.12)


def test_half_precision_is_faster_where_the_device_says_so() -> None:
    def step() -> outgrow.TrainingStep:
        left, right = torch.randn(512, 512, requires_grad=True), torch.randn(512, 512)

        def run_step() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                (left @ right).sum().backward()

        return outgrow.TrainingStep((), None, run_step)

    a100 = outgrow.find_hardware("a100 80gb")
    product = next(op for op in outgrow.trace(step).ops if op_class(op) is OpClass.PRODUCT)
    assert product.dtype == "bfloat16"
    assert op_seconds(product, a100) < op_seconds(replace(product, dtype="float32"), a100)


def test_a_trace_that_is_estimated_for_a_gpu_holds_no_workspaces_of_the_cpu() -> None:
    trace = fake("resnet-18", 2, 64)
    on_gpu = estimate(trace, outgrow.find_hardware("k40c"))
    on_cpu = estimate(trace, outgrow.Hardware("cpu", 1 << 34, 1e11, 1e10, 1e9, 1e9))
    assert (on_gpu.device, on_cpu.device) == ("cuda", "cpu")
    assert sum(op.workspace_bytes for op in on_gpu.ops) == 0 < sum(op.workspace_bytes for op in on_cpu.ops)


@pytest.mark.parametrize(
    "change", [{"efficiency": {"convolution": 0}}, {"flops_by_dtype": {"bfloat16": "fast"}}, {"device_type": 3}]
)
def test_hardware_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    document = outgrow.find_hardware("k40c").to_document()
    with pytest.raises(outgrow.TraceMismatch, match=next(iter(change))):
        outgrow.Hardware.from_document(document | change)


# --- limits ---


@pytest.mark.parametrize("policy", ["keep", "auto", "vdnn-all"])
def test_the_largest_batch_fits_and_one_that_is_two_percent_larger_does_not(policy: str) -> None:
    hardware, budget = outgrow.find_hardware("k40c"), 64 << 20

    def feasible(batch: int) -> bool:
        trace = fake("resnet-18", batch, 64)
        return outgrow.plan(trace, budget=budget, policy=policy, hardware=hardware).simulate().feasible

    budget = plain_profile(estimate(fake("resnet-18", 40, 64), hardware)).peak_bytes
    found = largest(lambda batch: fake("resnet-18", batch, 64), budget_bytes=budget, hardware=hardware, policy=policy)
    assert found is not None
    assert found.prediction.peak_bytes <= budget
    assert feasible(found.size)
    assert found.size >= 40
    assert not feasible(int(found.size * 1.03) + 1)


def test_nothing_fits_a_budget_that_is_too_small() -> None:
    hardware = outgrow.find_hardware("k40c")
    assert (
        largest(lambda batch: fake("resnet-18", batch, 64), budget_bytes=1000, hardware=hardware, policy="keep")
        is None
    )


def test_the_least_budget_of_a_policy_holds_and_less_does_not() -> None:
    hardware = outgrow.find_hardware("titan x")
    trace = fake("resnet-18", 8, 64)
    found = least_budget_of(trace, hardware, "vdnn-all")
    assert found.feasible
    below = outgrow.plan(trace, budget=int(found.peak_bytes * 0.97), policy="vdnn-all", hardware=hardware)
    assert not below.simulate().feasible


def test_limits_prints_the_deepest_gpt_that_fits(result: Json) -> None:
    found = result(
        "limits", "gpt", "--what", "depth", "--batch", "2", "--image-size", "64", "--budget", "120MiB",
        "--hardware", "v100", "--policy", "keep",
    )  # fmt: skip
    assert found["fits"]
    assert found["network"].startswith("gpt-")
    assert found["predicted_peak_bytes"] <= 120 << 20
    assert found["samples_per_second"] == pytest.approx(2 / found["predicted_step_seconds"])


def test_limits_says_when_nothing_fits(result: Json) -> None:
    found = result("limits", "resnet-18", "--image-size", "64", "--budget", "1MiB")
    assert not found["fits"]
    assert found["network"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("limits", "alexnet", "--what", "depth"), "no family"),
        (("limits", "resnet-50", "--hardware", "abacus"), "no hardware profile"),
        (("plan", "resnet-50", "--hardware", "abacus"), "no hardware profile"),
        (("compare", "resnet-50", "--hardware", "k40c", "--measure"), "leave --hardware away"),
        (("paper", "vdn"), "Did you mean 'vdnn'"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert says in captured.err


# --- plans for other devices ---


def test_a_plan_for_another_device_uses_its_memory_and_its_speed(result: Json) -> None:
    here = result("plan", "resnet-18", "--batch", "4", "--image-size", "64")
    there = result("plan", "resnet-18", "--batch", "4", "--image-size", "64", "--hardware", "k40c", "--budget", "50%")
    assert (here["hardware"], there["hardware"]) == ("this machine", "K40c")
    assert there["budget_bytes"] == 6 << 30
    assert there["plain_step_seconds"] != here["plain_step_seconds"]


def test_compare_predicts_for_another_device(result: Json) -> None:
    found = result(
        "compare", "resnet-18", "--batch", "4", "--image-size", "64", "--budgets", "80", "--policies", "auto",
        "--hardware", "titan-x",
    )  # fmt: skip
    assert found["hardware"]["name"] == "Titan X"


# --- papers ---


def test_every_paper_has_figures_and_an_unknown_one_is_an_error() -> None:
    assert all(figures_of(name) for name in papers())
    with pytest.raises(UnknownPaper):
        figures_of("pytorch")


@pytest.mark.parametrize("number", [0, 1, 4], ids=["AlexNet's average", "OverFeat's average", "VGG-16 on a Titan X"])
def test_vdnn_figures_come_out_near_the_paper(number: int) -> None:
    (row,) = figures_of("vdnn")[number].work_out(Lab())
    assert row.fits
    assert row.reported is not None
    assert row.own is not None
    assert row.auto is not None
    if row.unit is Unit.SLOWER:
        assert row.auto <= 0.05 < row.reported
        assert row.auto <= row.own
    else:
        assert row.own >= row.reported
        assert 0.7 < row.auto < 1


def test_what_the_step_itself_takes_leaves_training_state_out() -> None:
    trace = fake("resnet-18", 2, 32, momentum=0.9)
    bare = without_state(trace)
    sizes = {kind: sum(value.nbytes for value in bare.values if value.kind is kind) for kind in Kind}
    assert sizes[Kind.PARAMETER] == sizes[Kind.OPTIMIZER] == sizes[Kind.GRADIENT] == 0
    assert sizes[Kind.ACTIVATION] == sum(value.nbytes for value in trace.values if value.kind is Kind.ACTIVATION)
    hardware = outgrow.find_hardware("k40c")
    assert network_wide_bytes(trace) >= plain_profile(estimate(trace, hardware)).peak_bytes


def test_numbers_are_written_by_what_they_count() -> None:
    assert in_words(0.22, Unit.SLOWER) == "+22.0%"
    assert in_words(0.61, Unit.SAVED) == "-61.0%"
    assert in_words(12 << 30, Unit.BYTES) == "12.0 GiB"
    assert in_words(1920, Unit.LAYERS) == "1,920"
    assert in_words(3.2432, Unit.TIMES) == "3.24 x"
    assert in_words(None, Unit.BATCH) == ""


def test_resnets_by_superneurons_rule_exist() -> None:
    assert all(find(f"resnet-{resnet_depth(blocks)}") for blocks in (1, 6, 100, 790))
    assert resnet_depth(790) == 2504


@dataclass
class Trainer:
    """Says what it was asked to train, and answers as it was told."""

    answer: Measured | None
    trials: list[Trial] = field(default_factory=list)

    def __call__(self, trial: Trial) -> Measured | None:
        self.trials.append(trial)
        return self.answer


def test_nothing_is_measured_where_there_is_no_cuda_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert measurer_here() is None
    assert Lab(measurer=measurer_here()).measured("resnet-18", 4, 1 << 30) is None


def test_a_figure_is_measured_in_its_own_setting() -> None:
    trainer = Trainer(Measured(peak_bytes=11 << 30, step_seconds=1.1, plain_step_seconds=1.0))
    figures = {figure.name: figure for figure in figures_of("vdnn")}
    (slower,) = figures["VGG-16 on a Titan X"].work_out(Lab(measurer=trainer))
    assert slower.measured == pytest.approx(0.1)
    assert trainer.trials == [Trial("vgg-16", 256, 12 << 30, momentum=0.0, against_plain=True)]
    unmeasured = Trainer(None)
    (peak,) = figures["VGG-116"].work_out(Lab(measurer=unmeasured))
    assert peak.measured is None  # it did not train within the budget
    assert unmeasured.trials == [Trial("vgg-116", 32, 12 << 30)]


def test_a_trial_trains_under_auto_with_the_budget_as_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    plain = plain_profile(estimate(fake("resnet-18", 4, 64), outgrow.find_hardware("k40c"))).peak_bytes
    asked: list[dict[str, Any]] = []
    usual = outgrow.Session

    def session(*models: Any, **options: Any) -> outgrow.Session:
        asked.append(options)
        return usual(*models, **options)

    monkeypatch.setattr(outgrow, "Session", session)
    found = train(Trial("resnet-18", 4, 2 * plain, against_plain=True), cpu, image_size=64)
    assert found is not None
    assert 0 < found.peak_bytes <= 2 * plain
    assert found.slower is not None
    assert asked[0]["budget"] == 2 * plain
    assert asked[0].get("policy", "auto") == "auto"
    assert train(Trial("resnet-18", 4, plain // 20), cpu, image_size=64) is None
    alone = train(Trial("resnet-18", 4, 2 * plain), cpu, image_size=64)
    assert alone is not None
    assert alone.slower is None


def test_the_column_is_empty_without_a_device_and_filled_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only = [figure for figure in figures_of("vdnn") if figure.name == "VGG-16 on a Titan X"]
    monkeypatch.setattr("outgrow.cli.paper.figures_of", lambda name: only)
    monkeypatch.setenv("COLUMNS", "200")
    for trainer, says in ((None, "—"), (Trainer(Measured(1 << 30, 1.25, 1.0)), "+25.0%")):
        monkeypatch.setattr("outgrow.cli.paper.measurer_here", lambda trainer=trainer: trainer)
        assert run(("paper", "vdnn")) == 0
        assert says in capsys.readouterr().out


def test_vdnns_variants_differ_by_what_convolutions_hold() -> None:
    figures = {figure.name: figure for figure in figures_of("vdnn")}
    rows = figures["VGG-16 by workspace"].work_out(Lab())
    own = {(row.policy, row.claim.rpartition(" ")[2]): row.own for row in rows}
    assert own["vdnn-dyn", "dynamic"] is not None
    assert own["vdnn-all", "(m)"] is not None
    assert own["vdnn-dyn", "dynamic"] < own["vdnn-all", "(m)"]
    for name, loss in (("vDNN-all with memory-optimal algorithms", 0.58), ("vDNN-conv with", 0.55)):
        (row,) = next(figures[key] for key in figures if key.startswith(name)).work_out(Lab())
        assert row.reported == pytest.approx(1 / (1 - loss) - 1)
        assert row.own == pytest.approx(row.reported, rel=0.35)


# --- this machine ---


def test_what_an_older_edition_remembered_is_measured_anew(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = measure.remember(outgrow.Hardware("this machine", 1 << 34, 1e11, 1e10, 1e9, 1e9))
    assert measure.remembered() is not None
    document = json.loads(path.read_text())
    del document["machine"]["edition"]
    path.write_text(json.dumps(document))
    assert measure.remembered() is None


def test_what_was_measured_is_remembered_for_this_machine_alone(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure.remembered() is None
    hardware = replace(outgrow.find_hardware("k40c"), name="this machine")
    path = measure.remember(hardware)
    assert path.is_relative_to(own_cache)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert measure.remembered() == hardware == measure.this_machine()
    monkeypatch.setattr(measure, "processor_name", lambda: "another")
    assert measure.remembered() is None
    path.write_text("{}")
    assert measure.remembered() is None


def test_a_session_measures_the_machine_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "remembered", lambda: None)
    budget = 6 << 20
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    with outgrow.Session(model, budget=budget) as session:

        def step() -> None:
            with session.step():
                model(torch.randn(2048, 64)).sum().backward()

        assert rise_of(step) <= budget
        assert session.plan is not None


@pytest.mark.usefixtures("own_cache")
def test_doctor_measures_and_remembers(result: Json) -> None:
    before = torch.random.get_rng_state()
    found = result("doctor")
    assert torch.equal(torch.random.get_rng_state(), before)
    hardware = outgrow.Hardware.from_document(found["hardware"])
    assert hardware == measure.this_machine()
    assert {"convolution", "matrix product", "normalization", "other"} == set(hardware.efficiency)
    assert all(0 < share < 20 for share in hardware.efficiency.values())
    assert hardware.copy_out_bandwidth != hardware.copy_in_bandwidth
    assert len(found["devices"]) == len(profiles())
    assert found["findings"]["PyTorch"] == torch.__version__


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> outgrow.Hardware:
    """PyTorch says that there are two GPUs of one name; they are measured as told."""
    found = replace(
        outgrow.find_hardware("h200"), name="NVIDIA H200 NVL", copy_out_bandwidth=5.1e10, copy_in_bandwidth=5.3e10
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: found.name)
    monkeypatch.setattr("outgrow.cli.doctor.measure_gpu", lambda device: found)
    monkeypatch.setattr("outgrow.cli.doctor.measure_machine", lambda *a, **k: outgrow.find_hardware("k40c"))
    return found


@pytest.mark.usefixtures("own_cache")
def test_doctor_measures_a_gpu_and_its_link_once_for_each_name_and_remembers_it(
    one_gpu: outgrow.Hardware, result: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", 0)
    assert measure.remembered_gpu(device) is None
    found = result("doctor")
    assert [outgrow.Hardware.from_document(gpu["hardware"]) for gpu in found["gpus"]] == [one_gpu]
    assert Path(found["gpus"][0]["remembered_in"]).name == "gpu-nvidia-h200-nvl.json"
    # Sessions and plans reckon with it, and measure nothing.
    assert measure.remembered_gpu(device) == one_gpu == measure.this_gpu(device, spare_bytes=0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "another")
    assert measure.remembered_gpu(device) is None


@pytest.mark.usefixtures("own_cache")
def test_doctor_prints_the_link_both_ways(one_gpu: outgrow.Hardware, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(("doctor",)) == 0
    said = capsys.readouterr().out
    assert all(text in said for text in (one_gpu.name, "51.0 GB/s", "53.0 GB/s"))


def test_doctor_has_no_gpus_where_there_are_none(
    own_cache: Path, result: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("outgrow.cli.doctor.measure_machine", lambda *a, **k: outgrow.find_hardware("k40c"))
    assert result("doctor")["gpus"] == []
    assert [path.name for path in own_cache.rglob("*.json")] == ["machine.json"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("train", "resnet-18", "--device", "cuda"), "sees no CUDA device here"),
        (("plan", "resnet-18", "--device", "cuda"), "sees no CUDA device here"),
        (("plan", "resnet-18", "--device", "cuda", "--hardware", "k40c"), "leave --hardware away"),
        (("train", "resnet-18", "--device", "tpu"), "cuda"),
    ],
)
def test_a_device_that_is_not_here_is_one_line(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_training_on_the_cpu_is_the_default_and_says_nothing_of_a_gpu(result: Json) -> None:
    usual = result("train", "resnet-18", "--image-size", "32", "--batch", "2", "--steps", "2")
    named = result("train", "resnet-18", "--image-size", "32", "--batch", "2", "--steps", "2", "--device", "cpu")
    assert usual["device_peak_bytes"] is None
    assert usual["parameters_sha256"] == named["parameters_sha256"]


def test_this_machine_is_measured_whatever_the_programs_default_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: set[str] = set()

    def noted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*tensors: torch.Tensor) -> torch.Tensor:
            devices.update(tensor.device.type for tensor in tensors)
            return function(*tensors)

        return call

    for name in ("mm", "add"):
        monkeypatch.setattr(torch, name, noted(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "copy_", noted(torch.Tensor.copy_))
    with torch.device("meta"):
        measure.product_speed(torch.float32, 16)
        measure.copy_speed(1 << 10)
        measure.op_overhead_seconds()
    assert devices == {"cpu"}
