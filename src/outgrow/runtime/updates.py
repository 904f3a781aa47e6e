"""Optimizers make their state where they first step, which may be long after the first step of training."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class FirstUpdates:
    """Looks out for optimizers that are about to update parameters for the first time, the program's own too.

    PyTorch's hooks for all optimizers tell, so that nothing of ours is on the user's.
    """

    def __init__(self, begins: Callable[[Optimizer, bool], None]) -> None:
        """`begins` is a method, held weakly, that is called on the thread on which such an update begins.

        It is given the optimizer, and whether that has a closure to call first.
        """
        self._begins = weakref.WeakMethod(begins)
        self._updated: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        self._beginning: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        self._hooks = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )

    def is_under_way(self, optimizer: Optimizer) -> bool:
        """Whether the first update by an optimizer has begun, and has not ended, unless by an error."""
        return optimizer in self._beginning

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
            begins(optimizer, has_closure)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An update that failed, for want of memory perhaps, will be the first once more."""
        new = self._beginning.pop(optimizer, None)
        if new is not None:
            self._updated.setdefault(optimizer, set()).update(new)


def _updated_by(optimizer: Optimizer, *, has_closure: bool) -> set[int]:
    """The parameters that an optimizer updates if it steps now."""
    every = (item for group in optimizer.param_groups for item in group["params"])
    return {id(item) for item in every if item.grad is not None or (has_closure and item.requires_grad)}
