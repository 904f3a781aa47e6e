"""Saved tensors that stay where they are, as the plan says: packed and unpacked by `staying.cpp`, without Python.

Most of them are such: parameters, statistics, and what the plan neither moves nor makes anything anew from. The pool
need not know of them as long as the plan holds. It is shown them once memory runs short, and when they outlive their
step. Without a compiler the pool knows all.

Of a value that does move, the pool has to know one saved tensor: further ones, such as a recurrent network saves of
each part of a sequence, hold on to that one's handle, and come to Python only where the value is not there.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import subprocess
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from outgrow.planning.agenda import actions_of, stays_of
from outgrow.planning.plan import Plan
from outgrow.runtime.by_plan import ByPlan
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.handles import Handle, Kept, Owner, Share, changed, window
from outgrow.runtime.native import Code, built, once
from outgrow.runtime.pool import Pool
from outgrow.runtime.tiers.arena import ArenaCount
from outgrow.runtime.tiers.cuda import AllocatorCount
from outgrow.tracing.ir import Event, Fit, Kind
from outgrow.tracing.ledger import Ledger, StorageRecord

_LOG = logging.getLogger(__name__)

CODE = Code(Path(__file__).with_name("staying.cpp"), ("c10", "torch_cpu", "torch_python"), for_python=True)
_MODULE = "outgrow_staying"
# The roles and columns of `Expected` in staying.cpp.
_MOVES, _STAYS, _IS_STATE = range(3)
_COLUMNS = 5
_NBYTES, _STORAGE = 1, 3
_NO_SIZE = 1 << 62

_Hook = Callable[[Any], Any]


class Stay(Kept, Protocol):
    """A saved tensor that stays.

    `tensor` shares memory and version counter with what was saved; a parameter or buffer is that itself. Once memory
    ran short, a handle has taken its place.
    """

    @property
    def tensor(self) -> torch.Tensor: ...


class Ticks:
    """Where a step has come to: its next saved tensor, its next tick. As `Stays` in staying.cpp, which counts on.

    Attributes:
        waits: whether something waits for the next tick, whatever it is.
        kept_bytes: bytes of the values that stayed without anybody here knowing of them.
        thread: the one that the training is on, if that may change; else -1.
    """

    def __init__(self) -> None:
        self.number = self.tick = self.waits = self.kept_bytes = 0
        self.thread = -1


class Staying:
    """The hooks of a session's steps, and the saved tensors that stay in the one that runs.

    Attributes:
        pack, unpack: the hooks.
        ticks: where the step has come to.
        window: makes what autograd gets back of what left, as `window` in handles.py.
        returned: makes what it gets back of what did not: that itself, or another tensor on its memory.
        foretells: whether the pool knows of all that the cache is foretold to send away in this step.
    """

    def __init__(
        self,
        owner: Owner,
        hooks: tuple[_Hook, _Hook],
        ledger: Ledger,
        pool: Pool,
        fast_path: FastPath,
        *,
        look: Callable[[], object],
        strays: Callable[[], bool] | None,
        nothing: torch.Tensor,
    ) -> None:
        """`hooks` are those for all that does not stay, and `owner` is told when autograd lets go of it.

        `look` has a look at the resident set. `strays` says whether the program computes where copies are not
        ordered. `nothing` is a tensor without memory.
        """
        self._owner = owner
        self._ledger = ledger
        self._pool = pool
        self._nothing = nothing
        self._known: ByPlan[tuple[array[int], array[int]]] = ByPlan()
        self._expected: array[int] | None = None  # what native code goes by now
        self._exact: array[int] = array("q")  # and what it would in the plan's own step
        self._kinds: Mapping[int, Kind] = {}
        self.pack, self.unpack = hooks
        self.ticks: Any = Ticks()
        self.foretells = False
        self.window: Callable[..., torch.Tensor] = window
        self.returned: Callable[[torch.Tensor], torch.Tensor] = _itself
        module = _native() if fast_path.asks_parked else None
        self._stays: Any = None
        self._share: type = type(None)
        if module is None:
            return
        self._share = module.Share
        stays = self.ticks = self._stays = module.Stays()
        stays.pack_in_python, stays.unpack_in_python = hooks
        stays.see = ledger.see
        stays.is_compiling = get_eval_frame_callback
        stays.look, stays.strays = look, strays
        stays.is_parked = fast_path.asks_parked
        self.pack, self.unpack = stays.pack, stays.unpack
        stays.recent = pool.cache.recent
        self.window, self.returned = module.window, module.returned

    def reset(self, epoch: int, packs: list[int]) -> None:
        """Step number `epoch` begins, or ends; nothing is known to stay. `packs` takes the bytes of what is saved."""
        ticks = self.ticks
        ticks.number = ticks.tick = ticks.waits = ticks.kept_bytes = 0
        self._expected = None
        self.foretells = False
        if self._stays is not None:
            self._stays.on, self._stays.epoch, self._stays.packs = False, epoch, packs

    def begin(
        self,
        plan: Plan,
        kinds: Mapping[int, Kind],
        *,
        watched: bool,
        fit: Fit = Fit.EXACT,
        limits: Sequence[int] | None = None,
    ) -> None:
        """The step goes by `plan`, in every particular, but for sizes if they do not `fit`; ops are `watched` or not.

        `kinds` tells which storages are training state, by their serial numbers. What is saved goes past Python if it
        has no more bytes than `limits` say.
        """
        stays, self._kinds = self._stays, kinds
        if stays is None:
            return
        known = self._known.find(plan)
        if known is None:
            known = _expected(plan)
            self._known.add(plan, known)
        self._exact, codes = known
        expected = self._exact
        if fit is not Fit.EXACT:
            expected = _loosened(expected, plan, limits)
        elif limits is not None:
            expected = _capped(expected, limits)
        self._expected = expected
        stays.expect(expected, codes)
        count = self._ledger.count
        stays.counts_all = isinstance(count, AllocatorCount)
        stays.count, stays.counts = (count.address, count.asks) if isinstance(count, ArenaCount) else (0, 0)
        stays.looks, stays.lends = not watched, bool(plan.parks)
        stays.on = True
        self.foretells = bool(plan.prediction.evicted)

    def stop(self) -> None:
        """The step has left its plan: from here on the pool has to know of all that is saved."""
        self._expected = None
        self.foretells = False
        if self._stays is not None:
            self._stays.on = False

    def has_entry(self, handle: Handle) -> None:
        """The value of a saved tensor has an entry in the pool: further ones on it may share that."""
        if self._expected is not None:
            self._stays.anchor(handle.number, handle)

    def let_go_elsewhere(self) -> None:
        """A handle was let go of that is still about: none may be shared."""
        if self._stays is not None:
            self._stays.forget_anchors()

    def handle_of(self, kept: Stay | Share) -> Handle | None:
        """The handle that has taken the place of one, or takes that of a share now. None for one that stays."""
        if kept.handle is None and isinstance(kept, self._share):
            with torch._C._DisableTorchDispatch():
                return Handle.in_place_of(cast(Share, kept), self._owner, self._nothing)
        return kept.handle

    def saw_state(self, number: int, record: StorageRecord) -> None:
        """Saved tensor `number` is training state, which will lie there in the next step, too."""
        expected, place = self._expected, _COLUMNS * number
        if expected is not None and place < len(expected) and expected[place] == _IS_STATE:
            expected[place + _STORAGE] = self._exact[place + _STORAGE] = record.address

    def unpacked(self, stay: Stay) -> torch.Tensor:
        """What autograd is given back of one.

        Raises:
            RuntimeError: it was changed in place since it was saved.
        """
        tensor = stay.tensor
        if tensor._version != stay.version:
            raise changed(tensor.dtype, tensor.shape, stay.version, tensor._version)
        # Another one: the stay's own may lose its memory while autograd has this in hand.
        return self.returned(tensor)

    def show(self, nbytes: int) -> bool:
        """Show the pool the oldest of those that it does not know, as if saved before all that it knows.

        As many as come to `nbytes`, if there are: each that is shown is unpacked in Python. Whether any was.
        """
        if self._stays is None:
            return False
        oldest = self._stays.oldest(nbytes)
        return self._show_each(oldest) or (bool(oldest) and self._show_each(self._stays.all()))

    def show_all(self) -> None:
        """The step is over: show the pool all. Aliases of training state, which never leave, are counted there."""
        if self._stays is not None:
            self._show_each(self._stays.all(), is_over=True)

    def _show_each(self, stays: Sequence[Stay], *, is_over: bool = False) -> bool:
        """Show the pool some of them, the oldest first; whether it took any."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return sum(self._show(stay, is_over=is_over) for stay in reversed(stays)) > 0

    def _show(self, stay: Stay, *, is_over: bool) -> bool:
        """Show the pool one of them, if it lies where the pool could do something about it; or count it."""
        tensor = stay.tensor
        record = self._ledger.see(tensor)
        if record is None or tensor._version != stay.version or self._pool.is_parked(record):
            return False
        is_state = record.serial in self._kinds
        if is_state and not is_over:
            return False
        # Below autograd, where recipes run, another alias would not share the version counter.
        handle = Handle(self._owner, tensor, stay.epoch, stay.number, alias=tensor)
        if is_state:
            record.aliases += 1
            handle.record = record
        else:
            handle.enter(self._pool.adopt(tensor, record, is_oldest=True), self._nothing)
        stay.give_way(handle)
        return True


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _expected(plan: Plan) -> tuple[array[int], array[int]]:
    """What staying.cpp is told of the saved tensors under a plan, and of its ticks."""
    trace = plan.problem.trace
    expected: array[int] = array("q")
    windows = Counter(saved.value for saved in trace.saved)
    for saved, nbytes, counted in zip(trace.saved, trace.packs, stays_of(plan), strict=True):
        is_state = trace.values[saved.value].kind.lasts
        role = _MOVES if counted < 0 else _IS_STATE if is_state else _STAYS
        shared = saved.value if role == _MOVES and not is_state and windows[saved.value] > 1 else -1
        expected.extend((role, nbytes, max(0, counted), 0, shared))
    actions = actions_of(plan)
    codes = array(
        "q",
        (
            tick.saved << 2 | (number in actions) << 1 | (tick.event is Event.UNPACK)
            for number, tick in enumerate(trace.ticks)
        ),
    )
    return expected, codes


