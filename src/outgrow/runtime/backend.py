"""What a session stands on: the device's memory, the tiers below it, the copies between them, and a clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import psutil
import torch

from outgrow.runtime import fastpath, staying
from outgrow.runtime.clock import DeviceClock
from outgrow.runtime.copies.copy import Copies
from outgrow.runtime.copies.cpu import CpuCopies
from outgrow.runtime.copies.cuda import CudaCopies
from outgrow.runtime.copies.strays import Strays, StreamStrays
from outgrow.runtime.copies.streams import CudaStreams
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.native import build_ahead
from outgrow.runtime.tiers import arena
from outgrow.runtime.tiers.cuda import CudaMemory
from outgrow.runtime.tiers.disk import SpillFile
from outgrow.runtime.tiers.host import HostTier, pinned
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.runtime.tiers.place import Places
from outgrow.runtime.tiers.ram import Ram
from outgrow.tracing.ledger import Ledger


@dataclass(frozen=True)
class Backend:
    """The parts of one device.

    `clock` is that of a device which runs beside the host. On a CPU there is none: what was asked for is over when
    the call returns, and the host's clock is right. `strays` keep things in order where the program computes on
    streams of its own.
    """

    memory: DeviceMemory
    places: Places
    copies: Copies
    clock: DeviceClock | None
    fast_path: FastPath
    strays: Strays = field(default_factory=Strays)


def open_backend(
    device: torch.device, ledger: Ledger, budget_bytes: int, host_bytes: int | None, spill: SpillFile
) -> Backend:
    """The parts for a device; those of CUDA take `host_bytes` of pinned memory at most.

    Raises:
        HostBudgetTooSmall: that is not even enough for the way to the disk.
    """
    if device.type != "cpu":
        build_ahead(fastpath.CODE, staying.CODE)
    elif arena.is_wanted():
        build_ahead(arena.CODE, fastpath.CODE, staying.CODE)
    if device.type == "cpu":
        ram = Ram(psutil.Process().memory_info().rss - ledger.live_bytes, budget_bytes)
        fast_path = FastPath(ledger, budget_bytes, ram)
        return Backend(ram, spill, CpuCopies(spill, fast_path.ring), None, fast_path)
    assert host_bytes is not None, "a device other than the CPU has a host beside it"
    places = HostTier(host_bytes, spill, pinned)
    streams = CudaStreams(device)
    copies = CudaCopies(streams, spill, places.bounces)
    try:
        fast_path = FastPath(ledger, budget_bytes, None, device)
        memory = CudaMemory(device, budget_bytes, ledger)
        return Backend(memory, places, copies, DeviceClock(streams, copies.waits), fast_path, StreamStrays(streams))
    except BaseException:
        copies.close()
        places.close()
        raise
