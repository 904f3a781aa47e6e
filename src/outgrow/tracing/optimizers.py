"""What an optimizer's update takes, asked of a twin of it whose tensors have no memory.

Optimizers make their state when they first step, at the end of a step that has done all the rest by then: who says
how little memory would do should know of it before.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from outgrow.tracing.ledger import Ledger
from outgrow.tracing.ops import outputs_of

_LOG = logging.getLogger(__name__)

# Other people's code may do anything when it runs once more.
_TRUSTED = "torch.optim"
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Settings by which it runs on certain devices alone, and does the same.
_OF_DEVICES = ("fused", "capturable")


@dataclass(frozen=True)
class Update:
    """What an update comes to, in bytes.

    `state_bytes` are what the optimizer keeps from it, `beside_bytes` what it holds for itself at its worst moment
    once it has that, besides parameters and gradients.
    """

    state_bytes: int
    beside_bytes: int


def update_of(optimizer: Optimizer, *, of_all: bool) -> Update | None:
    """The update that an optimizer would make now; if it is `of_all`, of every parameter that wants gradients.

    Otherwise of those that have one. None where nobody can tell: of optimizers that are not PyTorch's own, of
    parameters on several devices, of sparse gradients, and of those that ask for more than gradients. No mode of the
    program's may be on.
    """
    if not f"{type(optimizer).__module__}.".startswith(f"{_TRUSTED}."):
        return None
    devices = {item.device for group in optimizer.param_groups for item in group["params"]}
    if len(devices) != 1:
        return None
    try:
        update = _measured(_twin_of(optimizer, of_all=of_all), on_cpu=devices == {torch.device("cpu")})
    except Exception as error:  # whatever it cannot do without memory
        _LOG.debug("what an update by %s takes is not known: %s", type(optimizer).__name__, error)
        return None
    is_fused = any(group.get("fused") for group in optimizer.param_groups)  # one op for all, that makes nothing
    return replace(update, beside_bytes=0) if is_fused else update


def _twin_of(optimizer: Optimizer, *, of_all: bool) -> Optimizer:
    """One with the same settings, over tensors without memory, that has made no update so far."""
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state = defaultdict(dict)
    twin.param_groups = [_group_of(group, of_all=of_all) for group in optimizer.param_groups]
    return twin


def _group_of(group: Mapping[str, Any], *, of_all: bool) -> dict[str, Any]:
    twin = {**group, "params": [_parameter_of(item, of_all=of_all) for item in group["params"]]}
    if group.get("foreach") is None and "foreach" in group:  # as it is chosen where the parameters are
        twin["foreach"] = not group.get("fused") and any(item.is_cuda for item in group["params"])
    # These know the devices that they run on.
    return {**twin, **{name: False for name in _OF_DEVICES if name in group}}


def _parameter_of(parameter: torch.Tensor, *, of_all: bool) -> torch.Tensor:
    gradient = parameter.grad
    if type(parameter) not in _PLAIN or (gradient is not None and gradient.layout is not torch.strided):
        raise NotImplementedError("parameters of somebody's own class, or gradients that are not dense")
    twin = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    if gradient is not None or (of_all and parameter.requires_grad):
        twin.grad = torch.empty_like(parameter if gradient is None else gradient, device="meta")
    return twin


def _measured(twin: Optimizer, *, on_cpu: bool) -> Update:
    """Of two updates, the first of which makes the state. Counters of steps are numbers on the CPU."""
    step: Callable[[Optimizer], object] = inspect.unwrap(type(twin).step)  # without the hooks of all optimizers
    with torch.no_grad():
        with _Blank():
            step(twin)
        with _Blank() as blank:
            step(twin)
    kept = {item.untyped_storage()._cdata: item for item in _tensors_of(twin.state) if item.is_meta or on_cpu}
    return Update(sum(item.nbytes for item in kept.values()), blank.most_bytes)


def _tensors_of(state: Mapping[Any, Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    return (item for items in state.values() for item in items.values() if isinstance(item, torch.Tensor))


class _Blank(TorchDispatchMode):
    """Has numbers for who asks tensors without memory for them, and measures what is made and lives at one time."""

    def __init__(self) -> None:
        super().__init__()
        self._ledger = Ledger("meta")
        self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        result = func(*args, **(kwargs or {}))
        if not func._schema.is_mutable:
            for tensor in outputs_of(result):
                self._ledger.see(tensor)
            self.most_bytes = max(self.most_bytes, self._ledger.live_bytes)
        return result