def _loosened(exact: array[int], plan: Plan, limits: Sequence[int] | None) -> array[int]:
    """The same for a step of other sizes, of which nothing is larger than `limits`, in bytes."""
    trace = plan.problem.trace
    if limits is None:
        limits = [saved.nbytes for saved in trace.saved]
    loose = array("q", exact)
    loose[_NBYTES::_COLUMNS] = array(
        "q",
        (
            nbytes if is_whole or nbytes < 0 else -2 - limit
            for is_whole, nbytes, limit in zip(trace.saves_whole_state, exact[_NBYTES::_COLUMNS], limits, strict=True)
        ),
    )
    return loose


def _capped(exact: array[int], limits: Sequence[int]) -> array[int]:
    """The same for a step of the plan's own sizes: Python is shown what has more bytes than `limits` say."""
    capped = array("q", exact)
    capped[_NBYTES::_COLUMNS] = array(
        "q",
        (
            nbytes if nbytes <= limit else _NO_SIZE
            for nbytes, limit in zip(exact[_NBYTES::_COLUMNS], limits, strict=True)
        ),
    )
    return capped


@once
def _native() -> Any:
    """The module in C++; None where there can be none, and the log says why."""
    try:
        path = str(built(CODE))
        loader = importlib.machinery.ExtensionFileLoader(_MODULE, path)
        spec = importlib.util.spec_from_loader(_MODULE, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError, subprocess.SubprocessError) as error:
        _LOG.info("every saved tensor goes through Python: %s", error)
        return None
    return module
