"""Profiles of real devices: the speeds that estimates and plans reckon with. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

from outgrow.errors import TraceMismatch


@dataclass(frozen=True, slots=True)
class Hardware:
    """Speeds of one device and of the link to its next tier.

    Attributes:
        name: what people call it.
        memory_bytes: capacity of the device, in bytes.
        flops_per_second: what a large matrix product or convolution reaches, in FLOP/s.
        memory_bandwidth: bytes per second that memory-bound ops move (read plus written).
        copy_out_bandwidth: bytes per second from the device to the next tier.
        copy_in_bandwidth: bytes per second back.
        copy_latency_seconds: fixed cost of one copy, in seconds.
        op_overhead_seconds: fixed cost of one op, in seconds.
        copy_cost_seconds_per_byte: time that a copy takes from the computation, per byte: on a CPU both share the
            cores; 0 where copies have an engine of their own.
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

    def copy_out_seconds(self, nbytes: int) -> float:
        """Time of one copy of `nbytes` to the next tier."""
        return self.copy_latency_seconds + nbytes / self.copy_out_bandwidth

    def copy_in_seconds(self, nbytes: int) -> float:
        """Time of one copy of `nbytes` from the next tier."""
        return self.copy_latency_seconds + nbytes / self.copy_in_bandwidth

    def copying_costs(self, nbytes: int) -> float:
        """Time that copies of `nbytes` take from the computation, in seconds."""
        return nbytes * self.copy_cost_seconds_per_byte

    def to_document(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Hardware:
        """The reverse of `to_document`."""
        try:
            hardware = cls(**document)
        except TypeError as error:
            raise TraceMismatch(f"not a hardware profile: {error}") from error
        for field in fields(cls):
            number = getattr(hardware, field.name)
            least = 0 if field.name == "copy_cost_seconds_per_byte" else 5e-324  # the least float above 0
            if field.name != "name" and not (type(number) in (int, float) and least <= number < inf):
                raise TraceMismatch(f"no hardware has a {field.name} of {number!r}")
        return hardware
