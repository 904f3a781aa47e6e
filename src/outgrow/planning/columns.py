"""The linear program's variables and rows."""

from __future__ import annotations

from collections.abc import Iterable

from scipy.sparse import csr_array

UNIT = 1 << 20  # bytes; solvers like numbers of ordinary size

Terms = list[tuple[int, float]]


class Columns:
    """Where each variable stands: shares by item, early returns by edge, levels (in `UNIT`) by moment."""

    def __init__(self, items: int, served: Iterable[int], edges: int, moments: int) -> None:
        self.offloaded = range(items)
        self.recomputed = range(items, 2 * items)
        # Of what is offloaded: copied out by an absence before, by the number of the item.
        self.served = {index: 2 * items + number for number, index in enumerate(served)}
        self.early = range(2 * items + len(self.served), 2 * items + len(self.served) + edges)
        self.twice_made = range(self.early.stop, self.early.stop + edges)
        self.twice_copied = range(self.twice_made.stop, self.twice_made.stop + edges)
        self.count = self.twice_copied.stop
        # Of what is offloaded: saved, free to go, copied, gone.
        self.packed, self.held, self.copied, self.gone = (self._levels(moments) for _ in range(4))
        # And: wanted, on its way, loaded, taking memory again.
        self.due, self.coming, self.back, self.inside = (self._levels(moments) for _ in range(4))
        # And: copied by others, must be gone as it has no room, has room again.
        self.given, self.ousted, self.welcome = (self._levels(moments) for _ in range(3))
        # Seconds of work that may be, that must be, and that is done; and of copies that take the device's time.
        self.begun, self.ended, self.worked = (self._levels(moments) for _ in range(3))
        self.handled_out, self.handled_back = (self._levels(moments) for _ in range(2))
        # Of the latter: what does not grow with the bytes.
        self.beside = self.count
        self.count += 1
        # What is dropped, time that the device waits, and bytes that fit only because it waits for them to leave.
        self.dropped, self.stall, self.over = (self._levels(moments) for _ in range(3))

    def extra(self, now: int, factor: float) -> Terms:
        """Time of a moment beyond that of its ops, times `factor`."""
        terms = [(self.stall[now], factor)]
        for level in (self.worked, self.handled_out, self.handled_back):
            terms.append((level[now], factor))
            if now:
                terms.append((level[now - 1], -factor))
        return terms

    def _levels(self, moments: int) -> range:
        start, self.count = self.count, self.count + moments
        return range(start, self.count)


class Rows:
    """Rows of a sparse program, all "at most"."""

    def __init__(self) -> None:
        self.limits: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._factors: list[float] = []

    def at_most(self, limit: float, terms: Iterable[tuple[int, float]]) -> None:
        before = len(self._columns)
        for column, factor in terms:
            self._columns.append(column)
            self._factors.append(factor)
        self._rows += [len(self.limits)] * (len(self._columns) - before)
        self.limits.append(limit)

    def at_least(self, limit: float, terms: Iterable[tuple[int, float]]) -> None:
        self.at_most(-limit, [(column, -factor) for column, factor in terms])

    def equal(self, limit: float, terms: Terms) -> None:
        self.at_most(limit, terms)
        self.at_least(limit, terms)

    def matrix(self, columns: int) -> csr_array:
        return csr_array((self._factors, (self._rows, self._columns)), shape=(len(self.limits), columns))
