"""Convolutions through cuDNN's frontend, whose plans tell their workspace before they run (`Session(workspace=)`).

PyTorch's own search for an algorithm is told nothing of workspaces: it tries and is refused. Here each pass of each
convolution (the result, the gradient of the images, that of the weight) has its *ways*, from cuDNN's heuristics, and
the way is chosen anew at each call, by the bytes that are free right then: SuperNeurons' dynamic workspace (section
3.5), whose ends vDNN calls (m) and (p) (section III-C).

The frontend is NVIDIA's Python package `nvidia-cudnn-frontend`, an optional one.
"""

from __future__ import annotations

import importlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import torch

from outgrow.cost.workspaces import Workspace
from outgrow.runtime.tiers.cuda import ROUNDING_BYTES
from outgrow.tracing.convolution import DATA_GRADIENT, FORWARD, WEIGHT_GRADIENT

_LOG = logging.getLogger(__name__)

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
# The fastest was seen among the first five (an H200, cuDNN 9.19).
_MOST_WAYS = 8
# A way that takes this many times the best one's time is not run again to be sure.
_HOPELESS = 8.0
_TYPES = {torch.float32: "FLOAT", torch.float16: "HALF", torch.bfloat16: "BFLOAT16"}
# Sizes and strides of cuDNN's tensors: images, weight, result.
_Layout = tuple[tuple[int, ...], tuple[int, ...]]
# What a pass writes to.
_MADE = {FORWARD: "result", DATA_GRADIENT: "images", WEIGHT_GRADIENT: "weight"}


@dataclass(frozen=True)
class Way:
    """One way to run a pass: the bytes of its workspace, and what runs it given the memory for that."""

    nbytes: int
    run: Callable[[Sequence[torch.Tensor], torch.Tensor], None]


@dataclass
class Ways:
    """The ways of one pass, and the time in seconds that each was seen to take."""

    ways: Sequence[Way]
    seconds: dict[int, float] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)  # those that failed

    @property
    def any_left(self) -> bool:
        """Whether there is one that did not fail."""
        return len(self.broken) < len(self.ways)

    def untimed(self, kind: Workspace, free_bytes: int) -> list[int]:
        """Those that nobody knows to be slower, and that have room to be tried.

        What comes after cuDNN's first ones is tried only where none of those has room: it may take a hundred times as
        long.
        """
        fitting = self._fitting(kind, free_bytes)
        first = [number for number in fitting if number < _MOST_WAYS]
        return [number for number in first or fitting if number not in self.seconds]

    def best(self, kind: Workspace, free_bytes: int) -> int | None:
        """The fastest that was timed and has room; None if there is none."""
        known = [number for number in self._fitting(kind, free_bytes) if number in self.seconds]
        return min(known, key=lambda number: (self.seconds[number], self.ways[number].nbytes), default=None)

    def _fitting(self, kind: Workspace, free_bytes: int) -> list[int]:
        most = free_bytes
        if kind is Workspace.MEMORY:  # no more than the least of all
            sound = (way.nbytes for number, way in enumerate(self.ways) if number not in self.broken)
            most = min(most, min(sound, default=0))
        return [number for number, way in enumerate(self.ways) if way.nbytes <= most and number not in self.broken]


@dataclass(frozen=True)
class _Pass:
    """One of the three things that a convolution works out, as cuDNN has to be asked for it."""

    kind: int
    images: _Layout
    weight: _Layout
    result: _Layout
    dtype: torch.dtype
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    is_deterministic: bool
    rounds_inputs: bool  # TF32


class _HasNoWays(Exception):
    """cuDNN's frontend knows no way to run a pass."""


