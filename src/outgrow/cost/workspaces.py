"""What cuDNN's algorithms for a convolution take on a GPU: bytes of workspace against seconds. Pure; no torch.

cuDNN runs the same convolution by one of several algorithms: the more memory they get, the faster they are. vDNN
calls the ends (m), memory-optimal, and (p), performance-optimal (section III-C); SuperNeurons takes, at each
convolution, the fastest whose workspace fits the bytes that are free right then (section 3.5). The numbers here are a
model of that, from what is published; cuDNN itself was not asked.

Times are relative to a matrix product (implicit GEMM with precomputed indices, 1.0), and scaled so that the fastest
algorithm of a convolution takes what `estimate` gives it: the profiles' shares were fitted to runs with cuDNN's
fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from outgrow.cost.estimate import op_class, op_seconds
from outgrow.cost.hardware import Hardware
from outgrow.errors import UnknownWorkspace
from outgrow.tracing.convolution import DATA_GRADIENT, FORWARD, WEIGHT_GRADIENT, Convolution
from outgrow.tracing.ir import Op


class Workspace(StrEnum):
    """How much memory convolutions may take for their work."""

    MEMORY = "memory"
    SPEED = "speed"
    DYNAMIC = "dynamic"


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run an op: its workspace in bytes and its time in seconds."""

    nbytes: int
    seconds: float


def find_workspace(name: str | None) -> Workspace | None:
    """The kind of that name; None for None, which stands for what the library takes by itself.

    Raises:
        UnknownWorkspace: there is none.
    """
    if name is None:
        return None
    try:
        return Workspace(name)
    except ValueError:
        known = ", ".join(f'"{kind.value}"' for kind in Workspace)
        raise UnknownWorkspace(
            f"workspace is {name!r}: it is one of {known}, or None for what PyTorch takes by itself"
        ) from None


# Implicit GEMM holds no index table (cuDNN's reference: "does not need any workspace") and is slower for that. The
# factor is fitted: with Winograd's below it makes VGG's 3 x 3 convolutions take 2.25 times as long under (m) as under
# (p), and vDNN reports that (m) loses 55 to 58% of the throughput on average, 2.2 to 2.4 times (section V-C) [from
# memory].
_IMPLICIT = 1.5
# A table of 4-byte indices, one for each row of the lowered matrix: kilobytes. micro-cuDNN has 4.3 KiB for AlexNet's
# second convolution (arXiv 1804.04806, figure 1) [from memory]. Explicit GEMM, which stores the whole lowered matrix
# (Chetlur et al. 2014, section 3), multiplies no faster, and so is never the one to take.
_INDEX_BYTES = 4
# F(2x2, 3x3): 2.25 times fewer products, of which 1.5 are left in time: Lavin and Gray, "Fast Algorithms for
# Convolutional Neural Networks" (arXiv 1509.09308), VGG-E in float32 at batch 64 on a Titan X: 1.48 times as fast as
# cuDNN's matrix product [from memory]. It transforms tiles on the fly, and stores the transformed weight: 4 x 4 for 3
# x 3.
_WINOGRAD = 1 / 1.5
_WINOGRAD_REACHES = 1.5 / 2.25  # of the products that are saved
# Non-fused Winograd, F(4x4, 3x3): 36 products in place of 144, at the share that the fused one reaches; transformed
# images and results are stored, and written and read once ("significant workspace may be needed", cuDNN's reference).
_WINOGRAD_NON_FUSED = 36 / 144 / _WINOGRAD_REACHES
_TILE, _TILED_POINTS = 4, 36
# FFT in tiles of 32 x 32 (cuDNN's reference): 32 x 17 complex numbers a tile, of 8 bytes, and a complex product of 8
# FLOP for each; written and read once. The share of a matrix product's speed is fitted between two readings of
# micro-cuDNN's 4.5 times for AlexNet's second convolution on a P100 (figure 1) [from memory].
_FFT_TILE, _FFT_POINTS = 32, 32 * 17
_COMPLEX_BYTES, _COMPLEX_FLOPS = 8, 8
_FFT_REACHES = 0.5
_SINGLE = "float32"  # the others use tensor cores, for which implicit products are the fast way
_WORD = 4  # bytes


