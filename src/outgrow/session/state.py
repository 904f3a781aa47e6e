"""The training state of a session: its models and optimizers, and what of theirs is on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from outgrow.session.parallel import Wrappers
from outgrow.tracing.capture import storage_kinds, training_state
from outgrow.tracing.ir import Kind
from outgrow.tracing.ledger import Ledger


class TrainingState:
    """What stays from step to step, as it is at the moment: programs exchange and add some of it as they like.

    Attributes:
        models: those of the session, `optimizers` theirs, and `wrappers` the data-parallel ones among the models.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer], ledger: Ledger
    ) -> None:
        """`ledger` counts the session's live bytes."""
        self.models: Sequence[torch.nn.Module] = models
        self.optimizers: Sequence[torch.optim.Optimizer] = optimizers
        self.wrappers = Wrappers(models)
        self._ledger = ledger

    def let_go(self) -> None:
        """Training is over: who still asks the session for figures holds no model."""
        self.models, self.optimizers = (), ()
        self.wrappers = Wrappers(())

    def kinds(self) -> dict[int, Kind]:
        """What each storage of it is, by serial number in the ledger."""
        return storage_kinds(self._ledger, self.models, self.optimizers)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All of it; buffers that are shared come more than once."""
        return (tensor for tensor, _ in training_state(self.models, self.optimizers))

    def gradients(self) -> Iterator[torch.Tensor]:
        """The gradients that there are now."""
        state = training_state(self.models, self.optimizers)
        return (tensor for tensor, kind in state if kind is Kind.GRADIENT)

    def may_be_lent(self) -> bool:
        """Whether it may leave within a step: not where code of the program's has it on other threads."""
        return not self.wrappers.have_hooks()

    def parameters(self) -> dict[int, torch.nn.Parameter]:
        """The models' parameters by `id`."""
        return {id(item): item for model in self.models for item in model.parameters()}

    def hidden_bucket_bytes(self) -> int:
        """Bytes of buckets that gradients are collected in and that no gradient shows yet."""
        in_buckets = self.wrappers.parameters_with_buckets()
        gradients = (item.grad for number, item in self.parameters().items() if number in in_buckets)
        storages = [gradient.untyped_storage() for gradient in gradients if gradient is not None]
        shown: dict[int, int] = {storage._cdata: storage.nbytes() for storage in storages}
        return max(0, self.wrappers.bucket_bytes() - sum(shown.values()))

    def holders(self) -> dict[str, int]:
        """Bytes of what is on the device, by kind in words."""
        kinds, found = self.kinds(), dict[str, int]()
        records = {record.serial: record for tensor in self.tensors() if (record := self._ledger.see(tensor))}
        for serial, record in records.items():
            name = kinds[serial].value
            found[name] = found.get(name, 0) + record.nbytes
        return found

    def gradient_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        """Bytes of the gradients that an optimizer reads, with the buckets that gradients are collected in."""
        return self.wrappers.bucket_bytes() + sum(map(_bytes_of_gradient, self._with_own_gradients(optimizer)))

    def coming_gradient_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        """Bytes of those that are not there yet, nor is memory for them."""
        return sum(_bytes_of_gradient(item) for item in self._with_own_gradients(optimizer) if item.grad is None)

    def _with_own_gradients(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        """The parameters whose gradients an optimizer reads, but those that have them in buckets."""
        in_buckets = self.wrappers.parameters_with_buckets()
        ours = self.parameters()
        updated = {id(item): item for group in optimizer.param_groups for item in group["params"]}
        return (
            item
            for number, item in updated.items()
            if number in ours and item.requires_grad and number not in in_buckets
        )

    def state_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        """Bytes of what an optimizer keeps by now, on the device."""
        kept = (tensor for tensor, kind in training_state((), (optimizer,)) if kind is Kind.OPTIMIZER)
        records = (self._ledger.see(tensor) for tensor in kept)
        return sum({record.serial: record.nbytes for record in records if record is not None}.values())


def _bytes_of_gradient(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()  # of sparse ones, too
