"""The region of memory for values on their way back: places, pages, and what is over."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outgrow.runtime.tiers import ram
from outgrow.runtime.tiers.ram import Buffers

PAGE = 4096
BUDGET = 64 * PAGE


def no_matter(nbytes: int) -> None:
    """Nobody watches the resident set."""


def test_a_value_takes_the_smallest_gap_that_it_fits() -> None:
    buffers = Buffers(BUDGET, no_matter)
    held = [buffers.take(pages * PAGE, 0) for pages in (4, 1, 2, 1, 3, 1)]
    wanted = held[2].data_ptr()
    del held[4], held[2], held[0]  # gaps of 3, 2 and 4 pages
    assert buffers.take(2 * PAGE, 0).data_ptr() == wanted


def test_gaps_side_by_side_are_one() -> None:
    buffers = Buffers(BUDGET, no_matter)
    held = [buffers.take(2 * PAGE, 0) for _ in range(4)]
    wanted = held[1].data_ptr()
    del held[1:3]
    assert buffers.take(4 * PAGE, 0).data_ptr() == wanted


def test_pages_are_asked_for_once() -> None:
    asked: list[int] = []
    buffers = Buffers(BUDGET, asked.append)
    for _ in range(3):
        buffers.take(8 * PAGE, 0)
    assert asked == [8 * PAGE]
    assert buffers.idle_bytes == 8 * PAGE
    buffers.shed(3 * PAGE)
    assert buffers.idle_bytes == 5 * PAGE
    buffers.take(8 * PAGE, 0)
    assert asked == [8 * PAGE, 3 * PAGE]


def test_pages_between_others_that_were_given_back_are_asked_for_again() -> None:
    asked: list[int] = []
    buffers = Buffers(BUDGET, asked.append)
    held = [buffers.take(2 * PAGE, 0) for _ in range(3)]
    del held[1]
    buffers.shed(2 * PAGE)
    asked.clear()
    held += [buffers.take(3 * PAGE, 0), buffers.take(PAGE, 0), buffers.take(PAGE, 0)]  # behind, between, between
    assert asked == [3 * PAGE, PAGE, PAGE]


def test_what_a_thread_lets_go_of_is_free() -> None:
    buffers = Buffers(BUDGET, no_matter)
    held = [buffers.take(8 * PAGE, 0)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert buffers.idle_bytes == 8 * PAGE


def test_a_value_outlives_the_region() -> None:
    buffers = Buffers(BUDGET, no_matter)
    storage = buffers.take(8 * PAGE, 100)
    values = torch.empty(0, dtype=torch.uint8).set_(storage).fill_(7)
    buffers.close()
    del buffers
    assert bool((values == 7).all())


def test_where_addresses_are_counted_a_value_keeps_no_pages_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram, "address_space_is_limited", lambda: True)
    asked: list[int] = []
    buffers = Buffers(BUDGET, asked.append)
    for _ in range(2):
        assert buffers.take(8 * PAGE - 100, 100).data_ptr() % PAGE == 100
    assert asked == [8 * PAGE, 8 * PAGE]
    assert buffers.idle_bytes == 0


@given(st.lists(st.tuples(st.integers(1, 20 * PAGE), st.integers(0, PAGE - 1), st.integers(0, 5)), max_size=40))
def test_values_never_meet_and_each_has_its_phase(wishes: list[tuple[int, int, int]]) -> None:
    """Each wish: bytes, phase, and which of the values so far goes (or, past the last one, pages are shed)."""
    buffers = Buffers(BUDGET, no_matter)
    held: list[tuple[torch.Tensor, int]] = []
    for number, (nbytes, phase, leaver) in enumerate(wishes):
        storage = buffers.take(nbytes, phase)
        assert storage.nbytes() == nbytes
        assert storage.data_ptr() % PAGE == phase
        mark = number % 251
        held.append((torch.empty(0, dtype=torch.uint8).set_(storage).fill_(mark), mark))
        del storage
        if leaver < len(held):
            held.pop(leaver)
        else:
            buffers.shed(leaver * PAGE)
        assert buffers.idle_bytes >= 0
        assert all(bool((values == mark).all()) for values, mark in held)
    buffers.shed(buffers.idle_bytes)
    assert buffers.idle_bytes == 0
    assert all(bool((values == mark).all()) for values, mark in held)
