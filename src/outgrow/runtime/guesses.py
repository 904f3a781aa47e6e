"""What an op will need that nobody saw yet.

Its outputs are computed without data (on the meta device), and its workspace is guessed on the high side: more than
what PyTorch and its libraries were seen to take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from operator import le
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from outgrow.cost.workspaces import most_bytes
from outgrow.runtime.need import Need
from outgrow.tracing.convolution import FORWARD, Convolution, convolution_shape
from outgrow.tracing.ops import OpFacts, nbytes_of, outputs_of, parts_of, tensors_in

# Twice that are kept free for what cuDNN may transform: with more it would not be the fast way.
_MOST_TRANSFORMED_BYTES = 3 << 29


def guess(func: Any, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any], extra: int) -> Need:
    """What a call may need. `extra` is what its library takes at first sight, where that is refused nothing."""
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
    workspace += _partial_sums_bytes(func, args) + _padded_weight_bytes(func, args)
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


def _padded_weight_bytes(func: Any, args: Sequence[Any]) -> int:
    """What oneDNN makes of the weight of a convolution in groups where channels come last: whole blocks of channels.

    So a depthwise one's gradient is summed up in 256 times its own bytes on CPUs with AVX-512, and in 64 times on
    others, unless its window is of 3 x 3 pixels and inside of the maps (seen in PyTorch 2.11 and 2.13).
    """
    is_backward = func is torch.ops.aten.convolution_backward.default
    if not is_backward and func is not torch.ops.aten.convolution.default:
        return 0
    x, weight = args[1:3] if is_backward else args[:2]
    groups = args[9] if is_backward else args[8]
    lies_otherwise = all(suggest_memory_format(tensor) is torch.contiguous_format for tensor in (x, weight))
    if x.device.type != "cpu" or groups == 1 or lies_otherwise:
        return 0
    channels = weight.shape[1], weight.shape[0] // groups
    window, sides = weight.shape[2:], x.shape[2:]
    fits = len(window) == 2 and max(window) <= 3 and all(map(le, window, sides))
    if channels == (1, 1) and (fits or not is_backward):
        return 0
    block = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
    padded = prod(-(-count // block) * block for count in channels)
    copies = 1 if weight.dtype is torch.float32 else 3  # one of them of float32
    return int(copies * nbytes_of(weight) * padded // prod(channels))


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