class Frontend:
    """cuDNN's frontend on one device, for the convolutions of one session.

    Attributes:
        settled: the device's mark after the last search for the fastest way, None if the last call needed none.
    """

    def __init__(
        self,
        device: torch.device,
        kind: Workspace,
        free_bytes: Callable[[], int],
    ) -> None:
        """`free_bytes` says how much of the budget is free.

        Raises:
            ImportError: the frontend is not installed, or does not find cuDNN.
        """
        self._cudnn = importlib.import_module("cudnn")
        self._device = device
        self._kind = kind
        self._free_bytes = free_bytes
        with torch.cuda.device(device):
            self._handle = self._cudnn.create_handle()
        self._ways: dict[_Pass, Ways] = {}
        self.settled: torch.cuda.Event | None = None

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a convolution, or what PyTorch would do where cuDNN is not the one to ask.

        Raises:
            torch.OutOfMemoryError: there is no room for any way.
        """
        self.settled = None
        if kwargs or not _is_for_cudnn(func, args):
            return func(*args, **kwargs)
        try:
            with torch.cuda.device(self._device):
                return self._forward(*args) if func is _FORWARD else self._backward(*args)
        except _HasNoWays:
            return func(*args)

    def close(self) -> None:
        """Let go of the plans and of the handle."""
        self._ways.clear()
        self._cudnn.destroy_handle(self._handle)

    def _forward(
        self,
        images: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        *_: Any,
    ) -> torch.Tensor:
        order = _memory_format(images, weight)
        images, weight = _laid_out(order, images, weight)
        sizes = [
            (size + 2 * pad - step * (window - 1) - 1) // move + 1
            for size, pad, step, window, move in zip(
                images.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True
            )
        ]
        result = _empty((images.shape[0], weight.shape[0], *sizes), images, order)
        self._work_out(FORWARD, images, weight, result, stride, padding, dilation)
        if bias is not None:
            result.add_(bias.view(1, -1, *(1 for _ in sizes)))
        return result

    def _backward(
        self,
        gradient: torch.Tensor,
        images: torch.Tensor,
        weight: torch.Tensor,
        bias_sizes: Sequence[int] | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        _transposed: bool,
        _output_padding: Sequence[int],
        _groups: int,
        wanted: Sequence[bool],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        order = _memory_format(images, weight)
        gradient, images, weight = _laid_out(order, gradient, images, weight)
        of_images = of_weight = of_bias = None
        if wanted[0]:
            of_images = _empty(images.shape, images, order)
            self._work_out(DATA_GRADIENT, of_images, weight, gradient, stride, padding, dilation)
        if wanted[1]:
            of_weight = _empty(weight.shape, weight, order)
            self._work_out(WEIGHT_GRADIENT, images, of_weight, gradient, stride, padding, dilation)
        if wanted[2]:
            of_bias = gradient.sum((0, *range(2, gradient.dim())))
        return of_images, of_weight, of_bias

    def _work_out(
        self,
        kind: int,
        images: torch.Tensor,
        weight: torch.Tensor,
        result: torch.Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> None:
        """One pass: one of the three tensors is written to, by what the other two hold."""
        question = _Pass(
            kind,
            (tuple(images.shape), images.stride()),
            (tuple(weight.shape), weight.stride()),
            (tuple(result.shape), result.stride()),
            images.dtype,
            tuple(padding),
            tuple(stride),
            tuple(dilation),
            torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic,
            torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
        )
        ways = self._ways.get(question)
        if ways is None:
            ways = self._ways[question] = Ways(self._ways_of(question))
        if not ways.any_left:
            raise _HasNoWays
        tensors = (images, weight, result)
        stream = torch.cuda.current_stream(self._device)
        self._cudnn.set_stream(handle=self._handle, stream=stream.cuda_stream)
        free = self._free_bytes() - ROUNDING_BYTES
        for new in ways.untimed(self._kind, free):
            try:
                seconds = self._time(ways.ways[new], tensors, min(ways.seconds.values(), default=inf))
            except RuntimeError as error:  # PyTorch's own search goes on to the next one, too
                _LOG.info("workspaces: a plan of cuDNN's frontend failed (%s)", error)
                ways.broken.add(new)
                continue
            if seconds is not None:
                ways.seconds[new] = seconds
            self.settled = stream.record_event(torch.cuda.Event(enable_timing=True))
        while (number := ways.best(self._kind, free)) is not None:
            if self._try(ways.ways[number], tensors):
                return
            free = ways.ways[number].nbytes - 1  # the budget has the room, but not in one piece
        if not ways.any_left:
            raise _HasNoWays
        least = min(way.nbytes for way in ways.ways)
        raise torch.OutOfMemoryError(f"CUDA out of memory: a convolution needs {least} bytes of workspace")

    def _time(self, way: Way, tensors: Sequence[torch.Tensor], best: float) -> float | None:
        """The time of a way in seconds, from its second run, or from its first if that is hopeless beside the best.

        None if there is no memory for it.
        """
        seconds = None
        for _ in range(2):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            if not self._try(way, tensors):
                return seconds
            ended.record()
            ended.synchronize()
            seconds = float(began.elapsed_time(ended)) / 1e3
            if seconds > _HOPELESS * best:
                break
        return seconds

    def _try(self, way: Way, tensors: Sequence[torch.Tensor]) -> bool:
        try:
            memory = torch.UntypedStorage(way.nbytes, device=self._device)  # which nobody fills
        except torch.OutOfMemoryError:
            return False
        workspace = torch.empty(0, dtype=torch.uint8, device=self._device).set_(memory)
        way.run(tensors, workspace)
        return True

    def _ways_of(self, question: _Pass) -> list[Way]:
        try:
            return self._ask(question)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the package's own classes, which are others in each of its versions
            _LOG.info("workspaces: cuDNN's frontend has no plans for %s (%s)", question, error)
            return []

    def _ask(self, question: _Pass) -> list[Way]:
        """The ways that cuDNN has for a pass: its heuristics' first ones, and the one with the least workspace."""
        cudnn = self._cudnn
        graph = cudnn.pygraph(
            io_data_type=getattr(cudnn.data_type, _TYPES[question.dtype]),
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self._handle,
        )
        layouts = {"images": question.images, "weight": question.weight, "result": question.result}
        made = _MADE[question.kind]
        places = {
            name: graph.tensor(dim=list(sizes), stride=list(strides))
            for name, (sizes, strides) in layouts.items()
            if name != made
        }
        geometry = {
            "padding": list(question.padding),
            "stride": list(question.stride),
            "dilation": list(question.dilation),
        }
        if question.kind == FORWARD:
            places[made] = graph.conv_fprop(image=places["images"], weight=places["weight"], **geometry)
        elif question.kind == DATA_GRADIENT:
            places[made] = graph.conv_dgrad(loss=places["result"], filter=places["weight"], **geometry)
        else:
            places[made] = graph.conv_wgrad(image=places["images"], loss=places["result"], **geometry)
        sizes, strides = layouts[made]
        places[made].set_output(True).set_dim(list(sizes)).set_stride(list(strides))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        notes = cudnn.numerical_note
        refused = [notes.NONDETERMINISTIC] if question.is_deterministic else []
        if question.dtype is torch.float32:  # as PyTorch refuses them (aten/src/ATen/native/cudnn/Conv_v8.cpp)
            refused += [notes.DOWN_CONVERT_INPUTS] + ([] if question.rounds_inputs else [notes.TENSOR_CORE])
        graph.deselect_numeric_notes(refused)
        in_order = [places[name] for name in layouts]
        ways: list[Way] = []

        def build(index: int) -> None:
            with suppress(Exception):  # one that the device or the notes rule out; there is no narrower class for it
                graph.build_plan_at_index(index)
                nbytes = graph.get_workspace_size_plan_at_index(index)
                ways.append(Way(nbytes, partial(self._execute, graph, index, in_order)))

        # Each takes some tenths of a second to build. Those without workspace stand at the end of the fallbacks.
        rest = deque(range(graph.get_execution_plan_count()))
        while rest and len(ways) < _MOST_WAYS:
            build(rest.popleft())
        while rest and min(way.nbytes for way in ways) > 0:
            build(rest.pop())
        return ways

    def _execute(
        self, graph: Any, index: int, places: Sequence[Any], tensors: Sequence[torch.Tensor], workspace: torch.Tensor
    ) -> None:
        graph.execute_plan_at_index(dict(zip(places, tensors, strict=True)), workspace, index, handle=self._handle)


