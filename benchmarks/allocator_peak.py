"""The peak of a training step as the allocator tells it, for steps that no dispatch mode can watch.

A compiled network runs its own kernels: the session's ledger would make it run op by op. So here PyTorch's profiler
takes down every block that the allocator gives out and takes back.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from outgrow.cli.interleave import Failure, Setup, SetupFailed
from outgrow.cli.job import make_job

_WARMUP = 2  # compiles, and makes the optimizer's state


def allocator_peak_bytes(setup: Setup, limit_seconds: float) -> int:
    """The peak, measured in a process of its own.

    Raises:
        SetupFailed: it raised an error, or took too long.
    """
    command = [sys.executable, str(Path(__file__))]
    try:
        done = subprocess.run(command, input=pickle.dumps(setup), capture_output=True, timeout=limit_seconds)
    except subprocess.TimeoutExpired as error:
        failure = Failure("TimeoutError", f"took longer than {limit_seconds:.0f} s")
        raise SetupFailed(setup.name, failure) from error
    if done.returncode:
        words = " ".join(done.stderr.decode(errors="replace").split())
        raise SetupFailed(setup.name, Failure("Died", words[-400:]))
    return int(done.stdout.split()[-1])


def _measure(setup: Setup) -> int:
    job = make_job(setup.options)
    batches = job.batches()
    model, optimizer = job.build()
    if setup.prepare:
        module, function, *arguments = setup.prepare
        getattr(import_module(module), function)(model, *arguments)
    for _ in range(_WARMUP):
        job.step(model, optimizer, next(batches))
    batch = next(batches)
    state = [*model.parameters(), *model.buffers(), *batch]
    state += [item for row in optimizer.state.values() for item in row.values() if isinstance(item, torch.Tensor)]
    sizes = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in state}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        job.step(model, optimizer, batch)
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = worst = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        worst = max(worst, level)
    return sum(sizes.values()) + worst


if __name__ == "__main__":
    print(_measure(pickle.load(sys.stdin.buffer)))
