"""Measures the machine at hand at leisure: what `outgrow doctor` finds and later plans reckon with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from outgrow.cost.hardware import Hardware
from outgrow.cost.measure import HANDLING_SECONDS, copy_speed, efficiency, op_overhead_seconds, product_speed
from outgrow.errors import DeviceOutOfMemory
from outgrow.networks import find
from outgrow.runtime.copies.cpu import CpuCopies
from outgrow.runtime.tiers.disk import SpillFile
from outgrow.tracing.capture import trace
from outgrow.tracing.ir import Trace
from outgrow.tuning.steps import synthetic_step

# Steps whose ops show what share of the roofline each class of op reaches: a convolutional network, and text.
_SAMPLES = (("resnet-50", 4, 128), ("gpt-4x384", 4, 256))
_PRODUCT_SIZE = 1536
_COPY_BYTES = 64 << 20
_DISK_BYTES, _DISK_PIECES = 32 << 20, 8


def measure_machine(
    spill_dir: str | Path | None, *, allow_tmpfs: bool = False, on_step: Callable[[str], None] = lambda what: None
) -> Hardware:
    """A profile of this machine with its disk; takes some ten seconds.

    `on_step` is told in words what is measured next.

    Raises:
        SpillError: the spill folder cannot be used.
        DeviceOutOfMemory: there is too little memory to measure in.
    """
    try:
        return _measured(spill_dir, allow_tmpfs=allow_tmpfs, on_step=on_step)
    except (RuntimeError, MemoryError) as error:
        raise DeviceOutOfMemory(f"too little memory to measure in, it takes some 2 GiB: {error}") from error


def _measured(spill_dir: str | Path | None, *, allow_tmpfs: bool, on_step: Callable[[str], None]) -> Hardware:
    on_step("matrix products")
    speed = product_speed(torch.float32, _PRODUCT_SIZE)
    half = product_speed(torch.bfloat16)  # where a CPU has no units for it, it takes long
    on_step("memory")
    bandwidth = copy_speed(_COPY_BYTES)
    on_step("disk")
    out, back, cost = _disk_speeds(spill_dir, allow_tmpfs=allow_tmpfs)
    hardware = Hardware(
        name="this machine",
        memory_bytes=psutil.virtual_memory().total,
        flops_per_second=speed,
        memory_bandwidth=bandwidth,
        copy_out_bandwidth=out,
        copy_in_bandwidth=back,
        op_overhead_seconds=op_overhead_seconds(),
        copy_cost_seconds_per_byte=cost,
        handling_seconds=HANDLING_SECONDS,
        flops_by_dtype={"bfloat16": half},
    )
    traces = []
    for name, batch, size in _SAMPLES:
        on_step(f"a step of {name}")
        traces.append(_real_trace(name, batch, size))
    return replace(hardware, efficiency=efficiency(traces, hardware))


def _disk_speeds(spill_dir: str | Path | None, *, allow_tmpfs: bool) -> tuple[float, float, float]:
    """Bytes per second out and in by the session's own lanes, and the seconds of a processor that a byte takes."""
    spill = SpillFile(spill_dir, allow_tmpfs=allow_tmpfs)
    copies = CpuCopies(spill)
    try:
        memory = torch.ones(_DISK_BYTES, dtype=torch.uint8, device="cpu")
        slots = [spill.reserve(_DISK_BYTES) for _ in range(_DISK_PIECES)]
        for lane in (copies.out, copies.back):
            for slot in slots:
                copy = lane.submit(slot, memory.data_ptr())
                copy.wait()
                copy.check()
        out, back = copies.out.bandwidth(), copies.back.bandwidth()
        costs = [lane.cost_per_byte() for lane in (copies.out, copies.back)]
    finally:
        copies.close()
        spill.close()
    assert out is not None, "enough was copied to tell"
    assert back is not None, "enough was copied to tell"
    return out, back, sum(cost or 0.0 for cost in costs) / len(costs)


def _real_trace(name: str, batch: int, size: int) -> Trace:
    """One step of a network, run for real; the random generator is left as it was."""
    with torch.random.fork_rng(devices=()):
        return trace(lambda: synthetic_step(find(name), batch, size, momentum=0.9), fake=False)
