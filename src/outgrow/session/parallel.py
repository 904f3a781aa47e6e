"""What a session has to know of models that train in several processes at once.

`DistributedDataParallel` copies each gradient to a bucket, lets threads of its own exchange the buckets while the
backward pass goes on, and copies what comes back to the gradients. It does so in C++, which shows its buckets to the
dispatcher only when it writes to them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from outgrow.errors import UnsupportedModel

_USE_INSTEAD = (
    "Wrap the model in torch.nn.parallel.DistributedDataParallel, and give each process's session a budget: what does"
    " not fit leaves for the disk instead of for other processes"
)


class Wrappers:
    """The `DistributedDataParallel` wrappers among a session's models."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        found = {
            id(module): module
            for model in models
            for module in model.modules()
            if isinstance(module, DistributedDataParallel)
        }
        self._wrappers = tuple(found.values())

    def syncs(self) -> tuple[bool, ...]:
        """For each wrapper whether backward passes exchange gradients from now on: not inside `no_sync()`."""
        return tuple(wrapper.require_backward_grad_sync for wrapper in self._wrappers)

    def have_hooks(self) -> bool:
        """Whether code of the program's own exchanges gradients, or updates parameters as it does."""
        return any(getattr(wrapper, "_comm_hooks", None) for wrapper in self._wrappers)

    def layouts(self) -> tuple[bool, ...]:
        """For each wrapper whether its buckets are laid out for good, in the order in which gradients come.

        They are laid out anew once, when the first exchange is over and the next forward pass begins.
        """
        return tuple(bool(getattr(wrapper, "_has_rebuilt_buckets", True)) for wrapper in self._wrappers)

    def bucket_bytes(self) -> int:
        """Bytes of all buckets: as many as the gradients have."""
        return sum(item.numel() * item.element_size() for item in self._reduced())

    def parameters_with_buckets(self) -> set[int]:
        """The parameters whose gradients are windows on buckets and take no memory of their own, by `id`."""
        return {
            id(item) for wrapper in self._wrappers if wrapper.gradient_as_bucket_view for item in _reduced_by(wrapper)
        }

    def _reduced(self) -> Iterator[nn.Parameter]:
        for wrapper in self._wrappers:
            yield from _reduced_by(wrapper)


def _reduced_by(wrapper: DistributedDataParallel) -> Iterator[nn.Parameter]:
    ignored = wrapper.parameters_to_ignore
    for name, parameter in wrapper.module.named_parameters():
        if parameter.requires_grad and name not in ignored:
            yield parameter


def refuse_sharded(models: Sequence[nn.Module]) -> None:
    """Refuse models whose parameters another library takes apart, moves or resizes while a step runs.

    Raises:
        UnsupportedModel: it says which, and what to use instead.
    """
    for module in (module for model in models for module in model.modules()):
        if _is_a(module, "torch.distributed.fsdp", "FSDPModule"):
            raise UnsupportedModel(
                "the model is sharded by fully_shard: it gathers parameters and frees them behind the dispatcher, so"
                f" that no budget could be held. {_USE_INSTEAD}"
            )
        if _is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            raise UnsupportedModel(
                "the model is a FullyShardedDataParallel: it gathers parameters and frees them behind the dispatcher,"
                f" so that no budget could be held. {_USE_INSTEAD}"
            )
        if isinstance(module, DistributedDataParallel) and getattr(module, "mixed_precision", None) is not None:
            raise UnsupportedModel(
                "the model is a DistributedDataParallel with mixed_precision=, which resizes parameters behind the"
                " dispatcher: use torch.autocast instead"
            )
        if any(_is_a(item, "torch.distributed.tensor", "DTensor") for item in module.parameters(recurse=False)):
            raise UnsupportedModel(
                "the model has parameters that are DTensors, parts of which other processes hold: no budget could be"
                f" held. {_USE_INSTEAD}"
            )


def _is_a(item: object, module: str, name: str) -> bool:
    """Whether something is of a class of a module that takes long to load: if nobody loaded it, it is not."""
    loaded = sys.modules.get(module)
    kind = getattr(loaded, name, None) if loaded is not None else None
    return isinstance(kind, type) and isinstance(item, kind)
