"""The gradient noise scale: estimated right, whatever passes, clipping and processes stand between."""

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

import outgrow
from conftest import StartChild
from outgrow.tuning.noise import efficiency, gain

SIZE = 400
BATCH = 4
# Of the gradient whose noise is known: |G|^2, and the variance of one sample's summed over all parameters.
GRADIENT_SQUARE, NOISE = 1.0, 60.0


class Known(torch.nn.Module):
    """Its gradient is a fixed vector plus noise of a known variance, whatever its parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.zeros(SIZE // 4))
        self.rest = torch.nn.Parameter(torch.zeros(SIZE - SIZE // 4))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return (samples @ torch.cat((self.one, self.rest))).mean()


def samples(count: int, generator: torch.Generator) -> torch.Tensor:
    true = torch.full((SIZE,), (GRADIENT_SQUARE / SIZE) ** 0.5)
    return true + torch.randn(count, SIZE, generator=generator) * (NOISE / SIZE) ** 0.5


def step_of(passes: int, clip: float | None = None) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)

    def step() -> None:
        for _ in range(passes):
            (model(samples(BATCH, generator)) / passes).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, step


def assert_is_known(scale: outgrow.NoiseScale | None) -> None:
    assert scale is not None
    assert scale.samples == pytest.approx(NOISE / GRADIENT_SQUARE, rel=0.15)
    assert scale.samples == pytest.approx(scale.noise / scale.gradient_square)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_accumulated_passes_tell_the_noise(clip: float | None) -> None:
    optimizer, step = step_of(passes=4, clip=clip)
    noise = outgrow.GradientNoise(optimizer, batch_size=BATCH)
    for _ in range(200):
        step()
    assert noise.scale is not None
    assert noise.scale.measurements == 200
    assert_is_known(noise.scale)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_steps_of_one_pass_tell_it_while_the_optimizer_is_held(clip: float | None) -> None:
    optimizer, step = step_of(passes=1, clip=clip)
    noise = outgrow.GradientNoise(optimizer, batch_size=BATCH)
    before = [item.clone() for group in optimizer.param_groups for item in group["params"]]
    with noise.held():
        for _ in range(400):
            step()
    assert_is_known(noise.scale)
    after = [item for group in optimizer.param_groups for item in group["params"]]
    assert all(map(torch.equal, before, after))
    assert all(item.grad is None for item in after)
    step()
    assert not any(map(torch.equal, before, after)), "the optimizer steps again"


def test_the_tuner_finds_it_in_the_passes_that_it_takes() -> None:
    def make_step(batch: int) -> outgrow.TrainingStep:
        model = Known()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(drawn: torch.Tensor) -> None:
            model(drawn).backward()
            optimizer.step()
            optimizer.zero_grad()

        def batches() -> Iterator[torch.Tensor]:
            generator = torch.Generator().manual_seed(3)
            while True:
                yield samples(batch, generator)

        return outgrow.TrainingStep(model, optimizer, step, batches())

    answer = outgrow.tune(make_step, budget="64MB", base_batch=16, max_batch=16, trials=1, trial_steps=1)
    assert_is_known(answer.noise)


def test_a_program_may_clear_gradients_by_its_model() -> None:
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    noise = outgrow.GradientNoise(optimizer, batch_size=BATCH)
    with noise.held(model):
        for _ in range(400):
            model.zero_grad()
            model(samples(BATCH, generator)).backward()
            optimizer.step()
    assert_is_known(noise.scale)
    model.one.grad = torch.ones_like(model.one)
    model.zero_grad()
    assert model.one.grad is None, "the model clears gradients again"


def test_what_clears_gradients_otherwise_is_told_so() -> None:
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = outgrow.GradientNoise(optimizer, batch_size=BATCH)

    def pass_that_clears() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(torch.ones(BATCH, SIZE)).backward()

    with noise.held():
        pass_that_clears()
        with pytest.raises(outgrow.TuningError, match="cleared between two backward passes"):
            pass_that_clears()


def test_a_step_of_one_pass_tells_nothing() -> None:
    optimizer, step = step_of(passes=1)
    noise = outgrow.GradientNoise(optimizer, batch_size=BATCH)
    step()
    assert noise.scale is None


def test_it_is_the_same_inside_a_session() -> None:
    def measured(budget: str | None) -> outgrow.NoiseScale | None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        noise = outgrow.GradientNoise(optimizer, batch_size=256)
        generator = torch.Generator().manual_seed(1)

        def step() -> None:
            for _ in range(2):
                model(torch.randn(256, 64, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        if budget is None:
            for _ in range(4):
                step()
        else:
            with outgrow.Session(model, optimizer, budget=budget, policy="vdnn-all", least_moved_bytes=1) as session:
                for _ in range(4):
                    with session.step():
                        step()
                assert session.summary().offloaded_bytes > 0
        return noise.scale

    assert measured("1MB") == measured(None)


def test_a_gradient_that_is_no_number_is_left_out() -> None:
    optimizer, step = step_of(passes=2)
    noise = outgrow.GradientNoise(optimizer, batch_size=BATCH)
    parameter = optimizer.param_groups[0]["params"][0]
    hook = parameter.register_hook(lambda gradient: gradient * float("inf"))
    step()
    assert noise.scale is None
    hook.remove()
    noise.close()
    step()
    assert noise.scale is None, "it no longer watches"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 1, "processes": 0}, "processes 0"),
        ({"batch_size": 1, "decay": 0.0}, "decay is 0.0"),
    ],
)
def test_nonsense_is_refused(options: dict[str, float], says: str) -> None:
    optimizer, _ = step_of(passes=1)
    with pytest.raises(outgrow.TuningError, match=says):
        outgrow.GradientNoise(optimizer, **options)


def test_an_optimizer_without_trained_parameters_is_refused() -> None:
    frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    with pytest.raises(outgrow.TuningError, match="no parameter that is trained"):
        outgrow.GradientNoise(torch.optim.SGD([frozen], lr=0.1), batch_size=1)


def _one_of_two(rank: int, folder: str) -> float:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = DistributedDataParallel(Known())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = outgrow.GradientNoise(optimizer, batch_size=BATCH, processes=2)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(400):
        with model.no_sync():
            (model(samples(BATCH, generator)) / 2).backward()
        (model(samples(BATCH, generator)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert noise.scale is not None
    # The wrapper and its group live as long as this process: where their end came with the function's, it hung once,
    # in C++ (it seems to wait for a thread of the group that wants the interpreter's lock).
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(model))
    return noise.scale.samples


def test_two_processes_each_tell_it(start_child: StartChild, tmp_path: Path) -> None:
    children = [start_child(_one_of_two, rank, str(tmp_path)) for rank in range(2)]
    for child in children:
        assert child.result() == pytest.approx(NOISE / GRADIENT_SQUARE, rel=0.15)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0, 1e9))
def test_a_larger_batch_is_worth_more_steps_but_never_more_than_the_noise_allows(
    batch: int, base: int, noise: float
) -> None:
    worth = gain(batch, base, noise)
    assert worth <= 1 + noise / base + 1e-9 * worth
    assert worth <= max(1.0, batch / base) + 1e-9 * worth
    assert gain(batch + 1, base, noise) >= worth * (1 - 1e-12)
    assert efficiency(batch + 1, base, noise) <= efficiency(batch, base, noise) <= 1
    assert batch > base or efficiency(batch, base, noise) == 1, "a smaller one is not chosen for its samples' worth"
    assert gain(base, base, noise) == pytest.approx(1)
    assert gain(batch, base, float("inf")) == batch / base
