"""vDNN (Rhu et al., MICRO 2016, arXiv 1602.08124): its figures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean

from outgrow.cost.workspaces import Workspace
from outgrow.papers.figure import Figure, Row, Unit
from outgrow.papers.lab import TWELVE_GB, Lab, gpu, network_wide_bytes, slower, trains, without_state

_AVERAGE_NOTE = (
    "of feature maps and their gradients, as vDNN manages no weights; the baseline holds each of them all through "
    "the step. PyTorch frees them at their last use: 'plain' is what that alone saves. 'auto' has the least budget "
    "+ 3%, and also sends away what costs under 3%"
)
_ABOVE_FLOOR = 1.03


def _average_memory(name: str, reported: float, source: str, lab: Lab) -> Sequence[Row]:
    titan_x = gpu("Titan X")
    trace = without_state(lab.trace(name, 128))
    everything = network_wide_bytes(trace)
    plain = lab.plain(trace, titan_x)
    own = lab.run(trace, titan_x, TWELVE_GB, "vdnn-all")
    budget = int(lab.floor_bytes(trace, titan_x) * _ABOVE_FLOOR)
    auto = lab.run_lean(trace, titan_x, budget)
    return (
        Row(
            claim="average memory",
            setting=f"{name}, batch 128, Titan X",
            unit=Unit.SAVED,
            source=source,
            policy="vdnn-all",
            reported=reported,
            plain=1 - plain.average_bytes / everything,
            own=1 - own.average_bytes / everything,
            auto=1 - auto.average_bytes / everything,
            auto_samples_per_second=128 / auto.step_seconds,
            fits=auto.feasible,
            note=f"{_AVERAGE_NOTE}. Slower than with enough memory: vdnn-all {slower(own):.1%}, auto "
            f"{slower(auto):.1%}",
        ),
    )


def _vgg_16(device: str, reported: float, source: str, lab: Lab) -> Sequence[Row]:
    hardware = gpu(device)
    trace = lab.trace("vgg-16", 256)
    setting = f"VGG-16, batch 256, {device}, 12 GB"
    plain = lab.plain(trace, hardware)
    own = lab.run(trace, hardware, TWELVE_GB, "vdnn-dyn")
    auto = lab.run(trace, hardware, TWELVE_GB, "auto")
    measured = lab.measured("vgg-16", 256, TWELVE_GB, against_plain=True)
    return (
        Row(
            claim="time on 12 GB",
            setting=setting,
            unit=Unit.SLOWER,
            source=source,
            policy="vdnn-dyn",
            reported=reported,
            own=slower(own) if own.feasible else None,
            auto=slower(auto),
            measured=None if measured is None else measured.slower,
            auto_samples_per_second=256 / auto.step_seconds,
            fits=auto.feasible,
            note=f"vDNN's plain step held 28 GB: all feature maps, gradients and workspaces at once. PyTorch's "
            f"holds {plain.peak_bytes / 2**30:.1f} GiB, as tensors go at their last use and ReLU works in place; "
            f"all at once they would be {network_wide_bytes(trace) / 2**30:.1f} GiB. vDNN also falls back to slower "
            "convolution algorithms that need no workspace; here a convolution has one speed, and only the link and "
            "vDNN's waits at the end of each layer cost time: with workspaces see below",
        ),
    )


def _deep_vgg(depth: int, lab: Lab) -> Sequence[Row]:
    name, source = f"vgg-{depth}", "trains [from memory]"
    return (trains(lab, name, 32, "Titan X", claim=f"VGG-{depth} trains", source=source, policy="vdnn-dyn"),)


# vDNN's networks, and the batches that its figures are of.
_NETWORKS = (("alexnet", 128), ("overfeat", 128), ("googlenet", 128), ("vgg-16", 64))
_MODEL_NOTE = (
    "algorithms and their workspaces are a model (outgrow/cost/workspaces.py); slower than a step that has all the "
    "memory it wants, with the fastest algorithms"
)


def _memory_optimal(policy: str, loss: float, lab: Lab) -> Sequence[Row]:
    """Offloading with the algorithms that need no workspace: what it costs on average."""
    titan_x = gpu("Titan X")
    kind = Workspace.MEMORY
    traces = [(batch, lab.trace(name, batch)) for name, batch in _NETWORKS]
    own = [slower(lab.run(trace, titan_x, TWELVE_GB, policy, kind)) for _, trace in traces]
    auto = [slower(lab.run(trace, titan_x, TWELVE_GB, "auto", kind)) for _, trace in traces]
    names = ", ".join(f"{name} ({batch})" for name, batch in _NETWORKS)
    return (
        Row(
            claim="time with memory-optimal algorithms (m)",
            setting=f"average of {names}; Titan X, 12 GB",
            unit=Unit.SLOWER,
            source=f"section V-C: {loss:.0%} of the throughput lost on average [from memory]",
            policy=policy,
            reported=1 / (1 - loss) - 1,
            own=mean(own),
            auto=mean(auto),
            note=f"{_MODEL_NOTE}. One of its numbers is fitted to this figure",
        ),
    )


def _vgg_16_by_workspace(device: str, lab: Lab) -> Sequence[Row]:
    """VGG-16 in 12 GB by vDNN's (m), (p) and dynamic variants."""
    hardware = gpu(device)
    trace = lab.trace("vgg-16", 256)
    variants = (
        ("vdnn-all", Workspace.MEMORY, "(m)"),
        ("vdnn-conv", Workspace.MEMORY, "(m)"),
        ("vdnn-all", Workspace.SPEED, "(p)"),
        ("vdnn-conv", Workspace.SPEED, "(p)"),
        ("vdnn-dyn", Workspace.DYNAMIC, "dynamic"),
    )
    rows: list[Row] = []
    for policy, kind, name in variants:
        own = lab.run(trace, hardware, TWELVE_GB, policy, kind)
        auto = lab.run(trace, hardware, TWELVE_GB, "auto", kind)
        least = lab.floor_bytes(trace, hardware, kind)
        does_not_fit = "" if auto.feasible else f"; nothing fits: the least budget is {least / 2**30:.1f} GiB"
        rows.append(
            Row(
                claim=f"time on 12 GB, workspaces {name}",
                setting=f"VGG-16, batch 256, {device}, 12 GB",
                unit=Unit.SLOWER,
                source="sections III-C and V-C",
                policy=policy,
                own=slower(own) if own.feasible else None,
                auto=slower(auto) if auto.feasible else None,
                auto_samples_per_second=256 / auto.step_seconds if auto.feasible else None,
                fits=auto.feasible,
                note=f"{_MODEL_NOTE}{does_not_fit}",
            )
        )
    return rows


_V1, _V3 = "abstract, version 1", "abstract, version 3"

FIGURES: Sequence[Figure] = (
    Figure("AlexNet's average memory", partial(_average_memory, "alexnet", 0.61, f"{_V1}; up to 89% in version 3")),
    Figure("OverFeat's average memory", partial(_average_memory, "overfeat", 0.83, f"{_V1}; up to 91% in version 3")),
    Figure("GoogLeNet's average memory", partial(_average_memory, "googlenet", 0.95, f"{_V3}, at most")),
    Figure("VGG-16 on a K40c", partial(_vgg_16, "K40c", 0.22, _V1)),
    Figure("VGG-16 on a Titan X", partial(_vgg_16, "Titan X", 0.18, _V3)),
    *(Figure(f"VGG-{depth}", partial(_deep_vgg, depth)) for depth in (116, 216, 316, 416)),
    Figure("vDNN-all with memory-optimal algorithms", partial(_memory_optimal, "vdnn-all", 0.58)),
    Figure("vDNN-conv with memory-optimal algorithms", partial(_memory_optimal, "vdnn-conv", 0.55)),
    Figure("VGG-16 by workspace", partial(_vgg_16_by_workspace, "Titan X")),
)
