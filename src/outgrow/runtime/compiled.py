"""Modules that `torch.compile` compiled, inside a step that is watched: each call is one op, and stays compiled.

A compiler skips what runs under a dispatch mode, so that such modules would run op by op. So the mode steps aside
while one runs. What its code saves for the backward pass is packed like everything else; what it makes meanwhile, an
allocator counts; and room for that is made before, forward and backward, by what it was seen to take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from outgrow.errors import DeviceOutOfMemory
from outgrow.runtime.care import Need
from outgrow.runtime.copies.streams import Event
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.faults import is_out_of_memory
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.runtime.watch import Watch
from outgrow.tracing.compiled import COMPILED, eagerly, place_of
from outgrow.tracing.ledger import Ledger
from outgrow.tracing.ops import OpFacts, outputs_of, tensors_in, tensors_within
from outgrow.tracing.probe import probing
from outgrow.tracing.recorder import Recorder

_NODE = "CompiledFunctionBackward"  # of PyTorch's AOTAutograd


@dataclass
class _Visit:
    """Compiled code that runs."""

    key: Hashable
    is_backward: bool
    need: Need
    before_bytes: int
    began: float
    mark: Event | None
    stack: ExitStack
    highest_bytes: int  # live bytes, as far as is known before it is over
    arrived_bytes: int = 0  # of saved values that came back meanwhile
    rise: list[int | None] = field(default_factory=list)  # what the probe saw


class Host(Protocol):
    """The step in which compiled code runs, as far as that has to do with it."""

    def prepare_for(self, facts: OpFacts, need: Need) -> None:
        """Make room for an op on the thread that calls."""

    def hold_back(self, nbytes: int) -> None:
        """Keep so much of the budget from what comes back, for what is to run then (less, if negative)."""

    def rose_to(self, nbytes: int, *, measured: bool) -> None:
        """Live bytes came to this, or no higher.

        Raises:
            BudgetTooSmall: they were measured, and are more than the budget has.
        """

    def begin_op(self) -> Event | None:
        """A recorded op begins: the device's mark, if it has a clock of its own."""

    def end_op(self, began: Event | None) -> None:
        """It is over."""


