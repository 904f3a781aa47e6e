"""Modules that `torch.compile` compiled, inside a step that is watched: each call is one op, and stays compiled.

A compiler skips what runs under a dispatch mode, so that such modules would run op by op. So the mode steps aside
while one runs. What its code saves for the backward pass is packed like everything else; what it makes meanwhile, an
allocator counts; and room for that is made before, forward and backward, by what it was seen to take. What it made
forward, recipes make anew by all of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from outgrow.errors import DeviceOutOfMemory
from outgrow.runtime.convolutions import Convolutions
from outgrow.runtime.copies.strays import Strays
from outgrow.runtime.dice import Dice
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.faults import is_out_of_memory
from outgrow.runtime.forwards import Compiled, Forward
from outgrow.runtime.handles import Handle
from outgrow.runtime.interrupts import Interrupts
from outgrow.runtime.need import Need
from outgrow.runtime.pool import Pool
from outgrow.runtime.recipes import Given, Snapshot, given_before
from outgrow.runtime.recompute import Recomputer
from outgrow.runtime.recording import Recording
from outgrow.runtime.room import Room
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.runtime.watch import Watch
from outgrow.tracing.compiled import COMPILED, eagerly, place_of
from outgrow.tracing.ledger import Ledger
from outgrow.tracing.ops import nbytes_of, outputs_of, tensors_in, tensors_within
from outgrow.tracing.probe import probing

_NODE = "CompiledFunctionBackward"  # of PyTorch's AOTAutograd
# With more calls than this that differ, a program may go on making new ones for ever.
_MOST_CALLS = 1 << 14
# Of buffers that a call writes to, copies are kept until it has run again: of no more than so many bytes.
_MOST_SNAPSHOT_BYTES = 1 << 20


@dataclass
class _Visit:
    """Compiled code that runs."""

    key: Hashable
    alike: Hashable
    task: int  # the backward pass that it is part of; -1 for a forward pass
    is_new: bool  # nobody can tell yet what it takes
    before_bytes: int
    highest_bytes: int  # live bytes, as far as is known before it is over
    own_bytes: int  # how far it lifts them for certain, beside what comes back meanwhile
    stack: ExitStack
    is_again: bool  # it has run before in this step, and makes the same once more
    opened: int | None = None  # the op in the recorder
    repeatable: bool = False
    saved: list[weakref.ref[Handle]] = field(default_factory=list)  # by its code, for the backward pass
    arrived_bytes: int = 0  # of saved values that came back meanwhile, those that left again for others with them
    settled_bytes: int = 0  # how much more was live when the last of them was handed out
    rise: list[int | None] = field(default_factory=list)  # what the probe saw


class CompiledCode:
    """Runs the compiled modules of a session's models."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        ledger: Ledger,
        pool: Pool,
        memory: DeviceMemory,
        fast_path: FastPath,
        convolutions: Convolutions,
        room: Room,
        recomputer: Recomputer,
        interrupts: Interrupts,
        strays: Strays,
        come_here: Callable[[], None],
        came_to: Callable[[int], None],
    ) -> None:
        """`come_here` has the step go on on the calling thread; `came_to` is told of live bytes."""
        self._modules = modules
        self._ledger = ledger
        self._pool = pool
        self._memory = memory
        self._fast = fast_path
        self._convolutions = convolutions
        self._room = room
        self._recomputer = recomputer
        self._interrupts = interrupts
        self._strays = strays
        self._come_here = come_here
        self._came_to = came_to
        self._rises: dict[Hashable, int] = {}
        self._guesses: dict[Hashable, int] = {}  # of code that is like such as was seen
        self._wants: dict[Hashable, int] = {}  # what came back for it
        self._tried: set[Hashable] = set()
        self._known: dict[Hashable, Compiled] = {}  # calls that can run again
        self._watch: Watch | None = None
        self._recording: Recording | None = None
        self._visit: _Visit | None = None

    def __bool__(self) -> bool:
        """Whether there is any that stays compiled: what it makes has to be counted."""
        return bool(self._modules) and self._fast.counts

    @property
    def is_inside(self) -> bool:
        """Whether compiled code runs now."""
        visit = self._visit
        if visit is not None and visit.task not in (-1, torch._C._current_graph_task_id()):
            self._abort()  # its backward pass failed, and the program went on
        return self._visit is not None

    @contextmanager
    def around(self, watch: Watch, recording: Recording | None) -> Iterator[None]:
        """Inside is a step that `watch` watches."""
        if not self:
            with eagerly(self._modules):
                yield
            return
        self._watch, self._recording = watch, recording
        places = [(module, place_of(module)) for module in self._modules]
        before = [(module, place, getattr(module, place)) for module, place in places if place]
        for module, place, run in before:
            setattr(module, place, partial(self._run, module, run))
        try:
            yield
        finally:
            for module, place, run in before:
                setattr(module, place, run)
            self._abort()
            self._watch = self._recording = None

    def end(self) -> None:
        """The step is over."""
        self._abort()

    def packed(self, handle: Handle) -> None:
        """Autograd saved something."""
        if self._visit is not None:
            self._visit.saved.append(weakref.ref(handle))

    def arrived(self, nbytes: int) -> None:
        """A saved value came back."""
        visit = self._visit
        if visit is not None:
            visit.arrived_bytes += nbytes
            # What a backward pass wants back comes before anything is made of it.
            ahead = visit.own_bytes if visit.task != -1 else 0
            visit.highest_bytes = max(visit.highest_bytes, self._ledger.live_bytes + ahead)

    def unpacked(self) -> None:
        """A saved value was handed out, and all that had to leave for it has left."""
        visit = self._visit
        if visit is not None and visit.arrived_bytes:
            visit.settled_bytes = max(0, self._ledger.live_bytes - visit.before_bytes)
            if self._recording is not None:  # to wait for copies is not the code's own time
                self._recording.begin_late()

    # --- forward ---

    def _run(self, module: torch.nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._fast.shown():  # a recomputation runs where a formula takes up what it saved
            return self._run_shown(module, run, *args, **kwargs)

    def _run_shown(self, module: torch.nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        watch = self._watch
        if watch is None:
            return run(*args, **kwargs)
        if _get_current_dispatch_mode() is not watch:
            if self.is_inside:
                return run(*args, **kwargs)
            with eagerly([module]):  # who else has a mode wants to see each op
                return run(*args, **kwargs)
        if self.is_inside:  # compiled code of a backward pass runs it again
            with _without(watch):
                return run(*args, **kwargs)
        state = [*module.parameters(), *module.buffers()]
        inputs = [*tensors_within((args, kwargs)), *state]
        ends = {tensor.grad_fn for tensor in inputs}
        # Blocks of a network are alike: they take about as much.
        alike = (type(module), module.training, torch.is_grad_enabled(), _shapes(inputs))
        key = (id(module), *alike, _others(args), _others(tuple(kwargs.values())))
        with torch._C._DisableTorchDispatch():
            number = self._fast.number
            visit = self._enter(key, alike, torch._C._current_graph_task_id())
            if self._recording is not None:
                visit.opened = self._recording.recorder.open_op(COMPILED, inputs, module)
        try:
            # It may be compiled first.
            with _without(watch), self._interrupts.let_in(), self._seen(key, alike, number):
                result = run(*args, **kwargs)
        except BaseException as error:
            self._abort()
            if not (isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error)):
                raise
            raise DeviceOutOfMemory(
                f"compiled code found no memory, and cannot be run again: {error}. Lower the batch or the budget, or "
                "compile smaller parts of the model"
            ) from error
        outputs = list(tensors_within(result))
        nodes = _nodes_between(outputs, ends)
        visit.repeatable = self._learn(key, nodes, outputs)
        saved = visit.saved if self._recomputer.on else []
        with torch._C._DisableTorchDispatch():
            self._leave(visit, (), outputs)
        for place, node in enumerate(nodes):
            node.register_prehook(partial(self._before_node, (key, place), (alike, place), saved))
            node.register_hook(self._after_node)
        return result

    def _learn(self, key: Hashable, nodes: Sequence[Any], outputs: Iterable[torch.Tensor]) -> bool:
        """Whether one function makes all that a call does, and can be run again. It is known from then on."""
        known = Compiled.of(nodes[0]) if len(nodes) == 1 else None
        if known is None or any(output.grad_fn not in (None, nodes[0]) for output in outputs):
            self._known.pop(key, None)
            return False
        self._known[key] = known
        return True

    def _seen(self, key: Hashable, alike: Hashable, number: int) -> AbstractContextManager[None]:
        """Inside is a call, op `number` of the step, whose results recipes may make anew."""
        known = self._known.get(key) if self._recomputer.on else None
        return nullcontext() if known is None else known.seen_by(partial(self._see, known, key, alike, number))

    def _see(
        self,
        known: Compiled,
        key: Hashable,
        alike: Hashable,
        number: int,
        function: Callable[[list[Any]], Any],
        args: list[Any],
    ) -> Any:
        """Call it, and take the call down if recipes make it once more."""
        given = list(args)  # the function empties its own
        buffers = [given[place] for place in known.written] if len(given) == known.takes else []
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            written = [record for record in map(self._ledger.see, buffers) if record is not None]
            self._recomputer.before_write(written)
            before: Given | None = None
            if (
                len(given) == known.takes
                and self._recomputer.runs_again(number, COMPILED.name)
                and sum(map(nbytes_of, buffers)) <= _MOST_SNAPSHOT_BYTES
            ):
                before = given_before(self._ledger, tensors_in(given, {}), Dice.all_of(self._ledger.device))
                for place in known.written:
                    contents = given[place].detach().clone()
                    self._ledger.see(contents)
                    given[place] = Snapshot(contents)
        made = function(args)
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            for record in written:
                record.writes += 1
            if before is not None:
                before = replace(before, dice=tuple(item for item in before.dice if item.were_cast))
                again = Forward(function, key, alike)
                self._recomputer.take_down(again, COMPILED, tuple(given), {}, before, made, None)
        return made

    def run_again(self, forward: Forward, args: Sequence[Any]) -> Any:
        """Run what was seen once more, for what it makes."""
        if self.is_inside:
            return forward(args)
        visit = self._enter(forward.key, forward.alike, torch._C._current_graph_task_id(), is_again=True)
        try:
            made = forward(args)
            for tensor in outputs_of(made):
                self._ledger.see(tensor)
        except BaseException as error:
            self._abort()
            if not (isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error)):
                raise
            raise DeviceOutOfMemory(f"compiled code that makes saved values anew found no memory: {error}") from error
        self._leave(visit, (), ())
        return made

    # --- backward ---

    def _before_node(
        self, key: Hashable, alike: Hashable, saved: Sequence[weakref.ref[Handle]], gradients: tuple[Any, ...]
    ) -> None:
        if self._watch is None or self.is_inside:  # a graph that outlives its step, or one in another
            return
        with torch._C._DisableTorchDispatch():
            self._make_anew(saved)
            if self._recording is not None:
                self._recording.recorder.begin_op()
            self._enter(key, alike, torch._C._current_graph_task_id())

    def _after_node(self, made: tuple[Any, ...], gradients: tuple[Any, ...]) -> None:
        visit = self._visit
        if visit is None:
            return
        with torch._C._DisableTorchDispatch():
            self._leave(visit, tensors_in(gradients, {}), outputs_of(made))

    def _make_anew(self, saved: Sequence[weakref.ref[Handle]]) -> None:
        """What code is about to want and was dropped comes back before: what it takes itself is then measured."""
        if self._pool.dropped:
            self._come_here()
            handles = [handle for handle in (item() for item in saved) if handle is not None]
            entries = [handle.entry for handle in handles if handle.entry is not None]
            for entry in entries:
                if entry in self._pool.dropped:
                    self._pool.dropped.restore(entry, entries)

    # --- both ---

    def _enter(self, key: Hashable, alike: Hashable, task: int, *, is_again: bool = False) -> _Visit:
        """Compiled code is about to run. Where nobody has seen any such before, all leaves for it that can."""
        known, guess = self._rises.get(key), self._guesses.get(alike)
        if known is not None:
            need = Need(known, known, measured=True, seen=True)
        elif guess is None or key in self._tried:  # this run is measured: the budget has to have room for that alone
            need = Need(0, self._room.budget_bytes, measured=False)
        else:
            need = Need(0, guess, measured=False)
        self._come_here()
        self._room.where = COMPILED.name
        self._room.prepare(need, COMPILED.name)
        if not is_again:
            self._fast.number += 1
        with ExitStack() as stack:
            if known is None:
                stack.enter_context(self._memory.openly(0))
            else:
                stack.enter_context(self._memory.gate_for_many(known + self._wants[key]))
            stack.enter_context(self._convolutions.aside())
            stack.enter_context(self._fast.paused())
            stack.enter_context(self._room.holding_back(known or guess or 0, is_certain=known is not None))
            if self._recording is not None and not is_again:
                self._recording.begin()
            before = self._ledger.live_bytes
            stack_of_visit = ExitStack()
            visit = _Visit(
                key=key,
                alike=alike,
                task=task,
                is_new=known is None,
                before_bytes=before,
                highest_bytes=before + need.certain_bytes,
                own_bytes=need.certain_bytes,
                stack=stack_of_visit,
                is_again=is_again,
            )
            if known is None and self._fast.most_bytes is None:
                stack.enter_context(probing(self._ledger.device_type, visit.rise))
            stack_of_visit.push(stack.pop_all())
        self._visit = visit
        self._recomputer.wait()
        return visit

    def _leave(self, visit: _Visit, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """It has run."""
        self._visit = None
        visit.stack.close()
        self._strays.ran([*inputs, *outputs])
        whole = visit.rise[0] if visit.rise else None
        if self._fast.most_bytes is not None:
            whole = self._fast.most_bytes - visit.before_bytes
        if whole is not None:
            visit.highest_bytes = visit.before_bytes + whole
            visit.own_bytes = max(0, whole - visit.settled_bytes)
            self._guesses[visit.alike] = visit.own_bytes
        # Where a compiler tries kernels out on a device, it may have done so just now.
        is_sure = whole is not None and (self._fast.most_bytes is not None or visit.key in self._tried)
        if len(self._tried) >= _MOST_CALLS:
            for memory in (self._tried, self._rises, self._wants, self._guesses, self._known):
                memory.clear()
        self._tried.add(visit.key)
        if is_sure:
            self._rises[visit.key] = max(self._rises.get(visit.key, 0), visit.own_bytes)
            self._wants[visit.key] = max(self._wants.get(visit.key, 0), visit.arrived_bytes)
        if not visit.is_again:
            self._note(visit, inputs, outputs)
        self._memory.count(self._room.budget_bytes)
        highest = max(visit.highest_bytes, self._ledger.live_bytes)
        self._came_to(highest)
        if visit.is_new and is_sure:  # measured at first sight, when all had left that can
            self._room.check(highest, COMPILED.name)
        self._recomputer.settle()

    def _note(self, visit: _Visit, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Have the recorder know of it."""
        recording = self._recording
        if recording is None:
            return
        seconds, rise, recorder = recording.end(), visit.own_bytes, recording.recorder
        if visit.opened is not None:
            recorder.close_op(visit.opened, outputs, rise_bytes=rise, seconds=seconds, repeatable=visit.repeatable)
        else:
            recorder.op(None, COMPILED, (), {}, inputs, outputs, outputs, rise_bytes=rise, seconds=seconds)
        recording.leave()

    def _abort(self) -> None:
        """It has failed."""
        visit, self._visit = self._visit, None
        if visit is not None:
            visit.stack.close()
            self._recomputer.give_up()
            if not visit.is_again:
                with torch._C._DisableTorchDispatch():
                    self._note(visit, (), ())


@contextmanager
def _without(watch: Watch) -> Iterator[None]:
    """Inside, the mode is off, which is the innermost."""
    watch.__exit__(None, None, None)
    try:
        yield
    finally:
        watch.__enter__()


def _others(items: tuple[Any, ...]) -> Hashable:
    """What else a call was given that may change what it takes. A float may be another one in every step."""
    return tuple(item for item in items if item is None or isinstance(item, bool | int | str))


def _shapes(tensors: Iterable[torch.Tensor]) -> Hashable:
    return tuple((tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad) for tensor in tensors)


def _nodes_between(outputs: Sequence[torch.Tensor], ends: set[Any]) -> list[Any]:
    """The nodes of compiled code that the backward pass meets between results and what they were made of."""
    found: list[Any] = []
    seen = set(ends)
    ahead = [tensor.grad_fn for tensor in outputs]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _NODE in node.name():
            found.append(node)
        ahead += [following for following, _ in node.next_functions]
    return found
