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
# What a current GPU does where there is no room to measure: half-wide matrix units, HBM, and PCIe of two generations.
_GPU_FLOPS = 5e13
_GPU_BANDWIDTH = 1.5e12
_LINK_BANDWIDTH = 2e10
_LINK_LATENCY_SECONDS = 2e-5
_LAUNCH_SECONDS = 5e-6
_MOST_MEASURED_BYTES = 16 << 20  # pinned as well, for a moment
_LEAST_MEASURED_BYTES = 4 << 20


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


def this_gpu(device: torch.device, spare_bytes: int) -> Hardware:
    """A profile of a CUDA device and its link to the host, measured in at most a quarter of `spare_bytes`."""
    room = min(_MOST_MEASURED_BYTES, spare_bytes // 8 // 4 * 4)
    flops_per_second, memory_bandwidth, out, back = _GPU_FLOPS, _GPU_BANDWIDTH, _LINK_BANDWIDTH, _LINK_BANDWIDTH
    if room >= _LEAST_MEASURED_BYTES:
        try:
            flops_per_second, memory_bandwidth, out, back = _gpu_speeds(device, room)
        except RuntimeError:  # out of memory: a typical value stands in
            torch.cuda.empty_cache()
    return Hardware(
        name=torch.cuda.get_device_name(device),
        memory_bytes=torch.cuda.mem_get_info(device)[1],
        flops_per_second=flops_per_second,
        memory_bandwidth=memory_bandwidth,
        copy_out_bandwidth=out,
        copy_in_bandwidth=back,
        copy_latency_seconds=_LINK_LATENCY_SECONDS,
        op_overhead_seconds=_LAUNCH_SECONDS,
    )


def _gpu_speeds(device: torch.device, room: int) -> tuple[float, float, float, float]:
    """FLOP/s of a matrix product, and bytes per second in memory, to the host and back; in `room` bytes twice."""
    with torch.no_grad(), torch.cuda.device(device):
        here = torch.zeros(room // 4, device=device)  # the user's random numbers are not ours to draw
        there = torch.zeros(room // 4, pin_memory=True)
        other = torch.empty_like(here)
        inside = _best_event_seconds(lambda: other.copy_(here))
        out = _best_event_seconds(lambda: there.copy_(here, non_blocking=True))
        back = _best_event_seconds(lambda: here.copy_(there, non_blocking=True))
        size = min(4096, int((room / 8) ** 0.5) // 64 * 64)
        left = here[: size * size].view(size, size)
        product = _best_event_seconds(lambda: torch.mm(left, left, out=other[: size * size].view(size, size)))
    return 2 * size**3 / product, 2 * room / inside, room / out, room / back


def _best_event_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    times: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return max(min(times), 1e-9)


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
