"""What is remembered of the steps under each plan: of the plans that were followed last."""

from __future__ import annotations

from typing import Generic, TypeVar

from outgrow.planning.plan import Plan

# As many as there may be kinds of step, but no more than for so many ops in all: it takes memory, too.
_MOST_PLANS, MOST_OPS = 32, 1 << 17

_Item = TypeVar("_Item")


class ByPlan(Generic[_Item]):
    """Items by plans, the latest first; plans that move the same are one."""

    def __init__(self) -> None:
        self._items: list[tuple[Plan, _Item]] = []

    def find(self, plan: Plan) -> _Item | None:
        """That of a plan, which is followed now."""
        for place, (known, item) in enumerate(self._items):
            if known.moves_as(plan):
                self._items.insert(0, self._items.pop(place))
                return item
        return None

    def add(self, plan: Plan, item: _Item) -> None:
        """One more; those that were not followed for longest may have to go."""
        self._items.insert(0, (plan, item))
        ops = 0
        for place, (known, _) in enumerate(self._items):
            ops += len(known.problem.trace.ops)
            if place > 0 and (place >= _MOST_PLANS or ops > MOST_OPS):
                del self._items[place:]
                break

    def forget(self, item: _Item) -> None:
        """It is of no use."""
        self._items = [known for known in self._items if known[1] is not item]
