"""Sees what Python code does to tensors past the dispatcher, while a step parks values (`parking.py`).

`numpy()`, `tolist()`, `data_ptr()`, pickling and printing read memory without an op. What such a function is given
comes back first; memory whose address gets out stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from outgrow.runtime.parking import Parking
from outgrow.tracing.functions import Onlooker, is_one_of, reads_by_ops, reads_no_data
from outgrow.tracing.ops import tensors_within
from outgrow.tracing.recorder import Recorder

# After these somebody may hold the address of a tensor's memory.
_LETS_OUT = frozenset(
    {
        "numpy",
        "__array__",
        "__array_interface__",
        "__dlpack__",
        "__cuda_array_interface__",
        "__reduce_ex__",
        "_reduce_ex_internal",
        "data_ptr",
        "mutable_data_ptr",
        "const_data_ptr",
        "untyped_storage",
        "storage",
        "_typed_storage",
        "share_memory_",
        "pin_memory",
    }
)
# Backward passes, with the name of the argument for the gradients that they start from.
_BACKWARD: Mapping[Any, str] = {
    torch.Tensor.backward: "gradient",
    torch.autograd.backward: "grad_tensors",
    torch.autograd.grad: "grad_outputs",
}
_INHERITED: Any = torch.Tensor.__torch_function__  # as classes have it that say nothing of functions
_TAKES_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


class Access(Onlooker):
    """Shows the parking each call of PyTorch's Python functions before it runs; and the recorder, if there is one."""

    def __init__(self, parking: Parking, recorder: Recorder | None = None) -> None:
        super().__init__()
        self._parking = parking
        self._recorder = recorder
        # Of each function that runs, the backward pass that it was called in; -1 for none.
        self._passes: list[int] = []
        parking.is_watched = self._is_on

    def _is_on(self) -> bool:
        """Whether calls are seen here: in a backward pass only if it took the mode along.

        While a function that was seen runs the mode is off.
        """
        task = torch._C._current_graph_task_id()
        if task == -1 or (self._passes and self._passes[-1] == task):
            return True
        return any(mode is self for mode in _get_current_function_mode_stack())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if reads_no_data(func):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        parking, recorder = self._parking, self._recorder
        if is_one_of(func, _BACKWARD):
            self._show(name, args, kwargs)
            return self._run_backward(func, args, dict(kwargs))
        # First of all: nothing that the function is given leaves to make room for the rest of it.
        parking.enter(func, args, kwargs)
        self._passes.append(torch._C._current_graph_task_id())
        is_told = False
        try:
            if recorder is not None:
                with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                    recorder.call(args, kwargs, reads_by_ops=reads_by_ops(func))
                is_told = True
            self._show(name, args, kwargs)
            # Torch's own code in Python calls functions that would be seen were the mode not off meanwhile.
            takes_functions = isinstance(func, FunctionType) and name not in _TAKES_HOOKS
            if takes_functions and any(isinstance(item, FunctionType) for item in (*args, *kwargs.values())):
                parking.give_up()  # somebody else's code runs in there
            return func(*args, **kwargs)
        finally:
            if recorder is not None and is_told:
                recorder.returned()
            self._passes.pop()
            parking.leave()

    def _show(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have back what a function is given, for good if it lets addresses out."""
        parking = self._parking
        lets_out = name in _LETS_OUT
        if lets_out or parking.parked.busy:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                found = list(tensors_within((args, kwargs)))
                if lets_out:
                    parking.expose(found)
                else:
                    parking.parked.touch(found)

    def _run_backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a backward pass with the mode on: hooks and functions of the user's run in there.

        PyTorch takes the mode off while it handles a function, and asks whether one is on before it looks at the
        gradients: the mode goes on again when it does that.
        """
        name = _BACKWARD[func]
        self._parking.lending.on = True
        roots = args[0] if args and isinstance(args[0], tuple | list) else args[:1]
        if name not in kwargs or not all(map(_is_plain, roots)):
            self._parking.give_up()
            try:
                return func(*args, **kwargs)
            finally:
                self._return_state()
        given = kwargs.pop(name)
        if given is None:
            given = (None,) * len(roots)
        elif isinstance(given, torch.Tensor):
            given = (given,)
        gradients = _Then(given, self.__enter__)
        if func is torch.Tensor.backward:
            func, name = torch.autograd.backward, "grad_tensors"
        try:
            return func(*args, **kwargs, **{name: gradients})
        finally:
            if gradients.was_read:
                self.__exit__(None, None, None)
            self._return_state()

    def _return_state(self) -> None:
        """Code that follows on a backward pass may read gradients and parameters unseen."""
        if torch._C._current_graph_task_id() != -1:  # a pass inside a pass
            return
        self._parking.lending.on = False
        if self._parking.parked.busy:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                self._parking.return_state()


def _is_plain(root: Any) -> bool:
    """Whether nobody's own code is asked what a backward pass from here is: the root's class says nothing of it."""
    kind = type(root)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return True
    if not issubclass(kind, torch.Tensor) or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    return getattr(kind.__torch_function__, "__func__", None) is _INHERITED.__func__


class _Then:
    """Some gradients, and what is to be done when they are read."""

    def __init__(self, items: Any, act: Callable[[], object]) -> None:
        self._items = items
        self._act = act
        self.was_read = False

    def __iter__(self) -> Iterator[Any]:
        items = list(self._items)
        if not self.was_read:
            self.was_read = True
            self._act()
        return iter(items)