class CompiledCode:
    """Runs the compiled modules of a session's models."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        ledger: Ledger,
        memory: DeviceMemory,
        fast_path: FastPath,
        host: Host,
    ) -> None:
        self._modules = modules
        self._ledger = ledger
        self._memory = memory
        self._fast = fast_path
        self._host = host
        self._rises: dict[Hashable, int] = {}
        self._budget = 0
        self._watch: Watch | None = None
        self._recorder: Recorder | None = None
        self._visit: _Visit | None = None

    def __bool__(self) -> bool:
        """Whether there is any that stays compiled: what it makes has to be counted."""
        return bool(self._modules) and self._fast.counts

    @property
    def is_inside(self) -> bool:
        """Whether compiled code runs now."""
        return self._visit is not None

    @contextmanager
    def around(self, watch: Watch, recorder: Recorder | None, budget_bytes: int) -> Iterator[None]:
        """Inside is a step that `watch` watches."""
        if not self:
            with eagerly(self._modules):
                yield
            return
        self._watch, self._recorder, self._budget = watch, recorder, budget_bytes
        usual = [(module, place_of(module)) for module in self._modules]
        before = [(module, place, getattr(module, place)) for module, place in usual if place]
        for module, place, run in before:
            setattr(module, place, partial(self._run, module, run))
        try:
            yield
        finally:
            for module, place, run in before:
                setattr(module, place, run)
            self._abort()
            self._watch = self._recorder = None

    def arrived(self, nbytes: int) -> None:
        """A saved value came back."""
        visit = self._visit
        if visit is not None:
            visit.arrived_bytes += nbytes
            # What a backward pass wants back comes before anything is made of it.
            ahead = visit.need.certain_bytes if visit.is_backward else 0
            visit.highest_bytes = max(visit.highest_bytes, self._ledger.live_bytes + ahead)

    # --- forward ---

    def _run(self, module: torch.nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        watch = self._watch
        if watch is None or self._visit is not None:
            return run(*args, **kwargs)
        if _get_current_dispatch_mode() is not watch:  # who else has a mode wants to see each op
            with eagerly([module]):
                return run(*args, **kwargs)
        state = [*module.parameters(), *module.buffers()]
        inputs = [*tensors_within((args, kwargs)), *state]
        # Modules that are alike take as much: blocks of a network.
        alike = (type(module), module.training, torch.is_grad_enabled(), _shapes(inputs))
        key = ("forward", alike)
        with torch._C._DisableTorchDispatch():
            visit = self._enter(key, is_backward=False)
            opened = None if self._recorder is None else self._recorder.open_op(COMPILED, inputs, module)
        watch.__exit__(None, None, None)
        try:
            result = run(*args, **kwargs)
        except BaseException as error:
            self._abort()
            watch.__enter__()
            if not (isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error)):
                raise
            raise DeviceOutOfMemory(
                f"compiled code found no memory, and cannot be run again: {error}. Lower the batch or the budget, or "
                "compile smaller parts of the model"
            ) from error
        watch.__enter__()
        outputs = list(tensors_within(result))
        with torch._C._DisableTorchDispatch():
            rise = self._leave(visit)
            if self._recorder is not None and opened is not None:
                seconds = time.perf_counter() - visit.began
                self._recorder.close_op(opened, outputs, rise_bytes=rise, seconds=seconds)
        self._await_backward(alike, inputs, outputs)
        return result

    # --- backward ---

    def _await_backward(
        self, alike: Hashable, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Be there when the backward pass comes to what has just run."""
        ends = {tensor.grad_fn for tensor in inputs}
        for number, node in enumerate(_nodes_between(outputs, ends)):
            key = ("backward", alike, number)
            node.register_prehook(partial(self._before_node, key))
            node.register_hook(self._after_node)

    def _before_node(self, key: Hashable, gradients: tuple[Any, ...]) -> None:
        if self._watch is None or self._visit is not None:  # a graph that outlives its step, or a session's end
            return
        with torch._C._DisableTorchDispatch():
            self._enter(key, is_backward=True)

    def _after_node(self, made: tuple[Any, ...], gradients: tuple[Any, ...]) -> None:
        visit = self._visit
        if visit is None:
            return
        with torch._C._DisableTorchDispatch():
            rise = self._leave(visit)
            if self._recorder is not None:
                inputs, outputs = tensors_in(gradients, {}), outputs_of(made)
                seconds = time.perf_counter() - visit.began
                self._recorder.op(
                    None, COMPILED, gradients, {}, inputs, outputs, made, rise_bytes=rise, seconds=seconds
                )

    # --- both ---

    def _enter(self, key: Hashable, *, is_backward: bool) -> _Visit:
        """Compiled code is about to run. Where nobody has seen it before, all leaves for it that can."""
        rise = self._rises.get(key)
        if rise is None:
            need = Need(0, self._budget, measured=False)
        else:
            need = Need(rise, rise, measured=True, seen=True)
        self._host.prepare_for(COMPILED, need)
        self._fast.number += 1
        with ExitStack() as stack:
            is_known = rise is not None
            stack.enter_context(self._memory.gate(need.likely_bytes) if is_known else self._memory.openly(0))
            stack.enter_context(self._fast.paused())
            self._host.hold_back(need.certain_bytes)
            stack.callback(self._host.hold_back, -need.certain_bytes)
            mark = None if self._recorder is None else self._host.begin_op()
            before = self._ledger.live_bytes
            highest = before + need.certain_bytes
            visit = _Visit(key, is_backward, need, before, time.perf_counter(), mark, ExitStack(), highest)
            if not is_known and self._fast.most_bytes is None:
                stack.enter_context(probing(self._ledger.device_type, visit.rise))
            visit.stack = stack.pop_all()
        self._visit = visit
        return visit

    def _leave(self, visit: _Visit) -> int:
        """It has run; how far it lifted live bytes, beyond what came back meanwhile."""
        self._visit = None
        visit.stack.close()
        if self._recorder is not None:
            self._host.end_op(visit.mark)
        whole = visit.rise[0] if visit.rise else None
        if self._fast.most_bytes is not None:
            whole = self._fast.most_bytes - visit.before_bytes
        is_new = visit.key not in self._rises
        if whole is not None:
            visit.highest_bytes = visit.before_bytes + whole
            self._rises[visit.key] = max(self._rises.get(visit.key, 0), whole - visit.arrived_bytes)
        self._memory.count(self._budget)
        highest = max(visit.highest_bytes, self._ledger.live_bytes)
        self._host.rose_to(highest, measured=is_new and whole is not None)
        return self._rises.get(visit.key, 0)

    def _abort(self) -> None:
        visit, self._visit = self._visit, None
        if visit is not None:
            visit.stack.close()


def _shapes(tensors: Iterable[torch.Tensor]) -> Hashable:
    return tuple((tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad) for tensor in tensors)


def _nodes_between(outputs: Sequence[torch.Tensor], ends: set[Any]) -> list[Any]:
    """The nodes of compiled code that the backward pass meets between results and what they were made of."""
    found: list[Any] = []
    seen = set(ends)
    ahead = [tensor.grad_fn for tensor in outputs]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _NODE in node.name():
            found.append(node)
        ahead += [following for following, _ in node.next_functions]
    return found
