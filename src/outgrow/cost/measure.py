"""The speeds of the machine at hand, measured in a fraction of a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import torch

from outgrow.cost.hardware import Hardware

# What stands in where no memory is left to measure in; plans for a measured step reckon with copies alone.
_TYPICAL_FLOPS = 1e11
_TYPICAL_BANDWIDTH = 1e10
# What a current NVMe drive does, until the real one was measured by copies of a session.
_DISK_OUT_BANDWIDTH = 1.5e9
_DISK_IN_BANDWIDTH = 1.0e9
_DISK_COST_SECONDS_PER_BYTE = 5e-11


def this_machine() -> Hardware:
    """A profile of this machine's CPU, with the disk's speeds at a typical value."""
    try:
        flops_per_second, memory_bandwidth = _speeds()
    except (RuntimeError, MemoryError):  # out of memory
        flops_per_second, memory_bandwidth = _TYPICAL_FLOPS, _TYPICAL_BANDWIDTH
    return Hardware(
        name="this machine",
        memory_bytes=psutil.virtual_memory().total,
        flops_per_second=flops_per_second,
        memory_bandwidth=memory_bandwidth,
        copy_out_bandwidth=_DISK_OUT_BANDWIDTH,
        copy_in_bandwidth=_DISK_IN_BANDWIDTH,
        copy_cost_seconds_per_byte=_DISK_COST_SECONDS_PER_BYTE,
    )


def _speeds() -> tuple[float, float]:
    """FLOP/s of a matrix product, and bytes per second of a copy in memory."""
    size = 768
    left, right = torch.ones(size, size), torch.ones(size, size)  # the user's random numbers are not ours to draw
    source, target = torch.zeros(1 << 22), torch.empty(1 << 22)
    with torch.no_grad():
        product = _best_seconds(lambda: torch.mm(left, right))
        copy = _best_seconds(lambda: target.copy_(source))
    return 2 * size**3 / product, 2 * source.numel() * source.element_size() / copy


def _best_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
