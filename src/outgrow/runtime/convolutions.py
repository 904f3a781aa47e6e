"""How convolutions on a GPU get memory for their work: `Session(workspace=...)`.

With cuDNN's frontend (`frontend.py`) the ways to run each convolution are known, and what each holds. Without it,
PyTorch has to be had to choose: it asks cuDNN once for each shape of a convolution and each thread, and keeps the
answer. With `torch.backends.cudnn.benchmark` off it takes the first algorithm by cuDNN's heuristics whose workspace
can be had, with it on the fastest of all whose workspace can be had at that moment. Where the memory for a known
answer is refused later, it looks again, tells nobody, and keeps the new answer
(`aten/src/ATen/native/cudnn/Conv_v8.cpp`). So an allocator with a limit makes that search vDNN's and SuperNeurons'
"fastest whose workspace fits the bytes that are free".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from outgrow.cost.workspaces import Workspace
from outgrow.runtime.frontend import Frontend
from outgrow.tracing.ops import OpFacts

_LOG = logging.getLogger(__name__)


class Convolutions:
    """What the executor does differently at convolutions.

    - None: the program's own flags count, and room is made for what the library takes.
    - `MEMORY`: the way that holds least; without the frontend cuDNN's heuristics. Room is made for what it takes.
    - `SPEED`: the fastest algorithm by trial within the budget, at first sight; from then on room is made for it.
    - `DYNAMIC`: the fastest by trial within what is free; nothing leaves for it, and where it does not fit at a later
      moment it is another.
    """

    def __init__(self, kind: Workspace | None = None, frontend: Frontend | None = None) -> None:
        """`frontend` is cuDNN's, if it is there."""
        self._kind = kind
        self._frontend = frontend if kind is not None else None

    @property
    def searches(self) -> bool:
        """Whether algorithms are tried out, so that memory which cuDNN is refused is no failure."""
        return self._kind in (Workspace.SPEED, Workspace.DYNAMIC)

    @property
    def knows_ways(self) -> bool:
        """Whether workspaces are known before they are asked for."""
        return self._frontend is not None

    @property
    def needs_all(self) -> bool:
        """Whether every convolution has to be seen before it runs."""
        return self.searches or self.knows_ways

    @property
    def take_what_is_free(self) -> bool:
        """Whether nothing is sent away for the sake of a workspace."""
        return self._kind is Workspace.DYNAMIC

    def searched(self, facts: OpFacts) -> bool:
        """Whether an op is a convolution whose algorithm is tried out."""
        return self.searches and is_convolution(facts)

    def seen(self, facts: OpFacts) -> bool:
        """Whether an op is one that has to be seen each time."""
        return self.needs_all and is_convolution(facts)

    def instead_of(self, func: Any, facts: OpFacts) -> Callable[..., Any]:
        """What is called in the place of an op: the op itself, or what runs a convolution in the way that is best."""
        if self._frontend is None or not is_convolution(facts):
            return func  # type: ignore[no-any-return]
        return partial(self._frontend.run, func)

    def settled(self, facts: OpFacts) -> torch.cuda.Event | None:
        """The device's mark from which on the op that ran last did not try, but work; None: it only worked."""
        if self._frontend is None or not is_convolution(facts):
            return None
        return self._frontend.settled

    def flags(self) -> AbstractContextManager[None]:
        """Inside, cuDNN chooses as is asked for; then the program's flag is as it was.

        The flag is one of the process: other threads that train meanwhile see it, too.
        """
        return nullcontext() if self._kind is None else _benchmark(self.searches)

    def aside(self) -> AbstractContextManager[None]:
        """Inside, nothing is tried out: what runs there is not called by us."""
        return _benchmark(False) if self.searches else nullcontext()

    def close(self) -> None:
        """Let go of the frontend."""
        if self._frontend is not None:
            self._frontend.close()


def open_convolutions(kind: Workspace | None, device: torch.device, free_bytes: Callable[[], int]) -> Convolutions:
    """Convolutions of a session on a device, with cuDNN's frontend if that is installed and of any use.

    `free_bytes` says how much of the budget is free.
    """
    if kind is None or device.type != "cuda":
        return Convolutions(kind)
    try:
        frontend = Frontend(device, kind, free_bytes)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        _LOG.info("workspaces: PyTorch searches for algorithms, as cuDNN's frontend is not there (%s)", error)
        return Convolutions(kind)
    _LOG.info("workspaces: chosen among the plans of cuDNN's frontend")
    return Convolutions(kind, frontend)


def is_convolution(facts: OpFacts) -> bool:
    """Whether an op is one for which cuDNN has several algorithms."""
    return "convolution" in facts.name


@contextmanager
def _benchmark(on: bool) -> Iterator[None]:
    """Inside, `torch.backends.cudnn.benchmark` is on or off, also where `torch.backends` was frozen."""
    before = torch._C._get_cudnn_benchmark()
    torch._C._set_cudnn_benchmark(on)
    try:
        yield
    finally:
        torch._C._set_cudnn_benchmark(before)
