"""What an op will need that nobody saw yet.

Its outputs are computed without data (on the meta device), and its workspace is guessed on the high side: more than
what PyTorch and its libraries were seen to take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch._prims_common import suggest_memory_format

from outgrow.runtime.convolution_guesses import ConvolutionCall, transformed_on_gpu, workspace_on_cpu
from outgrow.runtime.need import Need
from outgrow.tracing.ops import OpFacts, is_opaque, nbytes_of, outputs_of, parts_of, tensors_in

_COUNT_BYTES = torch.int64.itemsize


def guess(func: Any, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any], extra: int) -> Need:
    """What a call may need. `extra` is what its library takes at first sight, where that is refused nothing."""
    tensors = tensors_in(args, kwargs)
    results = _results(func, facts, args, kwargs)
    read = _read_bytes(facts.name, tensors, has_known_results=results is not None)
    if results is None:
        floor = read + extra
        likely = floor + _more_where_data_decides(facts.name, tensors, read)
        is_steady = func.namespace == "aten" and not (facts.sized_by_data or any(map(is_opaque, tensors)))
        return Need(0, likely, measured=False, depends_on_data=True, floor_bytes=floor, is_steady=is_steady)
    made = sum(results)
    more = _more(facts, args, tensors, made)
    if facts.writes:
        return Need(made, made + more, measured=False)
    convolution = ConvolutionCall.of(func, args)
    if convolution is not None and convolution.x.device.type == "cpu":
        workspace = workspace_on_cpu(convolution, made)
    else:
        if convolution is not None and convolution.transposed and convolution.gradient is None:
            read += made  # its result as it comes, then laid out
        workspace = _workspace(facts.name, read, made) + more
    if extra:  # a library that is refused nothing: what it takes beyond this passes the budget
        transformed = 0 if convolution is None else transformed_on_gpu(convolution)
        workspace = 2 * max(workspace, transformed) + extra
    return Need(made + _scratch_bytes(func, args), made + workspace, measured=False, made=results)


def _read_bytes(name: str, tensors: Sequence[torch.Tensor], *, has_known_results: bool) -> int:
    """What is read, each float as large as the largest kind among them."""
    if not has_known_results and any(map(parts_of, tensors)) and "to_dense" not in name:
        # Indices are sorted: both they and the values lie there in either order for a while.
        return 3 * sum(map(_bytes_of_parts, tensors))
    widest = _widest(tensors)
    return sum(nbytes_of(tensor) * (widest // tensor.itemsize if _has_a_say(tensor) else 1) for tensor in tensors)


def _widest(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the largest kind of floats among tensors; 0 if there are none."""
    return max((tensor.itemsize for tensor in tensors if _has_a_say(tensor)), default=0)


def _has_a_say(tensor: torch.Tensor) -> bool:
    """Whether it holds floats, and not one number alone: of what kind operands have to be."""
    return tensor.dtype.is_floating_point and tensor.dim() > 0


def _workspace(name: str, read: int, made: int) -> int:
    """More than what the allocator was seen to give out inside most ops."""
    if "convolution" in name:
        return read + made
    if "rnn" in name or "lstm" in name or "gru" in name:  # gates of all time steps
        return 32 * made
    return 2 * read + made  # bfloat16 operands are widened, reductions keep partial results


def _bytes_of_parts(tensor: torch.Tensor) -> int:
    """What a tensor takes: of a sparse one the tensors that it is made of, not all of its zeros."""
    return sum(map(nbytes_of, parts_of(tensor) or (tensor,)))


# --- what some take beside that, mostly on a CPU (seen in PyTorch 2.11 and 2.13) ---


def _are_on_cpu(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.device.type == "cpu" and tensor.layout is torch.strided for tensor in tensors)


def _more_where_data_decides(name: str, tensors: Sequence[torch.Tensor], read: int) -> int:
    """What they take whose results have sizes that nobody knows, beside as much as they read: `read` bytes."""
    padded = sum(map(_padded_bytes, tensors))
    if padded:  # layers of a transformer: queries, keys and values, and what is wider inside
        return (8 if "transformer" in name or "attention" in name else 3) * padded
    return 2 * read + _positions_bytes(tensors, of_all="nonzero" in name) if _are_on_cpu(tensors) else 0


