"""Which way a convolution takes, of those that cuDNN's frontend knows. How they run is in test_cuda.py."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from outgrow.cost.workspaces import Workspace
from outgrow.runtime.convolutions import Convolutions, open_convolutions
from outgrow.runtime.frontend import _MOST_WAYS, Frontend, Way, Ways, _is_for_cudnn
from outgrow.tracing.ops import facts_of

MiB = 1 << 20


def ways(*nbytes: int, seconds: dict[int, float] | None = None) -> Ways:
    """Ways by their workspaces."""
    return Ways([Way(size, lambda tensors, workspace: None) for size in nbytes], dict(seconds or {}))


KNOWN = ways(400 * MiB, 200 * MiB, 0, 0, seconds={0: 3e-3, 1: 4e-3, 2: 11e-3, 3: 10e-3})


@pytest.mark.parametrize(
    ("kind", "free", "best"),
    [
        (Workspace.SPEED, 1 << 30, 0),
        (Workspace.DYNAMIC, 1 << 30, 0),
        (Workspace.DYNAMIC, 399 * MiB, 1),
        (Workspace.DYNAMIC, 10, 3),
        (Workspace.MEMORY, 1 << 30, 3),
        (Workspace.DYNAMIC, -1, None),
    ],
)
def test_the_fastest_way_that_has_room_is_taken(kind: Workspace, free: int, best: int | None) -> None:
    assert KNOWN.best(kind, free) == best


def test_of_two_that_are_as_fast_the_one_that_holds_less() -> None:
    assert ways(9, 5, seconds={0: 1.0, 1: 1.0}).best(Workspace.SPEED, 10) == 1


def test_a_way_that_failed_is_never_taken() -> None:
    some = ways(200, 0, 100, seconds={0: 1.0, 2: 2.0})
    some.broken |= {0, 1}
    assert some.best(Workspace.SPEED, 500) == 2
    assert some.untimed(Workspace.SPEED, 500) == []
    assert some.best(Workspace.MEMORY, 500) == 2, "the least of those that are left"
    assert some.any_left
    some.broken.add(2)
    assert not some.any_left


def test_ways_are_tried_when_they_first_have_room() -> None:
    some = ways(400, 200, 0, seconds={2: 1.0})
    assert some.untimed(Workspace.DYNAMIC, 100) == []
    assert some.untimed(Workspace.DYNAMIC, 300) == [1]
    assert some.untimed(Workspace.SPEED, 500) == [0, 1]
    assert some.untimed(Workspace.MEMORY, 500) == [], "those that hold more than they must are never taken"


def test_the_way_of_last_resort_is_tried_where_no_other_has_room() -> None:
    """It may take a hundred times as long as those that cuDNN puts first."""
    some = ways(*[100] * _MOST_WAYS, 0)
    assert _MOST_WAYS not in some.untimed(Workspace.SPEED, 200)
    assert some.untimed(Workspace.SPEED, 50) == [_MOST_WAYS]
    assert some.untimed(Workspace.MEMORY, 200) == [_MOST_WAYS]


def test_the_frontend_is_for_kinds_of_workspaces_on_a_gpu() -> None:
    for kind, device in ((None, "cuda"), (Workspace.SPEED, "cpu")):
        assert not open_convolutions(kind, torch.device(device), lambda: 0).knows_ways


def test_where_there_is_no_frontend_pytorch_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    found = open_convolutions(Workspace.SPEED, torch.device("cuda", 0), lambda: 0)
    assert found.searches
    assert not found.knows_ways
    func = torch.ops.aten.convolution.default
    assert found.instead_of(func, facts_of(func)) is func


def test_all_convolutions_are_seen_where_somebody_chooses_for_them() -> None:
    convolution, relu = torch.ops.aten.convolution.default, torch.ops.aten.relu.default
    for kind in Workspace:
        convolutions = Convolutions(kind, object.__new__(Frontend))
        assert convolutions.needs_all
        assert convolutions.seen(facts_of(convolution))
        assert not convolutions.seen(facts_of(relu))
        assert convolutions.instead_of(convolution, facts_of(convolution)) is not convolution
        assert convolutions.instead_of(relu, facts_of(relu)) is relu
    assert not Convolutions(Workspace.MEMORY).needs_all  # cuDNN's heuristics, as everywhere
    assert not Convolutions(None, object.__new__(Frontend)).knows_ways  # nobody asked for it


class OnGpu:
    """What is asked of a tensor there."""

    is_cuda, dtype = True, torch.float32

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)


@pytest.mark.parametrize(("groups", "is_ours"), [(1, True), (4, True), (8, False)])
def test_windows_over_one_channel_each_are_left_to_pytorchs_own_kernels(groups: int, is_ours: bool) -> None:
    images, weight, out = OnGpu(2, 8, 9, 9), OnGpu(8, 8 // groups, 3, 3), OnGpu(2, 8, 7, 7)
    geometry = [1, 1], [0, 0], [1, 1], False, [0, 0], groups
    aten = torch.ops.aten
    assert _is_for_cudnn(aten.convolution.default, (images, weight, None, *geometry)) is is_ours
    backward = out, images, weight, None, *geometry, [True, True, False]
    assert _is_for_cudnn(aten.convolution_backward.default, backward) is is_ours
