"""What an op will need that nobody saw yet.

Its outputs are computed without data (on the meta device), and its workspace is guessed on the high side: more than
what PyTorch and its libraries were seen to take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from outgrow.runtime.convolution_guesses import ConvolutionCall, transformed_on_gpu, workspace_on_cpu
from outgrow.runtime.need import Need
from outgrow.tracing.ops import OpFacts, nbytes_of, outputs_of, parts_of, tensors_in

_WRITES_AT_POSITIONS = ("aten.index_put", "aten._index_put_impl")


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
        return Need(made, made + _positions_bytes(facts.name, args), measured=False)
    workspace = _workspace(facts.name, read, made)
    convolution = ConvolutionCall.of(func, args)
    if convolution is not None and convolution.x.device.type == "cpu":
        workspace = workspace_on_cpu(convolution, made)
    if facts.name.startswith("aten.masked_scatter"):  # counts, in 64 bits, what the mask picks
        workspace += torch.int64.itemsize * max(tensor.numel() for tensor in tensors)
    if extra:  # a library that is refused nothing: what it takes beyond this passes the budget
        transformed = 0 if convolution is None else transformed_on_gpu(convolution)
        workspace = 2 * max(workspace, transformed) + extra
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


def _positions_bytes(name: str, args: Sequence[Any]) -> int:
    """The positions that a mask stands for, in 64 bits for each of its dimensions, where it says what to write to."""
    if not name.startswith(_WRITES_AT_POSITIONS):
        return 0
    masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return sum(torch.int64.itemsize * mask.numel() * mask.dim() for mask in masks)


def _bytes_of_parts(tensor: torch.Tensor) -> int:
    """What a tensor takes: of a sparse one the tensors that it is made of, not all of its zeros."""
    return sum(map(nbytes_of, parts_of(tensor) or (tensor,)))


def _workspace(name: str, read: int, made: int) -> int:
    """More than what the allocator was seen to give out inside such ops on a CPU, but for convolutions."""
    if "convolution" in name:
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
