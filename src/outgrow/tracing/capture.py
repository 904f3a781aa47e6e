"""Traces one step on its own, without a budget: for `outgrow.trace`, on real or on fake tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from outgrow.errors import TraceMismatch
from outgrow.tracing.compiled import eagerly
from outgrow.tracing.functions import FunctionsSeen
from outgrow.tracing.ir import Kind, Trace
from outgrow.tracing.ledger import Ledger, StorageRecord
from outgrow.tracing.ops import OpTable, is_of_step, outputs_of, tensors_in
from outgrow.tracing.probe import measured_call
from outgrow.tracing.recorder import ModuleNames, Recorder

# What a module, or a kind of module, may do in a way of its own that lists what it is made of.
_LISTINGS = (
    "parameters",
    "named_parameters",
    "buffers",
    "named_buffers",
    "modules",
    "named_modules",
    "_named_members",
)


class TrainingStep(NamedTuple):
    """A model, its optimizer (or None, or several of either) and a function that runs one step on them.

    With `batches`, each step is called with the next of those: what draws them, and the data set that they are drawn
    from, is then no part of the step. Without, it is called with nothing.
    """

    model: torch.nn.Module | Sequence[torch.nn.Module]
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
    step: Callable[..., object]
    batches: Iterator[Any] | None = None

    def drawn(self) -> Callable[[], object]:
        """The next step, with its batch drawn; of real data, where fake tensors are on.

        Raises:
            TraceMismatch: there is no other batch.
        """
        if self.batches is None:
            return self.step
        with unset_fake_temporarily():
            try:
                batch = next(self.batches)
            except StopIteration:
                raise TraceMismatch("the batches ended: give an iterator that goes on as long as steps do") from None
        return partial(self.step, batch)


def trace(make_step: Callable[[], TrainingStep], *, fake: bool = True) -> Trace:
    """Record one training step.

    Args:
        make_step: builds model, optimizer and data, and returns a `TrainingStep`. With `fake=True` it runs
            under `FakeTensorMode`: tensors have shapes and devices but no memory, so the step may be larger
            than any machine. Everything that the step uses must be built inside.
        fake: False runs the step for real (once to warm up, once recorded, with times and workspaces).

    Returns:
        The trace of a step in its steady state: the optimizer's state exists already.
    """
    with ExitStack() as stack:
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        made = make_step()
        models = as_sequence(made.model)
        optimizers = as_sequence(made.optimizer)
        if fake:
            _make_optimizer_state(optimizers)
        else:
            made.drawn()()
        return _record(made.drawn(), models, optimizers, measured=not fake)


def as_sequence(item: Any) -> tuple[Any, ...]:
    """One, several or none, as a tuple."""
    if item is None:
        return ()
    if isinstance(item, torch.nn.Module | torch.optim.Optimizer):
        return (item,)
    return tuple(item) if isinstance(item, Iterable) else (item,)


def storage_kinds(
    ledger: Ledger, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[int, Kind]:
    """What the storages of models and optimizers are, by serial number in the ledger."""
    kinds: dict[int, Kind] = {}
    for tensor, kind in training_state(models, optimizers):
        record = ledger.see(tensor)
        if record is not None:
            kinds.setdefault(record.serial, kind)
    return kinds


def training_state(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[torch.Tensor, Kind]]:
    """Every tensor that training keeps from step to step, parameters and gradients once, with its kind."""
    passed: set[int] = set()
    for model in models:
        parameters, buffers = _members(model)
        yield from _with_gradients(parameters, passed)
        for buffer in buffers:
            yield buffer, Kind.BUFFER
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from _with_gradients(group["params"], passed)
        for state in optimizer.state.values():  # a parameter's, by name, or something of all of them
            for item in state.values() if isinstance(state, Mapping) else (state,):
                if isinstance(item, torch.Tensor):
                    yield item, Kind.OPTIMIZER


def _with_gradients(
    parameters: Iterable[torch.Tensor | None], passed: set[int]
) -> Iterator[tuple[torch.Tensor, Kind]]:
    """Parameters that were not `passed` yet, which are told by `id`, each with its gradient."""
    for parameter in parameters:
        if parameter is None or id(parameter) in passed:
            continue
        passed.add(id(parameter))
        yield parameter, Kind.PARAMETER
        if parameter.grad is not None:
            yield parameter.grad, Kind.GRADIENT


def _members(model: torch.nn.Module) -> tuple[Iterable[torch.Tensor | None], Iterable[torch.Tensor]]:
    """The parameters and the buffers of a model; some may come more than once.

    Each step begins with this, and `model.parameters()` spends milliseconds on names.
    """
    modules = list(_modules(model))
    if any(map(_lists_by_itself, {type(module) for module in modules})) or any(
        not module.__dict__.keys().isdisjoint(_LISTINGS) for module in modules
    ):
        return model.parameters(), model.buffers()
    parameters = (item for module in modules for item in module._parameters.values())
    return parameters, (item for module in modules for item in module._buffers.values() if item is not None)


def _lists_by_itself(kind: type[torch.nn.Module]) -> bool:
    return any(getattr(kind, name) is not getattr(torch.nn.Module, name) for name in _LISTINGS)


def _modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """As `model.modules()`, in the same order."""
    passed: set[int] = set()
    waiting: list[torch.nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None or id(module) in passed:
            continue
        passed.add(id(module))
        yield module
        waiting.extend(reversed(module._modules.values()))


def _make_optimizer_state(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Step fake optimizers once, so that momentum and the like are there before the recorded step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _record(
    step: Callable[[], object],
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    measured: bool,
) -> Trace:
    device = next((parameter.device for model in models for parameter in model.parameters()), torch.device("cpu"))
    ledger = Ledger(device.type, counts_fakes=True)
    kinds = storage_kinds(ledger, models, optimizers)
    recorder = Recorder(ledger, ModuleNames(models), kinds)
    recorder.start(tensor for tensor, _ in training_state(models, optimizers))
    ledger.on_death = recorder.died
    mode = _CaptureMode(recorder, device.type, measured=measured)

    def pack(tensor: torch.Tensor) -> _Handle:
        with mode.paused():
            # A detached alias: the tensor itself may be the node's own output, and would hold its graph.
            alias = tensor.detach()
        return _Handle(recorder, ledger.see(tensor), alias)

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: handle.unpack())
    with eagerly(models), hooks, mode, FunctionsSeen(recorder, fake=not measured):
        step()
    result = recorder.finish(storage_kinds(ledger, models, optimizers), str(device.type), measured=measured)
    ledger.close()
    return result


class _Handle:
    """What autograd keeps in place of a saved tensor; its end is the moment at which autograd lets go."""

    __slots__ = ("_index", "_record", "_recorder", "_tensor")

    def __init__(self, recorder: Recorder, record: StorageRecord | None, alias: torch.Tensor) -> None:
        self._tensor = alias
        self._record = record
        if record is not None:
            record.aliases += 1
        self._recorder = recorder
        self._index = recorder.packed(record, alias.numel() * alias.element_size())

    def unpack(self) -> torch.Tensor:
        self._recorder.unpacked(self._index)
        return self._tensor

    def __del__(self) -> None:
        if self._record is not None:
            self._record.aliases -= 1
        self._recorder.released(self._index)


class _CaptureMode(TorchDispatchMode):
    """Shows each op to the recorder."""

    def __init__(self, recorder: Recorder, device_type: str, *, measured: bool) -> None:
        super().__init__()
        self._recorder = recorder
        self._device_type = device_type
        self._measured = measured
        self._table = OpTable()
        self._paused = False
        self._left_at = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, ops are ours and no part of the step. (Switching dispatch off would strip fake tensors bare.)"""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        facts = self._table[func]
        if self._paused or not is_of_step(func, facts):
            return func(*args, **kwargs)
        rise, seconds = 0, 0.0
        if self._measured:
            result, measured = measured_call(func, args, kwargs, self._device_type)
            rise = measured or 0
            seconds = time.perf_counter() - self._left_at
        else:
            result = func(*args, **kwargs)
        self._recorder.op(
            func,
            facts,
            args,
            kwargs,
            tensors_in(args, kwargs),
            outputs_of(result),
            result,
            rise_bytes=rise,
            seconds=seconds,
        )
        self._left_at = time.perf_counter()
        return result
