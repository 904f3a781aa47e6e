"""GPUs to plan for without having them: data-sheet speeds, and what share of them training was seen to reach.

Each profile says where its numbers come from. Shares were fitted to published measurements of whole training steps
(forward and backward): with two numbers, one for convolutions and products and one for the rest, six networks come
out within 12% on each of the three cards of jcjohnson/cnn-benchmarks. A share above 1 is Winograd's: a 3 x 3
convolution takes fewer products than the FLOP count says.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outgrow.cost.hardware import Hardware, OpClass
from outgrow.errors import UnknownHardware

_GB, _TERA = 1e9, 1e12
_KERNEL_LAUNCH_SECONDS = 5e-6
_COPY_LAUNCH_SECONDS = 1e-5
_MOST_OF_A_PRODUCT = 0.85  # assumed; Winograd does not help a matrix product


@dataclass(frozen=True)
class Profile:
    """A device and where its numbers come from, by what they are."""

    hardware: Hardware
    sources: Mapping[str, str]


def profiles() -> tuple[Profile, ...]:
    """All known devices, oldest first."""
    return _PROFILES


def find_hardware(name: str) -> Hardware:
    """The device of that name, whatever its case, spaces and hyphens: "K40c", "titan-x", "A100 80GB".

    Raises:
        UnknownHardware: there is no such device; with close matches.
    """
    by_key = {_squeeze(profile.hardware.name): profile.hardware for profile in _PROFILES}
    wanted = _squeeze(name)
    if wanted in by_key:
        return by_key[wanted]
    close = [key for key in by_key if wanted and wanted in key] or difflib.get_close_matches(wanted, by_key)
    known = [by_key[key].name for key in close] or [profile.hardware.name for profile in _PROFILES]
    raise UnknownHardware(f"no hardware profile {name!r}; there are {', '.join(known)}")


def _squeeze(name: str) -> str:
    return re.sub(r"[-_\s]", "", name.lower())


def _gpu(
    name: str,
    memory_gib: int,
    *,
    teraflops: float,
    memory_gb_per_second: float,
    link_gb_per_second: float,
    compute_share: float,
    memory_share: float,
    sources: Mapping[str, str],
    teraflops_16_bit: float | None = None,
) -> Profile:
    sixteen = {} if teraflops_16_bit is None else {"float16": teraflops_16_bit, "bfloat16": teraflops_16_bit}
    hardware = Hardware(
        name=name,
        memory_bytes=memory_gib << 30,
        flops_per_second=teraflops * _TERA,
        memory_bandwidth=memory_gb_per_second * _GB,
        copy_out_bandwidth=link_gb_per_second * _GB,
        copy_in_bandwidth=link_gb_per_second * _GB,
        copy_latency_seconds=_COPY_LAUNCH_SECONDS,
        op_overhead_seconds=_KERNEL_LAUNCH_SECONDS,
        device_type="cuda",
        flops_by_dtype={dtype: number * _TERA for dtype, number in sixteen.items()},
        efficiency={
            OpClass.CONVOLUTION.value: compute_share,
            OpClass.PRODUCT.value: min(compute_share, _MOST_OF_A_PRODUCT),
            OpClass.NORMALIZATION.value: memory_share,
            OpClass.OTHER.value: memory_share,
        },
    )
    return Profile(hardware, MappingProxyType(dict(sources)))


_DATA_SHEET = "NVIDIA's data sheet"
_CNN_BENCHMARKS = "fitted to jcjohnson/cnn-benchmarks: VGG-16 and ResNet-18 to 152, batch 16, cuDNN 5"
_GEN3 = "PCIe 3.0 x16: 12.8 of 15.75 GB/s, as vDNN reports of its DMA (arXiv 1602.08124)"
_DEEP_LEARNING_EXAMPLES = "NVIDIA/DeepLearningExamples, PyTorch ResNet-50 v1.5"
_AS_A100 = "assumed to be as the A100's"

_PROFILES: tuple[Profile, ...] = (
    _gpu(
        "K40c",
        12,
        teraflops=4.29,
        memory_gb_per_second=288,
        link_gb_per_second=10.0,
        compute_share=0.45,
        memory_share=0.11,
        sources={
            "flops_per_second, memory_bandwidth, memory_bytes": f"{_DATA_SHEET}, without boost",
            "copy_bandwidth": "PCIe 3.0 x16: 10.0 GB/s from pinned memory, as Microway measured of a K40",
            "efficiency": _CNN_BENCHMARKS,
        },
    ),
    _gpu(
        "Titan X",
        12,
        teraflops=7.0,
        memory_gb_per_second=336.5,
        link_gb_per_second=12.8,
        compute_share=1.19,
        memory_share=0.22,
        sources={
            "flops_per_second, memory_bandwidth, memory_bytes": "vDNN, section IV (Maxwell)",
            "copy_bandwidth": _GEN3,
            "efficiency": _CNN_BENCHMARKS,
        },
    ),
    _gpu(
        "Titan Xp",
        12,
        teraflops=12.15,
        memory_gb_per_second=547.7,
        link_gb_per_second=12.8,
        compute_share=1.87,
        memory_share=0.22,
        sources={
            "flops_per_second, memory_bandwidth, memory_bytes": _DATA_SHEET,
            "copy_bandwidth": _GEN3,
            "efficiency": f"{_CNN_BENCHMARKS}, on the Titan X of the same generation (Pascal)",
        },
    ),
    _gpu(
        "P100",
        16,
        teraflops=10.6,
        memory_gb_per_second=732,
        link_gb_per_second=12.8,
        compute_share=0.9,
        memory_share=0.4,
        teraflops_16_bit=21.2,
        sources={
            "flops_per_second, memory_bandwidth, memory_bytes": f"{_DATA_SHEET} (SXM2)",
            "copy_bandwidth": _GEN3,
            "efficiency": "TensorFlow's benchmarks of 2017: ResNet-50, batch 64, 219 images/s",
        },
    ),
    _gpu(
        "V100",
        16,
        teraflops=15.7,
        memory_gb_per_second=900,
        link_gb_per_second=12.8,
        compute_share=1.0,
        memory_share=0.55,
        teraflops_16_bit=125,
        sources={
            "flops_per_second, memory_bandwidth, memory_bytes": f"{_DATA_SHEET} (SXM2)",
            "copy_bandwidth": _GEN3,
            "efficiency": f"{_DEEP_LEARNING_EXAMPLES}: float32, 367 images/s",
        },
    ),
    *(
        _gpu(
            f"A100 {memory} GB",
            memory,
            teraflops=19.5,
            memory_gb_per_second=bandwidth,
            link_gb_per_second=24.8,
            compute_share=0.6,
            memory_share=0.55,
            teraflops_16_bit=312,
            sources={
                "flops_per_second, memory_bandwidth, memory_bytes": f"{_DATA_SHEET} (SXM4), TF32 off",
                "copy_bandwidth": "PCIe 4.0 x16: 24.8 GB/s by nvbandwidth, on NVIDIA's developer forum",
                "efficiency": f"{_DEEP_LEARNING_EXAMPLES}: mixed precision on 80 GB, 2470 images/s",
            },
        )
        for memory, bandwidth in ((40, 1555), (80, 2039))
    ),
    _gpu(
        "RTX 4090",
        24,
        teraflops=82.6,
        memory_gb_per_second=1008,
        link_gb_per_second=24.8,
        compute_share=0.6,
        memory_share=0.55,
        teraflops_16_bit=165.2,
        sources={
            "flops_per_second, memory_bandwidth, memory_bytes": _DATA_SHEET,
            "copy_bandwidth": "PCIe 4.0 x16, as the A100",
            "efficiency": _AS_A100,
        },
    ),
    *(
        _gpu(
            name,
            memory,
            teraflops=66.9,
            memory_gb_per_second=bandwidth,
            link_gb_per_second=55.0,
            compute_share=0.6,
            memory_share=0.55,
            teraflops_16_bit=989,
            sources={
                "flops_per_second, memory_bandwidth, memory_bytes": f"{_DATA_SHEET} (SXM), TF32 off",
                "copy_bandwidth": "PCIe 5.0 x16: 63 GB/s at most, 55 assumed",
                "efficiency": _AS_A100,
            },
        )
        for name, memory, bandwidth in (("H100", 80, 3350), ("H200", 141, 4800))
    ),
)
