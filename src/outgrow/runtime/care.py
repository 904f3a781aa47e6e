"""How many bytes an op will add before it runs: what the runtime must know to keep every op inside the budget.

What an op was seen to need is remembered by its signature. For one that was never seen it is guessed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from outgrow.runtime.guesses import guess
from outgrow.runtime.need import NOTHING, Need
from outgrow.tracing.ir import Trace
from outgrow.tracing.ops import OpFacts, tensors_in

# What cuBLAS and cuDNN take at first sight, beside what grows with the operands; their ops are these.
_LIBRARY_BYTES = 128 << 20
_OF_LIBRARIES = ("aten.convolution", "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten._cudnn", "aten.cudnn")
# A step counter among an op's arguments makes a new signature in every step.
_MOST_SIGNATURES = 1 << 16
_PLACE_OF_WEIGHT = {"aten.convolution.default": 1, "aten.convolution_backward.default": 2}
# Guesses of fewer bytes than this teach nothing, and no lesson goes further.
_LITTLE = 4096
_MOST_TAUGHT = 32.0
_VARIES = -1


class Precedent:
    """A step on a larger batch: what its ops took bounds what ours take, where nobody measured that."""

    def __init__(self, trace: Trace) -> None:
        self._ops = trace.ops
        self._values = trace.values

    def bound(self, need: Need, number: int, name: str, given_bytes: int) -> Need:
        """What op `number` of the step needs, which reads so many bytes, if it is the same op of the larger step."""
        if number >= len(self._ops) or self._ops[number].name != name:
            return need
        op, values = self._ops[number], self._values
        if given_bytes > sum(values[index].nbytes for index in op.inputs):
            return need
        # Some results have other sizes without data (what oneDNN keeps of a layer of an LSTM).
        made = sum(values[index].nbytes for index in op.outputs if values[index].version == 0)
        most = max(made, need.certain_bytes) + op.workspace_bytes
        return replace(need, likely_bytes=min(need.likely_bytes, most))


class OpNeeds:
    """What ops need, by signature."""

    def __init__(
        self, device_type: str = "cpu", *, searched_convolutions: bool = False, open_convolutions: bool = False
    ) -> None:
        """`searched_convolutions` try all algorithms at first, so that only what they take later counts.

        `open_convolutions` need their outputs alone, however much they were seen to take.
        """
        self._device_type = device_type
        self._searched_convolutions = searched_convolutions
        self._open_convolutions = open_convolutions
        self._searched: set[Hashable] = set()
        self._needs: dict[Hashable, Need] = {}
        self._rises: dict[Hashable, int] = {}  # of calls whose results nobody foresees, as long as they are the same
        self._taught: dict[Hashable, float] = {}  # how many times its guess an op took, by family

    def before(
        self, func: Any, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Hashable, Need]:
        """The signature of a call and what it will need."""
        # A collective takes no memory of PyTorch's allocators on a CPU, and no two calls have the same process group.
        if facts.is_view or facts.is_collective:
            return None, NOTHING
        if self._device_type != "cpu" and not _is_on(self._device_type, args, kwargs):
            return None, NOTHING
        sizes = tuple(args) if facts.sized_by_floats else ()
        signature = (*signature_of(facts.name, args, kwargs), sizes)
        need = self._needs.get(signature)
        if need is None:
            if self._device_type == "cpu" and not _is_on("cpu", args, kwargs):  # on the meta device, say
                return None, NOTHING
            if len(self._needs) >= _MOST_SIGNATURES:
                self._needs.clear()
                self._searched.clear()
                self._rises.clear()
            extra = _LIBRARY_BYTES if self._device_type == "cuda" and facts.name.startswith(_OF_LIBRARIES) else 0
            need = guess(func, facts, args, kwargs, extra)
            if self._device_type == "cpu" and not need.depends_on_data:
                factor = self._taught.get(_family(signature), 1)
                need = replace(need, likely_bytes=int(factor * need.likely_bytes))
            if self._open_convolutions and "convolution" in facts.name:
                need = Need(need.certain_bytes, need.certain_bytes, measured=False, is_open=True)
            self._needs[signature] = need
        return signature, need

    def known(self, signature: Hashable) -> Need | None:
        """What a call of this signature will need, if there was one before; None for a signature of None."""
        return self._needs.get(signature)

    def ran(self, signature: Hashable) -> None:
        """A call has run, and nobody could tell what it needed."""
        known = self._needs.get(signature)
        if known is not None and not known.seen:
            self._needs[signature] = replace(known, seen=True)

    def measured(self, signature: Hashable, rise_bytes: int) -> bool:
        """Remember what a call was seen to need; whether that will do for others like it, from the next one on."""
        known = self._needs.get(signature)
        if known is not None and known.is_open:
            return False
        if known is not None and known.depends_on_data:
            most = max(known.floor_bytes, rise_bytes, known.likely_bytes if known.seen else 0)
            certain = rise_bytes if known.is_steady and self._took_again(signature, rise_bytes) else 0
            self._needs[signature] = replace(known, certain_bytes=certain, likely_bytes=most, seen=True)
            return False
        if known is not None and not known.seen and rise_bytes > known.likely_bytes > _LITTLE:
            family = _family(signature)
            factor = self._taught.get(family, 1) * rise_bytes / known.likely_bytes
            self._taught[family] = min(factor, _MOST_TAUGHT)
        if self._searched_convolutions and signature not in self._searched and _is_convolution(signature):
            self._searched.add(signature)
        elif signature is not None:
            made = () if known is None else known.made
            self._needs[signature] = Need(rise_bytes, rise_bytes, measured=True, seen=True, made=made)
        return True

    def _took_again(self, signature: Hashable, rise_bytes: int) -> bool:
        """Note what a call took; whether there were others before, and each took as much."""
        if self._rises.setdefault(signature, rise_bytes) != rise_bytes:
            self._rises[signature] = _VARIES
        known = self._needs[signature]
        return known.seen and self._rises[signature] == rise_bytes


def _family(signature: Hashable) -> tuple[Hashable, ...]:
    """What calls have in common whose guesses are too low by about as much: operator, and a convolution's window."""
    assert isinstance(signature, tuple)
    name, given = signature[:2]
    place = _PLACE_OF_WEIGHT.get(name)
    if place is None:
        return (name,)
    _, weight_shape, *_ = given[place]
    return name, weight_shape[1] == 1, *weight_shape[2:]


