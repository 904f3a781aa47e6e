"""A plan: for every saved value a decision, with the ticks at which its copies start and must be finished."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outgrow.cost.hardware import Hardware
from outgrow.errors import InvalidPlan, TraceMismatch
from outgrow.planning.problem import Problem
from outgrow.tracing.ir import Trace, number_from
from outgrow.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outgrow.planning.simulate import Prediction

FORMAT = "outgrow-plan-3"


class Decision(StrEnum):
    """What may happen to a saved value."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


class Replay(StrEnum):
    """What becomes of a value that was made anew as the source of another (SuperNeurons, section 3.4).

    `SPEED`: it stays until its own use, so that each op of a segment is run again once. `MEMORY`: it goes at once and
    is made anew for its own use, so that a segment never holds more than two of its values.
    """

    SPEED = "speed"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Offload:
    """One value leaves the device and comes back.

    Attributes:
        value: its number in the trace.
        out_tick: the tick at which the copy out starts.
        release_tick: the tick by which the value must be gone, so that the device waits if it is not; -1 lets
            it go whenever its copy is finished.
        in_tick: the tick at which the copy back starts; -1 waits until it is asked for.
        offset: where it lies in the spill file, in bytes.
    """

    value: int
    out_tick: int
    release_tick: int
    in_tick: int
    offset: int


@dataclass(frozen=True, slots=True)
class Recompute:
    """One value is dropped and made anew by its recipe when it is asked for.

    Attributes:
        value: its number in the trace.
        drop_tick: the tick at which the pool lets go of it.
        replay: what becomes of it when it was made anew for another value's sake.
    """

    value: int
    drop_tick: int
    replay: Replay = Replay.SPEED


@dataclass(frozen=True, slots=True)
class Park:
    """One value leaves the device and comes back although the program still holds it: a long skip.

    Between two uses nobody looks at it: U-Net's skips on their way down and up, a gradient that waits for its other
    half. Its storage stays where it is and is empty meanwhile.

    Attributes:
        value: its number in the trace; it need not be a saved one.
        out_tick: the tick at which the copy out starts; the memory goes when the copy is done.
        in_tick: the tick at which the copy back starts; -1 waits until an op wants it.
        offset: where it lies in the spill file, in bytes.
        remade: it is not copied but dropped, and made anew by its op; what that read stays instead.
    """

    value: int
    out_tick: int
    in_tick: int
    offset: int
    remade: bool = False


