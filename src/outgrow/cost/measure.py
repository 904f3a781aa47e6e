"""The speeds of the machine at hand: measured in a fraction of a second, or at leisure and remembered."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from outgrow.cache import cache_folder
from outgrow.cost.estimate import op_class
from outgrow.cost.hardware import Hardware
from outgrow.errors import TraceMismatch
from outgrow.tracing.ir import Trace

# The file in the cache that has this machine's profile, and which edition it is: older ones lack something.
_PROFILE, _EDITION = "machine.json", 2
# What stands in where no memory is left to measure in; plans for a measured step reckon with copies alone.
_TYPICAL_FLOPS = 1e11
_TYPICAL_BANDWIDTH = 1e10
# What a current NVMe drive does, until the real one was measured by copies of a session.
_DISK_OUT_BANDWIDTH = 1.5e9
_DISK_IN_BANDWIDTH = 1.0e9
_DISK_COST_SECONDS_PER_BYTE = 5e-11
# What sessions were seen to take on the training's thread, on an EPYC with cold caches.
HANDLING_SECONDS = 6e-5
# What a current GPU does where there is no room to measure: half-wide matrix units, HBM, and PCIe of two generations.
_GPU_FLOPS = 5e13
_GPU_BANDWIDTH = 1.5e12
_LINK_BANDWIDTH = 2e10
_LINK_LATENCY_SECONDS = 2e-5
_LAUNCH_SECONDS = 5e-6
_MOST_MEASURED_BYTES = 16 << 20  # on a GPU pinned as well, for a moment
_LEAST_MEASURED_BYTES = 4 << 20
_PRODUCT_SIZE = 768
_DOCTORS_BYTES = 256 << 20  # a copy that takes milliseconds, so that its start counts for nothing


def this_machine(spare_bytes: int | None = None) -> Hardware:
    """A profile of this machine's CPU: what `outgrow doctor` found, else measured now with a typical disk.

    What does not fit the spare bytes, if they are given, is not measured.
    """
    known = remembered()
    if known is not None:
        return known
    spare = 2 * _MOST_MEASURED_BYTES if spare_bytes is None else spare_bytes
    flops_per_second, memory_bandwidth = _TYPICAL_FLOPS, _TYPICAL_BANDWIDTH
    with suppress(RuntimeError, MemoryError):  # out of memory
        if spare >= 3 * _PRODUCT_SIZE**2 * torch.float32.itemsize:
            flops_per_second = product_speed(torch.float32)
        if spare >= 2 * _MOST_MEASURED_BYTES:
            memory_bandwidth = copy_speed()
    return Hardware(
        name="this machine",
        memory_bytes=psutil.virtual_memory().total,
        flops_per_second=flops_per_second,
        memory_bandwidth=memory_bandwidth,
        copy_out_bandwidth=_DISK_OUT_BANDWIDTH,
        copy_in_bandwidth=_DISK_IN_BANDWIDTH,
        copy_cost_seconds_per_byte=_DISK_COST_SECONDS_PER_BYTE,
        handling_seconds=HANDLING_SECONDS,
    )


def this_gpu(device: torch.device, spare_bytes: int) -> Hardware:
    """A profile of a CUDA device and its link: what `outgrow doctor` found, else measured in the spare bytes."""
    return remembered_gpu(device) or _measured_gpu(device, min(_MOST_MEASURED_BYTES, spare_bytes // 8 // 4 * 4))


def known_gpu(device: torch.device) -> Hardware:
    """The same before a session is there, in what the device has free."""
    return this_gpu(device, torch.cuda.mem_get_info(device)[0])


def measure_gpu(device: torch.device) -> Hardware:
    """A profile measured at leisure, in large pinned copies each way: what `outgrow doctor` keeps."""
    return _measured_gpu(device, min(_DOCTORS_BYTES, torch.cuda.mem_get_info(device)[0] // 8 // 4 * 4))


def _measured_gpu(device: torch.device, room: int) -> Hardware:
    """Measured in `room` bytes, three times: twice on the device, once in pinned memory."""
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
        device_type="cuda",
    )


def _gpu_speeds(device: torch.device, room: int) -> tuple[float, float, float, float]:
    """FLOP/s of a matrix product, and bytes per second in memory, to the host and back; in `room` bytes twice."""
    with torch.no_grad(), torch.cuda.device(device):
        # The user's random numbers are not ours to draw.
        here = torch.zeros(room // 4, dtype=torch.float32, device=device)
        there = torch.zeros(room // 4, dtype=torch.float32, device="cpu", pin_memory=True)
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


def product_speed(dtype: torch.dtype, size: int = _PRODUCT_SIZE) -> float:
    """FLOP/s of a square matrix product of `size`."""
    # The program may have another default device, and random numbers are not ours to draw.
    left, right = (torch.ones(size, size, dtype=dtype, device="cpu") for _ in range(2))
    with torch.no_grad():
        return 2 * size**3 / best_seconds(lambda: torch.mm(left, right))


def copy_speed(nbytes: int = _MOST_MEASURED_BYTES) -> float:
    """Bytes per second, read plus written, of a copy of `nbytes` in memory."""
    source = torch.zeros(nbytes // 4, dtype=torch.float32, device="cpu")
    target = torch.empty_like(source)
    with torch.no_grad():
        return 2 * nbytes / best_seconds(lambda: target.copy_(source))


def op_overhead_seconds() -> float:
    """Time of an op that has next to nothing to do, in seconds."""
    few = torch.zeros(16, device="cpu")
    calls = 100

    def run() -> None:
        for _ in range(calls):
            torch.add(few, few)

    with torch.no_grad():
        return best_seconds(run) / calls


def efficiency(traces: Iterable[Trace], hardware: Hardware) -> dict[str, float]:
    """The share of the roofline that each class of op reached in measured steps, by `OpClass`."""
    allowed: dict[str, float] = {}
    taken: dict[str, float] = {}
    for trace in traces:
        for op in trace.ops:
            if op.moved_bytes or op.flops:
                kind = op_class(op).value
                roofline = hardware.roofline_seconds(op.flops, op.moved_bytes, op.dtype)
                allowed[kind] = allowed.get(kind, 0.0) + roofline
                taken[kind] = taken.get(kind, 0.0) + max(op.seconds - hardware.op_overhead_seconds, roofline / 10)
    return {kind: allowed[kind] / seconds for kind, seconds in taken.items() if seconds and allowed[kind]}


def best_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """The shortest time that `run` takes, in seconds."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def remember(hardware: Hardware) -> Path:
    """Keep a profile of this machine for later processes; the file is returned.

    Raises:
        OSError: it cannot be written.
    """
    return _write(_PROFILE, _machine(), hardware)


