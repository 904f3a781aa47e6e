"""What an ATen operator's schema says of it: does it make memory, does it write to what it was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

# The library of the ops by which processes exchange tensors.
COLLECTIVES = "c10d"
DETACH = torch.ops.aten.detach.default

# Ops whose results hold whatever lay in memory.
_BLANK = ("aten.empty", "aten.new_empty", "aten._empty")
_SIZED_BY_FLOATS = ("aten.arange", "aten.range")
# They give what says how a nested tensor's parts lie, which is there already. PyTorch asks where no error may come.
_NESTED_SIZES = frozenset({"_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets"})
# Ops over lists, which the update makes.
_OVER_LISTS = ("aten._foreach_", "aten._fused_")
# Ops that replace what they write to and do not look at what was there.
_OVERWRITING = frozenset(
    {
        "bernoulli_",
        "cauchy_",
        "copy_",
        "exponential_",
        "fill_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
        "zero_",
    }
)
# These draw random numbers and do not carry the tag.
_UNTAGGED_DICE = frozenset({"random", "random_"})
# The argument by which a GPU's recurrent layers are given a generator of their own.
_DICE = "dropout_state"
# What batch norm updates; what tells whether it does; and by name which of its operators never do, or always.
_STATISTICS = ("running_mean", "running_var")
_TRAINS = ("training", "train")
_LEAVES_STATISTICS = ("backward", "functional")
_UPDATES_STATISTICS = ("aten._batch_norm_with_update", "aten.batch_norm_update_stats", "aten.batch_norm_gather_stats")
# What sparse tensors are made of.
_PARTS: Mapping[torch.layout, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    torch.sparse_coo: (torch.Tensor._indices, torch.Tensor._values),
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values),
}


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Facts of one operator overload.

    `is_view`: every result is a window on an argument and nothing is written.
    `makes_outputs`: some result is fresh memory, as far as the schema tells.
    `is_bookkeeping`: it computes nothing (profiler marks, questions about a tensor) and is no part of a step.
    `writes`: positions (int) or names (str) of the arguments that it writes to.
    `is_repeatable`: run again on the same inputs it gives the same outputs, as far as its schema tells (where it
    draws random numbers: on a generator in the same state). Only PyTorch's own ops are trusted that far.
    `draws`: it draws from a random generator.
    `is_blank`: its result holds whatever lay in memory.
    `overwrites`: it does not read what it writes to.
    `reads_shape`: of its first argument it reads no elements: `zeros_like`, `x.new_empty`.
    `is_collective`: it hands its arguments, and nothing else, to threads that exchange them with other processes and
    may write to them for as long as nobody has waited for that. Its schema does not say that it writes.
    `over_lists`: it takes lists of tensors in turn: where it fails, half of them may be done.
    `sized_by_floats`: numbers that need not be whole say how much it makes.
    `sized_by_data`: what its tensors hold may say so: `nonzero`, an index that is a mask.
    `statistics`: positions of the running statistics that batch norm updates, where the argument at `trains_at` says
    that it trains (-1: always). It does not read them then; and most schemas do not say that it writes.
    `takes_storage`: it makes a tensor of memory that no operator made: that of a file, or of another process.
    `dice_at`: the position of a tensor that holds the state of a generator, from which it draws and which it puts on;
    its schema does not say that it writes.
    """

    name: str
    is_view: bool
    makes_outputs: bool
    is_bookkeeping: bool
    writes: tuple[int | str, ...]
    is_repeatable: bool
    draws: bool
    is_blank: bool
    overwrites: bool
    reads_shape: bool
    is_collective: bool
    over_lists: bool
    sized_by_floats: bool
    sized_by_data: bool
    statistics: tuple[int, ...] = ()
    trains_at: int = -1
    takes_storage: bool = False
    dice_at: int = -1


@cache
def facts_of(func: Any) -> OpFacts:
    """Read an operator's facts off its schema."""
    schema = func._schema
    writes: list[int | str] = []
    is_collective = func.namespace == COLLECTIVES
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if (alias is not None and alias.is_write) or (is_collective and "Tensor" in str(argument.type)):
            writes.append(argument.name if argument.kwarg_only else position)
    returns = schema.returns
    name, names = str(func), [argument.name for argument in schema.arguments]
    is_aten = func.namespace == "aten"
    base = name.split(".")[1] if is_aten else ""
    is_blank = name.startswith(_BLANK)
    writes_to_lists = any(
        argument.alias_info is not None and argument.alias_info.is_write and "List" in str(argument.type)
        for argument in schema.arguments
    )
    over_lists = writes_to_lists or name.startswith(_OVER_LISTS)
    takes_one_tensor = sum("Tensor" in str(argument.type) for argument in schema.arguments) == 1
    is_view = bool(returns) and not writes and all(item.alias_info is not None for item in returns)
    return OpFacts(
        name=name,
        is_view=is_view,
        makes_outputs=any(item.alias_info is None and "Tensor" in str(item.type) for item in returns),
        is_bookkeeping=func.namespace in ("prim", "profiler") or base in _NESTED_SIZES,
        writes=tuple(writes),
        is_repeatable=is_aten and not is_blank and not over_lists,
        draws=torch.Tag.nondeterministic_seeded in func.tags or base in _UNTAGGED_DICE,
        is_blank=is_blank,
        overwrites=base in _OVERWRITING,
        reads_shape=takes_one_tensor and (base.endswith("_like") or base.startswith("new_")),
        is_collective=is_collective,
        over_lists=over_lists,
        sized_by_floats=name.startswith(_SIZED_BY_FLOATS),
        sized_by_data=torch.Tag.dynamic_output_shape in func.tags,
        takes_storage=any(str(argument.type) == "Storage" for argument in schema.arguments),
        dice_at=names.index(_DICE) if _DICE in names else -1,
        **_statistics_of(name, schema) if is_aten and "batch_norm" in base else {},
    )


