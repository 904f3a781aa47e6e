"""Random networks of what is hard: views, in-place ops, random numbers, several branches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

Layer = Callable[[torch.Tensor], torch.Tensor]

INPUT_CHANNELS = 8


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x


class Concatenation(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right, self.mix = left, right, nn.Conv2d(2 * INPUT_CHANNELS, INPUT_CHANNELS, 1)

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
        lambda x: F.unfold(x, 3, padding=1).view(x.shape[0], INPUT_CHANNELS, 9, -1).amax(2).view_as(x),
        lambda x: x.permute(0, 2, 3, 1).contiguous().tanh().permute(0, 3, 1, 2),
        lambda x: F.dropout(x, 0.2),
        lambda x: F.dropout2d(x.mul(2), 0.3, inplace=True),
        lambda x: F.alpha_dropout(x, 0.1, training=True),
        lambda x: x + torch.randn_like(x) * torch.empty(1, INPUT_CHANNELS, 1, 1).uniform_(),
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
        self.linear = nn.Linear(INPUT_CHANNELS, INPUT_CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Routed(nn.Module):
    """A layer for some positions, as many as their contents say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUT_CHANNELS, INPUT_CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.permute(0, 2, 3, 1).reshape(-1, INPUT_CHANNELS)
        picked = rows[:, 0] > rows.mean()
        made = rows.masked_scatter(picked[:, None], F.gelu(self.linear(rows[picked])))
        return made.view(x.shape[0], *x.shape[2:], INPUT_CHANNELS).permute(0, 3, 1, 2)


leaves = st.one_of(
    st.just(("conv",)),
    st.just(("linear",)),
    st.tuples(st.just("norm"), st.sampled_from(["batch", "group", "instance"])),
    st.tuples(st.just("activation"), st.sampled_from(["relu", "relu_", "gelu", "leaky_", "silu_", "elu"])),
    st.tuples(st.just("lambda"), st.integers(0, len(Lambda.FUNCTIONS) - 1)),
)


def networks_of(leaves: st.SearchStrategy[tuple]) -> st.SearchStrategy[tuple]:
    return st.recursive(
        st.lists(leaves, min_size=1, max_size=5).map(lambda items: ("chain", *items)),
        lambda inner: st.one_of(
            st.tuples(st.just("residual"), inner),
            st.tuples(st.just("concatenation"), inner, inner),
            st.lists(inner, min_size=1, max_size=3).map(lambda items: ("chain", *items)),
        ),
        max_leaves=6,
    )


# Fake tensors have no contents that could decide on sizes.
traceable_descriptions = networks_of(leaves)
descriptions = networks_of(st.one_of(leaves, st.just(("routed",))))


def build(description: tuple) -> nn.Module:
    kind, *rest = description
    if kind == "chain":
        return nn.Sequential(*(build(item) for item in rest))
    if kind == "residual":
        return Residual(build(rest[0]))
    if kind == "concatenation":
        return Concatenation(build(rest[0]), build(rest[1]))
    if kind == "conv":
        return nn.Conv2d(INPUT_CHANNELS, INPUT_CHANNELS, 3, padding=1)
    if kind == "linear":
        return PerPosition()
    if kind == "routed":
        return Routed()
    if kind == "norm":
        return {
            "batch": nn.BatchNorm2d(INPUT_CHANNELS),
            "group": nn.GroupNorm(2, INPUT_CHANNELS),
            "instance": nn.InstanceNorm2d(INPUT_CHANNELS, affine=True),
        }[rest[0]]
    if kind == "activation":
        return {
            "relu": nn.ReLU(),
            "relu_": nn.Sequential(nn.Conv2d(INPUT_CHANNELS, INPUT_CHANNELS, 1), nn.ReLU(inplace=True)),
            "gelu": nn.GELU(),
            "leaky_": nn.Sequential(nn.BatchNorm2d(INPUT_CHANNELS), nn.LeakyReLU(0.1, inplace=True)),
            "silu_": nn.Sequential(nn.Conv2d(INPUT_CHANNELS, INPUT_CHANNELS, 1), nn.SiLU(inplace=True)),
            "elu": nn.ELU(),
        }[rest[0]]
    return Lambda(rest[0])