@dataclass(frozen=True)
class Plan:
    """Decisions for one step under one budget; every saved value that is not named is kept.

    `evicts` says that the pool may also send away what the plan keeps, least recently used first, when memory
    runs short (SuperNeurons' tensor cache, section 3.3.2). `reuses` are the ops, by
    number, that write their result over an input that dies with them (Layrub's intra-layer reuse).
    """

    policy: str
    problem: Problem
    offloads: tuple[Offload, ...]
    evicts: bool
    spill_bytes: int
    recomputes: tuple[Recompute, ...] = ()
    parks: tuple[Park, ...] = ()
    reuses: tuple[int, ...] = ()

    @property
    def budget_bytes(self) -> int:
        """The most that live bytes may reach."""
        return self.problem.budget_bytes

    @cached_property
    def prediction(self) -> Prediction:
        """What the simulator says of this plan."""
        from outgrow.planning.simulate import simulate  # the simulator reads plans

        return simulate(self)

    def simulate(self) -> Prediction:
        """Predict time, stall and memory of a step under this plan."""
        return self.prediction

    def simulate_within(self, seconds: float) -> Prediction | None:
        """The same; None, and that sooner, where the step does not fit the budget or takes longer than `seconds`."""
        from outgrow.planning.simulate import simulate_within  # the simulator reads plans

        if "prediction" not in vars(self):
            found = simulate_within(self, seconds)
            if found is None:
                return None
            vars(self)["prediction"] = found  # a cached property keeps it there
        return self.prediction if self.prediction.feasible and self.prediction.step_seconds <= seconds else None

    @property
    def keeps_everything(self) -> bool:
        """Whether it needs no hand on the step: everything fits as it is."""
        if self.offloads or self.recomputes or self.parks or self.reuses:
            return False
        return self.prediction.feasible and self.prediction.evicted_bytes == 0

    @property
    def needs_watch(self) -> bool:
        """Whether somebody has to see the step's ops: to move something, or as the next one may need more."""
        return not self.keeps_everything or self.problem.trace.varies

    def moves_as(self, other: Plan) -> bool:
        """Whether two plans are the same but for the times of their ops, which are set right now and then."""
        return (
            self.problem.trace.values is other.problem.trace.values
            and self.offloads is other.offloads
            and self.recomputes is other.recomputes
            and self.parks is other.parks
            and self.reuses is other.reuses
        )

    def renamed(self, policy: str) -> Plan:
        """The same as another policy's; what is predicted for it is known already, if it is for this one."""
        other = replace(self, policy=policy)
        self._tell_prediction(other)
        return other

    @cached_property
    def expected_peak_bytes(self) -> int:
        """The peak that a session tells beforehand: that of the prediction, or more where copies may be late."""
        from outgrow.planning.simulate import peak_if_late  # the simulator reads plans

        return peak_if_late(self)

    @property
    def least_budget_bytes(self) -> int:
        """The least budget that any plan can hold for this trace, in bytes."""
        from outgrow.planning.floor import least_budget

        return least_budget(self.problem).bytes

    def decisions_summary(self) -> dict[str, dict[str, int]]:
        """Count and bytes of the saved values by decision."""
        trace = self.problem.trace
        sizes = {saved.value: trace.values[saved.value].nbytes for saved in trace.saved}
        decisions = dict.fromkeys((item.value for item in self.offloads), Decision.OFFLOAD)
        decisions |= dict.fromkeys((item.value for item in self.recomputes), Decision.RECOMPUTE)
        table = {decision.value: {"count": 0, "bytes": 0} for decision in Decision}
        for value, nbytes in sizes.items():
            row = table[decisions.get(value, Decision.KEEP).value]
            row["count"] += 1
            row["bytes"] += nbytes
        return table

    def laid_out(self) -> Plan:
        """The same plan with each value in a place of its own in the file, whatever places it came with."""
        other = make_plan(
            self.policy,
            self.problem,
            self.offloads,
            self.recomputes,
            parks=self.parks,
            reuses=self.reuses,
            evicts=self.evicts,
        )
        self._tell_prediction(other)
        return other

    def _tell_prediction(self, other: Plan) -> None:
        """What is predicted for this one is for that one, too."""
        if "prediction" in vars(self):
            vars(other)["prediction"] = self.prediction

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, with its trace and device, so that it can be simulated anywhere."""
        document = {
            "format": FORMAT,
            "policy": self.policy,
            "budget_bytes": self.problem.budget_bytes,
            "base_bytes": self.problem.base_bytes,
            "least_moved_bytes": self.problem.least_moved_bytes,
            "plain_seconds": self.problem.plain_seconds,
            "evicts": self.evicts,
            "spill_bytes": self.spill_bytes,
            "offloads": [asdict(offload) for offload in self.offloads],
            "recomputes": [asdict(item) for item in self.recomputes],
            "parks": [asdict(item) for item in self.parks],
            "reuses": list(self.reuses),
            "hardware": self.problem.hardware.to_document(),
            "trace": self.problem.trace.to_document(),
        }
        Path(path).write_text(json.dumps(document, separators=(",", ":")))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            TraceMismatch: the file is not a plan, or one of another format.
        """
        try:
            document: Mapping[str, Any] = json.loads(Path(path).read_text())
            if document["format"] != FORMAT:
                raise TraceMismatch(f"{path} has format {document['format']!r}, this version reads {FORMAT!r}")
            problem = Problem(
                trace=Trace.from_document(document["trace"]),
                hardware=Hardware.from_document(document["hardware"]),
                budget_bytes=int(document["budget_bytes"]),
                base_bytes=int(document["base_bytes"]),
                least_moved_bytes=int(document["least_moved_bytes"]),
                plain_seconds=None if document["plain_seconds"] is None else number_from(document["plain_seconds"]),
            )
            plan = cls(
                policy=str(document["policy"]),
                problem=problem,
                offloads=tuple(Offload(**item) for item in document["offloads"]),
                evicts=bool(document["evicts"]),
                spill_bytes=int(document["spill_bytes"]),
                recomputes=tuple(_recompute(item) for item in document["recomputes"]),
                parks=tuple(Park(**item) for item in document["parks"]),
                reuses=tuple(document["reuses"]),
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, TraceMismatch):
                raise
            raise TraceMismatch(f"{path} is not a plan that Outgrow wrote: {error!r}") from error
        from outgrow.planning.check import fault_of  # who checks plans reads them

        places = [item.offset for item in plan.offloads] + [item.offset for item in plan.parks]
        if not all(type(offset) is int and offset >= 0 for offset in places):
            raise TraceMismatch(f"{path} has places on the disk that are none")
        fault = fault_of(plan)
        if fault:
            raise TraceMismatch(f"{path} {fault}")
        return plan.laid_out()

    def __str__(self) -> str:
        prediction = self.prediction
        trace = self.problem.trace
        rows = [
            ("policy", self.policy),
            ("budget", format_bytes(self.budget_bytes)),
            (
                "predicted peak",
                f"{format_bytes(prediction.peak_bytes)} at {trace.describe_op(prediction.peak_op)}",
            ),
            ("predicted step", format_seconds(prediction.step_seconds)),
            ("plain step", format_seconds(prediction.plain_step_seconds)),
            ("stall", format_seconds(prediction.stall_seconds)),
            ("recomputing", format_seconds(prediction.recompute_seconds)),
        ]
        for name, row in self.decisions_summary().items():
            rows.append((name, f"{row['count']} values, {format_bytes(row['bytes'])}"))
        if not prediction.feasible:
            rows.append(("does not fit", f"the least budget is {format_bytes(self.least_budget_bytes)}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def make_plan(
    policy: str,
    problem: Problem,
    offloads: tuple[Offload, ...],
    recomputes: tuple[Recompute, ...] = (),
    *,
    parks: tuple[Park, ...] = (),
    reuses: tuple[int, ...] = (),
    evicts: bool = True,
) -> Plan:
    """A plan with each value in a place of its own in the spill file.

    Stays in the file nest almost perfectly (first out is last back), so sharing places between values would save
    little room; distinct places make every rewrite of a step land on blocks that exist already.

    Raises:
        InvalidPlan: there is no such value.
    """
    places: dict[int, int] = {}
    end = 0
    for value in dict.fromkeys([item.value for item in offloads] + [item.value for item in parks]):
        if not 0 <= value < len(problem.trace.values):
            raise InvalidPlan(f"policy {policy!r} moves value {value}, which its trace does not have")
        places[value] = end
        end += slot_bytes(problem.trace.values[value].nbytes)
    return Plan(
        policy=policy,
        problem=problem,
        offloads=tuple(replace(item, offset=places[item.value]) for item in offloads),
        evicts=evicts,
        spill_bytes=end,
        recomputes=recomputes,
        parks=tuple(replace(item, offset=places[item.value]) for item in parks),
        reuses=reuses,
    )


def _recompute(document: Mapping[str, Any]) -> Recompute:
    return Recompute(document["value"], document["drop_tick"], Replay(document["replay"]))


SLOT_ALIGNMENT = 4096


def slot_bytes(nbytes: int) -> int:
    """Room for `nbytes` in the spill file, in whole blocks."""
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
