"""The two policies that plan nothing: keep everything, or let the pool's cache decide."""

from __future__ import annotations

from outgrow.planning.plan import Plan, make_plan
from outgrow.planning.problem import Problem


class Keep:
    """Plain PyTorch: every saved value stays, and nothing leaves even when memory runs short."""

    name = "keep"

    def plan(self, problem: Problem) -> Plan:
        return make_plan(self.name, problem, (), evicts=False)


class Lru:
    """Data moves only when an allocation would not fit: SuperNeurons' tensor cache (section 3.3.2).

    The least recently used values leave first. The backward pass visits values in reverse, so the ones that it
    needs next are the ones that were used last.
    """

    name = "lru"

    def plan(self, problem: Problem) -> Plan:
        return make_plan(self.name, problem, ())
