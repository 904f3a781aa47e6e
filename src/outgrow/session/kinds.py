"""The kinds of step that a session has met, and which of them comes next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from outgrow.planning.plan import Plan
from outgrow.session.kind import StepKind, order_of_saves
from outgrow.session.strangers import Strangers
from outgrow.session.turns import Turns
from outgrow.tracing.ir import Fit, Trace

# After a step that turned out to be of another kind, so many are watched from their begin.
_WATCHED_AFTER_TURN = 16
# Kinds of step that are remembered; a data loader with ragged batches would otherwise grow the list for ever.
_MOST_KINDS = 32
# What came most among so many steps is what is thought to come where kinds come in no order: a program may change for
# good, when layers are unfrozen for one.
_RECENT_STEPS = 8
# A guess that is followed by another one so soon was wrong.
_GUESS_STEPS = 2
# Where so many kinds in a row came once only, a new one is planned for when it comes again, if it is not like another
# but for its sizes.
_STRANGERS = 3
# So many kinds that were like others but for their sizes are a sign of many more.
_MANY_SIZES = 4
# After so many steps in a row that began like smaller ones of a kind, and were not, no step is taken for one.
_MOST_MISLED = 3
# After so many steps that were not like a kind that nobody recorded, though they saved the same, it is forgotten; and
# after so many such kinds none is planned for without recording it.
_MOST_DOUBTS, _MOST_FORESEEN_WRONGLY = 2, 2


class Kinds:
    """All of them, the latest first.

    Attributes:
        expected: what the step that is open, or the next one, is thought to be; None before anything is known.
        steps: how many ended without an error.
        syncs: whether that step exchanges gradients (`StepKind.syncs`).
        has_turned: that step was thought to be of another kind, or of other sizes, when it began.
    """

    def __init__(self, syncs: tuple[bool, ...], make_way: Callable[[int], None]) -> None:
        """`make_way` is told that a plan has so many bytes of the next tier from now on."""
        self._make_way = make_way
        self.has_turned = False
        self._turned_at = -1
        self._guessed_at = -_GUESS_STEPS  # the last step of which only the backward pass was another kind's
        self.expected: StepKind | None = None
        self.steps = 0
        self._all: list[StepKind] = []
        self._numbers = count(1)
        self.syncs = syncs
        self._turns = Turns()
        self._recent: deque[int] = deque(maxlen=_RECENT_STEPS)  # the numbers of the kinds that came last
        self._strangers = Strangers()
        self._count_on_cache = True  # StepKind.counts_on_cache, for those that come
        self._misled = 0  # steps in a row that departed from the plan of a larger one
        self._foreseen_wrongly = 0  # kinds that nobody recorded, and that were forgotten
        self._fit = Fit.EXACT  # how the step that is open compares with the expected kind

    def expect(self, plan: Plan) -> None:
        """A plan is there before the first step: it is followed at once, and trusted as far as its trace is."""
        measured = plan.problem.trace.measured
        peak = plan.simulate().peak_bytes
        self.expected = StepKind(
            plan.problem.trace.packs, plan.laid_out(), measured, peak, 0.0, is_foreign=True, syncs=self.syncs
        )
        self._all = [self._numbered(self.expected)]
        self._strangers.recordings_left = 0 if measured else 1

    def begin(self, syncs: tuple[bool, ...], live_bytes: int) -> StepKind | None:
        """A step begins, with so many live bytes: what it is thought to be."""
        self.syncs = syncs
        for kind in self._all:
            kind.bytes_before = live_bytes
        self.has_turned, self._fit = False, Fit.EXACT
        if self.expected is not None and self.expected.syncs != syncs:
            self.expected = max(self._such(), key=self._frequency, default=None)
        return self.expected

    @property
    def should_record(self) -> bool:
        """Whether the step that begins should be recorded."""
        is_settled = self.expected is not None and (self.expected.steady or self.are_ragged)
        return not is_settled or self._strangers.may_come(self.steps + 1)

    def known(self, trace: Trace) -> StepKind | None:
        """The kind of a step that was recorded, if it was met before."""
        return next((kind for kind in self._such() if kind.is_like(trace)), None)

    @property
    def come_again(self) -> bool:
        """Whether a new kind is worth a plan at once, for all that is known of the latest ones."""
        latest = self._all[:_STRANGERS]
        return len(latest) < _STRANGERS or any(kind.met > 1 for kind in latest)

    @property
    def are_ragged(self) -> bool:
        """Whether the next step is of sizes that nobody knows, for all that came lately: batches as data has them."""
        are_strangers = not self.come_again or self._strangers.are_many
        return are_strangers and any(kind.is_resized for kind in self._all[:_STRANGERS])

    @property
    def _have_many_sizes(self) -> bool:
        """Whether steps are of so many sizes that one which nobody knows is no reason to look out for it."""
        return self.are_ragged or sum(kind.is_resized for kind in self._all) >= _MANY_SIZES

    def find(self, packs: Sequence[int], *, is_late: bool = False, is_watched: bool = True) -> StepKind | None:
        """A kind whose steps begin by saving this: another than is expected, the most frequent.

        Where there is none, that which saves least more, or little less and is known to hold it; or, where batches
        are ragged, one that saves the same in other sizes: that by which the step has gone so far, else the largest.
        It may be the expected one, and must be where it `is_late`. What was made for less will not do for a step that
        nobody watches.
        """
        if is_late:
            known = [] if self.expected is None else [self.expected]
        else:
            known = [kind for kind in self._such() if len(packs) <= kind.plan.problem.trace.saved_first]
        compared = ((kind, kind.plan.problem.trace.fit_of(packs)) for kind in known)
        fits = [(kind, fit) for kind, fit in compared if is_watched or fit is not Fit.OTHER]
        exact = (kind for kind, fit in fits if fit is Fit.EXACT and kind is not self.expected)
        holding = (
            kind
            for kind, fit in fits
            if fit is Fit.SMALLER or (fit is Fit.OTHER and kind.holds(packs) and not kind.is_much_larger(packs))
        )
        others = (kind for kind, fit in fits if fit is Fit.OTHER and kind.plan.evicts and self.are_ragged)
        goes_by = self.expected if self.has_turned else None
        found = max(exact, key=self._frequency, default=None)
        if found is not None or self._misled >= _MOST_MISLED:
            return found
        return min(holding, key=lambda kind: (kind.ill_suits(packs), kind.saved_bytes), default=None) or max(
            others, key=lambda kind: (kind is goes_by, kind.saved_bytes), default=None
        )

    def turn_to(self, kind: StepKind, fit: Fit = Fit.EXACT) -> None:
        """The step that is open proves to be of this kind, or like it but for its sizes."""
        if kind is not self.expected:
            if kind.plan.spill_bytes:
                self._make_way(kind.plan.spill_bytes)
            self._turned_at = self.steps
        self.expected, self.has_turned, self._fit = kind, True, fit
        if fit is Fit.EXACT:
            self._hope_for(kind)

    def like(self, trace: Trace) -> list[StepKind]:
        """Those whose steps differ from that of a trace in their sizes alone."""
        order = order_of_saves(trace)
        others = ((kind, kind.plan.problem.trace) for kind in self._such())
        return [kind for kind, it in others if it.fit_of(trace.packs) is not None and order_of_saves(it) == order]

    def covering(self, trace: Trace, like: Sequence[StepKind]) -> StepKind | None:
        """Of kinds that are `like` a trace one whose plan will do for its step; None if that is worth its own."""
        if not self.are_ragged or self._strangers.come_often(trace.packs):
            return None
        others = (
            kind
            for kind in like
            if kind.least_saved_bytes <= trace.saved_bytes
            and kind.plan.problem.trace.fit_of(trace.packs) is Fit.SMALLER
        )
        return min(others, key=lambda kind: kind.saved_bytes, default=None)

    def resembled(self, packs: tuple[int, ...], fit: Fit) -> bool:
        """A step went by the plan of the expected kind, but for its sizes, which nobody knows.

        Whether they are worth a plan of their own. Of many sizes only such are as no plan is there for, or as come
        often and have no good one.
        """
        kind = self.expected
        assert kind is not None
        self._misled = 0
        is_good = kind.is_good_for(packs) and (fit is Fit.SMALLER or kind.holds(packs))
        if not self._have_many_sizes or (self._strangers.come_often(packs) and not is_good):
            return True
        return fit is not Fit.SMALLER and not is_good and self._strangers.had_no_good_plan()

    def fared(self, kind: StepKind, packs: tuple[int, ...], lost: float) -> bool:
        """A smaller step has gone by the plan of a kind, and moved what might have stayed.

        What it `lost` by that is a share of what recording a step takes: of many sizes one is worth a plan of its own
        once such steps have lost as much.
        """
        return self._have_many_sizes and not kind.is_good_for(packs) and self._strangers.had_no_good_plan(lost)

    def record_for_want_of_plan(self, packs: tuple[int, ...]) -> None:
        """Sizes are worth a plan that only recording can give: the next few are, in the hope that they are as large.

        Of many sizes only one step is, unless those come often.
        """
        if self._have_many_sizes and not self._strangers.come_often(packs):
            self._strangers.record_next(1)
        else:
            self._strangers.came(self.steps)

    def of(self, packs: Sequence[int]) -> StepKind | None:
        """A kind whose steps save just so much."""
        return next((kind for kind in self._such() if kind.is_of(packs)), None)

    def recorded_like(self, followed: StepKind, packs: Sequence[int], ops: int = 0) -> list[StepKind]:
        """Recorded kinds that a step which went by a plan differs from in its sizes alone, as far as it shows.

        The nearest to it first, and then what is farthest from that. It ran so many `ops`, if they were counted:
        where that is not what its plan's step ran (an optimizer made its state in that one), it is like others.
        """
        if self._foreseen_wrongly >= _MOST_FORESEEN_WRONGLY:
            return []
        such = [
            kind
            for kind in self._such()
            if not (kind.is_foreseen or kind.is_foreign)
            and len(kind.packs) == len(packs)
            and kind.plan.problem.trace.fit_of(packs)
        ]
        names = _ops_of(followed)
        if ops and len(names) != ops:
            names = next((_ops_of(kind) for kind in such if len(_ops_of(kind)) == ops), names)
        like = [kind for kind in such if _ops_of(kind) == names]
        if not like:
            return []
        near = min(like, key=lambda kind: abs(kind.saved_bytes - sum(packs)))
        others = (kind for kind in like if kind.saved_bytes != near.saved_bytes)
        return [near, *sorted(others, key=lambda kind: -abs(kind.saved_bytes - near.saved_bytes))]

    def foresaw(self, kind: StepKind) -> None:
        """There is a plan for a kind of step that nobody recorded."""
        self._add(kind)
        self._strangers.record_no_more()

    @property
    def any_parks(self) -> bool:
        """Whether the plan of any of them parks."""
        return any(kind.plan.parks for kind in self._all)

    @property
    def come_in_no_order(self) -> bool:
        """Whether the step that begins may well be of another kind than is expected, for all that came lately.

        And whether that matters: there may be room for anything.
        """
        turned_lately = self._turned_at >= max(0, self.steps - _WATCHED_AFTER_TURN)
        return (turned_lately or self.are_ragged) and not all(kind.has_room for kind in self._all)

    def count(self) -> None:
        """A step ended without an error."""
        self.steps += 1
        self._strangers.count()

    def learnt(self, kind: StepKind) -> None:
        """A step was recorded, and was of this kind, which may be new."""
        if all(known is not kind for known in self._all):
            self._add(kind)
        self.expected = kind

    def _add(self, kind: StepKind) -> None:
        kind.counts_on_cache = self._count_on_cache
        self._strangers.was_met()
        self._misled = 0
        self._all = [self._numbered(kind), *self._all]
        if len(self._all) > _MOST_KINDS:  # what nobody recorded can be foreseen once more
            gone = next((known for known in reversed(self._all[1:]) if known.is_foreseen), self._all[-1])
            self._all = [known for known in self._all if known is not gone]

    def departed(self, packs: tuple[int, ...]) -> StepKind | None:
        """A step that nobody recorded was not of the kind that was expected, but of this one, if it is known.

        Where nobody knows it, the next few are recorded, and one as far ahead as the last such was ago. A kind
        that nobody recorded is forgotten after two such steps that saved what its own do.
        """
        self._misled += self._fit is not Fit.EXACT
        if self.expected is not None and self.expected.is_foreseen and self.expected.is_of(packs):
            self._doubt(self.expected)
        found = next((kind for kind in self._such() if kind is not self.expected and kind.is_of(packs)), None)
        if found is not None and self.expected is not None and self.expected.is_of(packs):
            # It went back otherwise: as the other one does, or in a way of its own. Who guesses again guessed wrong.
            guessed_before, self._guessed_at = self._guessed_at, self.steps
            if self.steps - guessed_before <= _GUESS_STEPS:
                found = None
        if found is not None:
            self.expected = found
            self._turned_at = self.steps
            self._hope_for(found)
        elif not self.are_ragged:
            self._strangers.came(self.steps)
        elif self._strangers.had_no_good_plan():
            self._strangers.record_next(1)
        return found

    def _doubt(self, kind: StepKind) -> None:
        """A step that saved what those of a foreseen kind do was another one all the same."""
        kind.recordings += 1
        if kind.recordings >= _MOST_DOUBTS:
            self._foreseen_wrongly += 1
            self._all = [known for known in self._all if known is not kind]

    def _hope_for(self, kind: StepKind) -> None:
        """A kind came that is not planned for: record the next few, as it may be among them."""
        if not kind.is_planned:
            self._strangers.record_next()

    def seen(self, came: StepKind | None, followed: StepKind | None, packs: tuple[int, ...]) -> None:
        """A step of kind `came`, or of one like it but for sizes, is over (None: nobody knows it).

        It was thought to be of the kind `followed`, and saved tensors of so many bytes.
        """
        number = 0 if came is None else came.number
        is_exact = came is not None and came.is_of(packs)
        if came is not None and is_exact:
            came.met += 1
        self._strangers.seen(packs, is_strange=came is None or came.met < 2 or not is_exact)
        self._recent.append(number)
        if followed is not None and self.expected is not None:
            # What comes most is what comes next; of two that come as often, the latest.
            self.expected = max(self.expected, followed, key=self._frequency)
        self._turns.came(number)
        following = self._turns.next
        if all(kind is not self.expected for kind in self._all):  # it was forgotten
            self.expected = max(self._such(), key=self._frequency, default=None)
        self.expected = next((kind for kind in self._all if kind.number == following), self.expected)

    def _frequency(self, kind: StepKind) -> int:
        """How many of the last steps were of a kind."""
        return self._recent.count(kind.number)

    def refused(self, *, is_strange: bool) -> None:
        """There was no room for a step: nothing is known to fit any more. Record the next if it was a stranger."""
        self._count_on_cache = False
        for kind in self._all:
            kind.fits, kind.largest_held, kind.counts_on_cache = False, (), False
        if is_strange:
            self._strangers.record_next(1)

    def _numbered(self, kind: StepKind) -> StepKind:
        kind.number = next(self._numbers)
        return kind

    def _such(self) -> list[StepKind]:
        """The kinds whose steps exchange gradients as this one does."""
        return [kind for kind in self._all if kind.syncs == self.syncs]


def _ops_of(kind: StepKind) -> tuple[str, ...]:
    """The names of the ops of its plan's step."""
    return kind.plan.problem.trace.op_names
