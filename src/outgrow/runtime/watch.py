"""The dispatch mode of a session: it shows the runner each op before it runs."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from outgrow.tracing.ops import OpFacts, OpTable, is_of_step

_FAKE = torch._C._TorchDispatchModeKey.FAKE


class Watcher(Protocol):
    """Who is shown the ops."""

    @property
    def parks(self) -> bool:
        """Whether Python functions are watched, ours too if nobody looks away."""

    @property
    def sees_views(self) -> bool:
        """Whether every op is wanted, views too."""

    @property
    def is_inside_compiled(self) -> bool:
        """Whether what runs now is compiled code, whose ops are not the step's."""

    def pass_view(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A view will be made."""

    def run(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op, and give its result."""


class Watch(TorchDispatchMode):
    """Shows each op to whoever runs it.

    PyTorch wraps a mode so that its compiler never looks into it. That takes a microsecond for each op, and more with
    cold caches, so this one has the wrapper around `_beside_compiler` alone, for ops that compiled code calls.
    """

    def __init__(self, watcher: Watcher, table: OpTable) -> None:
        super().__init__()
        # Here, as it takes a second and an optimizer has done it already.
        from torch._dynamo.decorators import skip

        skip(Watch.__torch_dispatch__)
        self._watcher = watcher
        self._table = table

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @property
    def supports_higher_order_operators(self) -> bool:  # type: ignore[override]
        """Whether PyTorch may show us operators that are given functions: in compiled code, which is let alone."""
        return self._watcher.is_inside_compiled

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What is asked of fake tensors, which have no memory, is nothing that the step does.
        if FakeTensor in types or torch._C._get_dispatch_mode(_FAKE) is not None:
            return func(*args, **(kwargs or {}))
        show = self._beside_compiler if get_eval_frame_callback() else self._show
        return show(func, args, kwargs or {})

    @_disable_dynamo
    def _beside_compiler(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._show(func, args, kwargs)

    def _show(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._watcher.parks:
            return self._run(func, args, kwargs)
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        facts = self._table[func]
        if not is_of_step(func, facts) or self._watcher.is_inside_compiled:
            return func(*args, **kwargs)
        if facts.is_view and not self._watcher.sees_views:
            self._watcher.pass_view(args, kwargs)
            return func(*args, **kwargs)
        return self._watcher.run(func, facts, args, kwargs)
