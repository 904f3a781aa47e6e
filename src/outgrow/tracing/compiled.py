"""Modules that `torch.compile` compiled: which they are, and what a call of one is in a trace."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from outgrow.tracing.ir import COMPILED_OP
from outgrow.tracing.ops import OpFacts

# The call of a compiled module, as an op of the step: nothing can be made anew by it.
COMPILED = OpFacts(
    name=COMPILED_OP,
    is_view=False,
    makes_outputs=True,
    is_bookkeeping=False,
    writes=(),
    is_repeatable=False,
    draws=False,
    is_blank=False,
    overwrites=False,
    reads_shape=False,
    is_collective=False,
    over_lists=False,
    sized_by_floats=False,
    sized_by_data=False,
)


def compiled_modules(models: Iterable[torch.nn.Module]) -> tuple[torch.nn.Module, ...]:
    """The outermost modules of models that were compiled, by `module.compile()` or as `torch.compile(module)`."""
    found: dict[int, torch.nn.Module] = {}
    inside: set[int] = set()
    for model in models:
        for module in model.modules():  # those around others come first
            if id(module) not in inside and place_of(module):
                found[id(module)] = module
                inside.update(id(item) for item in module.modules() if item is not module)
    return tuple(found.values())


def eagerly(models: Sequence[torch.nn.Module]) -> AbstractContextManager[object]:
    """Inside, compiled modules run op by op.

    A compiler that meets a dispatch mode never again looks at the functions that it met it in.
    """
    return torch.compiler.set_stance("force_eager") if compiled_modules(models) else nullcontext()


def place_of(module: torch.nn.Module) -> str:
    """The attribute of a compiled module that holds what was compiled; "" for one that was not."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "_compiled_call_impl"
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # which takes a second to import
    return "forward" if compiler is not None and isinstance(module, compiler.OptimizedModule) else ""
