"""Fills a trace from a step that runs: told of each op, pack, unpack, release and death, it dates the values.

It watches and never acts. `capture.py` feeds it from a step on its own, the runtime from a step under a budget;
a value that the runtime sends away and brings back is one value all the same.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from outgrow.tracing.convolution import DATA_GRADIENT, FORWARD, WEIGHT_GRADIENT, convolution_shape
from outgrow.tracing.ir import Event, Kind, Op, Phase, Saved, Tick, Trace, Value
from outgrow.tracing.ledger import Ledger, StorageRecord
from outgrow.tracing.ops import (
    OpFacts,
    accumulates_gradient,
    is_opaque,
    is_sized_by_data,
    nbytes_of,
    tensors_within,
    written_tensors,
)

# Kinds of value that somebody lets go of during a step; the others are training state.
_LET_GO = frozenset({Kind.TEMPORARY, Kind.INPUT})
# A model that hoards its activations would otherwise make each op look at all of them.
_LOOKS_PER_OP = 32
# What runs while a module does.
_CALL = torch.nn.Module._call_impl.__code__


@dataclass(slots=True)
class _Value:
    """A value while it is being dated. -1 stands for "not yet"."""

    storage: int
    version: int
    nbytes: int
    kind: Kind
    birth: int
    held: int = -1
    death: int = -1
    handles: dict[int, None] = field(default_factory=dict)  # the saved tensors that autograd has not let go of
    present: bool = True
    varies: bool = False


@dataclass(slots=True)
class _Saved:
    value: int
    nbytes: int
    module: str
    packed: int
    unpacked: list[int]
    node: str = ""
    released: int = -1


class Recorder:
    """Dates one step. Make a new one for each step."""

    def __init__(self, ledger: Ledger, modules: ModuleNames, kinds: Mapping[int, Kind]) -> None:
        """`kinds` tells what storages that are alive already are, by serial number in the ledger."""
        self._ledger = ledger
        self._modules = modules
        self._kinds = kinds
        self._opened: dict[int, None] | None = None  # what was made by an op that is not over yet
        self._begun = False  # an op runs that is told of when it is over
        self._ops: list[Op] = []
        self._values: list[_Value] = []
        self._saved: list[_Saved] = []
        self._ticks: list[Tick] = []
        self._current: dict[int, int] = {}
        self._watched: OrderedDict[int, StorageRecord] = OrderedDict()
        self._backward_module = ""
        self._blank: dict[int, int] = {}  # values that nobody has read or written yet, by the `empty` that made them
        # Serial numbers of storages that the functions which run may read unseen, and that the next op's may.
        self._given: list[list[int]] = []
        self._just_given: list[int] = []
        self._newest_before = ledger.newest

    @property
    def now(self) -> int:
        """The op that runs next."""
        return len(self._ops)

    def start(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note of the training state, which is alive before the step."""
        for tensor in tensors:
            record = self._ledger.see(tensor)
            if record is None:
                continue
            value = self._values[self._value_of(record)]
            storage = record.storage()  # counted below
            if value.kind is not Kind.BUFFER and storage is not None and record.other_holders() > 1:
                value.kind = Kind.SHARED

    def op(
        self,
        func: Any,
        facts: OpFacts,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        result: Any,
        *,
        rise_bytes: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """An op ran. `rise_bytes` is how far it lifted live bytes at its worst moment, 0 if nobody measured."""
        now = len(self._ops)
        self._begun = False
        in_backward = torch._C._current_graph_task_id() != -1
        read: dict[int, None] = {}
        moved = 0
        varies = is_sized_by_data(facts, inputs)
        for position, tensor in enumerate(inputs):
            record = self._ledger.see(tensor)
            if record is not None:
                value = self._value_of(record)
                varies = varies or self._values[value].varies
                if position > 0 or not facts.reads_shape:
                    read[value] = None
                    moved += nbytes_of(tensor)
        self._judge_blanks(facts, args, kwargs, read)
        born: dict[int, None] = {}
        for tensor in written_tensors(facts, args, kwargs):
            record = self._ledger.see(tensor)
            if record is not None:
                born[self._next_version(record, now)] = None
        new_bytes = 0
        accumulates = in_backward and accumulates_gradient()
        for tensor in outputs:
            record = self._ledger.see(tensor)
            if record is None:
                continue
            known = self._current.get(record.serial)
            if known is None:
                known = self._new_value(record, 0, Kind.TEMPORARY, now)
                new_bytes += record.nbytes
                born[known] = None
                self._values[known].varies = varies
                if facts.is_blank:
                    self._blank[known] = now
            if accumulates:
                self._values[known].kind = Kind.GRADIENT
            if not facts.is_view:
                moved += nbytes_of(tensor)
        if in_backward:
            phase, module = Phase.BACKWARD, self._backward_module
        elif torch.is_grad_enabled():
            phase, module = Phase.FORWARD, self._modules.current
        else:
            phase, module = Phase.UPDATE, self._modules.current
        self._ops.append(
            Op(
                name=facts.name,
                phase=phase,
                module=module,
                inputs=tuple(read),
                outputs=tuple(born),
                flops=_flops(func, args, kwargs, result),
                moved_bytes=0 if facts.is_view else moved,
                workspace_bytes=max(0, rise_bytes - new_bytes),
                seconds=seconds,
                repeatable=self._is_repeatable(facts, args),
                channels_last="convolution" in facts.name and any(map(_is_channels_last, inputs)),
                dtype=_dtype_of((*inputs, *outputs)),
                shape=_convolution_shape(facts.name, args, result) if "convolution" in facts.name else (),
                opaque=any(map(is_opaque, (*inputs, *outputs))),
                given=self._take_given(read, born),
            )
        )
        if self._watched:
            self._look_at_holders()

    def begin_op(self) -> None:
        """An op begins that asks for saved values and lets go of them before it is over; `op` tells of it then.

        Until it is over, it has them.
        """
        self._begun = True

    def open_op(self, facts: OpFacts, inputs: Sequence[torch.Tensor], module: torch.nn.Module) -> int:
        """An op begins that saves what it makes before it is over; its number, for `close_op`.

        It is all that `module` does. What is seen first meanwhile it has made.
        """
        number = len(self._ops)
        self._modules.enter(module)
        self.op(None, facts, (), {}, inputs, (), None)
        self._opened = {}
        return number

    def close_op(
        self,
        number: int,
        outputs: Sequence[torch.Tensor],
        *,
        rise_bytes: int,
        seconds: float,
        repeatable: bool = False,
    ) -> None:
        """It is over. `repeatable` says that it makes the same once more when it runs again."""
        for tensor in outputs:
            record = self._ledger.see(tensor)
            if record is not None:
                self._value_of(record)
        assert self._opened is not None
        made, self._opened = self._opened, None
        self._modules.leave()
        new_bytes = sum(self._values[index].nbytes for index in made)
        self._ops[number] = replace(
            self._ops[number],
            outputs=tuple(made),
            workspace_bytes=max(0, rise_bytes - new_bytes),
            seconds=seconds,
            repeatable=repeatable,
        )
        if self._watched:
            self._look_at_holders()

    def _is_repeatable(self, facts: OpFacts, args: Sequence[Any]) -> bool:
        """Whether the op gives the same outputs when it runs again, perhaps on the backward pass's thread."""
        if 0 <= facts.dice_at < len(args) and args[facts.dice_at] is not None:
            return False
        if facts.draws and self._ledger.device_type not in ("cpu", "cuda"):
            return False
        # With `benchmark` each thread takes the algorithm that was fastest when it looked.
        tries_out = self._ledger.device_type == "cuda" and torch.backends.cudnn.benchmark
        return facts.is_repeatable and not (tries_out and "convolution" in facts.name)

    def _judge_blanks(
        self, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any], read: Iterable[int]
    ) -> None:
        """What lay in memory before does not matter where the first op that wants it overwrites all of it."""
        if not self._blank or facts.is_view:
            return
        if facts.overwrites:
            for tensor in written_tensors(facts, args, kwargs):
                record = self._ledger.see(tensor)
                if record is not None and nbytes_of(tensor) == record.nbytes:
                    maker = self._blank.pop(self._value_of(record), None)
                    if maker is not None:
                        self._ops[maker] = replace(self._ops[maker], repeatable=True)
        for value in read:
            self._blank.pop(value, None)

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, reads_by_ops: bool) -> None:
        """Python code calls one of PyTorch's functions: what it gives has to be there.

        At least at once; and until the function has `returned`, unless it reads that `by_ops`.
        """
        records = map(self._ledger.see, tensors_within((args, kwargs)))
        given = [record.serial for record in records if record is not None]
        self._just_given += given
        self._given.append([] if reads_by_ops else given)

    def returned(self) -> None:
        """The innermost function that runs is over."""
        self._given.pop()

    def _take_given(self, read: Mapping[int, None], born: Mapping[int, None]) -> tuple[int, ...]:
        """What the functions around an op were given, as far as it is known and not the op's own."""
        serials = dict.fromkeys(chain(self._just_given, *self._given))
        self._just_given.clear()
        values = (self._current.get(serial) for serial in serials)
        return tuple(value for value in values if value is not None and value not in read and value not in born)

    def packed(self, record: StorageRecord | None, nbytes: int) -> int:
        """Autograd saved a window of `nbytes` on a storage; the number of the saved tensor is returned."""
        now = len(self._ops)
        index = len(self._saved)
        if record is None:  # not on the device: a tick, but nothing to manage
            self._values.append(_Value(0, 0, 0, Kind.INPUT, -1))
            value = len(self._values) - 1
        else:
            value = self._value_of(record)
            self._blank.pop(value, None)
            if self._values[value].held < 0 and self._values[value].kind in _LET_GO:
                self._watched[record.serial] = record
        self._values[value].handles[index] = None
        self._saved.append(_Saved(value, nbytes, self._modules.current, now, []))
        self._ticks.append(Tick(Event.PACK, index, now))
        return index

    def unpacked(self, index: int) -> None:
        """Autograd asks for saved tensor `index` back."""
        saved = self._saved[index]
        saved.unpacked.append(len(self._ops))
        self._backward_module = saved.module
        node = torch._C._current_autograd_node()
        if node is not None:
            saved.node = node.name()
        self._ticks.append(Tick(Event.UNPACK, index, len(self._ops)))

    def released(self, index: int) -> None:
        """Autograd let go of saved tensor `index`."""
        now = len(self._ops) + self._begun
        self._saved[index].released = now
        value = self._values[self._saved[index].value]
        value.handles.pop(index, None)
        if not value.handles and not value.present and value.death < 0:
            value.death = now

    def died(self, record: StorageRecord) -> None:
        """A storage is gone: freed, or sent away while saved tensors still want its contents."""
        self._watched.pop(record.serial, None)
        index = self._current.pop(record.serial, None)
        if index is None and record.serial <= self._newest_before:
            # What the program kept of an earlier step (outputs, a batch) until it had the next one.
            index = self._new_value(record, 0, Kind.INPUT, -1)
            del self._current[record.serial]
        if index is None:
            return
        value, now = self._values[index], len(self._ops) + self._begun
        value.present = False
        if value.held < 0:
            value.held = now
        if not value.handles:
            value.death = now

    def came_back(self, index: int, record: StorageRecord) -> None:
        """The contents of saved tensor `index` are in a new storage."""
        value = self._saved[index].value
        self._current[record.serial] = value
        self._values[value].present = True

    def set_times(self, seconds: Sequence[float]) -> None:
        """The times of all ops so far, in seconds, where they were not known as the ops ran."""
        self._ops = [replace(op, seconds=taken) for op, taken in zip(self._ops, seconds, strict=True)]

    def add_beside(self, nbytes: Sequence[int]) -> None:
        """What was allocated beside tensors, in bytes, as each of all ops so far began: it counts as workspace.

        An allocator rounds blocks up; most is lost so where most values are alive.
        """
        self._ops = [
            replace(op, workspace_bytes=op.workspace_bytes + beside)
            for op, beside in zip(self._ops, nbytes, strict=True)
        ]

    def finish(self, kinds: Mapping[int, Kind], device: str, *, measured: bool) -> Trace:
        """The trace. `kinds` tells what the storages alive now are, by serial number."""
        end = len(self._ops)
        for serial, kind in kinds.items():
            index = self._current.get(serial)
            if index is not None and self._values[index].kind in (Kind.TEMPORARY, Kind.INPUT):
                self._values[index].kind = kind
        shared = self._shared_gradients(kinds)
        for value in self._values:
            if value.storage in shared:
                value.kind = Kind.SHARED
        for saved in self._saved:
            value = self._values[saved.value]
            if value.kind is Kind.TEMPORARY:
                value.kind = Kind.ACTIVATION
        return Trace(
            ops=tuple(self._ops),
            values=tuple(self._dated(value, end) for value in self._values),
            saved=tuple(
                Saved(
                    value=item.value,
                    nbytes=item.nbytes,
                    node=item.node,
                    module=item.module,
                    packed=item.packed,
                    unpacked=tuple(item.unpacked),
                    released=end if item.released < 0 else item.released,
                )
                for item in self._saved
            ),
            ticks=tuple(self._ticks),
            device=device,
            measured=measured,
            torch_version=str(torch.__version__),
        )

    def _shared_gradients(self, kinds: Mapping[int, Kind]) -> set[int]:
        """Storages that gradients were written to and that something else has as well, by serial number.

        Where `DistributedDataParallel` collects gradients: it may be sending them while the step goes on. `kinds` is
        what the storages alive now are.
        """
        shared = set()
        for record in self._ledger.alive():
            index = self._current.get(record.serial)
            storage = record.storage()  # counted below
            if index is None or storage is None or self._values[index].kind is not Kind.GRADIENT:
                continue
            if record.serial not in kinds or record.other_holders() > 1:
                shared.add(record.serial)
        return shared

    @staticmethod
    def _dated(value: _Value, end: int) -> Value:
        death = end if value.death < 0 else value.death
        held = death if value.held < 0 else min(value.held, death)
        return Value(
            storage=value.storage,
            version=value.version,
            nbytes=value.nbytes,
            kind=value.kind,
            birth=value.birth,
            held=held,
            death=death,
            varies=value.varies,
        )

    def _value_of(self, record: StorageRecord) -> int:
        index = self._current.get(record.serial)
        if index is None and self._opened is not None and record.serial not in self._kinds:
            index = self._new_value(record, 0, Kind.TEMPORARY, len(self._ops) - 1)
            self._opened[index] = None
        elif index is None:  # no op made it: it was there before the step, or came from outside
            index = self._new_value(record, 0, self._kinds.get(record.serial, Kind.INPUT), -1)
        return index

    def _new_value(self, record: StorageRecord, version: int, kind: Kind, birth: int) -> int:
        index = len(self._values)
        self._values.append(_Value(record.serial, version, record.nbytes, kind, birth))
        self._current[record.serial] = index
        return index

    def _next_version(self, record: StorageRecord, now: int) -> int:
        index = self._current.get(record.serial)
        if index is None:
            return self._value_of(record)
        value = self._values[index]
        value.death = now
        value.present = False
        self._watched.pop(record.serial, None)
        index = self._new_value(record, value.version + 1, value.kind, now)
        changed = self._values[index]
        changed.varies = value.varies
        # What autograd saved of it is in the same memory, and is wanted as that is when it is asked for: a write that
        # counts for it ends in an error then, others are to other parts (chunks) or are meant to be seen (`data`).
        changed.handles, value.handles = value.handles, {}
        for saved in changed.handles:
            self._saved[saved].value = index
        if changed.handles and changed.kind in _LET_GO:
            self._watched[record.serial] = record
        return index

    def _look_at_holders(self) -> None:
        """Date the moment at which only saved tensors hold a value: the plain step's lifetime depends on it."""
        now = len(self._ops)
        for _ in range(min(len(self._watched), _LOOKS_PER_OP)):
            serial, record = self._watched.popitem(last=False)
            storage = record.storage()
            if storage is not None and record.other_holders() > 0:
                self._watched[serial] = record  # to the end of the queue
                continue
            index = self._current.get(serial)
            if index is not None and self._values[index].held < 0:
                self._values[index].held = now


