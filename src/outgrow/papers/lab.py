"""What the papers' figures are worked out with: fake traces of their networks, and plans on their GPUs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import outgrow
from outgrow.cost.hardware import Hardware
from outgrow.cost.profiles import find_hardware
from outgrow.cost.workspaces import Workspace
from outgrow.networks import Network, find
from outgrow.papers.figure import Row, Unit
from outgrow.papers.lean import lean
from outgrow.papers.trial import Measured, Measurer, Trial
from outgrow.planning.floor import least_budget
from outgrow.planning.plan import Plan
from outgrow.planning.problem import Problem
from outgrow.planning.simulate import Prediction
from outgrow.planning.workspaces import costed
from outgrow.tracing.ir import Kind, Trace
from outgrow.tracing.liveness import PlainProfile, plain_profile
from outgrow.tuning.limits import Limit, largest, least_budget_of
from outgrow.tuning.steps import synthetic_step

_KEPT_TRACES = 3
_STATE = frozenset({Kind.PARAMETER, Kind.BUFFER, Kind.GRADIENT, Kind.OPTIMIZER, Kind.SHARED})

TWELVE_GB = 12 << 30  # what the papers call 12 GB: a K40c or Titan X has 12 GiB


class Lab:
    """Works out what a figure needs; keeps the last few traces, as figures share networks."""

    def __init__(
        self,
        on_step: Callable[[str], None] = lambda what: None,
        *,
        workspace: Workspace | None = None,
        measurer: Measurer | None = None,
    ) -> None:
        """`on_step` is told in words what is being worked out.

        `workspace` is what convolutions hold where a figure does not say that itself. `measurer` trains for real,
        where there is a device for it; without one nothing is measured.
        """
        self._on_step = on_step
        self._workspace = workspace
        self._measurer = measurer
        self._floors: dict[tuple[str, int, str], dict[int, int]] = {}
        self._traces: OrderedDict[tuple[str, int, float], Trace] = OrderedDict()

    def trace(self, name: str, batch: int, *, momentum: float = 0.0) -> Trace:
        """A fake trace of one step with SGD; without momentum, as the papers count no momentum buffers."""
        key = (name, batch, momentum)
        if key not in self._traces:
            self._on_step(f"tracing {name}, batch {batch}")
            self._traces[key] = trace_step(find(name), batch, momentum)
            if len(self._traces) > _KEPT_TRACES:
                self._traces.popitem(last=False)
        self._traces.move_to_end(key)
        return self._traces[key]

    def plain(self, trace: Trace, hardware: Hardware) -> PlainProfile:
        """The plain step."""
        return plain_profile(costed(trace, hardware, self._workspace))

    def run(
        self,
        trace: Trace,
        hardware: Hardware,
        budget_bytes: int,
        policy: str,
        workspace: Workspace | None = None,
    ) -> Prediction:
        """A step under a budget, simulated."""
        self._on_step(f"planning with {policy}")
        return self._plan(trace, hardware, budget_bytes, policy, workspace or self._workspace).simulate()

    @staticmethod
    def _plan(trace: Trace, hardware: Hardware, budget_bytes: int, policy: str, workspace: Workspace | None) -> Plan:
        return outgrow.plan(trace, budget=budget_bytes, policy=policy, hardware=hardware, workspace=workspace)

    def measured(
        self, name: str, batch: int, budget_bytes: int, *, momentum: float = 0.0, against_plain: bool = False
    ) -> Measured | None:
        """What `auto` measures on the device that is here, with the budget as the wall; None where there is none.

        None as well where the network does not train there within the budget; `against_plain` times plain steps too.
        """
        if self._measurer is None:
            return None
        self._on_step(f"training {name}, batch {batch}")
        return self._measurer(Trial(name, batch, budget_bytes, momentum, against_plain))

    def run_lean(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Prediction:
        """A step under `auto` that also sends away what can leave for nothing, simulated."""
        self._on_step("planning with auto")
        return lean(self._plan(trace, hardware, budget_bytes, "auto", self._workspace)).simulate()

    def least(self, trace: Trace, hardware: Hardware, policy: str) -> Prediction:
        """A step under the least budget that the policy holds."""
        self._on_step(f"looking for the least budget of {policy}")
        return least_budget_of(trace, hardware, policy, self._workspace)

    def floor_bytes(self, trace: Trace, hardware: Hardware, workspace: Workspace | None = None) -> int:
        """The least budget that any plan holds."""
        return least_budget(Problem(costed(trace, hardware, workspace or self._workspace), hardware, 1)).bytes

    def largest_batch(self, name: str, hardware: Hardware, budget_bytes: int, policy: str) -> Limit | None:
        """The largest batch that fits."""
        return largest(
            lambda batch: trace_step(find(name), batch, 0.0),
            budget_bytes=budget_bytes,
            hardware=hardware,
            policy=policy,
            floors=self._floors.setdefault((name, 0, hardware.name), {}),
            workspace=self._workspace,
            on_try=lambda batch: self._on_step(f"{name} under {policy}: batch {batch}?"),
        )

    def deepest_resnet(self, batch: int, hardware: Hardware, budget_bytes: int, policy: str) -> Limit | None:
        """The deepest ResNet that fits, by SuperNeurons' rule; `size` is its depth in layers."""
        found = largest(
            lambda blocks: trace_step(find(f"resnet-{resnet_depth(blocks)}"), batch, 0.0),
            budget_bytes=budget_bytes,
            hardware=hardware,
            policy=policy,
            floors=self._floors.setdefault(("resnet", batch, hardware.name), {}),
            workspace=self._workspace,
            on_try=lambda blocks: self._on_step(f"ResNet under {policy}: {resnet_depth(blocks)} layers?"),
        )
        return None if found is None else replace(found, size=resnet_depth(found.size))


