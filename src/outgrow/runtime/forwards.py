"""The function that runs a compiled module forward, as AOTAutograd made it: seen as it runs, and run again.

It takes all that it reads in one list, parameters and buffers too, and gives all that it makes, what the backward
pass wants as well. `torch/_functorch/_aot_autograd/runtime_wrappers.py` has it as an attribute of the
`autograd.Function` that it makes for each compiled graph, and asks for that attribute in each call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch

# Calls the function that it is given with these arguments.
See = Callable[[Callable[[list[Any]], Any], list[Any]], Any]


@dataclass(frozen=True, eq=False)
class Compiled:
    """What AOTAutograd made of one graph.

    Attributes:
        place: the class that has the function as its `compiled_fw`.
        takes: how many arguments the function takes.
        written: the places of those that it writes to.
    """

    place: Any
    takes: int
    written: frozenset[int]

    @classmethod
    def of(cls, node: Any) -> Self | None:
        """That of a node of the backward pass; None for one that cannot be run again, or that we do not know.

        Tensor subclasses are taken apart around the function, effects are put in order by tokens, CUDA graphs give
        the same memory in each call, and of what it is given only buffers are written to by the function alone.
        """
        place = getattr(type(node), "_forward_cls", None)
        metadata: Any = getattr(place, "metadata", None)
        facts = getattr(metadata, "input_info", None)
        if facts is None or not callable(getattr(place, "compiled_fw", None)) or _has_cuda_graphs():
            return None
        wants_more = (
            getattr(place, "maybe_subclass_metadata", None),
            getattr(metadata, "tokens", None),
            getattr(metadata, "num_graphsafe_rng_states", 0),
            getattr(metadata, "is_rng_op_functionalized", False),
        )
        if any(wants_more):
            return None
        written = frozenset(number for number, item in enumerate(facts) if item.mutates_data or item.mutates_metadata)
        if not written <= {*metadata.static_input_indices} - {*metadata.mutated_inp_runtime_indices}:
            return None
        return cls(place, len(facts), written)

    @contextmanager
    def seen_by(self, see: See) -> Iterator[None]:
        """Inside, whoever calls the function has `see` call it."""
        function = self.place.compiled_fw

        def shown(args: list[Any]) -> Any:
            return see(function, args)

        shown._boxed_call = True  # type: ignore[attr-defined]
        self.place.compiled_fw = shown
        try:
            yield
        finally:
            self.place.compiled_fw = function


@dataclass(frozen=True, eq=False)
class Forward:
    """A call of such a function, to be run again. `key` and `alike` say what such calls take."""

    function: Callable[[list[Any]], Any]
    key: Hashable
    alike: Hashable

    def __call__(self, args: Sequence[Any]) -> Any:
        return self.function(list(args))  # which it empties


def _has_cuda_graphs() -> bool:
    """Whether any were made on any device."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not torch.cuda.is_initialized():
        return False
    managers = (trees.get_manager(index, create_if_none_exists=False) for index in range(torch.cuda.device_count()))
    return any(manager is not None for manager in managers)
