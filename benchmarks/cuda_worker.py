"""One way to train on a GPU, in a process of its own: `cuda_acceptance.py` starts these and has them take turns.

    python benchmarks/cuda_worker.py SPEC      # JSON; then lines on standard input

A line is a number of steps; "budget" and a number of bytes: from there on a session trains; or "gradients", a number
of steps and a share of the plain peak: their gradients plain, and in a session from the same states. For each it
prints a line of JSON, of steps with what they took and left behind. The wall of a session is the whole process's, so
that no plain training can run beside it in one process.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import peers
import torch
from torch import nn

import outgrow
from outgrow.networks import find
from outgrow.networks.vgg import VGG
from outgrow.planning.problem import LEAST_MOVED_BYTES

DEVICE = torch.device("cuda", 0)
_MOST_STEPS = 64  # of one line


@dataclass(frozen=True)
class Spec:
    """What a worker trains, and how.

    `peer` is a function of `peers.py`, after a colon what it is given ("compiled:0.5"), or "save_on_cpu", or
    "offload_all" (`Offload`). `budget` is one of bytes for a
    session. `deterministic` has PyTorch use algorithms that give the same bits twice; without `tf32` it rounds no
    operands of products and convolutions. In `channels_last` order cuDNN
    rearranges no images: in the usual one that takes workspaces as large as its operands. `workspace` is one of a
    session's.
    """

    network: str
    size: int
    batch: int
    budget: int | None = None
    policy: str = "auto"
    peer: str = ""
    host_budget: str | None = None
    deterministic: bool = False
    tf32: bool = True
    channels_last: bool = False
    workspace: str | None = None
    momentum: float = 0.9
    least_moved_bytes: int = LEAST_MOVED_BYTES

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


# The smallest tensors that torchtune sends to the host.
OFFLOADED_BYTES = 1024


class Offload:
    """Sends every saved tensor to pinned memory on a side stream, and back when it is wanted.

    As `OffloadActivations` of torchtune does it (`torchtune/training/_activation_offloading.py`, with its defaults:
    two streams, tensors from 1,024 bytes, five in flight on the way out).
    """

    _LEAST_BYTES = OFFLOADED_BYTES
    _IN_FLIGHT = 5

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._leaving: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def hooks(self) -> AbstractContextManager[Any]:
        """The hooks of one step."""
        self._leaving.clear()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.nbytes < self._LEAST_BYTES or isinstance(tensor, nn.Parameter) or not tensor.is_cuda:
            return tensor
        while len(self._leaving) >= self._IN_FLIGHT:
            torch.cuda.current_stream().wait_event(self._leaving.popleft()[1])
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
            self._leaving.append((tensor, self._stream.record_event()))
        return (copy,)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        self._leaving.clear()
        with torch.cuda.stream(self._stream):
            back: torch.Tensor = packed[0].to(DEVICE, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)
        back.record_stream(torch.cuda.current_stream())
        return back


class _Said(logging.Handler):
    """What a session logged: which plans it made, and why."""

    _MOST = 40  # lines

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[str] = []
        logger = logging.getLogger("outgrow")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line."""
        if len(self._lines) < self._MOST:
            self._lines.append(record.getMessage())

    def take(self) -> list[str]:
        """What was said since."""
        lines, self._lines = self._lines, []
        return lines


