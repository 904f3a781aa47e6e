"""What Python code calls: PyTorch's functions. Each runs ops, and may read what it is given past those."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from outgrow.tracing.recorder import Recorder

_Tensor = torch.Tensor
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


class FunctionsSeen(TorchFunctionMode):
    """Shows the recorder which functions the program calls, where a step is traced on its own."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

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
