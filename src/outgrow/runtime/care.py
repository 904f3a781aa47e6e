"""How many bytes an op will add before it runs: what the runtime must know to keep every op inside the budget.

What an op was seen to need is remembered by its signature. For one that was never seen, its outputs are computed
without data (on the meta device), and its workspace is guessed on the high side.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from outgrow.cost.workspaces import most_bytes
from outgrow.runtime.tiers.memory import Request
from outgrow.tracing.convolution import FORWARD, Convolution, convolution_shape
from outgrow.tracing.ir import Trace
from outgrow.tracing.ops import OpFacts, nbytes_of, outputs_of, parts_of, tensors_in


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that an op adds at its worst moment.

    `certain_bytes` are its outputs at least, and what is known to lie beside them; `likely_bytes` has the workspace
    too, measured or guessed. Where output sizes depend on data, `likely_bytes` is the most so far and never counts as
    measured, although such an op was `seen` to run. `is_open` is what takes a workspace only of what is free, another
    one each time. `made` are the blocks of its results, as far as they are known before it runs.
    """

    certain_bytes: int
    likely_bytes: int
    measured: bool
    depends_on_data: bool = False
    is_open: bool = False
    seen: bool = False
    made: tuple[int, ...] = ()

    def request(self, *, falls_back: bool) -> Request:
        """What the allocator will be asked for; of an op that does not fall back, for its results alone."""
        nbytes = self.likely_bytes if falls_back else self.certain_bytes
        work = nbytes - sum(self.made)
        if work < 0:  # a result took the place of an input
            return Request((), nbytes, falls_back)
        return Request(self.made, work, falls_back)


# What views and ops that write over their input add.
NOTHING = Need(0, 0, measured=True, seen=True)
# What cuBLAS and cuDNN take at first sight, beside what grows with the operands; their ops are these.
_LIBRARY_BYTES = 128 << 20
_OF_LIBRARIES = ("aten.convolution", "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten._cudnn", "aten.cudnn")
# A step counter among an op's arguments makes a new signature in every step.
_MOST_SIGNATURES = 1 << 16
# Twice that are kept free for what cuDNN may transform: with more it would not be the fast way.
_MOST_TRANSFORMED_BYTES = 3 << 29
_PLACE_OF_WEIGHT = {"aten.convolution.default": 1, "aten.convolution_backward.default": 2}
# Guesses of fewer bytes than this teach nothing, and no lesson goes further.
_LITTLE = 4096
_MOST_TAUGHT = 32.0


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
            if len(self._needs) >= _MOST_SIGNATURES:
                self._needs.clear()
                self._searched.clear()
            extra = _LIBRARY_BYTES if self._device_type == "cuda" and facts.name.startswith(_OF_LIBRARIES) else 0
            need = _guess(func, facts, args, kwargs, extra)
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
            most = max(known.likely_bytes, rise_bytes)
            self._needs[signature] = Need(0, most, measured=False, depends_on_data=True, seen=True)
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
    return any(tensor.device.type == device_type for tensor in tensors_in(args, kwargs))


def signature_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """What tells two calls apart as far as memory goes."""
    return name, _signature(args), _signature(tuple(kwargs.items())) if kwargs else ()


def _signature(items: Sequence[Any]) -> Hashable:
    return tuple([_item_signature(item) for item in items])


def _item_signature(item: Any) -> Hashable:
    if isinstance(item, torch.Tensor):
        if item.is_nested:
            return (item.dtype, id(item))
        return (item.dtype, item.shape, item.stride() if item.layout is torch.strided else item.layout)
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


def _guess(func: Any, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any], extra: int) -> Need:
    tensors = tensors_in(args, kwargs)
    results = _results(func, facts, args, kwargs)
    made = None if results is None else sum(results)
    if made is None and any(map(parts_of, tensors)) and "to_dense" not in facts.name:
        # Indices are sorted: both they and the values lie there in either order for a while.
        read = 3 * sum(map(_bytes_of_parts, tensors))
    else:
        read = sum(map(nbytes_of, tensors))
    if made is None or results is None:
        return Need(0, read + extra, measured=False, depends_on_data=True)
    if facts.writes:
        return Need(made, made, measured=False)
    if func is torch.ops.aten.convolution.default and args[6]:  # transposed: its result as it comes, then laid out
        read += made
    workspace = _guess_workspace(facts.name, read, made) + _columns_bytes(func, args, made)
    workspace += _partial_sums_bytes(func, args)
    if facts.name.startswith("aten.masked_scatter"):  # counts, in 64 bits, what the mask picks
        workspace += torch.int64.itemsize * max(tensor.numel() for tensor in tensors)
    if extra:  # a library that is refused nothing: what it takes beyond this passes the budget
        workspace = 2 * max(workspace, _transforms_bytes(func, args)) + extra
    return Need(made + _scratch_bytes(func, args), made + workspace, measured=False, made=results)


