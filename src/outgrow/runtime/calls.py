"""How an op is called where memory may run out inside it: with a workspace, again, or on another thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from outgrow.runtime.convolutions import Convolutions
from outgrow.runtime.copies.strays import Strays
from outgrow.runtime.dice import Dice
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.faults import is_out_of_memory
from outgrow.runtime.need import Need
from outgrow.runtime.pool import Pool
from outgrow.runtime.threads import run_on_new_thread
from outgrow.runtime.tiers.memory import DeviceMemory, Request, Scattered
from outgrow.runtime.tiers.reserve import Reserve
from outgrow.tracing.ops import OpFacts, tensors_in
from outgrow.tracing.probe import is_profiled, measured_call

# Libraries that try another algorithm, with other bits, where the first finds no workspace.
_FALLS_BACK = ("convolution", "cudnn", "miopen", "rnn", "lstm", "gru")
# It writes to what the forward pass left for it, and does not say so.
_SPOILS_ITS_INPUT = "aten._cudnn_rnn_backward"
# What PyTorch says where cuDNN has no algorithm that gets its workspace (Conv_v8.cpp).
_NO_ALGORITHM = "unable to find an engine"


# Runs an op; gives its result and how far it lifted live bytes, if that was measured.
_RunOp = Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[Any, int | None]]


class Calls:
    """Calls the ops of a session's steps."""

    def __init__(
        self,
        device_type: str,
        pool: Pool,
        memory: DeviceMemory,
        fast_path: FastPath,
        convolutions: Convolutions,
        strays: Strays,
    ) -> None:
        self._device_type = device_type
        self._fast = fast_path
        self._pool = pool
        self._memory = memory
        self._convolutions = convolutions
        self._strays = strays
        self._is_planned = False
        self._refusals = 0  # that the allocator made so far, without those that a search for an algorithm expects

    def begin(self, *, planned: bool) -> None:
        """A step begins, by a plan or not, on a device whose allocator counts what it refuses."""
        self._is_planned = planned
        self._memory.refusals()
        self._refusals = 0

    def unsaid_refusals(self) -> int:
        """How often in this step a library was refused memory, told nobody and did something else."""
        return max(0, self._refusals + self._memory.refusals() - self._pool.page_faults.count)

    def wants_gate(self, facts: OpFacts) -> bool:
        """Whether an op may give other bits where it is refused a workspace."""
        return self._memory.is_counted and any(name in facts.name for name in _FALLS_BACK)

    def call(
        self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], need: Need
    ) -> tuple[Any, int | None]:
        """Call an op that needs so much; where memory runs out, evict and call again (a page fault).

        Gives its result and how far it lifted live bytes, if that was not known before and could be measured.
        """
        call: _RunOp = _run_here if need.measured else self._measured_call
        if self._memory.is_counted:
            self._pool.page_faults.mind_bounds()
            call = self._bounded(call, facts, need)
        func = self._convolutions.instead_of(func, facts)
        # What it drew before memory ran out it must draw again.
        dice = Dice.before(args, kwargs) if facts.draws else None
        while True:
            self._take_room(facts, need)
            try:
                found = call(func, args, kwargs)
                if self._strays.now():
                    self._strays.ran(tensors_in(args, kwargs))
                return found
            except Scattered as error:
                self._gather(error, facts, need)
                continue
            except (RuntimeError, MemoryError) as error:
                # A list of tensors may be half updated: running the op again would update the first half twice.
                half_done = (facts.writes and facts.over_lists) or facts.name.startswith(_SPOILS_ITS_INPUT)
                half_done = half_done or facts.is_collective  # the other processes have answered the first call
                if half_done or not is_out_of_memory(error):
                    raise
                if _spoils_thread(error) and call is not _run_elsewhere:
                    call = _run_elsewhere
                else:
                    self._pool.page_faults.meet(error, need.likely_bytes, facts.name, need.certain_bytes)
            if dice is not None:
                dice.put_back()

    def _gather(self, error: Scattered, facts: OpFacts, need: Need) -> None:
        """Have saved values leave for what is free between them; the wall gives way where none can."""
        if self._pool.page_faults.thin_out(need.likely_bytes, is_fault=self._is_planned):
            self._refusals += self._is_planned  # a fault that no library knows of
        elif not self._memory.stretch(need.certain_bytes):
            self._refusals += 1
            self._pool.page_faults.meet(error, need.likely_bytes, facts.name, need.certain_bytes)

    def _bounded(self, call: _RunOp, facts: OpFacts, need: Need) -> _RunOp:
        """What calls an op with as much memory as it may have of an allocator that counts."""
        if self._convolutions.searched(facts):
            return partial(self._call_searching, need, call)
        if self.wants_gate(facts) and not need.measured:
            return partial(self._call_openly, need.likely_bytes, call)
        if need.depends_on_data:
            return partial(self._call_strictly, call)
        if self.wants_gate(facts):
            return partial(self._call_in_gate, need.request(falls_back=True), call)
        if not need.measured:  # what it takes beyond its results is a guess, and it says so where it is refused that
            return partial(self._call_in_gate, need.request(falls_back=False), call)
        return call

    def _take_room(self, facts: OpFacts, need: Need) -> None:
        """See that libraries find memory for themselves; where there is none, evict (a page fault)."""
        if facts.is_view:
            return
        while True:
            try:
                self._memory.reserve(anew=not need.seen)
                break
            except MemoryError as error:
                self._pool.page_faults.meet(error, need.likely_bytes, facts.name)

    def _measured_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int | None]:
        if not (is_profiled() and self._fast.counts_blocks):
            return measured_call(func, args, kwargs, self._device_type)
        with self._fast.measuring() as rise:
            result = func(*args, **kwargs)
        return result, rise()

    def _call_in_gate(
        self, request: Request, call: _RunOp, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int | None]:
        """Call an op that gets what it asks for, although the budget is near."""
        with self._memory.gate(request):
            return call(func, args, kwargs)

    def _call_openly(
        self, nbytes: int, call: _RunOp, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int | None]:
        """Call an op whose library takes nobody knows how much, and something else where it is refused that."""
        with self._memory.openly(nbytes):
            return call(func, args, kwargs)

    def _call_strictly(
        self, call: _RunOp, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int | None]:
        """Call an op that takes nobody knows how much."""
        with self._memory.strictly():
            return call(func, args, kwargs)

    def _call_searching(
        self, need: Need, call: _RunOp, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int | None]:
        """Call a convolution that looks for its fastest algorithm, with no more memory than the budget leaves.

        What the library is refused meanwhile says nothing of the plan. An algorithm that was found before gets its
        workspace where room was made for it; and where workspaces are known, none is asked for that has no room.
        """
        self._refusals += self._memory.refusals()
        try:
            if not (need.measured or self._convolutions.knows_ways):
                return self._call_strictly(call, func, args, kwargs)
            return self._call_in_gate(need.request(falls_back=True), call, func, args, kwargs)
        except RuntimeError as error:
            if _NO_ALGORITHM in str(error) and self._memory.refusals():  # none at all found room: a page fault
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        finally:
            self._memory.refusals()


def _run_here(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, None]:
    return func(*args, **kwargs), None


def _run_elsewhere(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int | None]:
    """Run an op on a thread of its own, which may start more."""

    def run() -> tuple[Any, int | None]:
        torch.get_num_threads()  # makes the new thread use as many as this one: kernels are built for a number
        reserve = Reserve()
        reserve.hold(anew=True)
        with torch._C._AutoDispatchBelowAutograd():  # as inside a dispatch mode
            return measured_call(func, args, kwargs)

    return run_on_new_thread(run, torch.get_num_threads())


def _spoils_thread(error: BaseException) -> bool:
    """Whether the error stays with the thread.

    When there is no memory for the code of a kernel, oneDNN's assembler notes it in a variable of the thread that
    nothing ever clears: no new kernel can be built on that thread. One that another thread has built can be used.
    """
    return "could not create a primitive" in str(error)
