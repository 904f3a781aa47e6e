"""Which ops of a step need nobody's care and run past the dispatch mode: `fastpath.cpp`, and what it is told.

The first step under a plan is the lesson: the executor says of each op that it has seen whether it needs care. In
those that follow, native code lets the others pass, as long as they are the ones expected and fit the budget. A
session that begins with a plan meets ops whose needs nobody has measured: its lesson takes a step more.

Where batches are of ever other sizes all plans for the same ops share one lesson, which is never over: an op passes
if none of its sizes is larger than when it was learned, since it takes no more then; a larger one is learned anew.
What a plan makes something of never passes under that plan.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outgrow.planning.agenda import ops_to_see
from outgrow.planning.plan import Plan
from outgrow.runtime.by_plan import MOST_OPS, ByPlan
from outgrow.runtime.native import Code, built, once
from outgrow.runtime.tiers.arena import ArenaCount
from outgrow.runtime.tiers.cuda import AllocatorCount
from outgrow.runtime.tiers.ram import Ram
from outgrow.tracing.ir import Fit
from outgrow.tracing.ledger import Ledger, StorageRecord

_LOG = logging.getLogger(__name__)

CODE = Code(Path(__file__).with_name("fastpath.cpp"), ("c10", "torch_cpu"))
# The dispatch key that native code sees ops on: PyTorch has it and makes no use of it.
KEY = "TESTING_ONLY_GenericMode"
# A number among an op's arguments may be another one in every step, so that its need is never known beforehand.
_MOST_STEPS_OF_A_LESSON = 3
# What is noted of an op that needs care. Of one that does not, the bytes that it adds, and whether a library may do
# it in another way where it is refused some of them, whether it writes to something, and whether it draws random
# numbers.
_CARE = -1
_GATED, _WRITES, _DRAWS = 1 << 62, 1 << 61, 1 << 60


class _Expected(ctypes.Structure):
    """As `Expected` in fastpath.cpp, which fills it in."""

    _fields_ = (
        ("op", ctypes.c_void_p),
        ("look", ctypes.c_uint64),
        ("ops", ctypes.c_int64),
        ("rise", ctypes.c_int64),
        ("flags", ctypes.c_int64),
        ("written", ctypes.c_uint64),
        ("first_bound", ctypes.c_int64),
        ("bounds", ctypes.c_int64),
    )


class _State(ctypes.Structure):
    """As `State` in fastpath.cpp."""

    _fields_ = (
        ("learns", ctypes.c_int64),
        ("passes", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("bell", ctypes.c_int64),
        ("level", ctypes.c_int64),
        ("open", ctypes.c_int64),
        ("loose", ctypes.c_int64),
        ("modes", ctypes.c_int64),
        ("wraps", ctypes.c_int64),
        ("hooks", ctypes.c_void_p),
        ("budget", ctypes.c_int64),
        ("peak", ctypes.c_int64),
        ("passed", ctypes.c_int64),
        ("device", ctypes.c_int64),
        ("stream", ctypes.c_int64),
        ("limit", ctypes.c_int64),
        ("statm", ctypes.c_int64),
        ("page", ctypes.c_int64),
        ("needs", ctypes.c_void_p),
        ("expected", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("booked", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("count_in", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("books", ctypes.c_void_p),
        ("keep_under", ctypes.c_void_p),
        ("let_go_of", ctypes.c_void_p),
    )


@dataclass
class _Lesson:
    """What is known of the steps under one plan; `is_over` once one of them was seen from begin to end.

    `steps` are those that were so far; `goes_on` says that the last one measured what may pass once that is known.
    That of steps of other sizes is never over: `bounds` is where native code has the sizes that were learned.
    """

    needs: Any
    expected: Any
    bounds: int = 0
    is_over: bool = False
    steps: int = 0
    goes_on: bool = False

    def begin(self) -> None:
        """A step of the lesson begins: nothing is known to need no care."""
        self.goes_on = False
        self.needs[:] = [_CARE] * len(self.needs)

    def end(self) -> None:
        """A step of the lesson went by its plan."""
        self.steps += 1
        self.is_over = not self.goes_on or self.steps >= _MOST_STEPS_OF_A_LESSON


class FastPath:
    """The way past the mode in the steps of a session; there is none without a compiler.

    Attributes:
        learns: what needs no care in this step is taken down: `needs_no_care` wants to be told.
    """

    def __init__(self, ledger: Ledger, budget_bytes: int, ram: Ram | None, gpu: torch.device | None = None) -> None:
        """`ram` is the memory of a CPU; with neither that nor a `gpu` no op passes."""
        self._state = _State(budget=budget_bytes, device=-1)
        self._ram = ram
        self._gpu = gpu
        self._ledger = ledger
        self._lessons: ByPlan[_Lesson] = ByPlan()
        self._loose: dict[tuple[str, ...], _Lesson] = {}  # by the names of ops; the last one used comes last
        self._seen: ByPlan[Any] = ByPlan()
        self._lesson: _Lesson | None = None
        self._count: ArenaCount | AllocatorCount | None = None
        self._let_go_of: Any = None
        self.learns = self._has_plan = self._is_ragged = self._is_paused = self._is_on = False
        arena = None if ram is None else ram.arena
        self._library = None if arena is None and gpu is None else _library()
        if self._library is None:
            return
        ledger.on_follow = partial(_follow, self._library)
        if gpu is not None:
            self._state.device = gpu.index or 0
            self._count = ledger.count = AllocatorCount(self._library, self._state.device, ledger.booked)
            return
        assert ram is not None
        assert arena is not None
        self._state.booked = ctypes.addressof(ledger.booked)
        self._count = ledger.count = arena.new_count(self._state.booked)
        self._state.count = self._count.address
        self._state.count_in = arena.count_in_address
        self._state.counts = self._count.asks
        self._state.books = self._library.outgrow_fastpath_new_books()
        ledger.on_book = partial(_book, self._library, self._state.books)
        for record in ledger.alive():
            ledger.on_book(record, record.booked > 0)
        self._state.keep_under = arena.keep_under_address
        self._state.limit, self._state.statm, self._state.page = ram.limit

    def ask_to_let_go(self, let_go_of: Callable[[int], None]) -> None:
        """Before gradients are summed up in place, whoever of ours may hold the storage at an address is asked to.

        `let_go_of` is a method; its object is not held, as no collector finds what native code holds.
        """
        method = weakref.WeakMethod(let_go_of)

        def ask(address: int) -> None:
            found = method()
            if found is not None:
                found(address)

        self._let_go_of = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ask)
        self._state.let_go_of = ctypes.cast(self._let_go_of, ctypes.c_void_p)

    # --- the step ---

    def begin(
        self, plan: Plan | None, modes: int, *, open_bytes: int, may_pass: bool = True, is_ragged: bool = False
    ) -> None:
        """A step begins that goes by `plan` (None: each op needs care), watched by one of `modes` dispatch modes.

        `modes` is 0 where nobody watches. Who else has a mode sees all ops. While the allocator holds less than
        `open_bytes`, it refuses nothing that fits the budget. Where nothing `may_pass`, the step may be a lesson.
        `is_ragged` says that steps are of ever other sizes.
        """
        self._has_plan, self._is_ragged = plan is not None, is_ragged
        if self._gpu is not None:
            self._state.stream = torch.cuda.current_stream(self._gpu).stream_id
        self._state.hooks = None
        self._enter(plan, modes, Fit.EXACT, open_bytes=open_bytes, may_pass=may_pass)
        self._see_nodes()

    def _enter(self, plan: Plan | None, modes: int, fit: Fit, *, open_bytes: int, may_pass: bool) -> None:
        state = self._state
        state.number = state.peak = state.passed = 0
        state.open = open_bytes
        state.learns = state.passes = state.loose = 0
        state.length = 0
        self._lesson = None
        self.learns = False
        self._watch(modes)
        if not self._is_on or plan is None or not self._has_memory:
            return
        is_loose = self._is_ragged or fit is not Fit.EXACT
        lesson = self._loose_lesson(plan) if is_loose else self._lesson_of(plan)
        if lesson.is_over and not may_pass:
            return
        if not (lesson.is_over or is_loose):
            lesson.begin()
        self._lesson = lesson
        state.loose, state.bounds = is_loose, lesson.bounds
        self.learns = not lesson.is_over
        state.length = len(lesson.needs)
        state.needs, state.expected = ctypes.addressof(lesson.needs), ctypes.addressof(lesson.expected)
        state.seen = ctypes.addressof(self._seen_by(plan)) if is_loose else None
        # Where state leaves, a copy that failed should show at once.
        state.level = 0 if plan.parks else plan.prediction.peak_bytes
        state.bell, state.learns, state.passes = 0, self.learns, lesson.is_over or (is_loose and may_pass)

    def _lesson_of(self, plan: Plan) -> _Lesson:
        """What is learned of the steps that are as large as a plan's."""
        lesson = self._lessons.find(plan)
        if lesson is None:
            lesson = _new_lesson(len(plan.problem.trace.ops))
            self._lessons.add(plan, lesson)
        return lesson

    def _loose_lesson(self, plan: Plan) -> _Lesson:
        """What is learned of steps of all sizes that run the same ops as a plan's."""
        names = plan.problem.trace.op_names
        lesson = self._loose.pop(names, None)
        if lesson is None:
            assert self._library is not None
            lesson = _new_lesson(len(names))
            lesson.bounds = self._library.outgrow_fastpath_new_bounds()
            weakref.finalize(lesson, self._library.outgrow_fastpath_end_bounds, lesson.bounds)
        self._loose[names] = lesson
        while len(self._loose) > 1 and sum(map(len, self._loose)) > MOST_OPS:
            self._loose.pop(next(iter(self._loose)))
        return lesson

    def _seen_by(self, plan: Plan) -> Any:
        """Of each op whether Python has to see it under a plan."""
        seen = self._seen.find(plan)
        if seen is None:
            seen = (ctypes.c_uint8 * len(plan.problem.trace.ops))()
            for number in ops_to_see(plan):
                seen[number] = True
            self._seen.add(plan, seen)
        return seen

    def join(self, modes: int) -> None:
        """From here on one of `modes` dispatch modes watches: have native code see what it is shown."""
        self._watch(modes)
        self._see_nodes()

    def _watch(self, modes: int) -> None:
        self._state.modes = modes
        if self._library is not None and modes == 1:
            self._is_on = bool(self._library.outgrow_fastpath_enter(ctypes.byref(self._state)))

    def _see_nodes(self) -> None:
        if self._is_on:
            assert self._library is not None
            self._library.outgrow_fastpath_see_nodes(True)

    def end(self, *, followed: bool) -> None:
        """The step ends, having gone by its plan or not."""
        if self._library is not None:
            self._library.outgrow_fastpath_see_nodes(False)
        if self._lesson is not None and self.learns and not self.is_loose:
            if followed:
                self._lesson.end()
            else:
                self._lessons.forget(self._lesson)
        self._leave()

    def _leave(self) -> None:
        if self._is_on:
            assert self._library is not None
            self._library.outgrow_fastpath_leave(ctypes.byref(self._state))
            self._is_on = False
        self._lesson = None
        self.learns = False

    def turn_to(self, plan: Plan, fit: Fit, *, may_pass: bool) -> None:
        """The step goes by another plan from here on, or is of other sizes than its plan's. Where nothing may pass
        any more, nothing does. A lesson of the plan that it began with begins anew with the next such step.
        """
        if not self._has_plan:
            return
        state = self._state
        number, modes, peak, passed = self.number, int(state.modes), state.peak, state.passed
        self._leave()
        self._enter(plan, modes, fit, open_bytes=0, may_pass=may_pass)
        self.was_measured()  # where this is a lesson, it does not tell of what came before
        self.number, state.peak, state.passed = number, peak, passed

    def go_astray(self) -> None:
        """From here on the allocator may refuse what fits the budget: gated ops need care."""
        self._state.open = 0

    def see_all(self) -> None:
        """From here on each op of this step needs care, and may teach what does not in steps of other sizes."""
        if self.is_loose:
            self._state.passes = 0
        else:
            self.stop()

    def trust_hooks(self, pack: object) -> None:
        """While autograd asks the saved-tensor hook `pack`, ops may pass; the caller holds it."""
        self._state.hooks = id(pack)

    def stop(self) -> None:
        """From here on each op of this step needs care."""
        self._state.learns = self._state.passes = 0
        self.learns = False

    @property
    def _has_memory(self) -> bool:
        """Whether ops may pass for all that is known of the device's memory.

        Where that of a CPU ran out once, an op may find none at any time, and the mode can do more about it.
        """
        return self._gpu is not None or (self._ram is not None and self._ram.arena is not None)

    # --- the ops ---

    @property
    def number(self) -> int:
        """The number of the next op of the step."""
        return int(self._state.number)

    @number.setter
    def number(self, number: int) -> None:
        self._state.number = number

    @property
    def passed(self) -> int:
        """How many ops of this step, or of the last one, ran past the mode."""
        return int(self._state.passed)

    @property
    def peak_bytes(self) -> int:
        """The highest live bytes at any of those."""
        return int(self._state.peak)

    @property
    def is_loose(self) -> bool:
        """Whether what is taken down is for steps of other sizes, too: all that an op takes has to be known."""
        return bool(self._state.loose)

    def needs_care(self, number: int) -> None:
        """An op runs of which nothing is known so far."""
        lesson = self._lesson
        if lesson is not None and number < len(lesson.needs):
            lesson.needs[number] = _CARE

    def needs_no_care(
        self, number: int, rise_bytes: int, *, writes: bool = False, gated: bool = False, draws: bool = False
    ) -> None:
        """An op has run that needs no care, and adds so much at its worst moment.

        Nothing is made anew from it; and if it `writes`, then to nothing that anybody follows. A `gated` one passes
        only where the allocator refuses nothing. If it `draws`, then from the generator of the CPU.
        """
        lesson = self._lesson
        if lesson is not None and number < len(lesson.needs):
            flags = _WRITES * writes | _GATED * gated | _DRAWS * draws
            lesson.needs[number] = rise_bytes | flags

    def was_measured(self) -> None:
        """What an op needs is known now: if the step is a lesson, another one is to come."""
        if self._lesson is not None:
            self._lesson.goes_on = True

    def pass_view(self) -> None:
        """A view is made, which needs no care."""
        number = self._state.number
        self._state.number = number + 1
        if self.learns:
            self.needs_no_care(number, 0)

    def parked(self, record: StorageRecord, *, is_parked: bool) -> None:
        """The bytes of this storage may be away from now on, or are there for good: who looks at it needs care."""
        if self._library is not None:
            self._library.outgrow_fastpath_parked(record.address, is_parked)

    def make_resizable(self, record: StorageRecord) -> bool:
        """Whether a storage that is said to be fixed may be resized all the same, from now on.

        An array that shared it says so for good. Ask only where nobody shares it any more.
        """
        return self._library is not None and bool(self._library.outgrow_fastpath_make_resizable(record.address))

    @property
    def asks_parked(self) -> int:
        """The address of `int (*)(address of a storage)`: whether its bytes may be away. 0 without a compiler."""
        if self._library is None:
            return 0
        return ctypes.cast(self._library.outgrow_fastpath_is_parked, ctypes.c_void_p).value or 0

    @property
    def counts(self) -> bool:
        """Whether what is made past the mode is counted."""
        return self._count is not None and self._has_memory

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the step's mode is on, where native code has hidden it: Python runs inside a formula's node."""
        if self._library is None or not self._library.outgrow_fastpath_hide(False):
            yield
            return
        try:
            yield
        finally:
            self._library.outgrow_fastpath_hide(True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, native code sees no op, and what is made on this thread is counted (`most_bytes`)."""
        enters = self._is_on
        if enters:
            assert self._library is not None
            self._library.outgrow_fastpath_leave(ctypes.byref(self._state))
        if isinstance(self._count, ArenaCount):
            self._count.count_in(self._ledger.live_bytes)
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            if isinstance(self._count, ArenaCount):
                self._count.count_out()
            if enters and self._is_on and self._library is not None:
                self._is_on = bool(self._library.outgrow_fastpath_enter(ctypes.byref(self._state)))
                if not self._is_on:  # another step took its place
                    self._lesson, self.learns = None, False

    @property
    def counts_blocks(self) -> bool:
        """Whether that is counted block by block, so that the most of it is known."""
        return self.counts and isinstance(self._count, ArenaCount)

    @contextmanager
    def measuring(self) -> Iterator[Callable[[], int | None]]:
        """As `paused`; what is given tells afterwards how far live bytes rose inside at their highest."""
        if self._is_paused:  # somebody counts already
            yield lambda: None
            return
        before = self._ledger.live_bytes
        with self.paused():
            yield lambda: None if self.most_bytes is None else max(0, self.most_bytes - before)

    @property
    def most_bytes(self) -> int | None:
        """The most that live bytes came to since the last pause began; None where nobody counts block by block."""
        return self._count.most_bytes if isinstance(self._count, ArenaCount) else None

    def ring(self) -> None:
        """The mode wants to see the next op that would lift the peak. Any thread may call this."""
        self._state.bell = 1

    def hear(self) -> None:
        """The mode is here."""
        self._state.bell = 0

    def close(self) -> None:
        """Count nothing any more."""
        if self._count is not None:
            self._ledger.count = None
            self._count.close()
            self._count = None
            if self._state.books:
                assert self._library is not None
                self._ledger.on_book = None
                self._library.outgrow_fastpath_end_books(self._state.books)
                self._state.books = None
            self._library = None
        self._state.let_go_of = self._let_go_of = None


