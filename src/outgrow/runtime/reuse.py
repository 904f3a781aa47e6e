"""Writes the result of a backward op over the gradient that it is made from (Layrub's intra-layer reuse).

The plan says where that should be possible. Whether it is, is seen in each step, at the op itself: nobody but the
autograd engine may hold the gradient, and the backward node must be one whose formula reads it once. What "nobody
but the engine" looks like is not written down here: it is measured on a backward pass of our own, since it differs
between versions of Python and PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from outgrow.errors import OutgrowError
from outgrow.planning.plan import Plan
from outgrow.planning.reuse import IN_PLACE_FORMS, InPlaceForm
from outgrow.runtime.care import signature_of
from outgrow.runtime.faults import is_out_of_memory
from outgrow.runtime.pool import Pool
from outgrow.runtime.threads import run_on_new_thread
from outgrow.tracing.ir import Kind
from outgrow.tracing.ledger import Ledger
from outgrow.tracing.ops import tensors_in


@dataclass(frozen=True, slots=True)
class Holders:
    """How many hold a tensor, its memory and what it is a view of: Python references and uses in C++."""

    tensor_references: int
    tensor_uses: int
    storage_references: int
    storage_uses: int
    base_references: int
    base_uses: int


def holders_of(args: tuple[Any, ...]) -> Holders:
    """Who holds the first of `args`. The caller must hold it by `args` alone."""
    tensor = args[0]
    storage = tensor.untyped_storage()
    base = tensor._base
    return Holders(
        sys.getrefcount(tensor),
        tensor._use_count(),
        sys.getrefcount(storage),
        int(torch._C._storage_Use_Count(storage._cdata)),
        0 if base is None else sys.getrefcount(base),
        0 if base is None else base._use_count(),
    )


# What to run so that the backward pass calls each operator on a gradient of the engine's own: on a function of `x`.
EXAMPLES: Mapping[str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    "aten.threshold_backward.default": (torch.relu, torch.relu_, lambda x: F.threshold(x, 0.1, 0.0)),
    "aten.gelu_backward.default": (F.gelu, lambda x: F.gelu(x, approximate="tanh")),
    "aten.silu_backward.default": (F.silu,),
    "aten.sigmoid_backward.default": (torch.sigmoid, torch.sigmoid_),
    "aten.tanh_backward.default": (torch.tanh, torch.tanh_),
    "aten.hardtanh_backward.default": (F.hardtanh, F.relu6, lambda x: F.hardtanh(x, inplace=True)),
    "aten.hardsigmoid_backward.default": (F.hardsigmoid,),
    "aten.hardshrink_backward.default": (F.hardshrink,),
    "aten.softshrink_backward.default": (F.softshrink,),
    "aten.softplus_backward.default": (F.softplus,),
    "aten.leaky_relu_backward.default": (F.leaky_relu, lambda x: F.leaky_relu(x, inplace=True)),
    "aten.elu_backward.default": (F.elu, F.celu, lambda x: F.elu(x, inplace=True)),
    "aten.log_sigmoid_backward.default": (F.logsigmoid,),
    "aten.mul.Tensor": (lambda x: x * 0.7, torch.exp),
    "aten.div.Tensor": (lambda x: x / 0.7,),
    "aten.neg.default": (torch.neg,),
}


@cache
def engine_alone() -> Mapping[tuple[str, str], frozenset[Holders]]:
    """What `holders_of` gives where only the autograd engine holds a gradient, by operator and backward node.

    The gradient is one of its own, or a view. How often C++ holds an argument depends on how an operator is called.

    Raises:
        MemoryError, RuntimeError: there is no memory for a thread or its work, where this was not known before.
    """
    # On a thread of its own, which has none of the user's modes and hooks.
    return run_on_new_thread(_calibrate)


def _is_calibrated() -> bool:
    """Whether `engine_alone` is known; it is found out the first time, in a moment that is no part of a step."""
    try:
        engine_alone()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _calibrate() -> Mapping[tuple[str, str], frozenset[Holders]]:
    mode = _Calibration()
    weight = torch.ones(2, 2, device="cpu", requires_grad=True)
    rows = torch.ones(1, 2, 2, device="cpu")
    with mode:
        for name, examples in EXAMPLES.items():
            for example in examples:
                mode.name = name
                # The gradient that arrives is what a multiplication of matrices made, or a view of that.
                torch.autograd.grad((example(rows[0] @ weight) @ weight).sum(), weight)
                torch.autograd.grad(F.linear(example(F.linear(rows, weight)), weight).sum(), weight)
    return {key: frozenset(found) for key, found in mode.found.items()}


class _Calibration(TorchDispatchMode):
    """Counts who holds the gradient at each call of the operator `name` by its node."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.found: dict[tuple[str, str], set[Holders]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        node = torch._C._current_autograd_node()
        if node is not None and str(func) == self.name and _is_last_reader(node, IN_PLACE_FORMS[self.name]):
            self.found.setdefault((self.name, node.name()), set()).add(holders_of(args))
        return func(*args, **(kwargs or {}))