def _padded_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a nested tensor if all of its parts were as large as the largest; 0 for others."""
    if not tensor.is_nested or tensor.layout is torch.jagged or tensor.numel() == 0:
        return 0
    sizes = tensor._nested_tensor_size()
    return len(sizes) * int(prod(sizes.amax(0).tolist())) * tensor.itemsize


def _more(facts: OpFacts, args: Sequence[Any], tensors: Sequence[torch.Tensor], made: int) -> int:
    """What they take beside `_workspace`, or in place of that where they write."""
    name = facts.name.removeprefix("aten.").lstrip("_").split(".")[0].removesuffix("_")
    numbers = max((tensor.numel() for tensor in tensors), default=0)
    if name.startswith("masked_scatter"):  # how many the mask has picked so far
        return _COUNT_BYTES * numbers
    if not tensors or not _are_on_cpu(tensors):
        return 0
    if name.startswith("index_put"):
        return _positions_bytes(tensors[1:])
    if name in ("sum", "prod", "cumsum", "cumprod"):  # of whole numbers: in 64 bits
        is_whole = not (tensors[0].is_floating_point() or tensors[0].is_complex())
        return _COUNT_BYTES * numbers if is_whole else 0
    if name == "kthvalue":  # positions
        return _COUNT_BYTES * numbers
    if name == "linalg_matrix_exp":  # as many powers as the numbers ask for
        return 16 * made
    if name == "trilinear" and len(args) >= 7:
        return _product_bytes(*args[:7])
    if name in ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_reduce"):
        return torch.float32.itemsize * tensors[0].numel() if tensors[0].itemsize == 2 else 0  # sums
    if name.startswith(("copy", "fused_", "amp_")):  # read all kinds of floats as they are
        return 0
    if facts.writes:
        return _converted_bytes(tensors, at_once=not facts.over_lists)
    return made if any(tensor.itemsize == 2 for tensor in tensors) or name == "affine_grid_generator" else 0


def _positions_bytes(tensors: Sequence[torch.Tensor], *, of_all: bool = False) -> int:
    """The positions that masks stand for, in 64 bits for each of their dimensions."""
    masks = [tensor for tensor in tensors if of_all or tensor.dtype in (torch.bool, torch.uint8)]
    return sum(_COUNT_BYTES * mask.numel() * mask.dim() for mask in masks)


def _converted_bytes(tensors: Sequence[torch.Tensor], *, at_once: bool) -> int:
    """Copies of operands that are smaller floats than others, as large ones; and the result, if it is one of them.

    Of lists whose tensors are not taken all `at_once`, those of the largest.
    """
    widest = _widest(tensors)

    def copied(tensor: torch.Tensor) -> int:
        return tensor.numel() if _has_a_say(tensor) and tensor.itemsize < widest else 0

    if not at_once:
        return 2 * widest * max(map(copied, tensors))
    return widest * (copied(tensors[0]) + sum(map(copied, tensors)))


def _product_bytes(
    one: torch.Tensor,
    two: torch.Tensor,
    three: torch.Tensor,
    expand_one: Sequence[int],
    expand_two: Sequence[int],
    expand_three: Sequence[int],
    sums: Sequence[int],
) -> int:
    """The products of the first two tensors of three, where nothing is summed up before the third comes."""

    def sides(tensor: torch.Tensor, expand: Sequence[int]) -> list[int]:
        shape = list(tensor.shape)
        for place in sorted(expand):
            shape.insert(place, 1)
        return shape

    pairs = zip(sides(one, expand_one), sides(two, expand_two), strict=True)
    summed = set(sums) & set(expand_three)
    return one.itemsize * prod(max(pair) for place, pair in enumerate(pairs) if place not in summed)


def _scratch_bytes(func: Any, args: Sequence[Any]) -> int:
    """What batch norm's backward pass takes beside its results.

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


# --- results ---


class _Blank(NamedTuple):
    """A tensor, as far as results have sizes for its sake."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> torch.Tensor:
        """Such a tensor, without memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _Number(NamedTuple):
    """A number: 1 and 1.0 are equal, and make results of other kinds."""

    kind: type
    value: bool | int | float | complex


def _results(func: Any, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Blocks of new memory among the outputs, in bytes; None where the shapes depend on data."""
    if facts.writes and not facts.makes_outputs:
        return ()
    if func.namespace != "aten":  # somebody's own code would run once more than in plain PyTorch
        return None
    if not facts.makes_outputs:
        return ()
    named = {name: item for name, item in kwargs.items() if name != "device"}
    if "generator" in named:  # without memory there is nothing to draw
        named["generator"] = None
    try:
        given = _described(args), tuple((name, _described(item)) for name, item in named.items())
        # What a number that is none of a tensor's kind makes of one, and what oneDNN's recurrent layers give.
        return _made(func, *given, "device" in kwargs, torch.get_default_dtype(), torch.is_grad_enabled())
    except Exception:
        # No shape function for this op, or shapes that depend on data: the guess by its inputs must do.
        return None


@lru_cache(4096)
def _made(
    func: Any,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    is_placed: bool,
    default_dtype: torch.dtype,
    has_gradients: bool,
) -> tuple[int, ...]:
    """What a call makes whose arguments are described so; each session meets the same ones.

    `is_placed` says that it is told a device. The last two are how things are set.
    """
    given, named = _undone(args), {name: _undone(item) for name, item in kwargs}
    result = func(*given, **named, **({"device": torch.device("meta")} if is_placed else {}))
    known = {tensor.untyped_storage()._cdata for tensor in tensors_in(given, named)}
    fresh = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in outputs_of(result)
        if tensor.layout is torch.strided
    }
    return tuple(size for address, size in fresh.items() if address not in known)


def _described(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return _Blank(item.shape, item.stride(), item.dtype)
    if isinstance(item, list | tuple):
        return tuple([_described(inner) for inner in item])
    if isinstance(item, bool | int | float | complex):
        return _Number(type(item), item)
    if isinstance(item, torch.UntypedStorage):  # it would be held for good
        raise NotImplementedError("memory among the arguments")
    return item


def _undone(item: Any) -> Any:
    if isinstance(item, _Blank):
        return item.made()
    if isinstance(item, _Number):
        return item.value
    return [_undone(inner) for inner in item] if isinstance(item, tuple) else item
