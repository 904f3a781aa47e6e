"""What a report is about: a plan, and what was measured of the steps that followed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outgrow.planning.plan import Plan
from outgrow.summary import Summary


@dataclass(frozen=True)
class Subject:
    """A plan with a title, the figures of measured steps, oldest first, and settings worth knowing.

    `first_step` is the number of the first of these steps, counted from 1. `budget_bytes` is what the step must stay
    within, the plan's own budget if it is left out; a session's plans may leave some of it to the allocator.
    """

    title: str
    plan: Plan
    history: tuple[Summary, ...] = ()
    first_step: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    budget_bytes: int | None = None

    @property
    def budget(self) -> int:
        """The budget, in bytes."""
        return self.plan.budget_bytes if self.budget_bytes is None else self.budget_bytes
