"""How many bytes an op holds at its worst moment, workspace included: asked of the allocator itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

# PyTorch's thread-local profiler, which its own type stubs leave out.
_profiler: Any = torch.autograd


def measured_call(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str = "cpu"
) -> tuple[Any, int | None]:
    """Run an op and tell how far it lifted the allocated bytes of a kind of device at its worst moment.

    PyTorch's allocators report every block to the profiler of the thread; started for one op it costs some
    6 microseconds. Where the user's own profiler runs, or there is no memory for this one, nothing is measured and
    None is returned. The peak that the CUDA allocator keeps itself would have to be reset for each op, and it is the
    user's to read.
    """
    found: list[int | None] = []
    with probing(device_type, found):
        result = func(*args, **kwargs)
    return result, found[0]


def is_profiled() -> bool:
    """Whether a profiler of the user's runs on this thread: nothing can be measured by ours meanwhile."""
    return bool(_profiler._profiler_enabled())


@contextmanager
def probing(device_type: str, found: list[int | None]) -> Iterator[None]:
    """The same for all that runs inside; what was seen is added to `found` at its end."""
    if is_profiled() or not _switch_on():
        found.append(None)
        yield
        return
    try:
        yield
    except BaseException:
        _switch_off()
        raise
    if not is_profiled():
        found.append(None)
        return
    try:
        found.append(_worst_rise(_profiler._disable_profiler_legacy(), device_type))
    except (MemoryError, RuntimeError):  # the op is done, and must not be run again for what was seen of it
        found.append(None)


def _switch_on() -> bool:
    """Start the profiler; False where there is no memory for that: the op may find enough for itself."""
    try:
        _profiler._enable_profiler_legacy(_memory_only())
    except (MemoryError, RuntimeError):
        _switch_off()
        return False
    return True


def _switch_off() -> None:
    """Stop the profiler if it runs, without a word: an error came before, and what was seen is of no use."""
    with suppress(MemoryError, RuntimeError):  # it is off all the same
        if is_profiled():
            _profiler._disable_profiler_legacy()


def _worst_rise(threads: Any, device_type: str) -> int:
    level = worst = 0
    for events in threads:
        for event in events:
            if event.kind() == "memory_alloc":
                level += event.cuda_memory_usage() if device_type == "cuda" else event.cpu_memory_usage()
                worst = max(worst, level)
    return worst


def _memory_only() -> Any:
    return _profiler.ProfilerConfig(
        _profiler.ProfilerState.CPU,
        False,  # report_input_shapes
        True,  # profile_memory
        False,  # with_stack
        False,  # with_flops
        False,  # with_modules
        torch._C._profiler._ExperimentalConfig(),
    )