def _is_convolution(signature: Hashable) -> bool:
    return isinstance(signature, tuple) and "convolution" in signature[0]


def _is_on(device_type: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may take memory of a kind of device: a step on a GPU runs ops on the CPU too."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == device_type
    tensors = list(tensors_in(args, kwargs))
    if not tensors:  # a factory that nobody tells where
        return device_type == "cpu"
    return any(tensor.device.type == device_type for tensor in tensors)


def signature_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """What tells two calls apart as far as memory goes."""
    return name, _signature(args), _signature(tuple(kwargs.items())) if kwargs else ()


def _signature(items: Sequence[Any]) -> Hashable:
    return tuple([_item_signature(item) for item in items])


def _item_signature(item: Any) -> Hashable:
    if isinstance(item, torch.Tensor):
        if item.is_nested:
            parts = id(item) if item.layout is torch.jagged else str(item._nested_tensor_size().tolist())
            return (item.dtype, parts)
        stride = item.stride() if item.layout is torch.strided else item.layout
        return (item.dtype, item.shape, stride, item.is_cpu)
    if item is None or isinstance(item, bool | int):
        return item
    if isinstance(item, list | tuple):
        return _signature(item)
    if isinstance(item, torch.UntypedStorage):
        return ("storage", item.nbytes())
    if isinstance(item, str | torch.dtype | torch.device | torch.layout | torch.memory_format):
        return item
    # A number changes no sizes, nor does a generator, and both may be others in every step.
    if isinstance(item, float | complex | torch.Generator):
        return type(item).__name__
    return (type(item).__name__, id(item))  # whatever holds memory is not held on to
