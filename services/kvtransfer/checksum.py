"""One 128-bit digest a KV block: XXH3, seeded with the block's place in the sequence.

XXH3 and not a cryptographic hash: peers are authenticated, the digest guards against broken hardware and misplaced
bytes, and it must cost nothing beside the copy (62 GB/s against 0.9 GB/s for BLAKE2b on one core of an EPYC Zen 4).
The seed makes a block that lands at another block's place as wrong as one with a flipped bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from baton.core.errors import CorruptTransfer
from baton.engine.blockcopy import xxh3_digest


def block_checksums(
    payload: bytes | memoryview, first_block: int, block_count: int, block_bytes: int
) -> tuple[bytes, ...]:
    """16 bytes for each of ``block_count`` blocks of ``payload``; the last one may be shorter than ``block_bytes``."""
    view = memoryview(payload)
    return tuple(
        xxh3_digest(view[index * block_bytes : (index + 1) * block_bytes], first_block + index)
        for index in range(block_count)
    )


def verify(
    payload: bytes | memoryview, first_block: int, checksums: Sequence[bytes], block_bytes: int, *, when: str
) -> None:
    """CorruptTransfer naming the first block whose bytes are not those that ``checksums`` were made from."""
    compare(block_checksums(payload, first_block, len(checksums), block_bytes), first_block, checksums, when=when)


def compare(found: Sequence[bytes], first_block: int, checksums: Sequence[bytes], *, when: str) -> None:
    """CorruptTransfer naming the first block whose digest in ``found`` is not the one in ``checksums``."""
    for index, (got, expected) in enumerate(zip(found, checksums, strict=True)):
        if got != expected:
            raise CorruptTransfer(f"block {first_block + index} does not match its checksum {when}")


def named_checksum(name: bytes, payload: bytes | memoryview) -> bytes:
    """The digest of a block of the cache tier: its name is its place, so a block under another's name is wrong."""
    return xxhash.xxh3_128_digest(payload, seed=xxhash.xxh3_64_intdigest(name))


def head_checksum(head: bytes) -> bytes:
    """8 bytes that guard what a file says of its payload."""
    return xxhash.xxh3_64_digest(head)


def verify_named(name: bytes, payload: bytes | memoryview, checksum: bytes, *, when: str) -> None:
    """CorruptTransfer unless ``payload`` is what ``checksum`` was made from, under this name."""
    if named_checksum(name, payload) != checksum:
        raise CorruptTransfer(f"block {name.hex()} does not match its checksum {when}")
