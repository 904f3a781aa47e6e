"""The vocabulary of a recorded step: plain records without torch, which planners and reports exchange.

Time in a trace is counted in ops: "at op i" means just before op i runs, and a value that is born at op i
is alive while op i runs. `len(trace.ops)` is the end of the step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, StrEnum, auto
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Any

from outgrow.errors import TraceMismatch
from outgrow.tracing.convolution import is_convolution_shape

FORMAT = "outgrow-trace-7"
COMPILED_OP = "outgrow.compiled"  # the name of a call of a module that torch.compile compiled


class Phase(StrEnum):
    """The part of the step that an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Kind(StrEnum):
    """What a value is to the training, which says who may move it.

    `SHARED` is a parameter, a gradient or optimizer state whose memory something else has as well: a numpy array, a
    view, a flat buffer of many.
    """

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer state"
    SHARED = "shared state"
    INPUT = "input"
    ACTIVATION = "saved"
    TEMPORARY = "temporary"

    @property
    def lasts(self) -> bool:
        """Whether it is there for longer than a step, and no larger with a larger batch."""
        return self not in _OF_A_STEP


_OF_A_STEP = frozenset({Kind.INPUT, Kind.ACTIVATION, Kind.TEMPORARY})


class Fit(Enum):
    """How the tensors that a step saves compare with those of a trace: training state is as large, and the others?"""

    EXACT = auto()
    SMALLER = auto()  # none is larger
    OTHER = auto()


class Event(StrEnum):
    """The two kinds of tick of the runtime's clock."""

    PACK = "pack"
    UNPACK = "unpack"


@dataclass(frozen=True, slots=True)
class Op:
    """One ATen operator call.

    `moved_bytes` are read plus written; `workspace_bytes` is what the op holds, at its worst moment, beyond
    what was alive before it and the outputs that it leaves. `seconds` is 0.0 where no clock ran. `repeatable` says
    that the op, run again on the same inputs, may be expected to give the same outputs as far as anybody reads them:
    `empty` is where another op overwrites all of its result at once. An op that only asks an argument for its shape
    does not have it among its `inputs`. `channels_last` says that a convolution finds its images or its weight in
    that order, which decides what it rearranges. `dtype` is what it calculates in ("float32"). `shape` has the
    numbers of a `Convolution`, where the op is one over images; they say which algorithms there are for it. `opaque`
    says that it reads or makes tensors that do not show all of their memory, as sparse ones. `given` are values that
    it does not read but that the function which it is part of may, unseen: Python code called that with them.
    """

    name: str
    phase: Phase
    module: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int
    moved_bytes: int
    workspace_bytes: int
    seconds: float
    repeatable: bool
    channels_last: bool = False
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    opaque: bool = False
    given: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Value:
    """The contents of one storage between two writes to it.

    `birth` is the op that makes it, -1 if it was there before the step; `death` the first op at which its
    memory is free (or holds the next version), `len(ops)` if it outlives the step. `held` is the first op
    from which on nothing but saved tensors holds it: before that, letting go of it frees no memory. `varies`: data
    may give it another size in the next step.
    """

    storage: int
    version: int
    nbytes: int
    kind: Kind
    birth: int
    held: int
    death: int
    varies: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """One saved tensor: a window on a value that autograd packs in forward and unpacks in backward.

    Of a storage that is written to after that it is the value that lies there when it is unpacked, as plain PyTorch
    finds it then (or raises an error). So it may be packed before its value is born.

    `node` is the backward node that unpacks it ("ConvolutionBackward0"), empty if none did. `unpacked` has an
    op for each time that it was unpacked; `released` is the op at which autograd let go of it.
    """

    value: int
    nbytes: int
    node: str
    module: str
    packed: int
    unpacked: tuple[int, ...]
    released: int


@dataclass(frozen=True, slots=True)
class Tick:
    """One call of the clock: saved tensor `saved` is packed or unpacked at op `op`."""

    event: Event
    saved: int
    op: int


