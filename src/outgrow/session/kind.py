"""One kind of step that a session has met: its plan, how that fares, and what it is known to hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import le

from outgrow.planning.floor import least_for_cache
from outgrow.planning.plan import Plan
from outgrow.planning.problem import LEAST_MOVED_BYTES
from outgrow.runtime.recompute import Verdicts
from outgrow.tracing.ir import Event, Phase, Trace

# A step that saves less than this share of what its plan was made for moves more than it would have to, and says
# little of how long the plan takes.
MUCH_SMALLER = 0.75
# And one that saves more than so many times as much moves less than it should.
_MUCH_LARGER = 1.1
# What the cache moves takes so many times as long as what a plan does.
_WORSE_BY_CACHE = 4
# How far what a step holds may grow if it is little larger: scores of attention as its square. Where the cache alone
# can hold that, and leaves this share of the budget to copies that are late and to recipes, nobody need park.
_GROWTH = _MUCH_LARGER**2
_SPARE_SHARE = 0.1
# Where a kind begins to look for another plan: when its times are so far from the prediction.
SEARCH_TOLERANCE = 0.10
# So many steps are asked, at first, before times are set right.
TIMED_STEPS = 3
# So often at most a kind is recorded anew: a machine whose speed wavers would be planned for without end.
_MOST_RECORDINGS = 4


@dataclass
class StepKind:
    """One kind of step that was met: its plan, and how that fares.

    Attributes:
        packs: bytes of the tensors that autograd saves, in order, -1 for those whose size depends on data; what tells
            kinds apart, with the order in which it wants them back (the plan's trace has that).
        plan: for the next step of this kind, with the trace that it was made from.
        steady: the trace shows the step as it is from now on; else the next one is recorded too.
        measured_peak: live bytes at the peak of the recorded step; as predicted where there was none.
        plan_seconds: what planning took, the last time.
        seconds_since: what steps of this kind took since then, as far as they were timed.
        wants_search: whether another plan may be better by now.
        searched_seconds: what a step was predicted to take when its plan was searched for; 0 if nobody knows.
        verdicts: which recipes were proved.
        recordings: how often the step was recorded anew because its plan proved wrong; of a foreseen kind, how often
            a step that saved just that was another one. `searches` is how often its plan was searched for again
            because the machine's speed had changed.
        tolerance: how far from the prediction times must be for another search: a search that finds nothing better
            takes its time all the same, so that the next one waits for a larger change.
        recent: times and stalls of the last steps under this plan, in seconds, `timed_steps` at most: so many are
            asked before times are set right.
        gave_back: of the last steps under this plan, whether the allocator gave free blocks back to find room; so
            often, `rooms`, a plan was asked for that leaves it some, and `room_bytes` is what it leaves.
        fits: the plan was seen to fit: a step that could have parked more than it had no need to.
        loses_count: in one of its steps ops had other numbers than the plan's, by which is known what it parks, and
            others had to leave.
        largest_held: what the largest step of other sizes saved that went by the plan, and was seen to fit; in bytes.
        is_foreign: the plan's trace is not this session's, whose storages have other numbers.
        number: which one it is; 0 before the session knows it.
        met: how many steps of this kind there were.
        is_planned: whether a plan was searched for; else the cache decides until it comes again.
        is_rough: its plan was made at once, and is for steps of all sizes up to its own.
        is_foreseen: nobody recorded it: its trace is made from those of two others.
        is_resized: when it was met first, there was one that differs from it in its sizes alone.
        syncs: for each data-parallel wrapper whether the step exchanges gradients, which no saved tensor shows.
        bytes_before: what is there as the step that is open begins, or as the last one began.
        counts_on_cache: no step was refused so far, so that what the cache alone could hold need not be seen to fit.
    """

    packs: tuple[int, ...]
    plan: Plan
    steady: bool
    measured_peak: int
    plan_seconds: float
    seconds_since: float = 0.0
    wants_search: bool = False
    searched_seconds: float = 0.0
    verdicts: Verdicts = field(default_factory=Verdicts)
    recordings: int = 0
    searches: int = 0
    tolerance: float = SEARCH_TOLERANCE
    recent: list[tuple[float, float]] = field(default_factory=list)
    timed_steps: int = TIMED_STEPS
    gave_back: list[bool] = field(default_factory=list)
    rooms: int = 0
    room_bytes: int = 0
    fits: bool = False
    loses_count: bool = False
    largest_held: tuple[int, ...] = ()
    is_foreign: bool = False
    number: int = 0
    met: int = 0
    is_planned: bool = True
    is_foreseen: bool = False
    is_resized: bool = False
    is_rough: bool = False
    syncs: tuple[bool, ...] = ()
    bytes_before: int = 0
    counts_on_cache: bool = True

    def begins_with(self, packs: Sequence[int]) -> bool:
        """Whether its steps begin by saving tensors of so many bytes."""
        return len(packs) <= len(self.packs) and tuple(packs) == self._filled(packs)

    def is_of(self, packs: Sequence[int]) -> bool:
        """Whether a step that saved tensors of so many bytes is of this kind."""
        return len(packs) == len(self.packs) and self.begins_with(packs)

    @property
    def held(self) -> tuple[int, ...] | None:
        """Bytes of the tensors that steps may save that fit, for all that is known; None if nothing is."""
        trace = self.plan.problem.trace
        if trace.varies:
            return None
        own: tuple[int, ...] = ()
        if self._cache_holds(_GROWTH):
            sizes = zip(trace.saved, trace.saves_whole_state, strict=True)
            own = tuple(saved.nbytes if whole else int(_GROWTH * saved.nbytes) for saved, whole in sizes)
            # What was seen to fit may have some tensors that are larger, and less of the others.
            return tuple(map(max, own, self.largest_held)) if self.largest_held else own
        if self.fits or self.plan.keeps_everything or self._cache_holds(1.0):
            own = tuple(saved.nbytes for saved in trace.saved)
        return max(own, self.largest_held, key=sum) or None

    def _cache_holds(self, growth: float) -> bool:
        """Whether the cache alone could hold a step in which all but training state is so many times as large.

        Nothing would be parked; and room for what the plan drops is counted wherever it may be made anew.
        """
        plan, trace = self.plan, self.plan.problem.trace
        # Free pieces of an allocator's may be too small.
        if not (self.counts_on_cache and plan.evicts and plan.problem.on_cpu):
            return False
        state = trace.state_bytes
        dropped = sum(trace.values[item.value].nbytes for item in plan.recomputes)
        needed = state + growth * (least_for_cache(plan.problem) + dropped - state)
        unforeseen = max(0, self.bytes_before - trace.bytes_before - plan.problem.base_bytes)
        return needed + unforeseen <= (1 - _SPARE_SHARE) * plan.budget_bytes

    @property
    def held_from_begin(self) -> tuple[int, ...] | None:
        """The same for a step that has saved nothing yet: None where it makes anything by then that nobody saves.

        That may be larger the next time, and cannot leave if nobody noted it.
        """
        makes_little = self.plan.problem.trace.made_before_saving_bytes < LEAST_MOVED_BYTES
        return self.held if makes_little else None

    def holds(self, packs: Sequence[int]) -> bool:
        """Whether a step that begins by saving tensors of so many bytes is known to fit, for all that it saved."""
        held = self.held
        return held is not None and all(map(le, packs, held))

    @property
    def has_room(self) -> bool:
        """Whether its steps could take twice as much as they do, and nothing would have to leave."""
        return not self.plan.needs_watch and 2 * self.likely_peak <= self.plan.budget_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes of all tensors that it saves."""
        return self.plan.problem.trace.saved_bytes

    @property
    def least_saved_bytes(self) -> int:
        """A step that saves less than this is better off with another plan."""
        return 0 if self.plan.keeps_everything else int(MUCH_SMALLER * self.saved_bytes)

    def is_good_for(self, packs: Sequence[int]) -> bool:
        """Whether a step of other sizes, which saves tensors of so many bytes, is no better off with another plan."""
        return sum(packs) >= self.least_saved_bytes and not self.is_much_larger(packs)

    def is_much_larger(self, packs: Sequence[int]) -> bool:
        """Whether a step that begins by saving tensors of so many bytes saves much more than the plan's."""
        return sum(packs) > _MUCH_LARGER * self._begin_bytes(len(packs))

    def ill_suits(self, packs: Sequence[int]) -> float:
        """How far a step that begins by saving tensors of so many bytes is from the plan's: not at all, 0.

        What is too much moves by plan and in good time, and what is too little is the cache's, which waits for it.
        """
        own, saved = max(1, self._begin_bytes(len(packs))), max(1, sum(packs))
        return _WORSE_BY_CACHE * (saved / own - 1) if saved > own else own / saved - 1

    def _begin_bytes(self, tensors: int) -> int:
        """Bytes of the first so many tensors that its plan's step saves."""
        return sum(saved.nbytes for saved in self.plan.problem.trace.saved[:tensors])

    def is_like(self, trace: Trace) -> bool:
        """Whether the step of a trace is of this kind: two may save the same, and differ in their backward passes."""
        return self.is_of(trace.packs) and order_of_saves(trace) == order_of_saves(self.plan.problem.trace)

    def _filled(self, packs: Sequence[int]) -> tuple[int, ...]:
        """As much of its own as `packs` has, with what depends on data as it is there."""
        own = self.packs[: len(packs)]
        if -1 not in own:
            return own
        return tuple(there if nbytes < 0 else nbytes for nbytes, there in zip(own, packs, strict=True))

    @property
    def likely_peak(self) -> int:
        """Live bytes at the peak of a step that nobody measured: in the recorded one more may have left."""
        return max(self.measured_peak, self.plan.expected_peak_bytes)

    def learn(self, plan: Plan, *, steady: bool, measured_peak: int, plan_seconds: float) -> None:
        """The step was recorded anew, and planned from that."""
        if not _alike(self.plan.problem.trace, plan.problem.trace):
            self.verdicts = Verdicts()
        self.verdicts.gradients.clear()  # named by ops of the backward pass, which may be others now
        self.go_by(plan)
        self.steady, self.is_foreign, self.is_planned, self.is_rough = steady, False, True, False
        self.is_foreseen = False
        self.measured_peak, self.plan_seconds = measured_peak, plan_seconds
        self.seconds_since, self.wants_search = 0.0, False

    def go_by(self, plan: Plan) -> None:
        """Steps go by another plan from here on."""
        self.plan, self.fits, self.largest_held, self.timed_steps = plan, False, (), TIMED_STEPS
        self.searched_seconds = plan.simulate().step_seconds
        self.verdicts.cramped.clear()  # another plan has room elsewhere
        self.recent.clear()
        self.gave_back.clear()

    def departed(self) -> bool:
        """A step of this kind departed from the trace where nothing saved shows it: whether to plan for it anew."""
        self.recordings += 1
        return self.recordings <= _MOST_RECORDINGS

    def distrust(self) -> None:
        """The trace proved wrong: record the next step."""
        if self.recordings < _MOST_RECORDINGS:
            self.recordings += 1
            self.steady = False


def _alike(one: Trace, other: Trace) -> bool:
    """Whether two traces save the same results of the same forward ops, so that one's recipes are the other's."""
    return _forward_ops(one) == _forward_ops(other) and one.first_saves == other.first_saves


def order_of_saves(trace: Trace) -> list[tuple[Event, int]]:
    """In what order tensors are saved and wanted back."""
    return [(tick.event, tick.saved) for tick in trace.ticks]


def _forward_ops(trace: Trace) -> list[str]:
    return [op.name for op in trace.ops if op.phase is Phase.FORWARD]
