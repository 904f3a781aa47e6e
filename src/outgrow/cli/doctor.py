"""`outgrow doctor`: what this machine can do, what is missing, and the devices that can be planned for."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

import outgrow
from outgrow.cost.hardware import Hardware
from outgrow.cost.measure import measure_gpu, remember, remember_gpu
from outgrow.cost.profiles import profiles
from outgrow.runtime.tiers.arena import find_arena
from outgrow.runtime.tiers.heap import address_space_is_limited
from outgrow.tuning.machine import measure_machine
from outgrow.units import format_bytes


def doctor(spill_dir: Path | None, allow_tmpfs: bool, as_json: bool) -> None:
    """Measure this machine, remember what came out, and print it: tables, or with `as_json` one line of JSON."""
    stderr = Console(stderr=True)
    with stderr.status("Measuring") if stderr.is_terminal else nullcontext() as status:

        def measuring(what: str) -> None:
            if isinstance(status, Status):
                status.update(f"Measuring: {what}")

        hardware = measure_machine(spill_dir, allow_tmpfs=allow_tmpfs, on_step=measuring)
        gpus = _measured_gpus(measuring)
    if allow_tmpfs:
        where, problem = None, "These speeds are not kept, as --allow-tmpfs may have measured memory for a disk."
    else:
        where, problem = _remembered(hardware)
    gpus_in = [_kept(gpu) for gpu in gpus]
    findings = _findings()
    if as_json:
        result: dict[str, Any] = {
            "hardware": hardware.to_document(),
            "remembered_in": where,
            "problem": problem or None,
            "gpus": [
                {"hardware": gpu.to_document(), "remembered_in": path}
                for gpu, path in zip(gpus, gpus_in, strict=True)
            ],
            "findings": findings,
            "devices": [
                {"hardware": profile.hardware.to_document(), "sources": dict(profile.sources)}
                for profile in profiles()
            ],
        }
        print(json.dumps(result), flush=True)
        return
    stdout = Console()
    stdout.print(_speeds(hardware))
    for gpu in gpus:
        stdout.print(_gpu_speeds(gpu))
    stdout.print(_setup(findings))
    stdout.print(_devices())
    threads = torch.get_num_threads()
    kept = f"Plans on this machine, with {threads} threads, reckon with these speeds from now on ({where})."
    stdout.print(escape(kept if where else problem))
    for path in filter(None, gpus_in):
        stdout.print(escape(f"Sessions on this GPU reckon with its speeds from now on ({path})."))


def _measured_gpus(measuring: Callable[[str], None]) -> list[Hardware]:
    """The GPUs that are here, one of each name: alike ones have alike links."""
    found: dict[str, Hardware] = {}
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", number)
        name = torch.cuda.get_device_name(device)
        if name not in found:
            measuring(f"{name}, its memory and its link")
            found[name] = measure_gpu(device)
    return list(found.values())


def _kept(gpu: Hardware) -> str | None:
    try:
        return str(remember_gpu(gpu))
    except OSError:
        return None


def _gpu_speeds(gpu: Hardware) -> Table:
    table = Table(title=escape(gpu.name), show_header=False)
    table.add_row("float32 matrix product", f"{gpu.flops_per_second / 1e12:.1f} TFLOP/s")
    table.add_row("memory, read plus written", f"{gpu.memory_bandwidth / 1e9:.0f} GB/s")
    table.add_row("to pinned memory", f"{gpu.copy_out_bandwidth / 1e9:.1f} GB/s")
    table.add_row("from pinned memory", f"{gpu.copy_in_bandwidth / 1e9:.1f} GB/s")
    return table


def _remembered(hardware: Hardware) -> tuple[str | None, str]:
    try:
        return str(remember(hardware)), ""
    except OSError as error:
        return None, f"These speeds could not be kept: {error}. Plans measure a few of them anew each time."


def _findings() -> dict[str, str]:
    """What of the set-up matters, by name, with advice where something could be better."""
    memory = psutil.virtual_memory()
    huge = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
    found = {
        "outgrow": outgrow.__version__,
        "Python": platform.python_version(),
        "PyTorch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
        "memory": f"{format_bytes(memory.available)} of {format_bytes(memory.total)} free",
        "huge pages": "on" if huge else "off: set THP_MEM_ALLOC_ENABLE=1 before Python starts, for faster steps",
    }
    if address_space_is_limited():
        found["tensor memory"] = "the address space is limited (ulimit -v, -d): tensors stay on the heap"
    else:
        found["tensor memory"] = (
            "an arena of its own" if find_arena() is not None else "on the heap: install g++ to build the arena"
        )
    found["CUDA"] = (
        ", ".join(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
        or "no device: training runs on the CPU alone"
    )
    return found


def _speeds(hardware: Hardware) -> Table:
    table = Table(title="This machine", show_header=False)
    table.add_row("float32 matrix product", f"{hardware.flops_per_second / 1e9:.0f} GFLOP/s")
    for dtype, speed in hardware.flops_by_dtype.items():
        table.add_row(f"{dtype} matrix product", f"{speed / 1e9:.0f} GFLOP/s")
    table.add_row("memory, read plus written", f"{hardware.memory_bandwidth / 1e9:.1f} GB/s")
    table.add_row("to the disk", f"{hardware.copy_out_bandwidth / 1e9:.2f} GB/s")
    table.add_row("from the disk", f"{hardware.copy_in_bandwidth / 1e9:.2f} GB/s")
    for kind, share in hardware.efficiency.items():
        table.add_row(f"{kind} ops reach", f"{share:.0%} of the roofline")
    return table


def _setup(findings: dict[str, str]) -> Table:
    table = Table(title="Set-up", show_header=False)
    for name, text in findings.items():
        table.add_row(name, text)
    return table


def _devices() -> Table:
    table = Table(title="Devices to plan for (--hardware)", caption="Sources of these numbers: --json.")
    table.add_column("device")
    for heading in ("memory", "float32", "memory bandwidth", "link"):
        table.add_column(heading, justify="right")
    for profile in profiles():
        hardware = profile.hardware
        table.add_row(
            hardware.name,
            format_bytes(hardware.memory_bytes),
            f"{hardware.flops_per_second / 1e12:.1f} TFLOP/s",
            f"{hardware.memory_bandwidth / 1e9:.0f} GB/s",
            f"{hardware.copy_out_bandwidth / 1e9:.1f} GB/s",
        )
    return table
