"""The protocol that every policy follows."""

from __future__ import annotations

from typing import Protocol

from outgrow.planning.plan import Plan
from outgrow.planning.problem import Problem


class Policy(Protocol):
    """An algorithm that makes a plan. It knows the problem and the simulator, and nothing of the runtime."""

    @property
    def name(self) -> str:
        """How users ask for it."""
        ...

    def plan(self, problem: Problem) -> Plan:
        """A plan for the problem; it may exceed the budget, which the simulator then says."""
        ...
