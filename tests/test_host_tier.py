"""The pinned host tier: its free list, its budget, and what goes to the disk instead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outgrow.errors import HostBudgetTooSmall
from outgrow.planning.plan import SLOT_ALIGNMENT, slot_bytes
from outgrow.runtime.tiers import host
from outgrow.runtime.tiers.disk import SpillFile
from outgrow.runtime.tiers.holes import Holes
from outgrow.runtime.tiers.host import LEAST_HOST_BYTES, DiskPlace, HostPlace, HostTier

MiB = 1 << 20


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000), st.integers(0, 100)), max_size=80))
def test_holes_give_out_no_byte_twice_and_join_again(script: list[tuple[bool, int, int]]) -> None:
    holes = Holes(100, 100 + 64 * 512, 512)
    taken: list[tuple[int, int]] = []
    for takes, nbytes, which in script:
        if takes or not taken:
            free = holes.free_bytes
            offset = holes.take(nbytes)
            if offset is None:
                assert free < 64 * 512, "an empty region has room for all of these"
                continue
            room = -(-nbytes // 512) * 512
            assert holes.free_bytes == free - room
            assert 100 <= offset <= 100 + 64 * 512 - room
            assert all(offset + room <= other or other + -(-size // 512) * 512 <= offset for other, size in taken)
            taken.append((offset, nbytes))
        else:
            holes.give(*taken.pop(which % len(taken)))
    for item in taken:
        holes.give(*item)
    assert holes.is_untouched
    assert holes.take(64 * 512) == 100


class Pins:
    """Counts what is pinned, and gives no more than `most` bytes."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most = most
        self.nbytes = 0
        self.sizes: list[int] = []

    def __call__(self, nbytes: int) -> torch.Tensor:
        if self.nbytes + nbytes > self.most:
            raise RuntimeError("CUDA error: out of memory\nmore words")
        self.nbytes += nbytes
        self.sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[SpillFile]:
    file = SpillFile(tmp_path, allow_tmpfs=True)
    yield file
    file.close()


def test_pinned_memory_never_exceeds_the_budget(spill: SpillFile) -> None:
    pins = Pins()
    tier = HostTier(10 * MiB + 12_345, spill, pins)
    places = [tier.reserve(700_000) for _ in range(40)]
    assert pins.nbytes == tier.pinned_bytes <= 10 * MiB + 12_345
    here = [place for place in places if isinstance(place, HostPlace)]
    assert len(here) == (tier._capacity // slot_bytes(700_000))
    assert all(isinstance(place, DiskPlace) for place in places[len(here) :])
    spans = sorted((place.offset, place.offset + place.nbytes) for place in here)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))


def test_nothing_is_pinned_before_it_is_wanted_but_the_buffers(spill: SpillFile) -> None:
    pins = Pins()
    tier = HostTier(1 << 33, spill, pins)
    assert pins.nbytes == 2 * host._MOST_BOUNCE_BYTES
    tier.reserve(100)
    assert pins.sizes[2:] == [host._MOST_BLOCK_BYTES]


def test_blocks_are_powers_of_two(spill: SpillFile) -> None:
    """PyTorch's pinned allocator rounds all else up to one, past the budget."""
    pins = Pins()
    tier = HostTier(777 * MiB + 99, spill, pins)
    assert tier.plan_area(tier._capacity) == tier._capacity
    assert all(size & (size - 1) == 0 for size in pins.sizes)
    assert pins.nbytes > 776 * MiB


def test_a_place_that_spans_blocks_is_in_pieces_that_cover_it(
    spill: SpillFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_MOST_BLOCK_BYTES", MiB)
    tier = HostTier(8 * MiB, spill, Pins())
    place = tier.reserve(int(2.5 * MiB))
    assert isinstance(place, HostPlace)
    assert [size for _, _, size in place.pieces] == [MiB, MiB, MiB // 2]
    assert [first for first, _, _ in place.pieces] == [0, MiB, 2 * MiB]
    memory = {block.data_ptr() for block in tier._blocks}
    assert all(address in memory for _, address, _ in place.pieces)


def test_what_a_plan_sends_away_first_is_on_the_disk_where_not_all_fits(spill: SpillFile) -> None:
    tier = HostTier(6 * MiB, spill, Pins())  # 4 MiB beside the buffers
    assert tier.plan_area(7 * MiB) == 7 * MiB
    kinds = [type(tier.planned_slot(k * MiB, MiB)) for k in range(7)]
    assert kinds == [DiskPlace] * 3 + [HostPlace] * 4
    straddling = tier.planned_slot(2 * MiB + SLOT_ALIGNMENT, 2 * MiB)
    assert isinstance(straddling, DiskPlace)
    assert sum(part.nbytes for _, part in straddling.parts) == 2 * MiB
    assert spill.reserve(1).offset >= 7 * MiB  # what no plan foresaw lies behind the plan's values


def test_a_smaller_plan_has_all_its_places_in_memory_again(spill: SpillFile) -> None:
    tier = HostTier(6 * MiB, spill, Pins())
    assert tier.plan_area(7 * MiB) == 7 * MiB
    assert tier.plan_area(3 * MiB) == 3 * MiB
    assert all(isinstance(tier.planned_slot(k * MiB, MiB), HostPlace) for k in range(3))
    assert isinstance(tier.reserve(MiB), HostPlace)


def test_a_plan_takes_no_room_from_values_that_lie_there(spill: SpillFile) -> None:
    tier = HostTier(6 * MiB, spill, Pins())
    place = tier.reserve(100)
    assert tier.plan_area(MiB) == 0
    tier.release(place)
    assert tier.plan_area(MiB) == MiB
    assert tier.reserve(100).offset >= MiB


def test_where_the_system_gives_no_more_the_rest_goes_to_the_disk(
    spill: SpillFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_MOST_BLOCK_BYTES", MiB)
    pins = Pins(most=2 * MiB + 3 * MiB)
    tier = HostTier(64 * MiB, spill, pins)
    places = [tier.reserve(MiB) for _ in range(5)]
    assert [type(place) for place in places] == [HostPlace] * 1 + [DiskPlace] * 4
    for place in places:
        tier.release(place)
    assert tier.plan_area(3 * MiB) == 3 * MiB
    assert [type(tier.planned_slot(k * MiB, MiB)) for k in range(3)] == [DiskPlace] * 2 + [HostPlace]


def test_a_budget_that_does_not_hold_the_buffers_is_refused(spill: SpillFile) -> None:
    with pytest.raises(HostBudgetTooSmall) as caught:
        HostTier(LEAST_HOST_BYTES - 1, spill, Pins())
    assert caught.value.least_bytes == LEAST_HOST_BYTES
    with pytest.raises(HostBudgetTooSmall, match="CUDA error: out of memory"):
        HostTier(LEAST_HOST_BYTES, spill, Pins(most=100))


def test_pinned_memory_is_the_hosts_whatever_the_programs_default_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        empty = torch.empty
        assert empty(0).is_meta  # from here on PyTorch knows which functions have a default
        monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **options: empty(*sizes, **options))
        assert host.pinned(16).device.type == "cpu"


def test_what_was_pinned_is_the_systems_again_once_a_session_is_closed(
    spill: SpillFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch keeps it for the next who asks, and the next session would find so much less free memory."""
    kept: list[int] = []
    tier = HostTier(64 * MiB, spill, Pins())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: kept.append(tier.pinned_bytes), raising=False)
    tier.close()
    assert kept == [0]
