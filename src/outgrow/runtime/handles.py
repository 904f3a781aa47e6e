"""What autograd keeps in place of a saved tensor: enough to rebuild the very same window on the value's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

import torch

from outgrow.runtime.entry import Entry
from outgrow.tracing.ledger import StorageRecord
from outgrow.tracing.ops import nbytes_of


class Owner(Protocol):
    """Who made a handle and wants to know when autograd lets go of it."""

    def released(self, handle: Handle) -> None: ...


class Kept(Protocol):
    """What autograd keeps that native code made, until a `handle` has taken its place. As in staying.cpp."""

    @property
    def handle(self) -> Handle | None: ...
    @property
    def epoch(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def version(self) -> int: ...
    def give_way(self, handle: Handle) -> None: ...


class Share(Kept, Protocol):
    """A further saved tensor on a value that the pool has.

    It holds the `anchor`, the handle of another one, until it has one of its own. `geometry` is dtype, offset, shape
    and strides of its window.
    """

    @property
    def anchor(self) -> Handle | None: ...
    @property
    def geometry(self) -> tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]: ...
    def ghost(self, nothing: torch.Tensor) -> torch.Tensor: ...


class Handle:
    """One saved tensor.

    Either `entry` is its value in the pool, and the window on it is rebuilt at unpack; or `tensor` is handed back as
    it is: a parameter itself (whose memory a program may exchange meanwhile, by `p.data = ...`), or an alias (layouts
    that the pool does not manage), with its storage's `record`.

    `ghost` is a tensor without memory that shares the version counter of the saved one: autograd does not compare
    versions when saved-tensor hooks are set, so that we must.
    """

    __slots__ = (
        "__weakref__",
        "_dtype",
        "_offset",
        "_shape",
        "_stride",
        "_version",
        "entry",
        "epoch",
        "ghost",
        "nbytes",
        "number",
        "owner",
        "record",
        "recorded",
        "tensor",
    )

    def __init__(
        self,
        owner: Owner,
        tensor: torch.Tensor,
        epoch: int,
        number: int,
        *,
        alias: torch.Tensor | None = None,
        wrapper: torch.Tensor | None = None,
    ) -> None:
        """Saved tensor `number` of step `epoch`. An `alias` of it must share its version counter.

        Of one that has no memory of its own, the `wrapper` that is handed back is not to be the tensor itself either.
        Must run with dispatch modes switched off: making the alias is no op of the step.
        """
        if alias is None:  # the tensor itself may be the output of the very node that saves it: no knots
            alias = tensor.detach()
        self.owner = owner
        self.epoch = epoch
        self.number = number
        self.recorded = -1
        self.ghost = alias
        self.tensor: torch.Tensor | None = alias if wrapper is None else wrapper
        self.entry: Entry | None = None
        self.record: StorageRecord | None = None
        self.nbytes = nbytes_of(tensor)
        self._version = tensor._version
        self._shape = torch.Size() if tensor.is_nested else tensor.shape
        self._dtype = tensor.dtype

    @classmethod
    def in_place_of(cls, share: Share, owner: Owner, nothing: torch.Tensor) -> Self:
        """The handle that takes the place of a share, whose entry has one more saved tensor for it."""
        assert share.anchor is not None
        entry = share.anchor.entry
        assert entry is not None
        self = cls.__new__(cls)
        self.owner, self.epoch, self.number, self.nbytes = owner, share.epoch, share.number, share.nbytes
        self.recorded = -1
        self.tensor = self.record = self.entry = None
        self.ghost, self._version = share.ghost(nothing), share.version
        self._dtype, self._offset, shape, self._stride = share.geometry
        self._shape = torch.Size(shape)
        self.entry = entry
        entry.handles += 1
        share.give_way(self)
        return self

    def enter(self, entry: Entry, nothing: torch.Tensor) -> None:
        """Leave the memory to the pool: from here on the handle holds a window, not a tensor."""
        alias = self.ghost
        self._stride, self._offset = alias.stride(), alias.storage_offset()
        self.entry = entry
        self.tensor = None
        alias.data = nothing  # drops the memory and keeps the version counter

    def keep(self, leaf: torch.Tensor, nothing: torch.Tensor) -> None:
        """Hold the tensor itself, as autograd does with what no node made: nothing holds its memory but itself."""
        self.tensor = leaf
        self.ghost.data = nothing

    def check_version(self) -> None:
        """Raise what plain PyTorch raises when a saved tensor was changed in place since it was saved."""
        if self.ghost._version != self._version:
            raise changed(self._dtype, self._shape, self._version, self.ghost._version)

    def rebuild(self, storage: torch.UntypedStorage, make: Callable[..., torch.Tensor]) -> torch.Tensor:
        """What autograd gets back: a window on the value's memory, made by `window` or like it."""
        return make(self.ghost, storage, self._dtype, self._offset, self._shape, self._stride)

    def __del__(self) -> None:
        self.owner.released(self)


def window(
    versioned: torch.Tensor,
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: torch.Size,
    stride: tuple[int, ...],
) -> torch.Tensor:
    """A window on memory, with size, stride and offset as they were, that shares a tensor's version counter.

    A graph of the gradient saves it, and has to see what is changed in place later on.
    """
    plain = torch.empty(0, dtype=dtype, device=storage.device)
    plain.set_(storage, offset, shape, stride)
    if plain.is_inference():  # a backward pass that leaves no graph, whatever becomes of it
        return plain
    shared = versioned.detach()
    shared.data = plain
    return shared


def changed(dtype: torch.dtype, shape: torch.Size, version: int, now: int) -> RuntimeError:
    """The error for a saved tensor that was changed in place: it was at `version` and is at another one `now`."""
    node = node_that_unpacks()
    kind = str(dtype).removeprefix("torch.")
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation:"
        f" [{kind} {list(shape)}], needed by {node or 'the backward pass'}, is at version {now};"
        f" expected version {version} instead. Hint: enable anomaly detection to find the operation"
        " that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
    )


def node_that_unpacks() -> str:
    """The name of the autograd node that runs on this thread; empty where none does."""
    node = torch._C._current_autograd_node()
    return node.name() if node is not None else ""
