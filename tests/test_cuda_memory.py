"""CUDA memory as a tier, with an allocator that is told what to say."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outgrow.runtime.copies.streams import CudaStreams, Stream
from outgrow.runtime.dice import Dice, _default_generator
from outgrow.runtime.fastpath import FastPath
from outgrow.runtime.page_faults import PageFaults
from outgrow.runtime.tiers.cuda import AllocatorCount, CudaMemory
from outgrow.runtime.tiers.memory import Request, Scattered
from outgrow.tracing.ledger import Ledger

GiB = 1 << 30
# Of 100 GiB, for a budget of 8: a piece and four small ones may be taken beyond it.
WALL = 0.084 - 28 / (100 << 10)
DEVICE = torch.device("cuda", 0)


@dataclass
class Allocator:
    """What `torch.cuda` says and is told."""

    share: float = 1.0
    allocated: int = GiB
    highest: int = GiB
    reserved: int = 2 * GiB
    ooms: int = 3
    retries: int = 0
    ends: int = 0  # bytes of pieces between blocks in use that are of no use to others
    asked: list[int] = field(default_factory=list)
    emptied: int = 0
    shares: list[float] = field(default_factory=list)

    def stand(self, share: float, device: torch.device) -> None:
        assert isinstance(share, float), "the real one takes nothing else"
        assert 0 <= share <= 1
        self.share = share
        self.shares.append(share)

    def stats(self, device: torch.device) -> dict[str, Any]:
        return {
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.highest}},
            "reserved_bytes": {"all": {"current": self.reserved}},
            "num_ooms": self.ooms,
            "num_alloc_retries": self.retries,
        }

    def empty(self) -> None:
        self.emptied += 1
        self.reserved = self.allocated

    def take(self, nbytes: int, device: torch.device) -> None:
        self.asked.append(nbytes)
        if self.allocated + self.ends + nbytes > self.share * 100 * GiB:
            self.ooms += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.reserved = min(self.reserved, self.allocated + self.ends + nbytes)  # it gave the rest back


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    fake = Allocator()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GiB, 100 * GiB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fake.share)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fake.stand)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", fake.stats)
    monkeypatch.setattr(torch.cuda, "empty_cache", fake.empty)
    monkeypatch.setattr(torch, "UntypedStorage", fake.take)
    return fake


def of(nbytes: int) -> Request:
    """One block, of an op that is to be refused nothing."""
    return Request((nbytes,), 0, falls_back=True)


def test_the_wall_stands_just_behind_the_budget_and_goes_with_the_session(allocator: Allocator) -> None:
    allocator.share = 0.9
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    assert allocator.share == pytest.approx(WALL)
    assert allocator.emptied == 1
    memory.close()
    assert allocator.share == 0.9


def test_the_wall_of_a_session_that_is_made_again_is_its_own(allocator: Allocator) -> None:
    """As in a notebook: the one before ends when the new one has begun."""
    allocator.share = 0.9
    before = CudaMemory(DEVICE, 2 * GiB, Ledger("cuda", 0))
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    assert allocator.share == pytest.approx(WALL)
    before.close()
    assert allocator.share == pytest.approx(WALL)
    memory.close()
    assert allocator.share == 0.9


def test_a_budget_never_lifts_a_wall_of_the_users(allocator: Allocator) -> None:
    allocator.share = 0.05
    CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    assert allocator.share == 0.05


def test_live_bytes_are_what_the_allocator_gave_out_near_the_budget_and_only_there(allocator: Allocator) -> None:
    ledger = Ledger("cuda", 0)
    memory = CudaMemory(DEVICE, 8 * GiB, ledger)
    assert ledger.live_bytes == GiB
    allocator.allocated = 3 * GiB
    memory.count(100)
    assert ledger.live_bytes == GiB
    memory.count(7 * GiB)
    assert ledger.live_bytes == ledger.unseen_bytes == 3 * GiB


def test_the_gate_stays_shut_where_there_is_room_beside_what_is_reserved(allocator: Allocator) -> None:
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    memory.begin_step(planned=True, again=False)
    allocator.allocated, allocator.reserved = 6 * GiB, 7 * GiB
    with memory.gate(of(GiB)):
        assert allocator.share == pytest.approx(WALL)
    assert not allocator.asked


def test_near_the_wall_the_gate_has_the_allocator_find_what_is_asked_for(allocator: Allocator) -> None:
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    memory.begin_step(planned=True, again=False)
    allocator.allocated, allocator.reserved = 6 * GiB, int(8.3 * GiB)
    with memory.gate(of(GiB)):  # it gives free blocks back for that
        assert allocator.asked == 2 * [GiB], "once more, as other blocks may be free by now"
    assert allocator.share == pytest.approx(WALL)


def test_the_gate_asks_for_the_blocks_that_the_op_will_ask_for(allocator: Allocator) -> None:
    """What is free in two places is no reason to give everything back."""
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    memory.begin_step(planned=True, again=False)
    allocator.allocated, allocator.reserved = 6 * GiB, int(8.3 * GiB)
    with memory.gate(Request((100, GiB // 2), GiB // 4, falls_back=True)):
        assert allocator.asked[:4] == [100, 3 * GiB // 4, GiB // 2, GiB // 4], "work on the first, and on the second"
        assert allocator.share * 100 * GiB >= allocator.reserved + 0.75 * GiB, "whatever order it asks in"
    assert allocator.share == pytest.approx(WALL)


def test_what_takes_more_than_was_found_for_it_is_found_one_block_from_then_on(allocator: Allocator) -> None:
    """As it asks in another order than most. What it took is given back at once."""
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    wayward, other = (Request((GiB // 2,), nbytes, falls_back=True) for nbytes in (GiB // 4, GiB // 8))
    for request in (wayward, other):
        memory.begin_step(planned=True, again=False)
        allocator.allocated, allocator.reserved, emptied = 6 * GiB, int(8.3 * GiB), allocator.emptied
        with memory.gate(request):
            assert GiB // 2 in allocator.asked
            allocator.reserved = int((8.5 if request is wayward else 8.39) * GiB)
        assert allocator.emptied == emptied + (request is wayward)
        memory.end_step()
        assert memory.gave_back == (request is wayward)
        allocator.asked.clear()
    allocator.allocated, allocator.reserved = 6 * GiB, int(8.3 * GiB)
    with memory.gate(wayward):
        assert set(allocator.asked) == {GiB // 2 + GiB // 4}
    allocator.reserved = int(8.3 * GiB)
    with memory.gate(other):
        assert GiB // 2 in allocator.asked


def test_what_says_so_where_it_is_refused_a_guess_gets_no_more_than_may_be_held(allocator: Allocator) -> None:
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    memory.begin_step(planned=True, again=False)
    allocator.allocated, allocator.reserved = 6 * GiB, int(8.3 * GiB)
    with memory.gate(Request((3 * GiB // 2,), 0, falls_back=False)):
        assert allocator.share == pytest.approx(0.08 * 1.05)


def test_at_small_budgets_ends_of_pieces_keep_out_more_than_the_wall_allows(allocator: Allocator) -> None:
    memory = CudaMemory(DEVICE, GiB, Ledger("cuda", 0))
    memory.begin_step(planned=True, again=False)
    allocator.allocated, allocator.reserved, allocator.ends = int(0.7 * GiB), int(1.05 * GiB), GiB // 5
    wall = allocator.share
    with memory.gate(of(GiB // 5)):
        assert allocator.asked == 4 * [GiB // 5], "further out each time"
        assert wall < allocator.share < 0.0135
    assert allocator.share == wall
    assert memory.refusals() == 0, "what was refused to us is nobody's"


def test_where_ends_of_pieces_keep_out_what_the_budget_holds_saved_values_leave_first(allocator: Allocator) -> None:
    """And the wall gives way where none is left that can."""
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    memory.begin_step(planned=True, again=False)
    allocator.allocated, allocator.reserved, allocator.ends = 6 * GiB, int(8.3 * GiB), GiB
    with pytest.raises(Scattered), memory.gate(of(GiB + GiB // 2)):
        pass
    assert allocator.share == pytest.approx(WALL)
    assert memory.stretch(GiB + GiB // 2)
    with memory.gate(of(GiB + GiB // 2)):
        assert allocator.share == pytest.approx(0.099, rel=0.01)
    memory.end_step()
    assert allocator.share == pytest.approx(WALL)
    assert memory.refusals() == 0, "what was refused to us is nobody's"
    allocator.ooms += 1
    assert memory.refusals() == 1


def test_the_gate_asks_for_nothing_that_would_lift_the_peak_over_the_budget(allocator: Allocator) -> None:
    """Blocks may be larger than what was asked for."""
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    memory.begin_step(planned=True, again=False)
    allocator.allocated, allocator.reserved = 6 * GiB, int(8.3 * GiB)
    with memory.gate(of(2 * GiB - 1000)):
        assert allocator.share == pytest.approx(0.104, rel=0.01)
    assert not allocator.asked


@pytest.mark.parametrize("planned", [False, True])
def test_a_librarys_op_that_nobody_knows_is_refused_nothing(allocator: Allocator, planned: bool) -> None:
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    memory.begin_step(planned=planned, again=False)
    allocator.allocated, allocator.reserved = 6 * GiB, 7 * GiB
    emptied = allocator.emptied
    with memory.openly(GiB):
        assert allocator.share == 1.0
    assert allocator.share == pytest.approx(WALL)
    assert allocator.emptied == emptied
    with memory.openly(2 * GiB):
        assert allocator.share == 1.0
    # Where a plan will want the same blocks again, they are not given back for it.
    assert allocator.emptied == emptied + (not planned)


def test_what_takes_many_blocks_has_nothing_given_back_for_it(allocator: Allocator) -> None:
    """One block of all that it takes may not be there, though it is in free blocks of many sizes."""
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    allocator.reserved = 10 * GiB
    before = allocator.share
    with memory.gate_for_many(GiB):
        assert not allocator.asked
        assert allocator.emptied == 1  # as the session began
        assert allocator.share * 100 * GiB >= 11 * GiB
    assert allocator.share == before


def test_the_allocators_own_peak_is_the_steps_if_it_rose_in_it(allocator: Allocator) -> None:
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    allocator.highest = 5 * GiB  # in an earlier step
    memory.begin_step(planned=True, again=False)
    assert memory.highest_bytes() is None
    allocator.highest = 6 * GiB
    assert memory.highest_bytes() == 6 * GiB
    memory.end_step()
    memory.begin_step(planned=True, again=True)
    assert memory.highest_bytes() is None
    allocator.highest = 2 * GiB  # the program had it forgotten in the middle of the step
    assert memory.highest_bytes() == 2 * GiB


def test_the_wall_is_there_again_after_an_error_in_the_gate(allocator: Allocator) -> None:
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))

    def fail() -> None:
        with memory.gate(of(9 * GiB)):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        fail()
    assert allocator.share == pytest.approx(WALL)


def test_what_takes_nobody_knows_how_much_gets_what_the_budget_has_and_no_more(allocator: Allocator) -> None:
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    with memory.strictly():
        assert allocator.share == pytest.approx(0.08)
    assert allocator.share == pytest.approx(WALL)


def test_the_wall_gives_way_once_a_step_to_what_the_budget_has_room_for(allocator: Allocator) -> None:
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    allocator.allocated, allocator.reserved = 5 * GiB, 8 * GiB
    assert not memory.stretch(4 * GiB)
    assert allocator.share == pytest.approx(WALL)
    assert memory.stretch(2 * GiB)
    stretched = allocator.share
    assert stretched == pytest.approx(0.101, rel=0.01)
    with memory.gate(of(2 * GiB)):
        assert allocator.share >= stretched
    assert allocator.share == stretched
    assert not memory.stretch(2 * GiB)
    assert memory.stretch(3 * GiB), "for more it moves further"
    memory.end_step()
    assert allocator.share == pytest.approx(WALL)
    allocator.reserved = 6 * GiB
    assert memory.stretch(2 * GiB)
    assert allocator.share == pytest.approx(WALL)  # and is never nearer for it


def test_the_wall_is_out_of_the_way_of_a_step_like_one_that_took_and_gave_back_nothing(allocator: Allocator) -> None:
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))

    def share_in_a_step(*, again: bool = True, flushes: int = 0, reserved: int = 2 * GiB) -> float:
        memory.begin_step(planned=True, again=again)
        assert memory.is_open == (allocator.share == 1.0)
        share = allocator.share
        allocator.retries += flushes
        allocator.reserved = reserved
        memory.end_step()
        assert allocator.share == pytest.approx(WALL)
        return share

    assert share_in_a_step(flushes=1) == pytest.approx(WALL)
    assert share_in_a_step() == pytest.approx(WALL)  # the last one had blocks given back
    assert share_in_a_step() == 1.0
    assert share_in_a_step(again=False) == pytest.approx(WALL)
    assert share_in_a_step(reserved=9 * GiB) == 1.0
    assert share_in_a_step() == pytest.approx(WALL)  # the last one went too far
    assert share_in_a_step() == pytest.approx(WALL)  # the last one took something
    assert share_in_a_step() == 1.0
    allocator.empty()
    assert share_in_a_step() == pytest.approx(WALL)  # blocks are not where they were


def test_a_step_without_a_wall_that_takes_something_all_the_same_has_it_back(allocator: Allocator) -> None:
    """Its copies are over at other moments, so that other blocks are free."""
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    assert memory.open_bytes == 0
    for _ in range(2):
        memory.begin_step(planned=True, again=True)
        memory.end_step()
    memory.begin_step(planned=True, again=True)
    assert memory.keeps_bounds()
    allocator.reserved += 1
    assert not memory.keeps_bounds()
    memory.go_astray()
    assert memory.open_bytes == 0
    assert memory.keeps_bounds()


def test_a_step_that_goes_astray_has_the_wall_back(allocator: Allocator) -> None:
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    for again in (False, True):
        memory.begin_step(planned=True, again=again)
        if not again:
            memory.end_step()
    assert memory.is_open
    with memory.gate(of(2 * GiB)):
        assert allocator.share == 1.0
    memory.go_astray()
    assert not memory.is_open
    assert allocator.share == pytest.approx(WALL)


def test_what_moves_the_wall_for_the_rest_of_a_step_outlasts_the_op_that_it_moved_for(allocator: Allocator) -> None:
    """Compiled code may run for long, and save values that leave the plan."""
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    memory.begin_step(planned=True, again=False)
    allocator.allocated, allocator.reserved = 5 * GiB, 8 * GiB
    with memory.openly(GiB):
        assert memory.stretch(2 * GiB)
        stretched = allocator.share
    assert allocator.share == stretched > WALL
    memory.end_step()
    allocator.reserved = 2 * GiB
    for again in (False, True):
        memory.begin_step(planned=True, again=again)
        if not again:
            memory.end_step()
    with memory.gate(of(GiB)):
        memory.go_astray()
    assert allocator.share == pytest.approx(WALL)


def test_a_wall_of_the_users_that_is_nearer_is_never_out_of_the_way(allocator: Allocator) -> None:
    allocator.share = 0.05
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    for again in (False, True):
        memory.begin_step(planned=True, again=again)
        memory.end_step()
    memory.begin_step(planned=True, again=True)
    assert not memory.is_open
    assert allocator.share == 0.05


def test_a_ledger_that_native_code_counts_for_needs_no_settling(allocator: Allocator) -> None:
    ledger = Ledger("cuda", 0)
    library = SimpleNamespace(
        outgrow_fastpath_allocated=lambda index: allocator.allocated,
        outgrow_fastpath_reserved=lambda index: allocator.reserved,
    )
    ledger.count = AllocatorCount(cast(Any, library), 0, ledger.booked)
    memory = CudaMemory(DEVICE, 8 * GiB, ledger)
    assert ledger.live_bytes == ledger.unseen_bytes == GiB
    allocator.allocated = 3 * GiB
    assert ledger.live_bytes == 3 * GiB
    memory.count(100)
    assert ledger.unseen_bytes == 3 * GiB


def test_refusals_are_counted_from_one_question_to_the_next(allocator: Allocator) -> None:
    memory = CudaMemory(DEVICE, 8 * GiB, Ledger("cuda", 0))
    assert memory.refusals() == 0
    allocator.ooms += 2
    assert memory.refusals() == 2
    assert memory.refusals() == 0


def test_an_op_draws_from_the_generator_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (None, own), raising=False)
    assert _default_generator((torch.ones(2),), {}) is torch.default_generator
    assert _default_generator((), {"device": torch.device("cuda", 1)}) is own
    assert _default_generator((), {"device": torch.device("meta")}) is None
    assert _default_generator((), {}) is torch.default_generator


def test_what_nobody_sees_inside_of_draws_from_the_generators_of_the_host_and_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (None, own), raising=False)
    drawn = Dice.all_of(torch.device("cuda", 1))
    assert [dice.generator for dice in drawn] == [torch.default_generator, own]
    assert [dice.generator for dice in Dice.all_of(torch.device("cpu"))] == [torch.default_generator]


class Marks:
    """Stands in for streams and events, on a machine that has none."""

    def __init__(self, *_: object, **options: object) -> None:
        self.waited: list[object] = []

    def record(self, stream: object) -> None:
        self.waited.append(stream)

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: object) -> float:
        return 2.0  # milliseconds


def test_a_step_keeps_the_stream_that_it_began_on(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = Marks(), Marks()
    now = [own]

    def enter(stream: Marks) -> AbstractContextManager[None]:
        now.append(stream)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", Marks)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Marks)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[-1])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: id(now[-1]), raising=False)
    streams = CudaStreams(torch.device("cpu"))
    streams.begin()
    now.append(other)  # the program is on another stream
    event = streams.record(Stream.COMPUTE)
    streams.wait(Stream.COMPUTE, event)
    assert own.waited == [event]
    assert not streams.has_strayed
    mark = streams.record_elsewhere()
    assert streams.has_strayed
    assert isinstance(mark, Marks)
    assert mark.waited == [other]
    streams.wait(Stream.ELSEWHERE, event)
    assert other.waited == [event]
    assert streams.current() != streams.home
    with streams.at_home():
        assert streams.current() == streams.home
    now.append(other)
    streams.begin()  # the next step begins there
    assert not streams.has_strayed  # that one is no other any more
    assert streams.current() == streams.home
    streams.wait(Stream.COMPUTE, event)
    assert other.waited == [event, event]


@pytest.mark.parametrize("counted", [True, False])
def test_where_an_allocator_refuses_a_large_op_plans_are_not_made_for_what_was_alive_beside_it(counted: bool) -> None:
    ledger, budget = Ledger("cuda", 0), 6400
    memory: Any = SimpleNamespace(is_counted=counted, relieve=lambda: None, go_astray=lambda: None)
    faults = PageFaults(budget, ledger, memory, FastPath(ledger, budget, None), lambda nbytes: True, lambda: "")
    ledger.settle(3000)
    faults.meet(MemoryError("none"), 2500, "an op that is guessed to take more", 2000)
    assert faults.level == (3000 + 2000 - budget // 64 if counted else 3000)
    ledger.settle(4500)
    assert faults.thin_out(50, is_fault=True)
    assert faults.level == (4500 if counted else 3000)
    assert faults.count == 2


def test_streams_copy_between_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Marks()
    monkeypatch.setattr(torch.cuda, "Stream", Marks)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Marks)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: usual)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7 + index, raising=False)
    streams = CudaStreams(torch.device("cpu"))
    device, pinned = torch.arange(100, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8)
    streams.to_host(Stream.OUT, pinned.data_ptr() + 50, device.data_ptr() + 1, 99)
    assert pinned[50:149].tolist() == list(range(1, 100))
    assert pinned[149:].sum() == pinned[:50].sum() == 0
    streams.to_device(Stream.BACK, device.data_ptr(), pinned.data_ptr() + 51, 10)
    assert device[:12].tolist() == [*range(2, 12), 10, 11]
    event = streams.record(Stream.COMPUTE)
    streams.wait(Stream.COMPUTE, event)
    assert usual.waited == [event]
    assert streams.seconds_between(event, event) == pytest.approx(2e-3)
    assert streams.current() == 7
