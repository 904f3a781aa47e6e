"""Checkpoints every sqrt(n) values (Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.1).

Of n saved values every sqrt(n)-th is kept, and the ones between are made anew segment by segment, as users do by hand
with `torch.utils.checkpoint`. What has no recipe (what another library's op made, say) is kept.
"""

from __future__ import annotations

from math import isqrt

from outgrow.planning.plan import Plan, make_plan
from outgrow.planning.prefetch import dropped_early, may_be_dropped
from outgrow.planning.problem import Problem


class Checkpoint:
    """Segments of sqrt(n) values: the first of each is kept, the others are made anew from it."""

    name = "checkpoint"

    def plan(self, problem: Problem) -> Plan:
        candidates = problem.candidates
        segment = max(1, isqrt(len(candidates)))
        dropped = [
            item for number, item in enumerate(candidates) if number % segment and may_be_dropped(problem, item)
        ]
        return make_plan(self.name, problem, (), dropped_early(problem, dropped))
