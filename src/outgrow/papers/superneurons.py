"""SuperNeurons (Wang et al., PPoPP 2018, arXiv 1801.04380): its figures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from outgrow.cost.workspaces import Workspace
from outgrow.papers.figure import Figure, Row, Unit
from outgrow.papers.lab import TWELVE_GB, Lab, gpu, network_wide_bytes, slower, trains
from outgrow.planning.simulate import Prediction

_FROM_MEMORY = "[from memory]"
_MB = 1e6


def _depth(lab: Lab) -> Sequence[Row]:
    k40 = gpu("K40c")
    plain = lab.deepest_resnet(16, k40, TWELVE_GB, "keep")
    own = lab.deepest_resnet(16, k40, TWELVE_GB, "superneurons")
    auto = lab.deepest_resnet(16, k40, TWELVE_GB, "auto")
    assert plain is not None, "a shallow ResNet fits"
    assert own is not None, "and under a plan as well"
    assert auto is not None, "and under a plan as well"
    speed = 16 / auto.prediction.step_seconds
    setting = "ResNet, batch 16, K40c, 12 GB, plain SGD"
    return (
        Row(
            claim="deepest ResNet",
            setting=setting,
            unit=Unit.LAYERS,
            source=f"1920; Caffe 148, Torch 152, MXNet 480, TensorFlow 592 {_FROM_MEMORY}",
            policy="superneurons",
            reported=1920,
            plain=plain.size,
            own=own.size,
            auto=auto.size,
            auto_samples_per_second=speed,
            note="to 1% in the number of blocks. Deeper than the paper's under the same rules, as tensors go at "
            "their last use to the byte, batch norm keeps no copies, and no convolution holds a workspace here; a "
            "K40c has some 11.2 GiB of its 12 for a program. "
            f"auto is {slower(auto.prediction):.0%} slower than with enough memory",
        ),
        Row(
            claim="deepest ResNet over the next best",
            setting=setting,
            unit=Unit.TIMES,
            source="abstract: at least 3.2432 times",
            policy="superneurons",
            reported=3.2432,
            plain=1.0,
            own=own.size / plain.size,
            auto=auto.size / plain.size,
            auto_samples_per_second=speed,
            note="over plain PyTorch of today, which frees tensors at their last use as the next best did then",
        ),
    )


def _resnet_2504(lab: Lab) -> Sequence[Row]:
    source = "abstract: ResNet2500, of 10,000 basic layers; batch not given there"
    claim = "ResNet of about 2,500 layers trains"
    return (trains(lab, "resnet-2504", 16, "K40c", claim=claim, source=source, policy="superneurons"),)


def _alexnet(lab: Lab) -> Sequence[Row]:
    k40 = gpu("K40c")
    trace = lab.trace("alexnet", 200, momentum=0.9)
    plain = lab.plain(trace, k40)
    offload = lab.least(trace, k40, "vdnn-all")
    own = lab.least(trace, k40, "superneurons")
    auto = lab.least(trace, k40, "auto")
    steps = (
        ("without liveness", 2189, network_wide_bytes(trace), None),
        ("with liveness", 1489, plain.peak_bytes, None),
        ("and offloading", 1132, offload.peak_bytes, None),
        ("and recomputation", 886, own.peak_bytes, auto.peak_bytes),
    )
    return tuple(
        Row(
            claim=f"peak {what}",
            setting="AlexNet, batch 200, K40c",
            unit=Unit.BYTES,
            source=_FROM_MEMORY,
            policy="superneurons",
            reported=reported * _MB,
            plain=plain.peak_bytes,
            own=ours,
            auto=by_auto,
            auto_samples_per_second=None if by_auto is None else 200 / auto.step_seconds,
            note="the AlexNet of one tower (Krizhevsky 2014) with ReLUs in place, which needs less than Caffe's; "
            "offloading as vdnn-all does it. Parameters, gradients and momentum are 0.68 GiB of each",
        )
        for what, reported, ours, by_auto in steps
    )


def _largest_batch(name: str, next_best: int, reported: int, lab: Lab) -> Sequence[Row]:
    k40 = gpu("K40c")
    plain, own, auto = (
        lab.largest_batch(name, k40, TWELVE_GB, policy) for policy in ("keep", "superneurons", "auto")
    )
    return (
        Row(
            claim="largest batch",
            setting=f"{name}, K40c, 12 GB, plain SGD",
            unit=Unit.BATCH,
            source=f"{reported}, the next best {next_best} {_FROM_MEMORY}",
            policy="superneurons",
            reported=reported,
            plain=None if plain is None else plain.size,
            own=None if own is None else own.size,
            auto=None if auto is None else auto.size,
            # The batch that the simulator answered with, if it trains there.
            measured=None if auto is None or lab.measured(name, auto.size, TWELVE_GB) is None else auto.size,
            auto_samples_per_second=None if auto is None else auto.size / auto.prediction.step_seconds,
            note=""
            if plain is None or auto is None
            else f"auto over plain: {auto.size / plain.size:.1f} times. The paper's networks held more a sample: "
            "frameworks then kept gradients of all layers and workspaces",
        ),
    )


def _dynamic_workspace(lab: Lab) -> Sequence[Row]:
    """What workspaces out of the bytes that are free right then are worth, in pools of two sizes."""
    k40, batch = gpu("K40c"), 1024
    trace = lab.trace("alexnet", batch)
    rows: list[Row] = []
    for gibibytes in (3, 5):
        budget = gibibytes << 30

        def speedup(policy: str, budget: int = budget) -> tuple[float, Prediction]:
            none = lab.run(trace, k40, budget, policy, Workspace.MEMORY)
            dynamic = lab.run(trace, k40, budget, policy, Workspace.DYNAMIC)
            return none.step_seconds / dynamic.step_seconds, dynamic

        (own, _), (auto, by_auto) = speedup("superneurons"), speedup("auto")
        rows.append(
            Row(
                claim="dynamic workspaces over none",
                setting=f"AlexNet, batch {batch}, K40c, {gibibytes} GB",
                unit=Unit.TIMES,
                source="section 3.5 and figure 12, whose numbers are for other batches",
                policy="superneurons",
                own=own,
                auto=auto,
                auto_samples_per_second=batch / by_auto.step_seconds,
                fits=by_auto.feasible,
                note="speed, in times. Algorithms and their workspaces are a model (outgrow/cost/workspaces.py)",
            )
        )
    return rows


_BATCHES = (
    ("alexnet", 1408, 1792),
    ("vgg-16", 80, 224),
    ("inception-v4", 64, 240),
    ("resnet-50", 128, 384),
    ("resnet-101", 80, 256),
    ("resnet-152", 48, 176),
)

FIGURES: Sequence[Figure] = (
    Figure("the deepest ResNet", _depth),
    Figure("ResNet-2504", _resnet_2504),
    Figure("AlexNet's peak", _alexnet),
    *(
        Figure(f"{name}'s largest batch", partial(_largest_batch, name, next_best, reported))
        for name, next_best, reported in _BATCHES
    ),
    Figure("dynamic workspaces", _dynamic_workspace),
)
