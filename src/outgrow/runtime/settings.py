"""What decides, beside its arguments, how an op calculates: a recipe runs its calls under what they first ran under.

A program may set these around a forward pass and no longer (`with torch.backends.mkldnn.flags(...)`); the backward
pass, in which recipes run, has others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Where each is read and where it is set. oneDNN's recurrent layers give one output more where gradients are on.
_PLACES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
)

Settings = tuple[Any, ...]


def settings() -> Settings:
    """What is set now."""
    return tuple([read() for read, _ in _PLACES])


@contextmanager
def under(wanted: Settings) -> Iterator[None]:
    """Inside, all is set as it was when `wanted` was read."""
    before = settings()
    _set(before, wanted)
    try:
        yield
    finally:
        _set(settings(), before)


def _set(now: Settings, wanted: Settings) -> None:
    for (_, write), old, new in zip(_PLACES, now, wanted, strict=True):
        if old != new:
            write(new)
