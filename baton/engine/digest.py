"""The digest of a KV block that a GPU computes while it copies, defined in numpy. No torch here.

A block is a row of 64-bit words. Each word is mixed with a key of its own (block, lane and position decide it) by a
bijection, and the results are added up modulo 2^64: the order does not matter, so any number of threads can share the
work. A change of one word always changes the digest; several changes cancel with a chance of 2^-64 in each lane. Light
digests have one lane, strong ones two with independent keys and multipliers. Error detection, not cryptography: peers
are authenticated, and who may write to memory here needs no collision. ``baton/engine/cuda/src/block_copy.cu`` computes
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.core.types import KvFormat

DIGEST_BYTES = 16  # a light digest's second half is zero
LIGHT_HALF = bytes(DIGEST_BYTES // 2)
WORD = 8

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Lane:
    """``step`` lies between the keys of neighbouring words; ``first`` and ``second`` multiply; all odd."""

    step: int
    first: int
    second: int


LANES = (
    Lane(0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB),
    Lane(0xD1342543DE82EF95, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53),
)


def block_keys(ordinal: int) -> NDArray[np.uint64]:
    """[lanes]: the keys of a block's first word, by the block's place in its sequence."""
    return np.array([_scrambled(len(LANES) * ordinal + lane + 1) for lane in range(len(LANES))], np.uint64)


def block_digest(block: bytes | memoryview, ordinal: int, layout: KvFormat, filled: int, *, is_strong: bool) -> bytes:
    """16 bytes, of the ``filled`` token slots of one block of this layout; words of the other slots are left out.

    A word's position counts from the block's beginning, whether slots before it are filled or not.
    """
    words = np.frombuffer(block, np.uint64)
    keys = block_keys(ordinal)
    positions = np.arange(words.size, dtype=np.uint64)
    if filled != layout.block_size:
        run = words.size // (layout.layers * 2 * layout.kv_heads)
        live = positions % run < run // layout.block_size * filled
        words, positions = words[live], positions[live]
    lanes = LANES if is_strong else LANES[:1]
    sums = [_lane_sum(words, positions, keys[index], lane) for index, lane in enumerate(lanes)]
    return b"".join(sum_.to_bytes(WORD, "little") for sum_ in sums).ljust(DIGEST_BYTES, b"\0")


def are_strong(digests: Sequence[bytes]) -> bytes:
    """One byte for each digest, 1 where both lanes are in it."""
    return bytes(digest[WORD:] != LIGHT_HALF for digest in digests)


def fits_words(layout: KvFormat, word: int = WORD) -> bool:
    """Whether a token slot of one head is made of whole words of ``word`` bytes, which filled slots are counted in."""
    return layout.slot_bytes % word == 0


def _lane_sum(words: NDArray[np.uint64], positions: NDArray[np.uint64], key: np.uint64, lane: Lane) -> int:
    with np.errstate(over="ignore"):
        x = words ^ (key + positions * np.uint64(lane.step))
        x ^= x >> np.uint64(32)
        x *= np.uint64(lane.first)
        x ^= x >> np.uint64(29)
        x *= np.uint64(lane.second)
        x ^= x >> np.uint64(32)
        return int(x.sum(dtype=np.uint64))


def _scrambled(number: int) -> int:
    """Far apart for neighbouring numbers (the finalizer of splitmix64, Steele et al. 2014)."""
    x = number * _GOLDEN & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