def choices(op: Op, hardware: Hardware) -> tuple[Choice, ...]:
    """The algorithms that an op can run by, from the one without workspace to the fastest; one for most ops.

    Each takes more memory than the one before it, and less time.
    """
    usual = op_seconds(op, hardware)
    if not op.shape or hardware.device_type != "cuda" or not op.flops:
        return (Choice(0, usual),)
    conv = Convolution(*op.shape)
    passes = [kind for kind in (FORWARD, DATA_GRADIENT, WEIGHT_GRADIENT) if conv.passes & kind]
    share = hardware.efficiency.get(op_class(op), 1.0)
    # What its memory traffic takes, no algorithm gets below; the arithmetic is divided evenly among the passes.
    traffic = hardware.roofline_seconds(0, op.moved_bytes, op.dtype) / share
    arithmetic = hardware.roofline_seconds(op.flops, 0, op.dtype) / share / len(passes)
    ways = [_in_seconds(list(_algorithms(conv, kind, op.dtype)), arithmetic, hardware) for kind in passes]

    def fastest_within(nbytes: int) -> Choice:
        """The passes run one after the other: each takes what it can, and memory is what the largest holds."""
        taken = [min((way for way in each if way.nbytes <= nbytes), key=lambda way: way.seconds) for each in ways]
        seconds = max(traffic, sum(way.seconds for way in taken))
        return Choice(max(way.nbytes for way in taken), hardware.op_overhead_seconds + seconds)

    found: list[Choice] = []
    for nbytes in sorted({way.nbytes for each in ways for way in each}):
        way = fastest_within(nbytes)
        if not found or way.seconds < found[-1].seconds * (1 - 1e-9):
            found.append(way)
    return (*found[:-1], Choice(found[-1].nbytes, usual))


def most_bytes(conv: Convolution) -> int:
    """The most that an algorithm for a float32 convolution holds, in bytes, whichever pass it is for."""
    passes = (FORWARD, DATA_GRADIENT, WEIGHT_GRADIENT)
    return max(way.nbytes for kind in passes for way in _algorithms(conv, kind, _SINGLE))


@dataclass(frozen=True, slots=True)
class _Algorithm:
    """Workspace in bytes, time in that of a matrix product, and bytes that it moves beside that."""

    nbytes: int
    products: float
    moved_bytes: int = 0


def _algorithms(conv: Convolution, kind: int, dtype: str) -> Iterator[_Algorithm]:
    """What there is for one pass, by the constraints of cuDNN's reference (cudnnConvolutionFwdAlgo_t and its
    like)."""
    rows = conv.channels_in // conv.groups * conv.kernel_height * conv.kernel_width
    yield _Algorithm(0, _IMPLICIT)
    yield _Algorithm(_INDEX_BYTES * rows, 1.0)
    if conv.stride > 1 or conv.dilation > 1 or conv.groups > 1 or dtype != _SINGLE:
        return
    maps = conv.batch * (conv.channels_in + conv.channels_out)
    filters = conv.channels_in * conv.channels_out
    if (conv.kernel_height, conv.kernel_width) == (3, 3):
        if kind != WEIGHT_GRADIENT:  # "WINOGRAD: not implemented" for that one
            yield _Algorithm(16 * filters * _WORD, _WINOGRAD)
        tiles = _tiles(conv.height_out, _TILE) * _tiles(conv.width_out, _TILE)
        nbytes = _TILED_POINTS * (tiles * maps + filters) * _WORD
        yield _Algorithm(nbytes, _WINOGRAD_NON_FUSED, 2 * nbytes)
    if min(conv.kernel_height, conv.kernel_width) > 1 and max(conv.kernel_height, conv.kernel_width) < _FFT_TILE:
        tiles = _tiles(conv.height_out, _FFT_TILE - conv.kernel_height + 1) * _tiles(
            conv.width_out, _FFT_TILE - conv.kernel_width + 1
        )
        nbytes = _FFT_POINTS * (tiles * maps + filters) * _COMPLEX_BYTES
        direct = 2 * conv.kernel_height * conv.kernel_width * conv.height_out * conv.width_out
        yield _Algorithm(nbytes, _COMPLEX_FLOPS * _FFT_POINTS * tiles / direct / _FFT_REACHES, 2 * nbytes)


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)


def _in_seconds(algorithms: list[_Algorithm], fastest_seconds: float, hardware: Hardware) -> list[Choice]:
    """Times of one pass, such that the fastest algorithm takes `fastest_seconds`."""
    extra = [way.moved_bytes / hardware.memory_bandwidth for way in algorithms]
    product = max((fastest_seconds - more) / way.products for way, more in zip(algorithms, extra, strict=True))
    return [Choice(way.nbytes, product * way.products + more) for way, more in zip(algorithms, extra, strict=True)]
