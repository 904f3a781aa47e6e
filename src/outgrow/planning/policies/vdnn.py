"""vDNN's policies (Rhu et al., 2016, sections III-B and III-C): offload feature maps layer by layer.

A layer here is what one backward node needs. Its input leaves while the layer's forward op runs and is gone when
the layer is over, as the device waits for the copy there. On the way back each layer fetches for the nearest
earlier layer that offloaded, and looks no further than the next convolution.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from outgrow.planning.plan import Plan, make_plan
from outgrow.planning.policies.layers import backward_layers, is_convolution, offload_with_its_layer
from outgrow.planning.problem import Candidate, Problem


class VdnnAll:
    """`all`: every layer's input leaves."""

    name = "vdnn-all"

    def plan(self, problem: Problem) -> Plan:
        return _offload(self.name, problem, problem.candidates)


class VdnnConv:
    """`conv`: only what convolutions need leaves; they run long enough to hide the copy."""

    name = "vdnn-conv"

    def plan(self, problem: Problem) -> Plan:
        wanted = {saved.value for saved in problem.trace.saved if is_convolution(saved.node)}
        return _offload(self.name, problem, (item for item in problem.candidates if item.value in wanted))


class VdnnDyn:
    """`dyn`: the first of none, conv and all that fits (section III-C).

    The paper's `dyn` also chooses a convolution algorithm for each layer. Here that goes with any policy
    (`planning/workspaces.py`): this one is then run with the fastest algorithms and with those without workspace.
    """

    name = "vdnn-dyn"

    def plan(self, problem: Problem) -> Plan:
        trials = (
            lambda: make_plan(self.name, problem, ()),
            lambda: VdnnConv().plan(problem),
            lambda: VdnnAll().plan(problem),
        )
        for trial in trials:
            plan = trial()
            prediction = plan.simulate()
            if prediction.feasible and prediction.evicted_bytes == 0:
                break
        return make_plan(self.name, problem, plan.offloads)


def _offload(name: str, problem: Problem, chosen: Iterable[Candidate]) -> Plan:
    candidates = {item.value: item for item in chosen}
    back = _prefetch_ticks(problem, candidates)
    offloads = tuple(offload_with_its_layer(problem, item, back.get(item.value, -1)) for item in candidates.values())
    return make_plan(name, problem, offloads)


def _prefetch_ticks(problem: Problem, chosen: dict[int, Candidate]) -> dict[int, int]:
    """For each offloaded value the tick at which its copy back starts (section III-B, `findPrefetchLayer`)."""
    layers = backward_layers(problem)
    # The layers at which a search may end: they wait for values, or are convolutions.
    ends = [
        place for place, layer in enumerate(layers) if layer.convolution or not chosen.keys().isdisjoint(layer.values)
    ]
    asked: dict[int, int] = {}
    for place, layer in enumerate(layers):
        following = bisect_right(ends, place)
        while following < len(ends):
            earlier = layers[ends[following]]
            wanted = [value for value in earlier.values if value in chosen and value not in asked]
            for value in wanted:
                if chosen[value].last_pack < layer.tick < chosen[value].first_unpack:
                    asked[value] = layer.tick
            if wanted or earlier.convolution:
                break
            del ends[following]  # all of its values were asked for
    return asked