def trains(
    lab: Lab,
    name: str,
    batch: int,
    device: str,
    *,
    claim: str,
    source: str,
    policy: str,
    budget_bytes: int = TWELVE_GB,
) -> Row:
    """A figure that says that a network trains on 12 GB: the peaks, and what that costs."""
    hardware = gpu(device)
    trace = lab.trace(name, batch)
    own = lab.run(trace, hardware, TWELVE_GB, policy)
    auto = lab.run(trace, hardware, TWELVE_GB, "auto")
    measured = lab.measured(name, batch, TWELVE_GB)
    return Row(
        claim=claim,
        setting=f"{name}, batch {batch}, {device}, 12 GB, plain SGD",
        unit=Unit.BYTES,
        source=source,
        policy=policy,
        plain=lab.plain(trace, hardware).peak_bytes,
        own=own.peak_bytes if own.feasible else None,
        auto=auto.peak_bytes,
        measured=None if measured is None else measured.peak_bytes,
        auto_samples_per_second=batch / auto.step_seconds,
        fits=auto.feasible,
        note=f"slower than with enough memory: {policy} {slower(own):.1%}, auto {slower(auto):.1%}",
    )


def resnet_depth(third_stage_blocks: int) -> int:
    """Depth of SuperNeurons' ResNets, which grow in their third stage alone: n1 = 6, n2 = 32, n4 = 6."""
    return 3 * (6 + 32 + third_stage_blocks + 6) + 2


def trace_step(network: Network, batch: int, momentum: float) -> Trace:
    """A fake trace of one step of a network at its own image size."""

    return outgrow.trace(lambda: synthetic_step(network, batch, momentum=momentum))


def without_state(trace: Trace) -> Trace:
    """The trace as if parameters, gradients and optimizer state took no room: what is left is the step's own."""
    values = tuple(replace(value, nbytes=0) if value.kind in _STATE else value for value in trace.values)
    return replace(trace, values=values)


def network_wide_bytes(trace: Trace) -> int:
    """What the step takes where every tensor has its memory all the time, as frameworks without liveness had it."""
    return sum({value.storage: value.nbytes for value in trace.values}.values())


def slower(prediction: Prediction) -> float:
    """By what share a step is slower than one that has all the memory it wants."""
    return prediction.step_seconds / prediction.plain_step_seconds - 1


def gpu(name: str) -> Hardware:
    """A device that a paper measured on."""
    return find_hardware(name)
