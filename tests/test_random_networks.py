"""Random networks under random plans: gradients equal plain PyTorch's to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import outgrow
import outgrow.session
from outgrow.planning.floor import needed_curve
from outgrow.planning.problem import Problem
from outgrow.tracing.liveness import plain_profile
from steps import RandomDecisions

pytestmark = pytest.mark.usefixtures("one_thread", "known_machine")

HARDWARE = outgrow.Hardware("any", 1 << 40, 1e11, 1e10, 1e9, 1e9)
STEPS = 4  # recorded, planned with every recipe proved, planned anew and proved, and one that trusts the proofs

Layer = Callable[[torch.Tensor], torch.Tensor]

CHANNELS = 8


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x


class Concatenation(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right, self.mix = left, right, nn.Conv2d(2 * CHANNELS, CHANNELS, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(torch.cat([self.left(x), self.right(x)], 1))


class Lambda(nn.Module):
    """A function on maps that keeps their shape."""

    FUNCTIONS: tuple[Layer, ...] = (
        lambda x: x.transpose(2, 3) * x.transpose(2, 3)[:, :1],
        lambda x: torch.relu_(x * 1.5),
        lambda x: (x + 1).sigmoid_().mul(x),
        lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1),
        lambda x: x * x.mean(1, keepdim=True).expand_as(x),
        lambda x: F.softmax(x.flatten(2), -1).view_as(x) + x,
        lambda x: F.unfold(x, 3, padding=1).view(x.shape[0], CHANNELS, 9, -1).amax(2).view_as(x),
        lambda x: x.permute(0, 2, 3, 1).contiguous().tanh().permute(0, 3, 1, 2),
        lambda x: F.dropout(x, 0.2),
        lambda x: F.dropout2d(x.mul(2), 0.3, inplace=True),
        lambda x: F.alpha_dropout(x, 0.1, training=True),
        lambda x: x + torch.randn_like(x) * torch.empty(1, CHANNELS, 1, 1).uniform_(),
        lambda x: x.as_strided(x.shape, x.stride(), 0) * x.flip(2),
        lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2),
    )

    def __init__(self, number: int) -> None:
        super().__init__()
        self.function = self.FUNCTIONS[number]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class PerPosition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


leaves = st.one_of(
    st.just(("conv",)),
    st.just(("linear",)),
    st.tuples(st.just("norm"), st.sampled_from(["batch", "group", "instance"])),
    st.tuples(st.just("activation"), st.sampled_from(["relu", "relu_", "gelu", "leaky_", "silu_", "elu"])),
    st.tuples(st.just("lambda"), st.integers(0, len(Lambda.FUNCTIONS) - 1)),
)
blocks = st.recursive(
    st.lists(leaves, min_size=1, max_size=5).map(lambda items: ("chain", *items)),
    lambda inner: st.one_of(
        st.tuples(st.just("residual"), inner),
        st.tuples(st.just("concatenation"), inner, inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda items: ("chain", *items)),
    ),
    max_leaves=6,
)


def build(description: tuple) -> nn.Module:
    kind, *rest = description
    if kind == "chain":
        return nn.Sequential(*(build(item) for item in rest))
    if kind == "residual":
        return Residual(build(rest[0]))
    if kind == "concatenation":
        return Concatenation(build(rest[0]), build(rest[1]))
    if kind == "conv":
        return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
    if kind == "linear":
        return PerPosition()
    if kind == "norm":
        return {
            "batch": nn.BatchNorm2d(CHANNELS),
            "group": nn.GroupNorm(2, CHANNELS),
            "instance": nn.InstanceNorm2d(CHANNELS, affine=True),
        }[rest[0]]
    if kind == "activation":
        return {
            "relu": nn.ReLU(),
            "relu_": nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.ReLU(inplace=True)),
            "gelu": nn.GELU(),
            "leaky_": nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.LeakyReLU(0.1, inplace=True)),
            "silu_": nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.SiLU(inplace=True)),
            "elu": nn.ELU(),
        }[rest[0]]
    return Lambda(rest[0])


@pytest.fixture(scope="module")
def known_machine() -> Iterator[None]:
    """The plans are random: sessions need not measure the machine for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outgrow.session, "this_machine", lambda: HARDWARE)
        yield


def run(model: nn.Module, k: int) -> None:
    x = torch.randn(2, CHANNELS, 8, 8, generator=torch.Generator().manual_seed(k))
    model(x).pow(2).mean().backward()


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    found = [None if item.grad is None else item.grad.clone() for item in model.parameters()]
    model.zero_grad()
    return found


def same(left: list[torch.Tensor | None], right: list[torch.Tensor | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(a.nan_to_num(7), b.nan_to_num(7)))
        for a, b in zip(left, right, strict=True)
    )


# Of these `make fuzz` tries five times as many.
@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(description=blocks, seed=st.integers(0, 2**32 - 1), tightness=st.floats(0, 1))
def test_gradients_equal_plain_pytorch_to_the_bit(description: tuple, seed: int, tightness: float) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), build(description))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(seed)
    plain = []
    for k in range(STEPS):
        run(model, k)
        plain.append(gradients(model))

    model.load_state_dict(before)
    trace = outgrow.trace(lambda: outgrow.TrainingStep(model, None, lambda: run(model, 0)), fake=False)
    model.zero_grad()
    problem = Problem(trace, HARDWARE, 1, least_moved_bytes=1)
    least, most = max(needed_curve(problem)) * 1.1 + 8192, plain_profile(trace).peak_bytes
    budget = int(least + max(0, most - least) * tightness)

    model.load_state_dict(before)
    torch.manual_seed(seed)
    with outgrow.Session(model, budget=budget, policy=RandomDecisions(seed), least_moved_bytes=1) as session:
        for k in range(STEPS):
            with session.step():
                run(model, k)
            assert same(gradients(model), plain[k])
            assert session.summary().measured_peak_bytes <= budget or k == 0