def _is_for_cudnn(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call is a convolution over images or volumes that PyTorch would leave to cuDNN."""
    if func is _FORWARD and len(args) == 9:
        tensors, transposed, geometry, images, groups = args[:2], args[6], args[3:6], args[0], args[8]
    elif func is _BACKWARD and len(args) == 11:
        tensors, transposed, geometry, images, groups = args[:3], args[7], args[4:7], args[1], args[9]
    else:
        return False
    return (
        not transposed
        and all(len(sizes) == tensors[0].dim() - 2 for sizes in geometry)
        and torch.backends.cudnn.enabled
        and len({tensor.dtype for tensor in tensors}) == 1
        and all(
            tensor.is_cuda and tensor.dtype in _TYPES and tensor.dim() in (4, 5) and tensor.numel() > 0
            for tensor in tensors
        )
        and not images.shape[1] == groups > 1  # for windows over one channel each PyTorch has kernels of its own
    )


def _memory_format(images: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """The order that PyTorch would have cuDNN work in."""
    last = torch.channels_last if images.dim() == 4 else torch.channels_last_3d
    for tensor in (images, weight):
        if tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous():
            return last
    return torch.contiguous_format


def _laid_out(order: torch.memory_format, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.contiguous(memory_format=order) for tensor in tensors)


def _empty(sizes: Sequence[int], like: torch.Tensor, order: torch.memory_format) -> torch.Tensor:
    return torch.empty(tuple(sizes), dtype=like.dtype, device=like.device, memory_format=order)