def _follow(library: ctypes.CDLL, record: StorageRecord, is_followed: bool) -> None:
    """Who writes to this storage needs care from now on, or no longer."""
    library.outgrow_fastpath_followed(record.address, is_followed)


def _book(library: ctypes.CDLL, books: int, record: StorageRecord, is_booked: bool) -> None:
    """The ledger counts this storage itself from now on, or no longer."""
    library.outgrow_fastpath_booked(books, record.address, is_booked)


def _new_lesson(length: int) -> _Lesson:
    """One of so many ops, of which nothing is known so far."""
    return _Lesson((ctypes.c_int64 * length)(*[_CARE] * length), (_Expected * (2 * length))())


@once
def _library() -> ctypes.CDLL | None:
    """The native half; None where there can be none, and the log says why."""
    if os.environ.get("OUTGROW_FASTPATH") == "0":
        return None
    try:
        library = ctypes.CDLL(str(built(CODE)))
    except (OSError, subprocess.SubprocessError) as error:
        _LOG.info("no fast path, every op goes through Python: %s", error)
        return None
    library.outgrow_fastpath_enter.argtypes = (ctypes.c_void_p,)
    library.outgrow_fastpath_leave.argtypes = (ctypes.c_void_p,)
    library.outgrow_fastpath_leave.restype = None
    library.outgrow_fastpath_see_nodes.argtypes = (ctypes.c_int,)
    library.outgrow_fastpath_see_nodes.restype = None
    for function in (library.outgrow_fastpath_allocated, library.outgrow_fastpath_reserved):
        function.argtypes = (ctypes.c_int,)
        function.restype = ctypes.c_int64
    library.outgrow_fastpath_followed.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.outgrow_fastpath_followed.restype = None
    library.outgrow_fastpath_new_books.restype = ctypes.c_void_p
    library.outgrow_fastpath_new_bounds.restype = ctypes.c_void_p
    library.outgrow_fastpath_end_bounds.argtypes = (ctypes.c_void_p,)
    library.outgrow_fastpath_end_bounds.restype = None
    library.outgrow_fastpath_booked.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    library.outgrow_fastpath_booked.restype = None
    library.outgrow_fastpath_end_books.argtypes = (ctypes.c_void_p,)
    library.outgrow_fastpath_end_books.restype = None
    library.outgrow_fastpath_make_resizable.argtypes = (ctypes.c_void_p,)
    library.outgrow_fastpath_parked.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.outgrow_fastpath_parked.restype = None
    try:
        _pass_higher_order_ops()
    except (AttributeError, RuntimeError) as error:
        _LOG.info("no fast path, every op goes through Python: %s", error)
        return None
    library.outgrow_fastpath_install()
    return library


def _pass_higher_order_ops() -> None:
    """Have operators over functions (`torch.cond`) look past the key that native code sees ops on.

    They dispatch in Python, by the keys that are on, and know none that is not written down for each of them.

    Raises:
        AttributeError, RuntimeError: this PyTorch dispatches them in another way.
    """
    key = torch._C._parse_dispatch_key(KEY)
    if key is None:
        raise RuntimeError(f"this PyTorch has no dispatch key {KEY}")
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(key)
