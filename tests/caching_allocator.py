"""A model of PyTorch's caching allocator on a GPU: one stream, expandable segments, as of 2.11 to 2.13.

After c10/cuda/CUDACachingAllocator.cpp: blocks up to 1 MiB come from a pool that grows by 2 MiB, others from one that
grows by 20 MiB; a free block is taken that is the smallest to hold what is asked for; what is left of it stays free;
the process's limit is compared before memory is mapped, and whole pieces are mapped then, which may go beyond it;
where there is none, all whole free pieces are given back, and it is tried once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

MiB = 1 << 20
_ROUND_BYTES = 512  # kMinBlockSize
_SMALL_BYTES = 1 * MiB  # kSmallSize
_SMALL_PIECE_BYTES, _LARGE_PIECE_BYTES = 2 * MiB, 20 * MiB  # kSmallBuffer, kLargeBuffer
_LEAST_LARGE_BYTES = 10 * MiB  # kMinLargeAlloc
_ROUND_LARGE_BYTES = 2 * MiB  # kRoundLarge


class OutOfMemory(Exception):
    """The limit leaves no memory for a block."""


@dataclass(eq=False)
class Block:
    """Neighbours in one range of addresses."""

    start: int
    nbytes: int
    is_free: bool = True
    is_mapped: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass
class _Pool:
    piece_bytes: int
    first: Block = field(default_factory=lambda: Block(0, 1 << 50))

    def blocks(self) -> Iterator[Block]:
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.after


class CachingAllocator:
    """Gives out blocks under a limit.

    Attributes:
        limit_bytes: what is never passed by more than a piece.
        allocated_bytes, reserved_bytes: of blocks in use, and of all memory that is mapped.
        most_allocated_bytes, most_reserved_bytes: the highest that these were.
        retries, ooms: how often free pieces were given back to find room, and how often there was none even so.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.most_allocated_bytes = 0
        self.reserved_bytes = self.most_reserved_bytes = 0
        self.retries = self.ooms = 0
        self._small, self._large = _Pool(_SMALL_PIECE_BYTES), _Pool(_LARGE_PIECE_BYTES)

    def allocate(self, nbytes: int) -> Block:
        """A block of so many bytes, rounded up."""
        nbytes = max(_ROUND_BYTES, _rounded(nbytes, _ROUND_BYTES))
        pool = self._small if nbytes <= _SMALL_BYTES else self._large
        block = _best(pool, nbytes) or self._grow(pool, nbytes)
        if block is None:
            self.retries += 1
            self.give_back()
            block = self._grow(pool, nbytes)
        if block is None:
            self.ooms += 1
            raise OutOfMemory
        _split(block, nbytes)
        block.is_free = False
        self.allocated_bytes += nbytes
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """It stays mapped, for others."""
        self.allocated_bytes -= block.nbytes
        block.is_free = True
        _join(block)

    def give_back(self) -> None:
        """Unmap all whole pieces that are free: `torch.cuda.empty_cache`."""
        for pool in (self._small, self._large):
            for block in [item for item in pool.blocks() if item.is_free and item.is_mapped]:
                start = _rounded(block.start, pool.piece_bytes)
                end = (block.start + block.nbytes) // pool.piece_bytes * pool.piece_bytes
                if start >= end:
                    continue
                whole = block if start == block.start else _split(block, start - block.start)
                assert whole is not None
                _split(whole, end - start)
                whole.is_mapped = False
                self.reserved_bytes -= end - start
                _join(whole)

    def _grow(self, pool: _Pool, nbytes: int) -> Block | None:
        if self.reserved_bytes + _size_of_segment(nbytes) > self.limit_bytes:
            return None
        block = next(item for item in pool.blocks() if item.is_free and not item.is_mapped and _reach(item) >= nbytes)
        if block.before is not None and block.before.is_free:  # mapped: it takes what is free before it along
            block = block.before
        else:
            block = self._map(pool, block, nbytes)
        while block.nbytes < nbytes:
            assert block.after is not None
            block = self._map(pool, block.after, nbytes - block.nbytes)
        return block

    def _map(self, pool: _Pool, block: Block, nbytes: int) -> Block:
        size = min(_rounded(nbytes, pool.piece_bytes), block.nbytes)
        _split(block, size)
        block.is_mapped = True
        self.reserved_bytes += size
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        return _join(block)


def _best(pool: _Pool, nbytes: int) -> Block | None:
    """The smallest free block that holds so much; of larger ones next the one that has least room to grow in."""
    fitting = [item for item in pool.blocks() if item.is_free and item.is_mapped and item.nbytes >= nbytes]
    fitting.sort(key=lambda item: (item.nbytes, item.start))
    for block, following in pairwise(fitting):
        if _room_of(following) >= _room_of(block):
            return block
    return fitting[-1] if fitting else None


def _room_of(block: Block) -> int:
    """Its bytes, and those behind it that can be mapped."""
    after = block.after
    return block.nbytes + (after.nbytes if after is not None and not after.is_mapped else 0)


def _reach(block: Block) -> int:
    """The bytes that are free in a row around an unmapped block: what is free before it counts."""
    nbytes = block.nbytes
    if block.before is not None and block.before.is_free:
        nbytes += block.before.nbytes
    item = block.after
    while item is not None and item.is_free:
        nbytes += item.nbytes
        item = item.after
    return nbytes


def _split(block: Block, nbytes: int) -> Block | None:
    """Cut a block after so many bytes; the rest, if there is any."""
    if block.nbytes == nbytes:
        return None
    rest = Block(block.start + nbytes, block.nbytes - nbytes, block.is_free, block.is_mapped, block, block.after)
    if block.after is not None:
        block.after.before = rest
    block.after, block.nbytes = rest, nbytes
    return rest


def _join(block: Block) -> Block:
    """Make one of a free block and its neighbours that are like it; the one that is left."""
    if block.before is not None and _are_alike(block.before, block):
        block = _absorb(block.before, block)
    if block.after is not None and _are_alike(block, block.after):
        block = _absorb(block, block.after)
    return block


def _are_alike(left: Block, right: Block) -> bool:
    return left.is_free and right.is_free and left.is_mapped == right.is_mapped


def _absorb(left: Block, right: Block) -> Block:
    left.nbytes += right.nbytes
    left.after = right.after
    if right.after is not None:
        right.after.before = left
    return left


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _size_of_segment(nbytes: int) -> int:
    """What is compared with the limit for a block."""
    if nbytes <= _SMALL_BYTES:
        return _SMALL_PIECE_BYTES
    return _LARGE_PIECE_BYTES if nbytes < _LEAST_LARGE_BYTES else _rounded(nbytes, _ROUND_LARGE_BYTES)