@dataclass(frozen=True)
class Trace:
    """The record of one step.

    `measured` says that op seconds and workspaces were measured on a real step; else they are estimates.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    saved: tuple[Saved, ...]
    ticks: tuple[Tick, ...]
    device: str
    measured: bool
    torch_version: str

    @property
    def seconds(self) -> float:
        """Time of the plain step, in seconds."""
        return sum(op.seconds for op in self.ops)

    def resident_bytes(self, at: int) -> int:
        """Bytes of the values that are alive at op `at` in a plain step; -1 asks for before the step."""
        return sum(value.nbytes for value in self.values if value.birth <= at < value.death)

    @cached_property
    def bytes_before(self) -> int:
        """Bytes of the values that are there before the step."""
        return self.resident_bytes(-1)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the training state that is there before the step: as much with any batch."""
        return sum(value.nbytes for value in self.values if value.birth < 0 and value.kind.lasts)

    @cached_property
    def made_before_saving_bytes(self) -> int:
        """The most bytes that the step has made before it saves a tensor, of what it still holds and never saves."""
        first = self.saved[0].packed if self.saved else len(self.ops)
        change = [0] * (first + 1)
        saved = {item.value for item in self.saved}
        for index, value in enumerate(self.values):
            if 0 <= value.birth < first and index not in saved:
                change[value.birth] += value.nbytes
                change[min(value.death, first)] -= value.nbytes
        return max(accumulate(change))

    @cached_property
    def op_names(self) -> tuple[str, ...]:
        """The names of its ops, in order: what it has in common with the same step in other sizes."""
        return tuple(op.name for op in self.ops)

    @cached_property
    def packs(self) -> tuple[int, ...]:
        """Bytes of each saved tensor, in order; -1 for those whose size depends on data."""
        return tuple(-1 if self.values[saved.value].varies else saved.nbytes for saved in self.saved)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes of all saved tensors together."""
        return sum(saved.nbytes for saved in self.saved)

    @cached_property
    def saved_first(self) -> int:
        """How many tensors are saved before the first is wanted back."""
        is_pack = (tick.event is Event.PACK for tick in self.ticks)
        return sum(1 for _ in takewhile(bool, is_pack))

    @cached_property
    def saves_whole_state(self) -> tuple[bool, ...]:
        """Of each saved tensor, whether it is a whole parameter or the like, which is as large with any batch."""
        values = ((saved, self.values[saved.value]) for saved in self.saved)
        return tuple(
            value.kind.lasts and value.kind is not Kind.BUFFER and saved.nbytes == value.nbytes
            for saved, value in values
        )

    def fit_of(self, packs: Sequence[int]) -> Fit | None:
        """How a step compares that begins by saving tensors of so many bytes; None if it is another one."""
        if len(packs) > len(self.saved):
            return None
        fit = Fit.EXACT
        for nbytes, own, is_whole in zip(packs, self.packs, self.saves_whole_state, strict=False):
            if own in (nbytes, -1):
                continue
            if is_whole:
                return None
            fit = Fit.OTHER if nbytes > own or fit is Fit.OTHER else Fit.SMALLER
        return fit

    @cached_property
    def varies(self) -> bool:
        """Whether data decides how large anything is: another such step may need more."""
        return any(value.varies for value in self.values)

    @cached_property
    def unsaved_input_bytes(self) -> int:
        """Bytes of what comes from outside of the step, is no training state, and nothing saves."""
        saved = {item.value for item in self.saved}
        return sum(
            value.nbytes
            for index, value in enumerate(self.values)
            if value.birth < 0 and value.kind is Kind.INPUT and index not in saved
        )

    @property
    def first_saves(self) -> list[int]:
        """For each saved tensor the number of the first one that has the same value."""
        first: dict[int, int] = {}
        return [first.setdefault(saved.value, number) for number, saved in enumerate(self.saved)]

    @cached_property
    def lasting_storages(self) -> dict[tuple[Kind, int], tuple[int, ...]]:
        """The numbers of the storages that were there before the step, in order, by their kind and bytes."""
        found: dict[tuple[Kind, int], list[int]] = {}
        for value in self.values:
            if value.birth < 0:
                found.setdefault((value.kind, value.nbytes), []).append(value.storage)
        return {alike: tuple(sorted(numbers)) for alike, numbers in found.items()}

    @cached_property
    def storage_births(self) -> dict[int, int]:
        """By the number of a storage the op that makes it, -1 for what was there before the step."""
        births: dict[int, int] = {}
        for value in self.values:
            births[value.storage] = min(value.birth, births.get(value.storage, value.birth))
        return births

    def with_ops(self, ops: Sequence[Op]) -> Trace:
        """The same step with other costs."""
        if len(ops) != len(self.ops):
            raise TraceMismatch(f"{len(ops)} costs for a trace of {len(self.ops)} ops")
        return replace(self, ops=tuple(ops))

    def describe_op(self, index: int) -> str:
        """An op for people: "convolution_backward in backward of layer3.4.conv2"."""
        if not self.ops:
            return ""
        op = self.ops[index]
        name = op.name.removeprefix("aten.").removesuffix(".default")
        place = f" of {op.module}" if op.module else ""
        return f"{name} in {op.phase}{place}"

    def to_document(self) -> dict[str, Any]:
        """As plain data for JSON: one list for each field, since a trace may have 100,000 ops."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "device": self.device,
            "measured": self.measured,
            "torch_version": self.torch_version,
        }
        for name in ("ops", "values", "saved", "ticks"):
            document[name] = _columns(getattr(self, name))
        return document

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON."""
        Path(path).write_text(json.dumps(self.to_document(), separators=(",", ":")))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace that `save` wrote.

        Raises:
            TraceMismatch: the file is not a trace, or one of another format.
        """
        try:
            return cls.from_document(json.loads(Path(path).read_text()))
        except (ValueError, RecursionError) as error:
            raise TraceMismatch(f"{path} is not a trace that Outgrow wrote: {error}") from error

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Trace:
        """The reverse of `to_document`.

        Raises:
            TraceMismatch: the data is not a trace, or one of another format.
        """
        try:
            if document["format"] != FORMAT:
                raise TraceMismatch(f"format {document['format']!r}, this version reads {FORMAT!r}")
            trace = cls(
                ops=tuple(_rows(Op, document["ops"])),
                values=tuple(_rows(Value, document["values"])),
                saved=tuple(_rows(Saved, document["saved"])),
                ticks=tuple(_rows(Tick, document["ticks"])),
                device=str(document["device"]),
                measured=bool(document["measured"]),
                torch_version=str(document["torch_version"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, TraceMismatch):
                raise
            raise TraceMismatch(f"not a trace: {error!r}") from error
        trace._check_references()
        return trace

    def _check_references(self) -> None:
        """A file from somebody else may point anywhere: every number must name something that is there."""
        ops, values, saved = len(self.ops), len(self.values), len(self.saved)
        good = (
            all(0 <= index < values for op in self.ops for index in (*op.inputs, *op.outputs, *op.given))
            and all(min(op.flops, op.moved_bytes, op.workspace_bytes, op.seconds) >= 0 for op in self.ops)
            and all(not op.shape or is_convolution_shape(op.shape) for op in self.ops)
            and all(-1 <= value.birth <= ops and value.nbytes >= 0 for value in self.values)
            and all(0 <= moment <= ops for value in self.values for moment in (value.held, value.death))
            and all(0 <= item.value < values and item.nbytes >= 0 for item in self.saved)
            and all(
                0 <= moment <= ops for item in self.saved for moment in (item.packed, item.released, *item.unpacked)
            )
            and all(0 <= tick.saved < saved and 0 <= tick.op <= ops for tick in self.ticks)
            and all(a.op <= b.op for a, b in pairwise(self.ticks))
        )
        if not good:
            raise TraceMismatch("the trace refers to ops, values or saved tensors that it does not have")


def _columns(records: Sequence[Any]) -> dict[str, list[Any]]:
    if not records:
        return {}
    return {field.name: [getattr(record, field.name) for record in records] for field in fields(records[0])}


def _whole(item: Any) -> int:
    if type(item) is not int:
        raise TraceMismatch(f"{item!r} stands where a whole number belongs")
    return item


def _truth(item: Any) -> bool:
    if type(item) is not bool:
        raise TraceMismatch(f"{item!r} stands where true or false belongs")
    return item


def number_from(item: Any) -> float:
    """A number from JSON that may be a time or a count of something.

    Raises:
        TraceMismatch: it is none, below 0, or beyond all.
    """
    if type(item) not in (int, float) or not 0 <= item < math.inf:
        raise TraceMismatch(f"{item!r} stands where a number belongs")
    return float(item)


# How a field comes back from JSON, by its annotation.
_READERS: dict[str, Callable[[Any], Any]] = {
    "int": _whole,
    "bool": _truth,
    "float": number_from,
    "str": str,
    "tuple[int, ...]": lambda items: tuple([_whole(item) for item in items]),
    "Phase": Phase,
    "Kind": Kind,
    "Event": Event,
}


def _rows(cls: type[Any], columns: Mapping[str, list[Any]]) -> list[Any]:
    if not columns:
        return []
    readers = [_READERS[str(field.type)] for field in fields(cls)]
    lists = [columns[field.name] for field in fields(cls)]
    if len({len(column) for column in lists}) != 1:
        raise TraceMismatch(f"the columns of {cls.__name__} have different lengths")
    return [cls(*(read(item) for read, item in zip(readers, row, strict=True))) for row in zip(*lists, strict=True)]
