"""What decides, beside its arguments, how an op calculates: a recipe runs its calls under what they first ran under.

A program may set these around a forward pass and no longer (`with torch.backends.mkldnn.flags(...)`); the backward
pass, in which recipes run, has others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


def _precision(backend: str, kind: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Where it is read and set how much of float32 products and convolutions may be lost."""
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    return partial(read, backend, kind), partial(write, backend, kind)


def _determinism() -> tuple[bool, bool]:
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def _set_determinism(wanted: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(wanted[0], warn_only=wanted[1])


def _products() -> str | None:
    """None where the program speaks of backends one by one, which is asked for below."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_products(wanted: str | None) -> None:
    if wanted is not None:
        torch.set_float32_matmul_precision(wanted)


# Where each is read and where it is set. oneDNN's recurrent layers give one output more where gradients are on.
_PLACES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (_determinism, _set_determinism),
    (_products, _set_products),
    *(_precision(backend, kind) for backend in ("mkldnn", "cuda") for kind in ("matmul", "conv", "rnn")),
)

Settings = tuple[Any, ...]


def settings() -> Settings:
    """What is set now."""
    return tuple([read() for read, _ in _PLACES])


@contextmanager
def under(wanted: Settings) -> Iterator[None]:
    """Inside, all is set as it was when `wanted` was read."""
    before = settings()
    if before == wanted:
        yield
        return
    _set(wanted)
    try:
        yield
    finally:
        _set(before)


def _set(wanted: Settings) -> None:
    for (read, write), new in zip(_PLACES, wanted, strict=True):
        if read() != new:  # asked only now: who sets how products are made sets that of each backend
            write(new)
