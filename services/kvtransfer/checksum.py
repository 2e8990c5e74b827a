"""One 128-bit digest a KV block: XXH3, seeded with the block's place in the sequence.

XXH3 and not a cryptographic hash: peers are authenticated, the digest guards against broken hardware and misplaced
bytes, and it must cost nothing beside the copy (62 GB/s against 0.9 GB/s for BLAKE2b on one core of an EPYC Zen 4).
The seed makes a block that lands at another block's place as wrong as one with a flipped bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from baton.core.errors import CorruptTransfer


def block_checksums(payload: bytes, first_block: int, block_count: int) -> tuple[bytes, ...]:
    """16 bytes for each of the ``block_count`` equal parts of ``payload``."""
    size = len(payload) // block_count
    view = memoryview(payload)
    return tuple(
        xxhash.xxh3_128_digest(view[index * size : (index + 1) * size], seed=first_block + index)
        for index in range(block_count)
    )


def verify(payload: bytes, first_block: int, checksums: Sequence[bytes], *, when: str) -> None:
    """CorruptTransfer naming the first block whose bytes are not those that ``checksums`` were made from."""
    found = block_checksums(payload, first_block, len(checksums))
    for index, (got, expected) in enumerate(zip(found, checksums, strict=True)):
        if got != expected:
            raise CorruptTransfer(f"block {first_block + index} does not match its checksum {when}")
