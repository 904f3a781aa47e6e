"""Whole training steps with the CUDA engine and the pinned tier, on CPU tensors and fake streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

import outgrow
import outgrow.session
from cases import training_of
from fake_streams import FakeStreams
from outgrow.errors import HostBudgetTooSmall, SessionError
from outgrow.planning.policies import Policy
from outgrow.runtime.backend import Backend
from outgrow.runtime.clock import DeviceClock
from outgrow.runtime.copies.cuda import CudaCopies
from outgrow.runtime.tiers import host
from outgrow.runtime.tiers.disk import SpillFile
from outgrow.runtime.tiers.host import HostTier
from outgrow.runtime.tiers.ram import Ram
from outgrow.tracing.ledger import Ledger
from steps import RecomputeAll, budget_for, train_in_session, train_plain

MiB = 1 << 20


class Fakes:
    """The backends that sessions opened, with what they pinned."""

    def __init__(self, host_bytes: int, luck: float) -> None:
        self.host_bytes = host_bytes
        self.luck = luck
        self.streams: list[FakeStreams] = []
        self.pinned = 0

    def open(
        self, device: torch.device, ledger: Ledger, budget: int, host_bytes: int | None, spill: SpillFile
    ) -> Backend:
        streams = FakeStreams(Random(len(self.streams)), self.luck)
        self.streams.append(streams)
        self.pinned = 0
        places = HostTier(self.host_bytes, spill, self._pin)
        copies = CudaCopies(streams, spill, places.bounces)
        return Backend(Ram(1 << 40, budget), places, copies, DeviceClock(streams, copies.waits))

    def _pin(self, nbytes: int) -> torch.Tensor:
        self.pinned += nbytes
        assert self.pinned <= self.host_bytes
        return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fakes]:
    """Makes sessions stand on the engine of CUDA."""

    def install(host_bytes: int = 256 * MiB, luck: float = 0.1) -> Fakes:
        made = Fakes(host_bytes, luck)
        monkeypatch.setattr(outgrow.session, "open_backend", made.open)
        return made

    return install


POLICIES: tuple[str | Policy, ...] = ("auto", "lru", "vdnn-all", "superneurons", RecomputeAll())


@pytest.mark.parametrize("luck", [0.0, 0.5])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(("name", "size", "batch"), [("resnet-18", 32, 2), ("gpt-2x64", 64, 2)])
def test_training_is_plain_training_to_the_bit(
    fakes: Callable[..., Fakes], name: str, size: int, batch: int, policy: str | Policy, luck: float
) -> None:
    made = fakes(luck=luck)
    make = training_of(name, size, batch)
    plain = train_plain(make, 4)
    budget = budget_for(make, 0.7)
    ours, summaries = train_in_session(make, 4, budget=budget, policy=policy)
    assert ours == plain
    assert all(summary.measured_peak_bytes <= budget for summary in summaries)
    assert [streams.races for streams in made.streams] == [[]]


def test_what_has_no_room_in_pinned_memory_goes_to_the_disk_and_comes_back_equal(
    fakes: Callable[..., Fakes], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = SpillFile.write

    def count(spill: SpillFile, slot: object, address: int) -> None:
        written.append(address)
        write(spill, slot, address)  # type: ignore[arg-type]

    monkeypatch.setattr(SpillFile, "write", count)
    monkeypatch.setattr(host, "_LEAST_BOUNCE_BYTES", 64 << 10)
    monkeypatch.setattr(host, "LEAST_HOST_BYTES", 128 << 10)
    made = fakes(host_bytes=MiB // 2)
    make = training_of("resnet-18", 32, 2)
    plain = train_plain(make, 4)
    ours, summaries = train_in_session(make, 4, budget=budget_for(make, 0.6), policy="vdnn-all")
    assert ours == plain
    assert summaries[-1].offloaded_bytes > MiB // 2
    assert written
    assert 0 < made.pinned <= MiB // 2
    assert [streams.races for streams in made.streams] == [[]]


def test_a_host_budget_that_does_not_hold_the_buffers_is_refused(fakes: Callable[..., Fakes], tmp_path: Path) -> None:
    fakes(host_bytes=MiB)
    with pytest.raises(HostBudgetTooSmall, match=r"2\.00 MiB at least") as caught:
        outgrow.Session(torch.nn.Linear(8, 8), budget="1GiB", spill_dir=tmp_path, allow_tmpfs=True)
    assert caught.value.least_bytes == 2 * MiB
    assert "host_budget" in str(caught.value)


def test_a_host_budget_for_a_model_on_the_cpu_is_refused() -> None:
    with pytest.raises(SessionError, match="host_budget is for models on a GPU"):
        outgrow.Session(torch.nn.Linear(8, 8), budget="1GiB", host_budget="1GiB")