def _scratch_bytes(func: Any, args: Sequence[Any]) -> int:
    """What batch norm's backward pass takes on a CPU beside its results (seen in PyTorch 2.11 and 2.13).

    As much as the input, where both that and the gradient that it is given are contiguous, or both are channels last.
    """
    if func is not torch.ops.aten.native_batch_norm_backward.default:
        return 0
    gradient, x, mask = args[0], args[1], args[-1]
    if x.device.type != "cpu" or not mask[0]:
        return 0
    form = suggest_memory_format(x)
    is_alike = suggest_memory_format(gradient) is form
    is_laid_out = all(tensor.is_contiguous(memory_format=form) for tensor in (gradient, x))
    return nbytes_of(x) if is_alike and is_laid_out else 0


def _transforms_bytes(func: Any, args: Sequence[Any]) -> int:
    """What cuDNN keeps of transformed images and weights, where it may not multiply on tensor cores.

    Of many channels on small maps that is far more than the operands: 2.4 GB for a convolution of VGG-16 on an H200,
    whose images and weights are 60 MB.
    """
    if func is torch.ops.aten.convolution.default:
        images, weight, _, stride, _, dilation, transposed, _, groups = args
    elif func is torch.ops.aten.convolution_backward.default:
        _, images, weight, _, stride, _, dilation, transposed, _, groups, _ = args
    else:
        return 0
    if transposed or images.dtype is not torch.float32 or images.dim() != 4:
        return 0
    if torch.backends.cudnn.conv.fp32_precision == "tf32":  # type: ignore[attr-defined]
        return 0
    shape = convolution_shape(
        images.shape, weight.shape, (0, len(weight), *images.shape[2:]), stride, dilation, groups, FORWARD
    )
    return min(_MOST_TRANSFORMED_BYTES, most_bytes(Convolution(*shape)))


def _bytes_of_parts(tensor: torch.Tensor) -> int:
    """What a tensor takes: of a sparse one the tensors that it is made of, not all of its zeros."""
    return sum(map(nbytes_of, parts_of(tensor) or (tensor,)))


def _columns_bytes(func: Any, args: Sequence[Any], made: int) -> int:
    """What a convolution lays out on a CPU for which oneDNN has none of this type: all of its patches, as columns.

    PyTorch's own way (aten/src/ATen/native/ConvolutionMM2d.cpp) multiplies those. It is taken for float64, and for
    16-bit floats on CPUs without instructions for them.
    """
    if func is torch.ops.aten.convolution.default:
        maps, x, weight, transposed, groups = made, *args[:2], args[6], args[8]
    elif func is torch.ops.aten.convolution_backward.default:
        maps, x, weight, transposed, groups = nbytes_of(args[0]), *args[1:3], args[7], args[9]
    else:
        return 0
    if x.device.type != "cpu" or _has_onednn(x.dtype):
        return 0
    patches = nbytes_of(x) // max(1, x.shape[1]) if transposed else maps // max(1, weight.shape[0])
    return int(patches * weight.shape[1] * groups * prod(weight.shape[2:]))


def _partial_sums_bytes(func: Any, args: Sequence[Any]) -> int:
    """What oneDNN sums up a weight's gradient in where the window is larger than the maps, as in deep stages of
    networks on small images: its way for all cases, on CPUs without AVX-512, took four float32 sums a thread.
    """
    if func is not torch.ops.aten.convolution_backward.default:
        return 0
    x, weight = args[1], args[2]
    is_larger = any(window > side for window, side in zip(weight.shape[2:], x.shape[2:], strict=True))
    if x.device.type != "cpu" or len(x) < 2 or not is_larger:
        return 0
    return int(4 * torch.get_num_threads() * weight.numel() * torch.float32.itemsize)


def _has_onednn(dtype: torch.dtype) -> bool:
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def _guess_workspace(name: str, read: int, made: int) -> int:
    """More than what the allocator was seen to give out inside such ops on a CPU."""
    if "convolution" in name:  # oneDNN keeps copies of the operands, laid out in blocks of channels
        return read + made
    if "rnn" in name or "lstm" in name or "gru" in name:  # gates of all time steps
        return 32 * made
    return 2 * read + made  # bfloat16 operands are widened, reductions keep partial results


def _results(func: Any, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Blocks of new memory among the outputs, in bytes; None where the shapes depend on data."""
    if facts.writes and not facts.makes_outputs:
        return ()
    if func.namespace != "aten":  # somebody's own code would run once more than in plain PyTorch
        return None
    if not facts.makes_outputs:
        return ()
    try:
        meta_args = _to_meta(list(args))
        meta_kwargs = _to_meta(dict(kwargs))
        if "device" in meta_kwargs:
            meta_kwargs["device"] = torch.device("meta")
        if "generator" in meta_kwargs:
            meta_kwargs["generator"] = None
        result = func(*meta_args, **meta_kwargs)
    except Exception:
        # No shape function for this op, or shapes that depend on data: the guess by its inputs must do.
        return None
    given = {tensor.untyped_storage()._cdata for tensor in tensors_in(meta_args, meta_kwargs)}
    fresh = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in outputs_of(result)
        if tensor.layout is torch.strided
    }
    return tuple(size for address, size in fresh.items() if address not in given)


def _to_meta(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
    if isinstance(item, list | tuple):
        return [_to_meta(inner) for inner in item]
    if isinstance(item, dict):
        return {name: _to_meta(inner) for name, inner in item.items()}
    return item
