"""What counts as training state: what PyTorch lists of models and optimizers, each tensor once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from outgrow.tracing.capture import training_state
from outgrow.tracing.ir import Kind


def tied() -> nn.Module:
    """Two layers with one weight, a module that is there twice, and one that is not there."""
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = layer.weight
    model = nn.Sequential(layer, nn.BatchNorm1d(4), layer, other)
    model.register_module("absent", None)
    model.register_parameter("missing", None)
    model.register_buffer("nothing", None)
    return model


class Holder(nn.Module):
    """Parameters in lists and dictionaries, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.ones(3))})
        self.deep = nn.ModuleDict({"b": nn.ModuleList([nn.Linear(2, 2), Lister()])})
        self.register_buffer("count", torch.zeros(1), persistent=False)


class Lister(nn.Module):
    """It lists what it trains in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(5))
        self.hidden = (nn.Parameter(torch.ones(7)),)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from super().parameters(recurse)
        yield from self.hidden


class Namer(nn.Module):
    """It has a module that only its list of modules has."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = (nn.Linear(3, 3),)

    def named_modules(self, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Module]]:  # type: ignore[override]
        yield from super().named_modules(*given, **named)
        yield "hidden", self.hidden[0]


def overridden() -> nn.Module:
    model = nn.Linear(3, 3)
    model.parameters = lambda recurse=True: iter([model.weight])  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    "make",
    [
        tied,
        Holder,
        Lister,
        lambda: nn.Sequential(nn.Linear(2, 2), Namer()),
        overridden,
        lambda: weight_norm(nn.Linear(3, 3)),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))),
        lambda: nn.DataParallel(nn.Sequential(nn.LSTM(3, 4, 2), nn.BatchNorm1d(3))),
        lambda: torch.compile(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))),
    ],
    ids=[
        "tied",
        "lists",
        "own listing",
        "own names",
        "overridden",
        "parametrized",
        "scripted",
        "wrapped",
        "compiled",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_it_is_what_pytorch_lists(make: Callable[[], nn.Module]) -> None:
    model = make()
    found = list(training_state([model], []))
    parameters = [tensor for tensor, kind in found if kind is Kind.PARAMETER]
    buffers = {tensor.data_ptr() for tensor, kind in found if kind is Kind.BUFFER}
    assert list(map(id, parameters)) == list(map(id, model.parameters())) or (
        [item.data_ptr() for item in parameters] == [item.data_ptr() for item in model.parameters()]
    )
    assert buffers == {buffer.data_ptr() for buffer in model.buffers()}


def test_parameters_come_once_with_their_gradients_and_what_optimizers_keep() -> None:
    model, stranger = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([*model.parameters(), stranger], lr=0.1, momentum=0.9)
    (model(torch.ones(2, 4)) * stranger).sum().backward()
    optimizer.step()
    found = list(training_state([model, model], [optimizer]))
    momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
    wanted = [model.weight, model.weight.grad, model.bias, model.bias.grad, stranger, stranger.grad, *momentum]
    assert list(map(id, wanted)) == [id(tensor) for tensor, _ in found]


def test_what_an_optimizer_keeps_of_all_parameters_is_its_state() -> None:
    """By a name of its own, as some keep the number of steps."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state["steps"] = steps = torch.zeros(1)
    optimizer.state["rate"] = 0.5
    found = list(training_state([], [optimizer]))
    assert [(id(tensor), kind) for tensor, kind in found] == [
        (id(parameter), Kind.PARAMETER),
        (id(steps), Kind.OPTIMIZER),
    ]
