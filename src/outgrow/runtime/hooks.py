"""The saved-tensor hooks of a live step: the clock of its plan.

Each pack and unpack is a tick. Autograd gets a handle for each tensor that it saves, and the tensor back for that,
from wherever its value is by then. What stays where it is goes past this, if there is native code (`staying.py`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import _disable_current_modes

from outgrow.runtime.copies.strays import Strays
from outgrow.runtime.current import CurrentStep
from outgrow.runtime.demand import Demand
from outgrow.runtime.entry import Entry
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.handles import Handle, Share
from outgrow.runtime.interrupts import Interrupts
from outgrow.runtime.parking import Parking
from outgrow.runtime.pool import Pool
from outgrow.runtime.recompute import Recomputer
from outgrow.runtime.room import Room
from outgrow.runtime.staying import Stay, Staying
from outgrow.runtime.tiers.memory import DeviceMemory
from outgrow.tracing.ir import Event
from outgrow.tracing.ledger import Ledger
from outgrow.tracing.ops import wraps

# Where ops are not watched, the resident set is looked at every so many saved tensors.
_PACKS_PER_LOOK = 8
_CHECKPOINT = "torch.utils.checkpoint"


class Ticking(Protocol):
    """Who goes by the clock."""

    def __call__(self, event: Event, handle: Handle | Stay, entry: Entry | None) -> None:
        """One tick: a saved tensor's, whose value is an `entry` of the pool or none of it."""


