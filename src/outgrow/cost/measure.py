"""The speeds of the machine at hand: measured in a fraction of a second, or at leisure and remembered."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from outgrow.cache import cache_folder
from outgrow.cost.estimate import op_class
from outgrow.cost.hardware import Hardware
from outgrow.errors import TraceMismatch
from outgrow.tracing.ir import Trace

# What stands in where no memory is left to measure in; plans for a measured step reckon with copies alone.
_TYPICAL_FLOPS = 1e11
_TYPICAL_BANDWIDTH = 1e10
# What a current NVMe drive does, until the real one was measured by copies of a session.
_DISK_OUT_BANDWIDTH = 1.5e9
_DISK_IN_BANDWIDTH = 1.0e9
_DISK_COST_SECONDS_PER_BYTE = 5e-11


def this_machine() -> Hardware:
    """A profile of this machine's CPU: what `outgrow doctor` found, else measured now with a typical disk."""
    known = remembered()
    if known is not None:
        return known
    try:
        flops_per_second, memory_bandwidth = product_speed(torch.float32), copy_speed()
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


def product_speed(dtype: torch.dtype, size: int = 768) -> float:
    """FLOP/s of a square matrix product of `size`."""
    left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))  # random numbers are not ours to draw
    with torch.no_grad():
        return 2 * size**3 / best_seconds(lambda: torch.mm(left, right))


def copy_speed(nbytes: int = 16 << 20) -> float:
    """Bytes per second, read plus written, of a copy of `nbytes` in memory."""
    source, target = torch.zeros(nbytes // 4), torch.empty(nbytes // 4)
    with torch.no_grad():
        return 2 * nbytes / best_seconds(lambda: target.copy_(source))


def op_overhead_seconds() -> float:
    """Time of an op that has next to nothing to do, in seconds."""
    few = torch.zeros(16)
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
    path = _profile_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"machine": _machine(), "hardware": hardware.to_document()}, indent=2))
    os.replace(partial, path)  # whole or not at all
    return path


def remembered() -> Hardware | None:
    """The profile that was kept for this machine; None if there is none, or if it is another machine's."""
    try:
        document: Mapping[str, Any] = json.loads(_profile_path().read_text())
        if document["machine"] != _machine():
            return None
        return Hardware.from_document(document["hardware"])
    except (OSError, ValueError, KeyError, TypeError, TraceMismatch):
        return None


def _profile_path() -> Path:
    return cache_folder() / "machine.json"


def _machine() -> dict[str, Any]:
    """What a profile holds for: it is measured anew where any of this differs."""
    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "torch": str(torch.__version__),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
