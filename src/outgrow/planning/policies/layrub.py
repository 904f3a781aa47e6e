"""Layrub (Liu et al., PPoPP 2018; TACO 2018): the footprint of a layer, not of the network.

Three things together make it follow the widest layer instead of the depth:

- *data migration*: what each layer saved leaves when the layer is over, and comes back one layer ahead of its use,
  for all layers alike. Both are hard meeting points: a layer does not begin while its neighbour's data is moving.
- *inter-layer reuse*: the few blocks that the layers share are freed when their data has left. Here that is the
  pool's letting go of a value whose copy is done.
- *intra-layer reuse*: the gradient of a layer's input takes the place of the gradient of its output, wherever the
  layer's formula allows it (`Plan.reuses`).
"""

from __future__ import annotations

from outgrow.planning.plan import Plan, make_plan
from outgrow.planning.policies.layers import backward_layers, offload_with_its_layer
from outgrow.planning.problem import Problem
from outgrow.planning.reuse import reusable_ops


class Layrub:
    """Every layer's data migrates, one layer ahead; gradients share their memory."""

    name = "layrub"

    def plan(self, problem: Problem) -> Plan:
        ahead = _one_layer_ahead(problem)
        offloads = tuple(
            offload_with_its_layer(
                problem, item, max(ahead[item.value], item.last_pack) if item.value in ahead else -1
            )
            for item in problem.candidates
        )
        return make_plan(self.name, problem, offloads, reuses=reusable_ops(problem))


def _one_layer_ahead(problem: Problem) -> dict[int, int]:
    """For each saved value the tick at which the backward layer before the first one that wants it starts.

    What the first layer of all wants comes when it is asked for.
    """
    starts: dict[int, int] = {}
    layers = backward_layers(problem)
    for earlier, layer in zip([None, *layers], layers, strict=False):
        for value in layer.values:
            starts.setdefault(value, -1 if earlier is None else earlier.tick)
    return {value: tick for value, tick in starts.items() if tick >= 0}
