"""One way to train on a GPU, in a process of its own: `cuda_acceptance.py` starts these and has them take turns.

    python benchmarks/cuda_worker.py SPEC      # JSON; then a number of steps on each line of standard input

For each line it prints a line of JSON with what the steps took and left behind. The wall of a session is the whole
process's, so that plain training cannot run beside it in one process.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import peers
import torch

import outgrow
from outgrow.networks import find

DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Spec:
    """What a worker trains, and how.

    `peer` is a function of `peers.py`, or "save_on_cpu"; `budget` is one of bytes for a session. `deterministic` has
    PyTorch use algorithms that give the same bits twice. In `channels_last` order cuDNN rearranges no images: in the
    usual one that takes workspaces as large as its operands. `workspace` is the session's.
    """

    network: str
    size: int
    batch: int
    budget: int | None = None
    policy: str = "auto"
    peer: str = ""
    host_budget: str | None = None
    deterministic: bool = False
    channels_last: bool = False
    workspace: str | None = None

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


class Job:
    """A network that trains, plain, as a peer does it, or in a session."""

    def __init__(self, spec: Spec) -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        if spec.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False
        self.spec = spec
        self.network = find(spec.network)
        self.classes = self.network.classes
        torch.manual_seed(0)
        self.model = self.network.build(spec.size, self.classes).to(DEVICE)
        if spec.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if spec.peer and spec.peer != "save_on_cpu":
            getattr(peers, spec.peer)(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.session: outgrow.Session | None = None
        if spec.budget is not None:
            self.session = outgrow.Session(
                self.model,
                self.optimizer,
                budget=spec.budget,
                policy=spec.policy,
                host_budget=spec.host_budget,
                spill_dir=tempfile.gettempdir(),
                allow_tmpfs=True,
                workspace=spec.workspace,
            )
        self.count = 0
        torch.manual_seed(1)
        torch.cuda.reset_peak_memory_stats()

    def run(self, steps: int) -> dict[str, Any]:
        """Train, and say what was measured."""
        seconds: list[float] = []
        losses: list[float] = []
        for _ in range(steps):
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss = self._step(self.count)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            losses.append(float(loss))
            self.count += 1
        found: dict[str, Any] = {
            "seconds": seconds,
            "losses": losses,
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
        }
        if self.session is not None:
            found["summary"] = asdict(self.session.summary())
            found |= self._link(self.session)
        return found

    def _step(self, k: int) -> torch.Tensor:
        spec = self.spec
        generator = torch.Generator(DEVICE).manual_seed(k)
        around: AbstractContextManager[Any] = nullcontext()
        if self.session is not None:
            around = self.session.step()
        elif spec.peer == "save_on_cpu":
            around = torch.autograd.graph.save_on_cpu(pin_memory=True)
        with around:
            x, y = self.network.sample(spec.batch, spec.size, self.classes, generator, DEVICE)
            if spec.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            loss = self.network.loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    @staticmethod
    def _link(session: outgrow.Session) -> dict[str, Any]:
        """What the copies of a step take by themselves, and the share of that in which the device did not stand."""
        copies, summary = session._copies, session.summary()
        out, back = copies.out.bandwidth(), copies.back.bandwidth()
        found: dict[str, Any] = {"copy_out_bandwidth": out, "copy_in_bandwidth": back}
        if out and back and summary.offloaded_bytes:
            alone = summary.offloaded_bytes / out + summary.offloaded_bytes / back
            found |= {"copy_seconds": alone, "hidden_share": max(0.0, 1 - summary.stall_seconds / alone)}
        return found

    def digest(self) -> dict[str, str]:
        """A hash of parameters, buffers and the optimizer's state."""
        total = hashlib.sha256()

        def add(item: Any) -> None:
            if isinstance(item, torch.Tensor):
                total.update(item.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

        for _, tensor in sorted(self.model.state_dict().items()):
            add(tensor)
        for _, state in sorted(self.optimizer.state_dict()["state"].items()):
            for _, item in sorted(state.items()):
                add(item)
        return {"digest": total.hexdigest()}


def answer(act: Callable[[], dict[str, Any]]) -> None:
    """Print what `act` gives, or how it failed, on one line."""
    try:
        found = act()
    except Exception as error:
        found = {"error": type(error).__name__, "message": " ".join(str(error).split())[:600]}
        found["least_bytes"] = getattr(error, "least_bytes", None)
    print(json.dumps(found), flush=True)


def main() -> None:
    """Serve until standard input ends."""
    spec = Spec(**json.loads(sys.argv[1]))
    jobs: list[Job] = []

    def begin() -> dict[str, Any]:
        jobs.append(Job(spec))
        return {"parameters": sum(item.numel() for item in jobs[0].model.parameters())}

    answer(begin)
    for line in sys.stdin:
        steps = int(line)
        answer(partial(jobs[0].run, steps) if steps else jobs[0].digest)


if __name__ == "__main__":
    main()
