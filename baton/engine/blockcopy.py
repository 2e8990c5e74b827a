"""Blocks copied from one pool into another, or only read, with a digest of each. ``native/block_copy.py`` does it in
one pass over the bytes; what is here does it where there is no compiler, and finds the same digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import xxhash

DIGEST_BYTES = 16


def xxh3_digest(block: bytes | memoryview, ordinal: int) -> bytes:
    """16 bytes: XXH3, seeded with the block's place in the sequence, where another block's bytes are wrong."""
    return xxhash.xxh3_128_digest(block, seed=ordinal)


class BlockCopy(Protocol):
    """A pool is a view of whole blocks of ``size`` bytes. Digests are those of ``xxh3_digest``, of places in the
    sequence from ``first_ordinal`` on. Other threads go on meanwhile."""

    def copy(
        self,
        target: memoryview,
        blocks: Sequence[int],
        source: memoryview,
        source_blocks: Sequence[int],
        size: int,
        first_ordinal: int,
    ) -> tuple[bytes, ...]:
        """``source_blocks`` into ``blocks`` of ``target``, which are as many, and the digests of what was stored."""
        ...

    def digests(self, source: memoryview, blocks: Sequence[int], size: int, first_ordinal: int) -> tuple[bytes, ...]:
        """Of ``blocks``."""
        ...


class PlainBlockCopy:
    """Satisfies ``BlockCopy``, block by block: a block of a usual size is digested while the caches still have it."""

    def copy(
        self,
        target: memoryview,
        blocks: Sequence[int],
        source: memoryview,
        source_blocks: Sequence[int],
        size: int,
        first_ordinal: int,
    ) -> tuple[bytes, ...]:
        into, out_of = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
        digests: list[bytes] = []
        for ordinal, (block, origin) in enumerate(zip(blocks, source_blocks, strict=True), first_ordinal):
            stored = into[block * size : (block + 1) * size]
            np.copyto(stored, out_of[origin * size : (origin + 1) * size])
            digests.append(xxh3_digest(stored.data, ordinal))
        return tuple(digests)

    def digests(self, source: memoryview, blocks: Sequence[int], size: int, first_ordinal: int) -> tuple[bytes, ...]:
        return tuple(
            xxh3_digest(source[block * size : (block + 1) * size], ordinal)
            for ordinal, block in enumerate(blocks, first_ordinal)
        )


PLAIN = PlainBlockCopy()
