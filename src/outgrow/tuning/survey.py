"""Looks at every batch that fits: some are run for real, and all are planned from what those say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from outgrow.errors import BudgetTooSmall
from outgrow.tuning.forecast import Forecast
from outgrow.tuning.limits import largest_within
from outgrow.tuning.records import Records
from outgrow.tuning.runs import Reporter, Runs

# So often what all predictions rest on is run, in turns: a machine's speed wavers for half a minute at a time.
_ROUNDS = 3
# No line is drawn over a wider gap between batches than this times the smaller one, if there is one in between.
_WIDEST_GAP = 3
# The largest batch that predictions rest on, over the base batch: still larger ones take long, and lie on its line.
_FURTHEST = 4


class Survey:
    """The first part of a search: from the least batch to a plan for each that fits."""

    def __init__(
        self, forecast: Forecast, records: Records, runs: Runs, reporter: Reporter, *, least: int, budget_bytes: int
    ) -> None:
        """`least` is the smallest batch that the network takes."""
        self._forecast = forecast
        self._records = records
        self._runs = runs
        self._reporter = reporter
        self._least = least
        self._budget = budget_bytes

    def run_base(self, base: int, *, measure_noise: bool) -> None:
        """Run the base batch, or the nearest below it that fits: how fast is the machine?

        Raises:
            BudgetTooSmall: not even the least batch fits.
        """
        floor = self._forecast.floor(self._least)
        if floor.bytes > self._budget:
            trace = self._forecast.trace_of(self._least)
            where = f"{trace.describe_op(floor.op)} with a batch of {self._least}"
            raise BudgetTooSmall(self._budget, floor.bytes, floor.holders, where)
        wanted = max(self._least, base)
        for size in reversed([*sizes_between(self._least, wanted - 1), wanted]):
            if size > self._least and self._forecast.floor(size).bytes > self._budget:
                continue
            if measure_noise:
                self._runs.run_and_measure_noise(size)
            else:
                self._runs.run(size)
            if self._records.trials:
                return
        raise self._records.failures[-1]

    def plan_all(self, max_batch: int | None) -> int:
        """Plan every batch that fits, from estimates that a few real steps have set right; the largest of them."""
        self._reporter.say("looking for the largest batch")
        fits = largest_within(lambda size: self._forecast.floor(size).bytes, self._budget, self._least)
        most = fits or self._least
        most = most if max_batch is None else min(most, max_batch)
        run = self._records.batches()
        sizes = sorted({*sizes_between(self._least, most), *run, most})
        # Without the very largest: just above its least budget a plan moves all that it can, as no other does.
        near = sorted({*sizes_between(self._least, min(most, _FURTHEST * max(run))), *run})
        while ends := self._ends(near):  # what was run says better which are kept whole
            for size in ends:
                if not self._records.is_out(size, 1):  # the ones before may have failed
                    self._runs.run(size)
        for _ in range(_ROUNDS - 1):
            for batch, passes in list(self._records.trials):
                self._runs.run(batch, passes)
        self._reporter.expect(len(sizes))
        for size in sizes:
            self._reporter.say(f"planning batch {size}")
            self._forecast.plan(size)
            self._reporter.advance()
        return most

    def _ends(self, sizes: Sequence[int]) -> list[int]:
        """What is yet to be run: the ends of what is kept whole, and of what is not, as far as is known.

        The two smallest that are kept: one sample runs other kernels than two. And in the middle of what would be a
        wide gap.
        """
        run = self._records.batches()
        kept = [size for size in sizes if not self._forecast.moves(size)]
        moved = [size for size in sizes if self._forecast.moves(size)]
        wanted = {*kept[:2], *kept[-1:], *moved[:1], *moved[-1:], *run}
        for such in (kept, moved):
            wanted |= _middles([size for size in such if size in wanted], such)
        return sorted(size for size in wanted - run if not self._records.is_out(size, 1))


def sizes_between(least: int, most: int) -> list[int]:
    """Powers of two and one and a half times those, from `least` to `most`."""
    found = {power * factor // 2 for power in (1 << bit for bit in range(most.bit_length() + 1)) for factor in (2, 3)}
    return sorted(size for size in found if least <= size <= most)


def _middles(chosen: Sequence[int], sizes: Sequence[int]) -> set[int]:
    """Of all sizes those in the middle, by ratio, of gaps between the chosen ones that are too wide."""
    found: set[int] = set()
    for low, high in pairwise(chosen):
        if high > _WIDEST_GAP * low:
            between = [size for size in sizes if low < size < high]
            found |= {*sorted(between, key=lambda size: abs(size * size - low * high) / size)[:1]}
    return found
