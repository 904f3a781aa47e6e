"""The layers of the backward pass, as policies that work layer by layer see them."""

from __future__ import annotations

from dataclasses import dataclass

from outgrow.planning.plan import Offload
from outgrow.planning.problem import Candidate, Problem
from outgrow.tracing.ir import Event


@dataclass(frozen=True, slots=True)
class Layer:
    """One backward node: the tick at which it starts, whether it is a convolution, and what it unpacks."""

    tick: int
    convolution: bool
    values: tuple[int, ...]


def backward_layers(problem: Problem) -> list[Layer]:
    """Backward nodes in the order in which they run; consecutive unpacks of one kind of node at one op are one."""
    trace = problem.trace
    layers: list[Layer] = []
    key: tuple[int, str] | None = None
    values: list[int] = []
    start = 0
    for number, tick in enumerate(trace.ticks):
        if tick.event is not Event.UNPACK:
            continue
        saved = trace.saved[tick.saved]
        if (tick.op, saved.node) != key:
            if key is not None:
                layers.append(Layer(start, is_convolution(key[1]), tuple(values)))
            key, values, start = (tick.op, saved.node), [], number
        values.append(saved.value)
    if key is not None:
        layers.append(Layer(start, is_convolution(key[1]), tuple(values)))
    return layers


def is_convolution(node: str) -> bool:
    """Whether a backward node is a convolution's, by its name."""
    return "Convolution" in node


def offload_with_its_layer(problem: Problem, item: Candidate, in_tick: int) -> Offload:
    """The value leaves when it was saved for the last time, and the device waits for that when the layer is over.

    That is when its input is held by nobody but autograd. The copy back starts at `in_tick`; -1 waits for who asks.
    """
    over = max(problem.first_tick_at(item.held), item.last_pack)
    last = min(item.first_unpack, len(problem.trace.ticks)) - 1
    return Offload(item.value, item.last_pack, min(over, last), in_tick, offset=0)