class ModuleNames:
    """Which module runs, by name.

    The interpreter's stack tells. Hooks would go along where the program copies or saves a module meanwhile, and a
    compiler would look into them.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._names: dict[int, str] = {}
        for model in models:
            for name, module in model.named_modules():
                self._names.setdefault(id(module), name)
        self._entered: list[str] = []

    @property
    def current(self) -> str:
        """The innermost module that runs, "" outside of any."""
        if self._entered:
            return self._entered[-1]
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CALL:
                name = self._names.get(id(frame.f_locals["self"]))
                if name is not None:
                    return name
            frame = frame.f_back
        return ""

    def enter(self, module: torch.nn.Module) -> None:
        """A module begins to run, and what it calls is its own."""
        self._entered.append(self._names.get(id(module), self.current))

    def leave(self) -> None:
        """It has run."""
        self._entered.pop()


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """FLOPs by PyTorch's own formulas; 0 for ops that it has none for (they are bound by memory)."""
    formula = flop_registry.get(getattr(func, "_overloadpacket", func))
    if formula is None:
        return 0
    return int(formula(*args, **kwargs, out_val=result))


def _convolution_shape(name: str, args: Sequence[Any], result: Any) -> tuple[int, ...]:
    """The numbers of a convolution over images; none for other calls. Both ops take all their arguments by position.

    A transposed convolution is left out: what it works out forward is another one's gradient.
    """
    if name == "aten.convolution.default" and len(args) == 9:
        images, weight, _, stride, _, dilation, transposed, _, groups = args
        done, passes = result, FORWARD
    elif name == "aten.convolution_backward.default" and len(args) == 11:
        done, images, weight, _, stride, _, dilation, transposed, _, groups, wanted = args
        passes = DATA_GRADIENT * wanted[0] + WEIGHT_GRADIENT * wanted[1]
    else:
        return ()
    if transposed or not passes:
        return ()
    return convolution_shape(images.shape, weight.shape, done.shape, stride, dilation, groups, passes)


def _dtype_of(tensors: Iterable[torch.Tensor]) -> str:
    """The dtype that an op calculates in: that of the first floating-point tensor which it reads or makes."""
    found = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    return str(found).removeprefix("torch.")


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether its strides say so; what is contiguous in both orders (1 x 1 kernels) is not."""
    return (
        tensor.dim() == 4
        and tensor.layout is torch.strided
        and tensor.is_contiguous(memory_format=torch.channels_last)
        and not tensor.is_contiguous()
    )
