"""Steps that nobody ran: traces put together by hand, as deep as a test wants them, in no time and without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outgrow.api import plan
from outgrow.cost.hardware import Hardware
from outgrow.planning.plan import Plan
from outgrow.tracing.ir import Event, Kind, Op, Phase, Saved, Tick, Trace, Value

CPU_AND_DISK = Hardware("CPU", 24 << 30, 2e11, 2e10, 1.5e9, 1e9, 1e-4, 1e-5, 5e-11, 6e-5)
_IMAGE = 4 << 20
_WEIGHT = 1 << 16
MAP_BYTES = 8 << 20


def deep_trace(layers: int, module: str = "layer{}.conv") -> Trace:
    """A chain of convolutions, each followed by a ReLU; a layer takes three milliseconds."""
    names = [module.format(number) for number in range(layers)]
    ops: list[Op] = []
    values: list[Value] = []
    saved: list[Saved] = []
    ticks: list[Tick] = []
    end = 5 * layers

    def op(name: str, phase: Phase, home: str, inputs: tuple[int, ...], outputs: tuple[int, ...], ms: float) -> None:
        workspace = 1 << 18 if name.startswith("convolution") else 0
        full = f"aten.{name}.default"
        ops.append(Op(full, phase, home, inputs, outputs, 10**8, 10**7, workspace, ms / 1e3, repeatable=True))

    def value(kind: Kind, nbytes: int, birth: int, held: int, death: int) -> int:
        values.append(Value(len(values), 0, nbytes, kind, birth, held, death))
        return len(values) - 1

    weights = [value(Kind.PARAMETER, _WEIGHT, -1, end, end) for _ in names]
    kept = [value(Kind.INPUT, _IMAGE, -1, end, end)]
    packs: list[tuple[int, int]] = []  # of each layer: what its convolution and what its ReLU save
    for number, name in enumerate(names):
        at, back = 2 * number, end - layers - 2 - 2 * number  # its convolution, and its ReLU's backward op
        made = value(Kind.TEMPORARY, _IMAGE, at, at + 2, at + 2)
        held = at + 3 if number + 1 < layers else at + 2
        result = value(Kind.ACTIVATION, _IMAGE, at + 1, held, back + 1)
        op("convolution", Phase.FORWARD, name, (kept[-1], weights[number]), (made,), 0.8)
        op("relu", Phase.FORWARD, name, (made,), (result,), 0.2)
        packs.append((len(saved), len(saved) + 1))
        saved.append(Saved(kept[-1], _IMAGE, "ConvolutionBackward0", name, at, (back + 1,), back + 2))
        saved.append(Saved(result, _IMAGE, "ReluBackward0", name, at + 1, (back,), back + 1))
        ticks += [Tick(Event.PACK, packs[-1][0], at + 1), Tick(Event.PACK, packs[-1][1], at + 2)]
        kept.append(result)
    gradient = kept[-1]
    for number, name in reversed(list(enumerate(names))):
        at = len(ops)
        through = value(Kind.TEMPORARY, _IMAGE, at, at + 2, at + 2)
        ticks += [Tick(Event.UNPACK, packs[number][1], at), Tick(Event.UNPACK, packs[number][0], at + 1)]
        op("threshold_backward", Phase.BACKWARD, name, (gradient, kept[number + 1]), (through,), 0.2)
        of_weight = value(Kind.GRADIENT, _WEIGHT, at + 1, end, end)
        gradient = value(Kind.TEMPORARY, _IMAGE, at + 1, at + 3, at + 3)
        inputs = (through, kept[number], weights[number])
        op("convolution_backward", Phase.BACKWARD, name, inputs, (gradient, of_weight), 1.6)
    for number in range(layers):
        op("_foreach_add_", Phase.UPDATE, "", (weights[number],), (), 0.2)
    return Trace(tuple(ops), tuple(values), tuple(saved), tuple(ticks), "cpu", True, "2.11.0")


def deep_plan(layers: int, share: float = 0.5, policy: str = "vdnn-all", module: str = "layer{}.conv") -> Plan:
    """A plan for such a step, within a share of what its activations take."""
    trace = deep_trace(layers, module)
    state = 2 * layers * _WEIGHT
    budget = int(state + (layers + 4) * _IMAGE * share)
    return plan(trace, budget=budget, policy=policy, hardware=CPU_AND_DISK)


@dataclass(frozen=True)
class Map:
    """A value that autograd saves: made by an op, held by the program until one, and wanted back at one.

    `made_from` names the maps that a recipe makes it from; None where no recipe can. Autograd may want it once more.
    """

    birth: int
    held: int
    wanted: int
    made_from: tuple[int, ...] | None = None
    again: int | None = None

    @property
    def unpacked(self) -> tuple[int, ...]:
        return (self.wanted,) if self.again is None else (self.wanted, self.again)


def trace_of_maps(maps: Sequence[Map], seconds: Sequence[float], workspaces: Mapping[int, int]) -> Trace:
    """A step of as many ops as there are seconds, with workspaces by op; maps have `MAP_BYTES` each."""
    backward = min(item.wanted for item in maps)
    values = tuple(
        Value(number, 0, MAP_BYTES, Kind.ACTIVATION, item.birth, item.held, item.unpacked[-1] + 1)
        for number, item in enumerate(maps)
    )
    at_birth = {item.birth: item for item in maps}
    ops = tuple(
        Op(
            "aten.mul.Tensor",
            Phase.FORWARD if number < backward else Phase.BACKWARD,
            "",
            (at_birth[number].made_from or ()) if number in at_birth else (),
            tuple(value for value, item in enumerate(maps) if item.birth == number),
            0,
            0,
            workspaces.get(number, 0),
            duration,
            repeatable=number in at_birth and at_birth[number].made_from is not None,
        )
        for number, duration in enumerate(seconds)
    )
    saved = tuple(
        Saved(number, MAP_BYTES, "MulBackward0", "", item.birth, (wanted,), wanted + 1)
        for number, item in enumerate(maps)
        for wanted in item.unpacked
    )
    ticks = [Tick(Event.PACK, number, maps[item.value].birth + 1) for number, item in enumerate(saved)]
    ticks += [Tick(Event.UNPACK, number, item.unpacked[0]) for number, item in enumerate(saved)]
    return Trace(ops, values, saved, tuple(sorted(ticks, key=lambda tick: tick.op)), "cpu", True, "2.11.0")
