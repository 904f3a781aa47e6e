"""Times training steps of several set-ups turn by turn, each in a process of its own.

A machine's speed wavers over minutes; steps that take turns waver together, so the ratio of their medians says
what the set-ups differ in. Processes of their own keep one set-up's heap out of the other's way.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Setup:
    """One way to train one network. No budget means plain PyTorch."""

    name: str
    network: str
    batch: int
    image_size: int
    budget_bytes: int | None = None
    policy: str = "auto"
    dtype: str = "float32"


class Worker:
    """A process that runs one step each time it is asked."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(asdict(setup))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self) -> dict[str, Any]:
        """Run one step and tell what it was."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.setup.name} died")
        return dict(json.loads(line))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def interleave(setups: list[Setup], warmup: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Run `warmup` and then `steps` steps of each set-up, turn by turn; the latter are returned by name."""
    workers = [Worker(setup) for setup in setups]
    try:
        for _ in range(warmup):
            for worker in workers:
                worker.step()
        found: dict[str, list[dict[str, Any]]] = {setup.name: [] for setup in setups}
        for number in range(steps):
            # Every other round goes backwards, so that nobody always runs after the same neighbour.
            for worker in workers if number % 2 == 0 else reversed(workers):
                found[worker.setup.name].append(worker.step())
    finally:
        for worker in workers:
            worker.close()
    return found


def ratio(found: dict[str, list[dict[str, Any]]], ours: str, base: str) -> float:
    """Ratio of the medians of step seconds."""
    return median(row["seconds"] for row in found[ours]) / median(row["seconds"] for row in found[base])


def _work(setup: Setup) -> None:
    import torch

    import outgrow
    from outgrow.networks import find

    torch.manual_seed(0)
    network = find(setup.network)
    model = network.build(setup.image_size, network.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x, y = network.sample(setup.batch, setup.image_size, network.classes, torch.Generator().manual_seed(0))
    session = None
    if setup.budget_bytes is not None:
        session = outgrow.Session(model, optimizer, budget=setup.budget_bytes, policy=setup.policy)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=setup.dtype == "bfloat16"):
            loss = network.loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in sys.stdin:
        before = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        if session is None:
            step()
        else:
            with session.step():
                step()
        row: dict[str, Any] = {"seconds": time.perf_counter() - start}
        after = resource.getrusage(resource.RUSAGE_SELF)
        row["user_seconds"] = after.ru_utime - before.ru_utime
        row["system_seconds"] = after.ru_stime - before.ru_stime
        row["page_faults"] = after.ru_minflt - before.ru_minflt
        if session is not None:
            row |= asdict(session.summary())
        print(json.dumps(row), flush=True)
    if session is not None:
        session.close()


if __name__ == "__main__":
    _work(Setup(**json.loads(sys.argv[1])))