def alone_at(name: str) -> Container[Holders]:
    """What is to be counted where nobody but the engine holds the gradient of op `name`, and reads it no more."""
    node = torch._C._current_autograd_node()
    if node is None or not _is_last_reader(node, IN_PLACE_FORMS[name]):
        return ()
    return engine_alone().get((name, node.name()), ())


def _is_last_reader(node: torch.autograd.graph.Node, form: InPlaceForm) -> bool:
    """Whether a backward node reads its incoming gradient once, by the op of this form."""
    if node.name().rstrip("0123456789") not in form.nodes:
        return False
    edges = node.next_functions
    return not form.one_edge or (edges[0][0] is not None and all(other is None for other, _ in edges[1:]))


class Reuser:
    """The reuse half of an executor: which ops of this step write over their first argument.

    An op is trusted once it gave the very same bits both ways, on no fewer numbers; that happens where the op first
    comes up in a step of a plan, recorded or not, and there it takes the memory of the plain op.

    Attributes:
        count: how many ops of this step wrote over their input.
    """

    def __init__(self, ledger: Ledger, pool: Pool) -> None:
        self._ledger = ledger
        self._pool = pool
        self._proved: dict[Hashable, int] = {}  # on how many numbers, -1 if it gave others; by what calls are like
        self.begin(None, {})

    def begin(self, plan: Plan | None, kinds: Mapping[int, Kind]) -> None:
        """A step begins. `kinds` tells which storages are training state."""
        self.count = 0
        self._kinds = kinds
        self._ops: Mapping[int, str] = {}
        if plan is not None and plan.reuses and self._ledger.device_type == "cpu":
            ops = plan.problem.trace.ops
            if _is_calibrated():
                self._ops = {number: ops[number].name for number in plan.reuses if ops[number].name in IN_PLACE_FORMS}

    @property
    def on(self) -> bool:
        """Whether the plan has any such op."""
        return bool(self._ops)

    def expects(self, number: int) -> bool:
        """Whether op `number` of the plan adds no memory of its own."""
        return number in self._ops

    def may_write_over(self, number: int, name: str, args: tuple[Any, ...]) -> bool:
        """Whether nobody will read the first of `args` after this op.

        To be asked before anything else looks at `args`: it counts references.
        """
        if self._ops.get(number) != name:
            return False
        # A graph of the gradient (`create_graph`) saves what the op is given.
        if torch.is_grad_enabled() or type(args[0]) is not torch.Tensor:
            return False
        # Every holder that we do not know of adds to one of the numbers, and none takes away.
        if holders_of(args) not in alone_at(name):
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return False  # who holds the wrapper around a batched tensor does not count as its holder
        return self._is_all_of_its_memory(args[0])

    def _is_all_of_its_memory(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor covers a storage that neither the pool nor the training state has."""
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_neg():
            return False
        record = self._ledger.see(tensor)
        return (
            record is not None
            and record.aliases == 0
            and record.serial not in self._kinds
            and not self._pool.values_in(record)
            and tensor.storage_offset() == 0
            and tensor.numel() * tensor.element_size() == record.nbytes
        )

    def is_proved(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether such a call was seen to give the same bits in place."""
        like, size = _likeness(name, args, kwargs)
        return size <= self._proved.get(like, -1)

    def write_over(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Run an op with its first argument's memory for its result, as a new tensor.

        It must not be run again where it fails: half of its input may be gone. There is little that could fail, as
        nothing is allocated.
        """
        self.count += 1
        return _write_over(func, args, kwargs)

    def prove(
        self,
        name: str,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """The plain op gave `result`, and its first argument is free: do it again in place and compare, once."""
        like, size = _likeness(name, args, kwargs)
        known = self._proved.get(like, 0)
        if known < 0 or known >= size:
            return
        with torch._C._DisableTorchDispatch():
            # The next op may go by the layout of what it is given.
            same = isinstance(result, torch.Tensor) and _layout(result) == _layout(args[0])
            if same:
                try:
                    same = torch.equal(_bytes_of(_write_over(func, args, kwargs)), _bytes_of(result))
                except (RuntimeError, MemoryError, OutgrowError):  # it has no such form after all
                    same = False
        self._proved[like] = size if same else -1


def _likeness(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Hashable, int]:
    """What calls are like of which one proves those on fewer numbers; and on how many this one is.

    Those on tensors that are all laid out as the first are; others prove nothing but themselves.
    """
    first, tensors = args[0], tensors_in(args, kwargs)
    if any(item.shape != first.shape or item.stride() != first.stride() for item in tensors):
        return signature_of(name, args, kwargs), 1
    strides = first.stride()
    order = tuple(sorted(range(len(strides)), key=strides.__getitem__))
    given = [item.dtype if isinstance(item, torch.Tensor) else item for item in args]
    return (order, *signature_of(name, given, kwargs)), first.numel()


def _write_over(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    form = IN_PLACE_FORMS[str(func)]
    source = args[0]
    # Another tensor on the same memory: autograd sees a result like any other, with a version counter of its own.
    result = torch.empty(0, dtype=source.dtype, device=source.device)
    result.set_(source.untyped_storage(), 0, source.shape, source.stride())
    call: Callable[..., Any] = getattr(func.overloadpacket, form.overload)
    call(*args, **kwargs, **{form.target: result})
    return result


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.storage_offset())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
