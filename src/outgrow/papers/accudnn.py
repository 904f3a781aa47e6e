"""AccUDNN (arXiv 1901.06773, 2019): its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from outgrow.cost.hardware import Hardware
from outgrow.papers.figure import Figure, Row, Unit
from outgrow.papers.lab import TWELVE_GB, Lab, gpu, network_wide_bytes, slower
from outgrow.tracing.ir import Kind, Trace
from outgrow.tuning.limits import Limit

_EIGHT_GB, _TWENTY_FOUR_GB = 8 << 30, 24 << 30
_DEVICE = "Titan Xp"
# Shares of the largest batch that fits whose speed is compared.
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
_GPUS = 8


def _resnet_152(lab: Lab) -> Sequence[Row]:
    device = gpu(_DEVICE)
    batch = 16
    while lab.plain(lab.trace("resnet-152", batch), device).peak_bytes <= _TWENTY_FOUR_GB:
        batch += 16
    trace = lab.trace("resnet-152", batch)
    plain = lab.plain(trace, device)
    own = lab.run(trace, device, _EIGHT_GB, "accudnn")
    auto = lab.run(trace, device, _EIGHT_GB, "auto")
    measured = lab.measured("resnet-152", batch, _EIGHT_GB)
    return (
        Row(
            claim="ResNet-152, from more than 24 GB to 8 GB",
            setting=f"ResNet-152, batch {batch}, {_DEVICE}, 8 GB",
            unit=Unit.BYTES,
            source="abstract; the batch is not given there",
            policy="accudnn",
            reported=float(_EIGHT_GB),
            plain=plain.peak_bytes,
            own=own.peak_bytes if own.feasible else None,
            auto=auto.peak_bytes,
            measured=None if measured is None else measured.peak_bytes,
            auto_samples_per_second=batch / auto.step_seconds,
            fits=auto.feasible,
            note="the least batch, in sixteens, with which plain PyTorch takes more than 24 GB; all tensors at "
            f"once, as original Caffe held them, would be {network_wide_bytes(trace) / 2**30:.0f} GiB. "
            f"Slower than with enough memory: accudnn {slower(own):.1%}, auto {slower(auto):.1%}",
        ),
    )


@dataclass(frozen=True)
class _Best:
    """The batch with the most samples per second, and that speed."""

    batch: int
    samples_per_second: float
    step_seconds: float


def _best_batch(lab: Lab, device: Hardware, policy: str, most: Limit) -> _Best:
    best = _Best(most.size, most.size / most.prediction.step_seconds, most.prediction.step_seconds)
    for share in _SHARES[1:]:
        batch = max(1, int(most.size * share))
        prediction = lab.run(lab.trace("resnet-152", batch), device, TWELVE_GB, policy)
        speed = batch / prediction.step_seconds
        if prediction.feasible and speed > best.samples_per_second:
            best = _Best(batch, speed, prediction.step_seconds)
    return best


def _efficient_batch(lab: Lab) -> Sequence[Row]:
    device = gpu(_DEVICE)
    plain = lab.largest_batch("resnet-152", device, TWELVE_GB, "keep")
    assert plain is not None, "one image fits"
    auto_most = lab.largest_batch("resnet-152", device, TWELVE_GB, "auto")
    assert auto_most is not None, "what fits as it is fits under a plan"
    own_most = lab.largest_batch("resnet-152", device, TWELVE_GB, "accudnn")
    assert own_most is not None, "what fits as it is fits under a plan"
    own = _best_batch(lab, device, "accudnn", own_most)
    auto = _best_batch(lab, device, "auto", auto_most)
    caffe = _largest_without_liveness(lab.trace("resnet-152", 1), lab.trace("resnet-152", 2))
    setting = f"ResNet-152, {_DEVICE}, 12 GB, plain SGD"
    speeds = (
        f"samples per second: plain {plain.size / plain.prediction.step_seconds:.1f}, accudnn "
        f"{own.samples_per_second:.1f}, auto {auto.samples_per_second:.1f}"
    )
    return (
        Row(
            claim="efficiency-optimal batch over original Caffe's",
            setting=setting,
            unit=Unit.TIMES,
            source="abstract: 4.2 times",
            policy="accudnn",
            reported=4.2,
            plain=plain.size / caffe,
            own=own.batch / caffe,
            auto=auto.batch / caffe,
            auto_samples_per_second=auto.samples_per_second,
            note=f"most samples per second of {len(_SHARES)} batches up to the largest. Caffe's largest is taken as "
            f"{caffe}, by all tensors at once. The roofline has no fixed cost a kernel beyond its launch, so that "
            f"speed hardly grows with the batch here; {speeds}",
        ),
        Row(
            claim="largest batch over plain PyTorch's",
            setting=setting,
            unit=Unit.TIMES,
            source="the figure above, held against PyTorch instead",
            policy="accudnn",
            plain=1.0,
            auto=auto_most.size / plain.size,
            auto_samples_per_second=auto_most.size / auto_most.prediction.step_seconds,
            note=f"plain {plain.size}, auto {auto_most.size}",
        ),
        _eight_gpus(lab, device, plain.prediction.step_seconds, own.step_seconds, auto.step_seconds),
    )


def _largest_without_liveness(one: Trace, two: Trace) -> int:
    """The largest batch where every tensor has its memory all the time: the need is linear in the batch."""
    first, each = network_wide_bytes(one), network_wide_bytes(two) - network_wide_bytes(one)
    return 1 + (TWELVE_GB - first) // each


def _eight_gpus(lab: Lab, device: Hardware, plain_seconds: float, own_seconds: float, auto_seconds: float) -> Row:
    """Ring all-reduce after the backward pass, nothing hidden: 2 (n - 1) / n of the gradients over the link."""
    speedup = partial(_speedup, _gradient_bytes(lab.trace("resnet-152", 1)) / device.copy_out_bandwidth)
    return Row(
        claim="data parallel on 8 GPUs",
        setting=f"ResNet-152, 8 x {_DEVICE}, 12 GB each",
        unit=Unit.TIMES,
        source="abstract: 7.7 times",
        policy="accudnn",
        reported=7.7,
        plain=speedup(plain_seconds),
        own=speedup(own_seconds),
        auto=speedup(auto_seconds),
        note="a model, not a simulation: ring all-reduce of the gradients over PCIe after each backward pass, "
        "nothing hidden behind it",
    )


def _gradient_bytes(trace: Trace) -> int:
    return sum({value.storage: value.nbytes for value in trace.values if value.kind is Kind.GRADIENT}.values())


def _speedup(once_over_the_link_seconds: float, step_seconds: float) -> float:
    exchange = 2 * (_GPUS - 1) / _GPUS * once_over_the_link_seconds
    return _GPUS * step_seconds / (step_seconds + exchange)


FIGURES: Sequence[Figure] = (
    Figure("ResNet-152 in 8 GB", _resnet_152),
    Figure("the batch that is worth it, and eight GPUs", _efficient_batch),
)