def remember_gpu(hardware: Hardware) -> Path:
    """Keep the profile of a GPU of this machine, by its name; the file is returned.

    Raises:
        OSError: it cannot be written.
    """
    return _write(_gpu_profile(hardware.name), _gpu_machine(), hardware)


def _write(name: str, machine: Mapping[str, Any], hardware: Hardware) -> Path:
    path = cache_folder() / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"machine": machine, "hardware": hardware.to_document()}, indent=2))
    os.replace(partial, path)  # whole or not at all
    return path


def remembered() -> Hardware | None:
    """The profile that was kept for this machine; None if there is none, or if it is another machine's."""
    return _read(_PROFILE, _machine())


def remembered_gpu(device: torch.device) -> Hardware | None:
    """The profile that was kept for this GPU; None if there is none, or if it was in another machine."""
    return _read(_gpu_profile(torch.cuda.get_device_name(device)), _gpu_machine())


def _read(name: str, machine: Mapping[str, Any]) -> Hardware | None:
    try:
        document: Mapping[str, Any] = json.loads((cache_folder() / name).read_text())
        if document["machine"] != machine:
            return None
        return Hardware.from_document(document["hardware"])
    except (OSError, ValueError, KeyError, TypeError, TraceMismatch):
        return None


def _gpu_profile(name: str) -> str:
    """The file for the profile of a GPU of this name."""
    return f"gpu-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"


def _gpu_machine() -> dict[str, Any]:
    """What the profile of a GPU holds for; the number of threads does not matter to it."""
    return {name: fact for name, fact in _machine().items() if name != "threads"} | {"cuda": torch.version.cuda}


def _machine() -> dict[str, Any]:
    """What a profile holds for: it is measured anew where any of this differs."""
    return {
        "edition": _EDITION,
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "torch": str(torch.__version__),
    }


def processor_name() -> str:
    """What the system calls this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