class Hooks:
    """What autograd calls for each tensor that it saves, wants back, and lets go of.

    Attributes:
        staying: the saved tensors that stay; its hooks are those to set.
        packs: bytes of each saved tensor of this step.
        saved_bytes: bytes of the values that autograd saved in this step, and that the pool knows.
        is_beside_compiler: a compiler's frames call the hook that runs.
    """

    def __init__(
        self,
        current: CurrentStep,
        ledger: Ledger,
        pool: Pool,
        memory: DeviceMemory,
        room: Room,
        fast_path: FastPath,
        recomputer: Recomputer,
        parking: Parking,
        demand: Demand,
        strays: Strays,
        interrupts: Interrupts,
        tick: Ticking,
        make_way: Callable[[Handle], None],
        unpacked: Callable[[], None],
    ) -> None:
        """`tick` is told of each tick, and `make_way` before that of a saved tensor that has to come back.

        `unpacked` is told when one is handed out that may have come back.
        `interrupts` wait until packs and unpacks are booked.
        """
        self._current = current
        self._ledger = ledger
        self._pool = pool
        self._memory = memory
        self._room = room
        self._recomputer = recomputer
        self._parking = parking
        self._demand = demand
        self._strays = strays
        self._interrupts = interrupts
        self._tick = tick
        self._make_way = make_way
        self._unpacked = unpacked
        # The backward pass of a GPU runs on a thread of autograd's own, while the one that asked for it waits.
        self.changes_threads = ledger.device_type != "cpu"
        self._thread = threading.get_ident()
        self._fast = fast_path
        self._trusted: object = None
        self._released_elsewhere: deque[Handle] = deque()
        self._nothing = torch.empty(0, device=ledger.device)
        # A compiler looks at all that compiled code calls. Imported here, as an optimizer has done that already.
        from torch._dynamo.decorators import skip

        skip(Hooks.pack)
        self.staying = Staying(
            self,
            (self.pack, self.unpack),
            ledger,
            pool,
            fast_path,
            look=self._look,
            strays=strays.now if self.changes_threads else None,
            nothing=self._nothing,
        )
        pool.cache.unknown = self.staying
        self._ticks = self.staying.ticks
        self.forget()

    def forget(self) -> None:
        """A step begins, or is over."""
        self.packs: list[int] = []
        self.saved_bytes = 0
        self.is_beside_compiler = False
        self._trusted = None
        self.staying.reset(self._current.epoch, self.packs)

    # --- threads ---

    def begin_here(self) -> None:
        """A step begins on the calling thread."""
        self._thread = threading.get_ident()
        if self.changes_threads:
            self._ticks.thread = self._thread
        self._ledger.work_here()

    def come_here(self) -> None:
        """The training goes on on the calling thread, which has to see what was freed on the other one."""
        if threading.get_ident() != self._thread:
            self.begin_here()
        self.catch_up()

    def catch_up(self) -> None:
        """Book what other threads let go of, if the training is here."""
        while self._released_elsewhere and threading.get_ident() == self._thread:
            self.released(self._released_elsewhere.popleft())

    def are_trusted(self) -> bool:
        """Whether those that autograd asks now keep no address of what is saved, as the program's own may.

        Those of `torch.utils.checkpoint` keep nothing. Native code goes by what was said of them last.
        """
        asked = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack = self.staying.pack if asked is None else asked[0]
        if pack is not self._trusted:
            if pack is not self.staying.pack and getattr(pack, "__module__", "") != _CHECKPOINT:
                return False
            self._trusted = pack  # held: another one could lie where it lay
            self._fast.trust_hooks(pack)
        return True

    def _look(self) -> None:
        """Now and then in a step that nobody watches: let in who waits, and look at what there is."""
        if self._interrupts.waiting:
            self._interrupts.check()
        self._current.look()
        self._memory.make_room(0)

    # --- what autograd saves ---

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Autograd saves a tensor."""
        return self._pack_beside_compiler(tensor) if get_eval_frame_callback() else self._pack(tensor)

    @_disable_dynamo
    def _pack_beside_compiler(self, tensor: torch.Tensor) -> Handle:
        self.is_beside_compiler = True
        try:
            return self._pack(tensor)
        finally:
            self.is_beside_compiler = False

    def _pack(self, tensor: torch.Tensor) -> Handle:
        if self._interrupts.waiting:
            self._interrupts.check()
        if self.changes_threads:
            self.come_here()
        if self._released_elsewhere:
            self.catch_up()
        current = self._current
        wrapper = _detached_wrapper(tensor) if wraps(tensor) else None
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            handle = Handle(self, tensor, current.epoch, self._ticks.number, wrapper=wrapper)
            self._ticks.number += 1
            record = self._ledger.see(tensor) if _is_plain(tensor) else None
            if current.recording is not None:
                handle.recorded = current.recording.recorder.packed(record, handle.nbytes)
            entry: Entry | None = None
            # Copies are ordered by the step's stream alone: what is saved on another one stays where it is.
            strays = self._strays.now()
            if (
                strays
                or record is None
                or record.serial in current.kinds
                or (tensor.is_leaf and tensor.requires_grad)
            ):
                if record is not None and not strays:
                    self.staying.saw_state(handle.number, record)
                if record is not None and tensor.is_leaf:
                    handle.keep(tensor, self._nothing)
                elif record is not None:
                    record.aliases += 1
                    handle.record = record
            else:
                entry = self._pool.adopt(tensor, record)
                if entry.epoch != current.epoch:
                    entry.epoch, entry.saved_index = current.epoch, handle.recorded
                    self.saved_bytes += entry.nbytes
                handle.enter(entry, self._nothing)
                self._recomputer.packed(record, entry)
                self.staying.has_entry(handle)
            self.packs.append(handle.nbytes)
            if not current.is_watched and handle.number % _PACKS_PER_LOOK == 0:
                self._memory.make_room(0)
            self._tick(Event.PACK, handle, entry)
        return handle

    # --- what it wants back ---

    def unpack(self, kept: Handle | Stay | Share) -> torch.Tensor:
        """Autograd wants a saved tensor back."""
        with torch._C.DisableTorchFunction():
            handle = kept if isinstance(kept, Handle) else self.staying.handle_of(kept)
            if handle is not None:
                return self._unpack(handle)
            return self._unpack_stay(cast(Stay, kept))

    def _unpack_stay(self, stay: Stay) -> torch.Tensor:
        if self._interrupts.waiting:
            self._interrupts.check()
        if self.changes_threads:
            self.come_here()
        tensor = self.staying.unpacked(stay)
        if self._parking.parked.busy:
            with torch._C._DisableTorchDispatch():
                self._parking.parked.touch((tensor,))
        if stay.epoch == self._current.epoch:
            self._tick(Event.UNPACK, stay, None)
        return tensor

    def _unpack(self, handle: Handle) -> torch.Tensor:
        if self._interrupts.waiting:
            self._interrupts.check()
        if self.changes_threads:
            self.come_here()
        handle.check_version()
        current = self._current
        this_step = handle.epoch == current.epoch
        if current.recording is not None and this_step:
            current.recording.recorder.unpacked(handle.recorded)
        with torch._C._DisableTorchDispatch():
            entry = handle.entry
            if entry is None:
                assert handle.tensor is not None
                if self._parking.parked.busy:
                    self._parking.parked.touch((handle.tensor,))
                if this_step:
                    self._tick(Event.UNPACK, handle, None)
                return self.staying.returned(handle.tensor)
            self._room.where = ""  # names of nodes take time: asked for where somebody reads them
            if this_step and entry.storage is None:
                self._make_way(handle)
            storage = self._pool.request(entry, self._room.make)
            if self._demand.on:
                self._demand.touched(entry.record)
            current.look()
            if this_step:
                self._tick(Event.UNPACK, handle, entry)
            self._pool.wait_in(entry)
            self._strays.follow()
            tensor = handle.rebuild(storage, self.staying.window)
            self._room.fill_up()
            self._unpacked()
            return tensor

    # --- what it lets go of ---

    def released(self, handle: Handle) -> None:
        """Autograd let go of a saved tensor."""
        if threading.get_ident() != self._thread:  # garbage collection runs on any thread
            self.staying.let_go_elsewhere()
            self._released_elsewhere.append(handle)
            return
        recording = self._current.recording
        if recording is not None and handle.epoch == self._current.epoch and handle.recorded >= 0:
            recording.recorder.released(handle.recorded)
        if handle.entry is not None:
            self._pool.drop(handle.entry)
        elif handle.record is not None:
            handle.record.aliases -= 1


def _detached_wrapper(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor around what a subclass has in place of memory, as the subclass makes it: no op of the step."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.detach()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a window on ordinary memory: no subclass, no sparse layout, no lazy conjugate."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and not tensor._is_zerotensor()
    )