class Job:
    """A network that trains, plain, as a peer does it, or in a session."""

    def __init__(self, spec: Spec) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = spec.tf32
        if spec.deterministic:
            torch.use_deterministic_algorithms(True)
            settings: Any = torch.utils.deterministic
            settings.fill_uninitialized_memory = False
        self.spec = spec
        self.network = find(spec.network)
        self.classes = self.network.classes
        torch.manual_seed(0)
        self.model = self.network.build(spec.size, self.classes).to(DEVICE)
        if spec.deterministic and isinstance(self.model, VGG):
            self.model.avgpool = nn.Identity()  # maps of 7 x 7 are pooled to 7 x 7, by additions in any order
        if spec.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if spec.peer and spec.peer not in ("save_on_cpu", "offload_all"):
            name, *given = spec.peer.split(":")
            getattr(peers, name)(self.model, *given)
        self.offload = Offload()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=spec.momentum)
        self.session: outgrow.Session | None = None
        self._said = _Said()
        self.count = 0
        # One block, however many steps: a peak of a peer's is to be met to the byte.
        self._losses = torch.zeros(_MOST_STEPS, device=DEVICE)
        torch.manual_seed(1)
        if spec.budget is not None:
            self.open(spec.budget)

    def open(self, budget: int) -> dict[str, Any]:
        """Train in a session from here on."""
        spec = self.spec
        self.session = outgrow.Session(
            self.model,
            self.optimizer,
            budget=budget,
            policy=spec.policy,
            host_budget=spec.host_budget,
            spill_dir=tempfile.gettempdir(),
            allow_tmpfs=True,
            workspace=spec.workspace,
            least_moved_bytes=spec.least_moved_bytes,
        )
        torch.cuda.reset_peak_memory_stats()
        return {"budget": budget}

    def rest(self) -> dict[str, Any]:
        """Give back what only steps need."""
        gc.collect()
        torch.cuda.empty_cache()
        return {"reserved": torch.cuda.memory_reserved()}

    def run(self, steps: int) -> dict[str, Any]:
        """Train, and say what was measured: `seconds` are a step's, from the first's begin to the last's end.

        Peaks of a session are those since it began, its first step included. Those of other steps are of this call:
        before the first cuDNN tries algorithms that take much memory, and then takes others.
        """
        if self.session is None:
            torch.cuda.reset_peak_memory_stats()
        assert steps <= _MOST_STEPS
        losses = self._losses[:steps]
        torch.cuda.synchronize()
        began = time.perf_counter()
        for place in losses:
            place.copy_(self._step(self.count))
            self.count += 1
        asked = time.perf_counter() - began
        torch.cuda.synchronize()
        found: dict[str, Any] = {
            "seconds": (time.perf_counter() - began) / steps,
            "host_seconds": asked / steps,
            "losses": losses.tolist(),
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "flushes": torch.cuda.memory_stats()["num_alloc_retries"],
        }
        if self.session is not None:
            found["summary"] = asdict(self.session.summary())
            found["log"] = self._said.take()
            found |= self._link(self.session)
        return found

    def _step(self, k: int, *, clear: bool = True) -> torch.Tensor:
        spec = self.spec
        generator = torch.Generator(DEVICE).manual_seed(k)
        around: AbstractContextManager[Any] = nullcontext()
        if self.session is not None:
            around = self.session.step()
        elif spec.peer == "save_on_cpu":
            around = torch.autograd.graph.save_on_cpu(pin_memory=True)
        elif spec.peer == "offload_all":
            around = self.offload.hooks()
        with around:
            x, y = self.network.sample(spec.batch, spec.size, self.classes, generator, DEVICE)
            if spec.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            output = self.model(x)
            if spec.deterministic and self.network.kind == "segmentation":  # a loss of pixels in a row adds in order
                output, y = output.flatten(2).mT.flatten(0, 1), y.flatten()
            loss = self.network.loss(output, y)
            loss.backward()
            self.optimizer.step()
            if clear:
                self.optimizer.zero_grad()
        return loss.detach()

    @staticmethod
    def _link(session: outgrow.Session) -> dict[str, Any]:
        """What the copies of a step take by themselves, and the share of what the simulator hides that is hidden."""
        copies, summary, plan = session._copies, session.summary(), session.plan
        out, back = copies.out.bandwidth(), copies.back.bandwidth()
        found: dict[str, Any] = {
            "copy_out_bandwidth": out,
            "copy_in_bandwidth": back,
            "ops": 0 if plan is None else len(plan.problem.trace.ops),
            "passed": session._pool.fast_path.passed,
        }
        if out and back and plan is not None and summary.offloaded_bytes:
            alone = summary.offloaded_bytes / out + summary.offloaded_bytes / back
            foretold = max(0.0, alone - plan.simulate().stall_seconds)
            hidden = max(0.0, alone - summary.stall_seconds)
            found |= {"copy_seconds": alone, "hidden_seconds": hidden, "foretold_seconds": foretold}
        return found

    def digest(self) -> dict[str, str]:
        """A hash of parameters, buffers and the optimizer's state."""
        total = hashlib.sha256()
        found: list[Any] = [tensor for _, tensor in sorted(self.model.state_dict().items())]
        for _, state in sorted(self.optimizer.state_dict()["state"].items()):
            found += [item for _, item in sorted(state.items())]
        for item in found:
            if isinstance(item, torch.Tensor):
                total.update(item.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return {"digest": total.hexdigest()}

    def compare(self, steps: int, share: float) -> dict[str, Any]:
        """How far gradients of a session at a share of the plain peak are from plain ones, each from the same state.

        The largest relative difference of all gradients taken as one vector, over so many steps; and that of plain
        PyTorch from itself.
        """
        torch.cuda.reset_peak_memory_stats()
        truth: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        for k in range(steps):
            if k == 2:  # before, cuDNN has tried algorithms that take much memory
                torch.cuda.reset_peak_memory_stats()
            before = [item.to("cpu", copy=True) for item in self.model.state_dict().values()]
            truth.append((before, self._gradients(k)))
        budget = int(torch.cuda.max_memory_allocated() * share)
        found: dict[str, Any] = {"budget": budget, "plain_apart": self._apart(truth)}
        self.open(budget)
        found["apart"] = self._apart(truth)
        assert self.session is not None
        return found | {
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "summary": asdict(self.session.summary()),
        }

    def _apart(self, truth: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> float:
        worst = 0.0
        for k, (before, gradients) in enumerate(truth):
            with torch.no_grad():
                for place, item in zip(self.model.state_dict().values(), before, strict=True):
                    place.copy_(item)
            pairs = zip(self._gradients(k), gradients, strict=True)
            norms = [((ours - plain).double().norm(), plain.double().norm()) for ours, plain in pairs]
            apart, length = (torch.stack(column).norm() for column in zip(*norms, strict=True))
            worst = max(worst, float(apart / length))
        return worst

    def _gradients(self, k: int) -> list[torch.Tensor]:
        torch.manual_seed(k)  # of dropout
        self._step(k, clear=False)
        found = [item.grad.to("cpu", copy=True) for item in self.model.parameters() if item.grad is not None]
        self.optimizer.zero_grad()
        return found


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
        match line.split():
            case ["rest"]:
                answer(jobs[0].rest)
            case ["budget", nbytes]:
                answer(partial(jobs[0].open, int(nbytes)))
            case ["gradients", steps, share]:
                answer(partial(jobs[0].compare, int(steps), float(share)))
            case ["0"]:
                answer(jobs[0].digest)
            case [steps]:
                answer(partial(jobs[0].run, int(steps)))


if __name__ == "__main__":
    main()
