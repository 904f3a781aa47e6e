"""Optimizers make their state where they first step, which may be long after the first step of training."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class FirstUpdates:
    """Looks out for optimizers that are about to update parameters for the first time, the program's own too.

    PyTorch's hooks for all optimizers tell, so that nothing of ours is on the user's.
    """

    def __init__(self, begins: Callable[[Optimizer], None]) -> None:
        """`begins` is a method, held weakly: called with the optimizer on the thread on which its update begins."""
        self._begins = weakref.WeakMethod(begins)
        self._updated: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        self._beginning: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        self._computing: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # the gradients, by a closure, perhaps
        self._hooks = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )

    @property
    def beginning(self) -> Sequence[Optimizer]:
        """Those whose first update has begun since `forget` and has not ended, but those that call a closure."""
        return [optimizer for optimizer in self._beginning if optimizer not in self._computing]

    def forget(self) -> None:
        """Updates that have not ended by now have failed, or are other threads'."""
        self._beginning.clear()

    def close(self) -> None:
        """Look out no more."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_closure = len(args) > 1 or bool(kwargs)  # which will make gradients
        new = _updated_by(optimizer, has_closure=has_closure) - self._updated.get(optimizer, set())
        begins = self._begins()
        if new and begins is not None:
            self._beginning[optimizer] = new
            (self._computing.add if has_closure else self._computing.discard)(optimizer)
            begins(optimizer)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An update that failed, for want of memory perhaps, will be the first once more."""
        new = self._beginning.pop(optimizer, None)
        if new is not None:
            self._updated.setdefault(optimizer, set()).update(new)


def _updated_by(optimizer: Optimizer, *, has_closure: bool) -> set[int]:
    """The parameters that an optimizer updates if it steps now."""
    every = (item for group in optimizer.param_groups for item in group["params"])
    return {id(item) for item in every if item.grad is not None or (has_closure and item.requires_grad)}
