"""Layrub (Liu et al., PPoPP 2018; TACO 2018): its figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from outgrow.papers.figure import Figure, Row, Unit
from outgrow.papers.lab import Lab, gpu, network_wide_bytes, slower, trains

# Networks and batches of its release, as far as they are in the catalogue.
_NETWORKS = (
    ("alexnet", 256),
    ("googlenet", 32),
    ("vgg-16", 64),
    ("resnet-18", 32),
    ("resnet-34", 32),
    ("resnet-50", 32),
    ("resnet-101", 32),
    ("resnet-152", 32),
    ("wrn-28-10", 128),
)


@dataclass(frozen=True)
class _Result:
    """One network: its row, and how much slower each policy is than a step with enough memory."""

    row: Row
    own_slower: float
    auto_slower: float


def _against_caffe(lab: Lab) -> Sequence[Row]:
    results = [_network(name, batch, lab) for name, batch in _NETWORKS]
    rows = [result.row for result in results]
    return (
        Row(
            claim="memory, average of these networks",
            setting="training with momentum, Titan X",
            unit=Unit.SAVED,
            source="abstract (TACO): 58.2% on average, 98.9% at most",
            policy="layrub",
            reported=0.582,
            plain=_mean(row.plain for row in rows),
            own=_mean(row.own for row in rows),
            auto=_mean(row.auto for row in rows),
            note="of what original Caffe holds, which is every tensor all through the step. The most here is "
            f"{max(row.own or 0 for row in rows):.1%}",
        ),
        Row(
            claim="time, average of these networks",
            setting="training with momentum, Titan X, at Layrub's own least peak",
            unit=Unit.SLOWER,
            source="abstract (TACO): 24.1% on average",
            policy="layrub",
            reported=0.241,
            own=_mean(result.own_slower for result in results),
            auto=_mean(result.auto_slower for result in results),
            note="against a device with enough memory, at the least peak that the policy holds: all layers leave, "
            "and come back one layer ahead over a link that is slow for this device. The paper's is against "
            "original Caffe, which took longer for everything else",
        ),
        *rows,
    )


def _network(name: str, batch: int, lab: Lab) -> _Result:
    titan_x = gpu("Titan X")
    trace = lab.trace(name, batch, momentum=0.9)
    everything = network_wide_bytes(trace)
    plain = lab.plain(trace, titan_x)
    own = lab.least(trace, titan_x, "layrub")
    auto = lab.run(trace, titan_x, own.peak_bytes, "auto")
    row = Row(
        claim="memory",
        setting=f"{name}, batch {batch}, Titan X",
        unit=Unit.SAVED,
        source="one of the networks of its release",
        policy="layrub",
        plain=1 - plain.peak_bytes / everything,
        own=1 - own.peak_bytes / everything,
        auto=1 - auto.peak_bytes / everything,
        auto_samples_per_second=batch / auto.step_seconds,
        fits=auto.feasible,
        note=f"slower than with enough memory: layrub {slower(own):.1%}, auto {slower(auto):.1%}",
    )
    return _Result(row, slower(own), slower(auto))


def _mean(numbers: Iterable[float | None]) -> float:
    return mean(number for number in numbers if number is not None)


def _resnet_1517(lab: Lab) -> Sequence[Row]:
    source = "abstract (TACO): on one GPU of 12 GB"
    return (trains(lab, "resnet-1517", 32, "Titan X", claim="ResNet-1517 trains", source=source, policy="layrub"),)


FIGURES: Sequence[Figure] = (
    Figure("memory and time against Caffe", _against_caffe),
    Figure("ResNet-1517", _resnet_1517),
)
