"""How kinds of step take turns, so that the next one is foretold."""

from __future__ import annotations

# Situations after which it is remembered what came; more than that have no pattern.
_MOST_SITUATIONS = 1 << 12


class Turns:
    """How kinds of step take turns: what comes next is what came last time that it was so.

    So it is when as many steps of this kind have come in a row, after as many of the kind before; or, if that is new,
    when as many of this kind have come. That foretells the steps of two networks that are trained in turn, one to one
    or five to one, and the smaller last batch of each epoch from the second one on. Only that another kind came is
    remembered, and what came there since.
    """

    def __init__(self) -> None:
        self._last = self._now = (0, 0)  # a kind, and how many of its steps came in a row
        self._followed_by: dict[tuple[int, ...], int] = {}

    def came(self, kind: int) -> None:
        """A step of kind number `kind` is over; 0: nobody knows its kind."""
        latest, count = self._now
        if kind:
            if len(self._followed_by) >= _MOST_SITUATIONS:
                self._followed_by.clear()
            for situation in self._situations():
                if kind != latest or situation in self._followed_by:
                    self._followed_by[situation] = kind
        if kind == latest:
            self._now = (kind, count + 1)
        else:
            self._last, self._now = self._now, (kind, 1)

    @property
    def next(self) -> int:
        """The number of the next step's kind; 0 where no other kind ever came when it was like this."""
        found = (self._followed_by.get(situation, 0) for situation in self._situations())
        return next((kind for kind in found if kind), 0)

    def _situations(self) -> tuple[tuple[int, ...], ...]:
        return (*self._last, *self._now), self._now