def _statistics_of(name: str, schema: Any) -> dict[str, Any]:
    """Which running statistics an operator of batch norm updates, and what says whether it does."""
    names = [argument.name for argument in schema.arguments]
    trains_at = next((names.index(flag) for flag in _TRAINS if flag in names), -1)
    if any(part in name for part in _LEAVES_STATISTICS) or (
        trains_at < 0 and not name.startswith(_UPDATES_STATISTICS)
    ):
        return {}
    return {"statistics": tuple(names.index(each) for each in _STATISTICS if each in names), "trains_at": trains_at}


def is_of_step(func: Any, facts: OpFacts) -> bool:
    """Whether a call is an op of a step.

    `detach` is none: autograd detaches what it takes up again where somebody sees that, and not where nobody does.
    Only where a gradient becomes a leaf's by it, it is one.
    """
    return accumulates_gradient() if func is DETACH else not facts.is_bookkeeping


def accumulates_gradient() -> bool:
    """Whether the backward pass is at a node that adds to the gradient of a leaf."""
    node = torch._C._current_autograd_node()
    return node is not None and "AccumulateGrad" in node.name()


class OpTable:
    """Facts by operator, read once each."""

    def __init__(self) -> None:
        # By identity, with a hold on the operator so that it stays its own: its hash is a function in Python.
        self._facts: dict[int, tuple[OpFacts, Any]] = {}

    def __getitem__(self, func: Any) -> OpFacts:
        known = self._facts.get(id(func))
        if known is None:
            known = self._facts[id(func)] = (facts_of(func), func)
        return known[0]


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among an op's arguments, lists opened, and lists of lists, in order."""
    found: list[torch.Tensor] = []
    for item in args:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            found.extend(inner for inner in item if isinstance(inner, torch.Tensor))
            if item and isinstance(item[0], list):  # what collectives gather into
                found.extend(tensors_in(item, {}))
    if kwargs:
        found.extend(tensors_in(tuple(kwargs.values()), {}))
    return found


def tensors_within(item: Any) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples and dictionaries, however deep; inside `torch.vmap`, those that it batches."""
    if isinstance(item, torch.Tensor):
        while is_functorch_wrapped_tensor(item):
            item = get_unwrapped(item)
        yield item
    elif isinstance(item, list | tuple):
        for inner in item:
            yield from tensors_within(inner)
    elif isinstance(item, dict):
        for inner in item.values():
            yield from tensors_within(inner)


def written_tensors(facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call writes to, by the operator's schema."""
    for place in facts.writes:
        if isinstance(place, str):
            item = kwargs.get(place)
        else:
            item = args[place] if place < len(args) else None
        yield from tensors_within(item)


def updated_statistics(facts: OpFacts, args: Sequence[Any]) -> list[torch.Tensor]:
    """The running statistics that a call of batch norm updates, whether or not its schema says that it writes."""
    if not facts.statistics or (facts.trains_at >= 0 and not args[facts.trains_at]):
        return []
    return [args[place] for place in facts.statistics if isinstance(args[place], torch.Tensor)]


def wraps(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass that runs ops itself, with other tensors in place of memory."""
    kind = type(tensor)
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl and not issubclass(kind, FakeTensor)


def is_opaque(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage is not the memory that ops read of it.

    A sparse one is made of others, a wrapper lies around others, and zeros of forward derivatives have none.
    """
    return wraps(tensor) or tensor.layout is not torch.strided or tensor.is_nested or tensor._is_zerotensor()


def is_sized_by_data(facts: OpFacts, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether what a call makes has the size that the contents of its inputs say."""
    if not facts.sized_by_data or facts.name != "aten.index.Tensor":
        return facts.sized_by_data
    return any(index.dtype in (torch.bool, torch.uint8) for index in inputs[1:])


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that a sparse one is made of, as far as its layout tells; none for others."""
    if tensor.layout is torch.strided:
        return ()
    return tuple(part(tensor) for part in _PARTS.get(tensor.layout, ()))


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; 0 for jagged ones, whose sizes are no plain numbers."""
    return 0 if tensor.layout is torch.jagged else tensor.numel() * tensor.element_size()


def outputs_of(result: Any) -> list[torch.Tensor]:
    """The tensors that a call returned."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return tensors_in(result, {})
    return []
