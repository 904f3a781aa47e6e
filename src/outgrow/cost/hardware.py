"""What a device can do: the speeds that estimates and plans reckon with. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from math import inf
from typing import Any

from outgrow.errors import TraceMismatch

# An op that is run again is taken down when it runs first and looked after as often as so many copies.
_REPLAY_HANDLING = 4


class OpClass(StrEnum):
    """Kinds of op that reach different shares of what a device could do."""

    CONVOLUTION = "convolution"
    PRODUCT = "matrix product"
    NORMALIZATION = "normalization"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Hardware:
    """Speeds of one device and of the link to its next tier.

    Attributes:
        name: what people call it.
        memory_bytes: capacity of the device, in bytes.
        flops_per_second: float32 FLOP/s, of the data sheet or as a large matrix product reaches.
        memory_bandwidth: bytes per second that memory-bound ops move (read plus written).
        copy_out_bandwidth: bytes per second from the device to the next tier.
        copy_in_bandwidth: bytes per second back.
        copy_latency_seconds: fixed cost of one copy, in seconds.
        op_overhead_seconds: fixed cost of one op, in seconds.
        copy_cost_seconds_per_byte: time that a copy takes from the computation, per byte: on a CPU both share the
            cores; 0 where copies have an engine of their own.
        handling_seconds: time that the computation waits for each copy, and for each saved tensor of what leaves, as
            the thread that trains looks after them; 0 where that runs ahead of the device.
        device_type: "cpu" or "cuda": whose kernels run, and hold workspaces.
        flops_by_dtype: FLOP/s in other dtypes ("bfloat16"); what is not there runs as fast as float32.
        efficiency: by `OpClass`, the share of the roofline that such ops reach; 1 for what is not there.
    """

    name: str
    memory_bytes: int
    flops_per_second: float
    memory_bandwidth: float
    copy_out_bandwidth: float
    copy_in_bandwidth: float
    copy_latency_seconds: float = 1e-4
    op_overhead_seconds: float = 1e-5
    copy_cost_seconds_per_byte: float = 0.0
    handling_seconds: float = 0.0
    device_type: str = "cpu"
    flops_by_dtype: Mapping[str, float] = field(default_factory=dict)
    efficiency: Mapping[str, float] = field(default_factory=dict)

    def copy_out_seconds(self, nbytes: int) -> float:
        """Time of one copy of `nbytes` to the next tier."""
        return self.copy_latency_seconds + nbytes / self.copy_out_bandwidth

    def copy_in_seconds(self, nbytes: int) -> float:
        """Time of one copy of `nbytes` from the next tier."""
        return self.copy_latency_seconds + nbytes / self.copy_in_bandwidth

    def copying_costs(self, nbytes: int) -> float:
        """Time that a copy of `nbytes` takes from the computation, in seconds."""
        return self.handling_seconds + nbytes * self.copy_cost_seconds_per_byte

    def replaying_costs(self, ops: int) -> float:
        """Time that so many ops take when they are run again, beside what they compute, in seconds."""
        return _REPLAY_HANDLING * ops * self.handling_seconds

    def roofline_seconds(self, flops: int, moved_bytes: int, dtype: str = "float32") -> float:
        """The time below which no op gets: its arithmetic or its memory traffic, whichever is slower.

        Williams, Waterman, Patterson, "Roofline" (CACM 2009).
        """
        speed = self.flops_by_dtype.get(dtype, self.flops_per_second)
        return max(flops / speed, moved_bytes / self.memory_bandwidth)

    def to_document(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Hardware:
        """The reverse of `to_document`.

        Raises:
            TraceMismatch: the data describes no hardware that there could be.
        """
        try:
            hardware = cls(**document)
        except TypeError as error:
            raise TraceMismatch(f"not a hardware profile: {error}") from error
        for each in fields(cls):
            value = getattr(hardware, each.name)
            if not _is_possible(each.name, value):
                raise TraceMismatch(f"no hardware has a {each.name} of {value!r}")
        return hardware


def _is_possible(name: str, value: object) -> bool:
    if name in ("name", "device_type"):
        return isinstance(value, str)
    if name in ("flops_by_dtype", "efficiency"):
        return isinstance(value, Mapping) and all(
            isinstance(key, str) and _is_above_zero(number) for key, number in value.items()
        )
    return _is_above_zero(value) or (
        name in ("copy_cost_seconds_per_byte", "handling_seconds") and type(value) in (int, float) and value == 0
    )


def _is_above_zero(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf
