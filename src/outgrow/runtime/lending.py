"""Which training state may leave the device, and when: inside a backward pass whose end will be seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from outgrow.planning.problem import STATE
from outgrow.tracing.ir import Kind
from outgrow.tracing.ledger import StorageRecord


class Lending:
    """The training state of the step that runs, as far as it may be lent.

    Attributes:
        on: a backward pass runs whose end will be seen.
    """

    def __init__(self, gradients: Callable[[], Iterable[torch.Tensor]], may_lend: Callable[[], bool]) -> None:
        """`gradients` are those that the parameters have now; `may_lend` says whether all who read state are seen."""
        self._gradients_now = gradients
        self._may_lend = may_lend
        self.begin({})

    def begin(self, kinds: Mapping[int, Kind]) -> None:
        """A step begins. `kinds` has the training state by serial number."""
        self.on = False
        self._is_seen = self._may_lend()
        self._kinds = kinds
        self._added: set[int] = set()
        self._gradients: set[int] = set()

    def add(self, serials: Iterable[int]) -> None:
        """These storages hold gradients, as it seems: they are training state from now on."""
        self._added.update(serials)

    def is_state(self, record: StorageRecord) -> bool:
        """Whether a storage holds training state, or what will be."""
        return record.serial in self._kinds or record.serial in self._added

    def may_leave(self, record: StorageRecord) -> bool:
        """Whether training state may leave: one tensor alone has it (an array would count as another)."""
        return (
            self.on
            and self._is_seen
            and torch._C._current_graph_task_id() != -1
            and (self._kinds.get(record.serial) in STATE or record.serial in self._added)
            and record.other_holders() <= 1
            and (record.serial in self._kinds or self._is_gradient(record))
        )

    def _is_gradient(self, record: StorageRecord) -> bool:
        """Whether a storage of this step is a parameter's gradient now: hooks make other tensors beside it."""
        if record.serial not in self._gradients:
            with torch._C.DisableTorchFunction():
                dense = (item for item in self._gradients_now() if item.layout is torch.strided)
                addresses = {gradient.untyped_storage()._cdata for gradient in dense}
            if record.address in addresses:
                self._gradients.add(record.serial)
        return record.serial in self._gradients
