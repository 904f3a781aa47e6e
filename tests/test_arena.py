"""The arena: blocks of tensors in one region of addresses, whose pages stay, and go back in time."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import outgrow
from conftest import RunChild
from outgrow.planning.policies import find
from outgrow.runtime.tiers.arena import Arena, find_arena
from outgrow.runtime.tiers.ram import Ram
from outgrow.runtime.tiers.resident import ResidentSet
from outgrow.tracing.probe import measured_call
from steps import Training, budget_for, momentum, train_in_session

MIB = 1 << 20
NO_LIMIT = 1 << 60


@pytest.fixture(scope="module")
def process_arena() -> Arena:
    found = find_arena()
    if found is None:
        pytest.skip("needs a C++ compiler")
    gc.collect()  # what tests before these left in it must not go in the middle of one
    return found


@pytest.fixture
def arena(process_arena: Arena) -> Iterator[Arena]:
    with opened(process_arena) as found:
        yield found


@contextmanager
def opened(found: Arena | None) -> Iterator[Arena]:
    assert found is not None
    found.open()
    try:
        yield found
    finally:
        limit(found, NO_LIMIT)
        found.close()


def limit(arena: Arena, nbytes: int, *, in_step: bool = False) -> None:
    """Let the resident set be so many bytes larger than what is outside the arena."""
    resident = ResidentSet()
    keep = arena.keep_under if in_step else arena.make_room_beside
    keep(resident.nbytes - arena.present_bytes + nbytes, resident, 0)
    resident.close()


def block(nbytes: int, fill: int = 1) -> torch.Tensor:
    return torch.full((nbytes,), fill, dtype=torch.uint8)


# --- blocks ---


@settings(max_examples=150, deadline=None)
@given(
    moves=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 700_000), st.booleans()), min_size=1, max_size=120),
    allowed=st.integers(0, 4 * MIB),
)
def test_blocks_keep_what_is_written_to_them(
    process_arena: Arena, moves: list[tuple[int, int, bool]], allowed: int
) -> None:
    before = process_arena.used_bytes
    process_arena.open()
    limit(process_arena, allowed)
    blocks: dict[int, torch.Tensor] = {}
    for number, (place, nbytes, goes) in enumerate(moves):
        assert is_even(blocks.pop(place, None))
        if not goes:
            blocks[place] = block(nbytes, number % 251)
    assert all(map(is_even, blocks.values()))
    ranges = sorted((held.data_ptr(), held.data_ptr() + held.numel()) for held in blocks.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    blocks.clear()
    limit(process_arena, NO_LIMIT)
    process_arena.close()
    assert process_arena.used_bytes == before


def is_even(held: torch.Tensor | None) -> bool:
    return held is None or bool((held == held[0]).all())


def test_large_blocks_lie_in_the_arena_on_whole_pages_and_small_ones_elsewhere(arena: Arena) -> None:
    before = arena.used_bytes
    small = block((64 << 10) - 1)
    assert arena.used_bytes == before
    large = block((64 << 10) + 1)
    assert arena.used_bytes == before + (68 << 10)
    assert large.data_ptr() % 4096 == 0
    del small, large
    assert arena.used_bytes == before


# Where a block goes, and which pages go for it, hangs on what others left in the arena: these see one of their own.


def test_a_block_goes_where_it_fits_best(process_arena: Arena, run_child: RunChild) -> None:
    wanted, found = run_child(place_of_a_block_among_gaps)
    assert found == wanted


def place_of_a_block_among_gaps() -> tuple[int, int]:
    """The address of the gap that a block fits, and that of the block."""
    with opened(find_arena()):
        held = [block(size * MIB) for size in (4, 1, 2, 1, 3, 1)]
        wanted = held[2].data_ptr()
        del held[4], held[2], held[0]
        return wanted, block(2 * MIB).data_ptr()


def test_neighbours_that_are_free_make_one_gap(process_arena: Arena, run_child: RunChild) -> None:
    wanted, found = run_child(place_of_a_block_among_neighbours)
    assert found == wanted


def place_of_a_block_among_neighbours() -> tuple[int, int]:
    """The address of the first of three blocks that went, and that of one as large as all of them."""
    with opened(find_arena()):
        held = [block(2 * MIB) for _ in range(5)]
        wanted = held[1].data_ptr()
        del held[3], held[1:3]
        return wanted, block(6 * MIB).data_ptr()


def test_blocks_come_and_go_on_many_threads_at_once(arena: Arena) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        held: list[torch.Tensor] = []
        for turn in range(300):
            held.append(block((64 << 10) + 4096 * ((7 * turn + number) % 50), number))
            if len(held) > 8:
                old = held.pop(turn % 8)
                wrong.extend([number] * (not bool((old == number).all())))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_finds_the_lock_free(arena: Arena) -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            torch.empty(MIB, dtype=torch.uint8)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if not child:
                os._exit(0 if torch.empty(MIB, dtype=torch.uint8).numel() == MIB else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()


def test_what_an_op_holds_inside_is_measured_in_the_arena_too(arena: Arena) -> None:
    image, weight = torch.randn(2, 16, 64, 64), torch.randn(16, 16, 3, 3)
    inputs = (image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    measured_call(torch.ops.aten.convolution.default, inputs, {})
    result, rise = measured_call(torch.ops.aten.convolution.default, inputs, {})
    assert rise is not None
    assert rise >= result.numel() * 4


# --- pages ---


def test_pages_stay_for_the_next_block(arena: Arena) -> None:
    sizes = [3, 5, 2, 7, 1, 4]

    def step() -> None:
        held = [block(size * MIB) for size in sizes]
        while held:
            held.pop(len(held) // 2)

    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 10 * sum(sizes) * MIB // 4096 // 20


def test_free_pages_go_where_others_would_come_over_the_limit(process_arena: Arena, run_child: RunChild) -> None:
    before, after = run_child(pages_of_a_block_that_fits_no_gap, 30 * MIB)
    assert before + 13 * MIB > 30 * MIB  # else nothing has to go
    assert after <= 30 * MIB


def pages_of_a_block_that_fits_no_gap(limit_bytes: int) -> tuple[int, int]:
    """How many pages there are, in bytes, before and after a block comes that is larger than all gaps."""
    with opened(find_arena()) as arena:
        limit(arena, limit_bytes)
        held = [block(size * MIB) for size in (12, 2, 12, 2)]
        del held[2], held[0]
        before = arena.present_bytes
        held.append(block(13 * MIB))
        return before, arena.present_bytes


def test_free_pages_move_to_a_block_that_would_come_over_the_limit(process_arena: Arena, run_child: RunChild) -> None:
    there, present = run_child(pages_that_a_block_begins_with)
    assert there >= 10 * MIB // 4096
    assert present <= 30 * MIB


def pages_that_a_block_begins_with() -> tuple[int, int]:
    """How many pages are there of a block of 13 MiB that nobody wrote to, and how many in all, in bytes."""
    with opened(find_arena()) as arena:
        limit(arena, 30 * MIB)
        held = [block(size * MIB) for size in (12, 2, 12, 2)]
        del held[2], held[0]
        untouched = torch.empty(13 * MIB, dtype=torch.uint8)
        there = resident_pages(untouched.data_ptr(), untouched.nbytes)
        return there, arena.present_bytes


def test_pages_that_were_free_for_longest_go_first(process_arena: Arena, run_child: RunChild) -> None:
    longest, latest = run_child(pages_left_in_two_gaps)
    assert longest < latest


def pages_left_in_two_gaps() -> tuple[int, int]:
    """How many pages of a gap are there that was free for longer than another, and of that, when some had to go."""
    with opened(find_arena()) as arena:
        first, wall, second, end = block(32 * MIB), block(MIB), block(32 * MIB), block(MIB)
        places = first.data_ptr(), second.data_ptr()
        del second, first
        used_again = block(32 * MIB).data_ptr()
        assert used_again in places
        limit(arena, arena.present_bytes - 12 * MIB)
        others = places[used_again == places[0]]
        pages = resident_pages(others, 32 * MIB), resident_pages(used_again, 32 * MIB)
        del wall, end
    return pages


def resident_pages(address: int, nbytes: int) -> int:
    """How many pages of a range are in RAM."""
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(address // 4096 * 8)
        entries = pages.read(nbytes // 4096 * 8)
    return sum(entries[start + 7] >> 7 for start in range(0, len(entries), 8))


def test_what_each_step_fills_at_its_most_stays_over_the_limit(process_arena: Arena, run_child: RunChild) -> None:
    assert run_child(pages_after_steps, [40], 30) >= 40 * MIB
    assert run_child(pages_after_steps, [40, 40, 0], 30) >= 40 * MIB  # and for the next to begin with


def test_so_do_pages_that_are_filled_in_part(process_arena: Arena, run_child: RunChild) -> None:
    assert run_child(pages_after_steps, [41], 30) >= 42 * MIB  # the last of them is huge, and half full


def test_what_one_step_alone_filled_goes_in_the_next(process_arena: Arena, run_child: RunChild) -> None:
    assert run_child(pages_after_steps, [40, 60, 40, 10], 30) <= 40 * MIB  # the one before filled 40
    assert run_child(pages_after_steps, [40, 60, 10, 10], 30) <= 30 * MIB


def test_what_each_step_fills_goes_for_what_comes_beside_tensors(process_arena: Arena, run_child: RunChild) -> None:
    assert run_child(pages_after_steps, [40, 40, 40], 30, False) <= 30 * MIB


def pages_after_steps(sizes: list[int], limit_mib: int, in_step: bool = True) -> int:
    """How many pages are there, in bytes, after steps that filled so many MiB each, at most and for a moment."""
    with opened(find_arena()) as arena:
        for size in sizes:
            arena.begin_step()
            held = block(size * MIB)
            del held
            limit(arena, limit_mib * MIB, in_step=True)
        limit(arena, limit_mib * MIB, in_step=in_step)
        return arena.present_bytes


def test_the_resident_set_keeps_to_a_sessions_limit(process_arena: Arena, run_child: RunChild) -> None:
    growth, budget = run_child(resident_growth)
    assert growth <= budget + 8 * MIB


def resident_growth() -> tuple[int, int]:
    """Growth of the resident set over steps that make and drop blocks of ever other sizes, and the budget."""
    budget = 128 * MIB
    model = warm_model()
    process = psutil.Process()
    before = most = process.memory_info().rss
    with outgrow.Session(model, budget=budget) as session:
        for step in range(6):
            with session.step():
                for size in range(3 + step, 100, 7):
                    held = torch.ones(size, MIB, dtype=torch.uint8)
                    most = max(most, process.memory_info().rss)
                    del held
                walls = [torch.ones(9, MIB, dtype=torch.uint8) for _ in range(12)]
                del walls[::2]  # six holes, too small for what comes
                held = torch.ones(60, MIB, dtype=torch.uint8)
                most = max(most, process.memory_info().rss)
                del held, walls
                model(torch.ones(2, 4)).sum().backward()
    return most - before, budget


def test_what_planning_takes_keeps_to_the_limit_too(process_arena: Arena, run_child: RunChild) -> None:
    growth, taken, budget = run_child(resident_growth_while_planning)
    assert taken > 24 * MIB
    assert growth <= budget + 8 * MIB


def resident_growth_while_planning() -> tuple[int, int, int]:
    """Growth of the resident set while a plan is made that takes much memory, that much, and the budget."""
    budget, ops = 128 * MIB, 9000
    model, most, taken = warm_model(), [0], [0]
    process = psutil.Process()

    class Hungry:
        name = "hungry"

        def plan(self, problem: outgrow.Problem) -> outgrow.Plan:
            there = np.ones(len(problem.trace.ops) * 3 << 10, dtype=np.uint8)
            most[0] = max(most[0], process.memory_info().rss)
            taken[0] = there.nbytes
            return find("auto").plan(problem)

    before = process.memory_info().rss
    with outgrow.Session(model, budget=budget, policy=Hungry()) as session, session.step():
        held = [torch.ones(10, MIB, dtype=torch.uint8) for _ in range(12)]
        del held
        small = torch.ones(4)
        for _ in range(ops):
            small = small + 1
        model(torch.ones(2, 4)).sum().backward()
    return most[0] - before, taken[0], budget


# --- sessions ---


def many_maps() -> Training:
    """A chain whose saved maps, 1 MiB each, are most of a step."""
    model = torch.nn.Sequential(
        *(part for _ in range(12) for part in (torch.nn.Linear(256, 256, bias=False), torch.nn.Tanh()))
    )
    optimizer = momentum(model.parameters())

    def run(k: int) -> torch.Tensor:
        loss = model(torch.randn(1024, 256, generator=torch.Generator().manual_seed(k))).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training([model], [optimizer], run)


@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_steps_leave_a_64th_of_the_budget_for_what_comes_beside_tensors(policy: str, process_arena: Arena) -> None:
    budget = budget_for(many_maps, 0.8)
    _, summaries = train_in_session(many_maps, 4, budget=budget, policy=policy)
    assert all(summary.budget_bytes == budget for summary in summaries)
    assert all(budget * 0.8 < summary.measured_peak_bytes <= budget - budget // 64 for summary in summaries)


def test_a_plan_that_would_come_into_the_last_64th_moves_one_map_more(
    process_arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predicted(budget: int) -> int:
        gc.collect()  # what others left in cycles would count as this session's, until it goes
        _, summaries = train_in_session(many_maps, 3, budget=budget, policy="auto")
        assert summaries[-1].predicted_peak_bytes is not None
        return summaries[-1].predicted_peak_bytes

    with monkeypatch.context() as patch:
        patch.setattr(Ram, "_MARGIN_SHARE", 1 << 60)
        full = predicted(budget_for(many_maps, 0.8))
        assert predicted(full + 4096) == full  # it fills the budget, but for a page
    assert predicted(full + 4096) <= full - MIB


def test_what_was_made_before_the_session_comes_back_to_the_arena(process_arena: Arena) -> None:
    early = block(3 * MIB)
    gc.collect()
    before = process_arena.used_bytes
    memory = Ram(base_bytes=psutil.Process().memory_info().rss, budget_bytes=64 * MIB)
    try:
        for _ in range(2):
            memory.empty(early.untyped_storage())
            assert process_arena.used_bytes == before
            memory.refill(early.untyped_storage(), 3 * MIB)
            assert process_arena.used_bytes == before + 3 * MIB
        early.fill_(7)
    finally:
        memory.close()
    assert int(early[-1]) == 7


def test_so_does_what_was_made_before_there_was_an_arena(process_arena: Arena, run_child: RunChild) -> None:
    assert run_child(used_after_a_refill) == 3 * MIB


def used_after_a_refill() -> int:
    early = block(3 * MIB)
    memory = Ram(base_bytes=psutil.Process().memory_info().rss, budget_bytes=64 * MIB)
    memory.empty(early.untyped_storage())
    memory.refill(early.untyped_storage(), 3 * MIB)
    arena = find_arena()
    used = -1 if arena is None else arena.used_bytes
    memory.close()
    return used


def test_what_is_too_small_for_the_arena_is_left_where_it_was(process_arena: Arena) -> None:
    small = block(MIB // 32)
    assert not process_arena.adopt(small.untyped_storage())


def test_memory_that_was_left_on_the_heap_goes_back(process_arena: Arena, run_child: RunChild) -> None:
    assert run_child(resident_fall) >= 30 * MIB


def resident_fall() -> int:
    """By how many bytes the resident set falls when half of the blocks that lie on the heap are emptied."""
    find_arena()  # what was made before there was one has no other allocator to go to
    process = psutil.Process()
    blocks = [block(MIB // 8) for _ in range(512)]  # small enough for glibc to put them side by side
    memory = Ram(base_bytes=process.memory_info().rss, budget_bytes=64 * MIB)
    before = process.memory_info().rss
    for item in blocks[::2]:
        memory.empty(item.untyped_storage())
    memory.begin_step(planned=False, again=False)
    fall = before - process.memory_info().rss
    memory.close()
    return fall


def test_the_arena_learns_of_each_step_that_begins(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    model, begun = torch.nn.Linear(4, 4), 0
    really_begin = arena.begin_step

    def begin_step() -> None:
        nonlocal begun
        begun += 1
        really_begin()

    monkeypatch.setattr(arena, "begin_step", begin_step)
    with outgrow.Session(model, budget="1GiB") as session:
        for number in range(1, 4):
            with session.step():
                assert begun == number
                model(torch.ones(2, 4)).sum().backward()


def test_blocks_outlive_the_session_and_go_back_when_they_are_dropped(process_arena: Arena) -> None:
    model, arena = torch.nn.Linear(400, 400), process_arena
    before = arena.used_bytes
    with outgrow.Session(model, budget="1GiB") as session, session.step():
        model(torch.ones(8, 400)).sum().backward()
        kept = torch.arange(1 << 22)
    assert arena.used_bytes >= before + kept.numel() * 8
    assert torch.equal(kept, torch.arange(1 << 22))
    there = arena.present_bytes
    del kept
    assert arena.present_bytes <= there - 30 * MIB
    late = torch.arange(1 << 22)
    assert arena.used_bytes <= before + 400 * 400 * 4 + 4096  # the gradient
    del late


def test_addresses_that_are_not_used_count_nowhere(process_arena: Arena, run_child: RunChild) -> None:
    before, after = run_child(data_bytes_around_a_session)
    assert after - before < 64 * MIB


def warm_model() -> torch.nn.Module:
    """A model that was planned for: what is loaded when it is first used is there."""
    model = torch.nn.Linear(4, 4)
    with outgrow.Session(model, budget="1GiB") as session:
        for _ in range(3):
            with session.step():
                model(torch.ones(2, 4)).sum().backward()
    return model


def data_bytes_around_a_session() -> tuple[int, int]:
    """What RLIMIT_DATA counts, before a session and in it."""
    model = warm_model()
    find = psutil.Process().memory_info
    before = find().data
    with outgrow.Session(model, budget="1GiB") as session:
        with session.step():
            model(torch.ones(2, 4)).sum().backward()
        return before, find().data


# --- where there is none ---


@pytest.mark.parametrize("reason", ["switched off", "no compiler", "a compiler that fails", "no cache", "no home"])
def test_without_an_arena_training_is_the_same(run_child: RunChild, tmp_path: Path, reason: str) -> None:
    assert run_child(trained_without_arena, reason, str(tmp_path))
    assert not list(tmp_path.rglob("*.so"))


def has_no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def trained_without_arena(reason: str, folder: str) -> bool:
    """Whether there is no arena and a session trains as plain PyTorch does, under its budget."""
    changes = {
        "switched off": {"OUTGROW_ARENA": "0"},
        "no compiler": {"PATH": folder, "CXX": "none"},
        "a compiler that fails": {"CXX": "false"},
        "no cache": {"XDG_CACHE_HOME": "/dev/null"},
        "no home": {"XDG_CACHE_HOME": ""},
    }
    os.environ.update({"XDG_CACHE_HOME": folder} | changes[reason])
    if reason == "no home":
        Path.home = has_no_home  # type: ignore[method-assign]

    def train(budget: str | None) -> tuple[torch.Tensor, bool]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh()))
        )
        images = torch.randn(512, 256)
        if budget is None:
            for _ in range(3):
                model(images).square().mean().backward()
            return next(model.parameters()).grad.clone(), True
        with outgrow.Session(model, budget=budget) as session:
            for _ in range(3):
                with session.step():
                    model(images).square().mean().backward()
            return next(model.parameters()).grad.clone(), session.summary().offloaded_bytes > 0

    plain, ours = train(None), train("8MiB")
    return find_arena() is None and torch.equal(plain[0], ours[0]) and ours[1]
