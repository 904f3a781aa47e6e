"""How a session has cuDNN choose its algorithms for convolutions on a GPU: `Session(workspace=...)`.

PyTorch asks cuDNN once for each shape of a convolution and each thread, and keeps the answer. With
`torch.backends.cudnn.benchmark` off it takes the first algorithm by cuDNN's heuristics whose workspace can be had,
with it on the fastest of all whose workspace can be had at that moment. Where the memory for a known answer is
refused later, it looks again, tells nobody, and keeps the new answer (`aten/src/ATen/native/cudnn/Conv_v8.cpp`). So
an allocator with a limit makes that search vDNN's and SuperNeurons' "fastest whose workspace fits the bytes that are
free".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from outgrow.cost.workspaces import Workspace
from outgrow.tracing.ops import OpFacts


class Convolutions:
    """What the executor does differently at convolutions.

    - None: the program's own flags count, and room is made for what the library takes.
    - `MEMORY`: cuDNN's heuristics; room is made for what they take.
    - `SPEED`: the fastest algorithm by trial within the budget, at first sight; from then on room is made for it.
    - `DYNAMIC`: the fastest by trial within what is free; nothing leaves for it, and where it does not fit at a later
      moment another is looked for.
    """

    def __init__(self, kind: Workspace | None = None) -> None:
        self._kind = kind

    @property
    def searches(self) -> bool:
        """Whether algorithms are tried out, so that memory which cuDNN is refused is no failure."""
        return self._kind in (Workspace.SPEED, Workspace.DYNAMIC)

    @property
    def take_what_is_free(self) -> bool:
        """Whether nothing is sent away for the sake of a workspace."""
        return self._kind is Workspace.DYNAMIC

    def searched(self, facts: OpFacts) -> bool:
        """Whether an op is a convolution whose algorithm is tried out."""
        return self.searches and is_convolution(facts)

    @contextmanager
    def flags(self) -> Iterator[None]:
        """Inside, cuDNN chooses as is asked for; then the program's flag is as it was.

        The flag is one of the process: other threads that train meanwhile see it, too.
        """
        if self._kind is None:
            yield
            return
        before = _set_benchmark(self.searches)
        try:
            yield
        finally:
            _set_benchmark(before)


def is_convolution(facts: OpFacts) -> bool:
    """Whether an op is one for which cuDNN has several algorithms."""
    return "convolution" in facts.name


def _set_benchmark(on: bool) -> bool:
    """Set `torch.backends.cudnn.benchmark`, also where `torch.backends` was frozen; gives what it was."""
    before = torch._C._get_cudnn_benchmark()
    torch._C._set_cudnn_benchmark(on)
    return before
