"""What Python code calls: PyTorch's functions. Each runs ops, and may read what it is given past those."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from outgrow.tracing.recorder import Recorder

_Tensor = torch.Tensor
_OVERRIDES: Any = torch.overrides  # of which one function is exchanged
# Functions of many ops, which read what they are given by ops alone, as their code shows. Where attention has weights
# for all pairs, most of its ops do not need all of the queries, keys and values; a product goes on with a copy of
# what is in no order that it can work with.
_READ_BY_OPS = frozenset(
    {
        functional.scaled_dot_product_attention,
        functional.multi_head_attention_forward,
        functional.linear,
        torch.einsum,
        torch.matmul,
        _Tensor.matmul,
        _Tensor.__matmul__,
        _Tensor.__rmatmul__,
        _Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
    }
)
# Functions that tell what a tensor is, without its data.
_READ_NO_DATA = frozenset(
    {
        _Tensor.__len__,
        _Tensor.dim,
        _Tensor.element_size,
        _Tensor.get_device,
        _Tensor.is_complex,
        _Tensor.is_contiguous,
        _Tensor.is_floating_point,
        _Tensor.nelement,
        _Tensor.numel,
        _Tensor.size,
        _Tensor.storage_offset,
        _Tensor.stride,
        torch.is_complex,
        torch.is_floating_point,
        torch.numel,
    }
)


def is_one_of(function: Any, functions: Container[Any]) -> bool:
    """Whether a function is one of PyTorch's own that are named; others may be objects that have no hash."""
    try:
        return function in functions
    except TypeError:
        return False


def reads_by_ops(function: Any) -> bool:
    """Whether what a function is given is read by its ops alone: it need not be there all the time."""
    return is_one_of(function, _READ_BY_OPS)


def reads_no_data(function: Any) -> bool:
    """Whether a function only says what a tensor is: its shape, its flags, its aliases."""
    return getattr(function, "__name__", "") == "__get__" or is_one_of(function, _READ_NO_DATA)


class Onlooker(TorchFunctionMode):
    """A mode that changes nothing, and of which modules that have a faster way know nothing.

    `nn.MultiheadAttention` and `nn.TransformerEncoder` leave their fast path where
    `torch.overrides.has_torch_function` says that functions are watched. Padded batches come out otherwise by it, and
    not in their last bits alone.

    Attributes:
        is_overlooked: whether they know nothing of this one.
    """

    is_overlooked = True
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _on: ClassVar[int] = 0  # of all threads
    _has_torch_function: ClassVar[Callable[[Iterable[Any]], bool]]

    def __enter__(self) -> Self:
        with Onlooker._lock:
            if Onlooker._on == 0:
                Onlooker._has_torch_function = _OVERRIDES.has_torch_function
                _OVERRIDES.has_torch_function = _is_watched_by_others
            Onlooker._on += 1
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Go off, and leave others on: those that have handled the function that runs came to lie above meanwhile."""
        others = []
        while (mode := _pop_mode()) is not self:
            others.append(mode)
        for mode in reversed(others):
            _push_mode(mode)
        with Onlooker._lock:
            Onlooker._on -= 1
            if Onlooker._on == 0:
                _OVERRIDES.has_torch_function = Onlooker._has_torch_function


def _is_watched_by_others(relevant_args: Iterable[Any]) -> bool:
    """In place of `has_torch_function`, while an onlooker is on."""
    mode = _get_current_function_mode()
    if not (isinstance(mode, Onlooker) and mode.is_overlooked):
        return Onlooker._has_torch_function(relevant_args)
    _pop_mode()
    try:
        return Onlooker._has_torch_function(relevant_args)
    finally:
        _push_mode(mode)


class FunctionsSeen(Onlooker):
    """Shows the recorder which functions the program calls, where a step is traced on its own."""

    def __init__(self, recorder: Recorder, *, fake: bool) -> None:
        super().__init__()
        self._recorder = recorder
        self.is_overlooked = not fake  # the fast paths have operators that know no fake tensors

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if reads_no_data(func):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._recorder.call(args, kwargs, reads_by_ops=reads_by_ops(func))
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.returned()
