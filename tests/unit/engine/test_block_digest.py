"""The digest that a GPU computes while it copies, by its definition in numpy."""

from __future__ import annotations

import random

import pytest

from baton.core.types import KvFormat
from baton.engine.digest import DIGEST_BYTES, LIGHT_HALF, are_strong, block_digest, block_keys, fits_words

LAYOUT = KvFormat("float32", block_size=4, layers=2, kv_heads=2, head_dim=4)
BLOCK = random.Random(1).randbytes(LAYOUT.block_bytes)


def digest(block: bytes, ordinal: int = 3, filled: int = 4, *, is_strong: bool = True) -> bytes:
    return block_digest(block, ordinal, LAYOUT, filled, is_strong=is_strong)


def flipped(bit: int) -> bytes:
    changed = bytearray(BLOCK)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("is_strong", [False, True])
def test_every_flipped_bit_changes_the_digest(is_strong: bool) -> None:
    seen = {digest(flipped(bit), is_strong=is_strong) for bit in range(8 * LAYOUT.block_bytes)}
    assert len(seen) == 8 * LAYOUT.block_bytes
    assert digest(BLOCK, is_strong=is_strong) not in seen


def test_a_light_digest_is_the_first_half_of_the_strong_one() -> None:
    light, strong = digest(BLOCK, is_strong=False), digest(BLOCK)
    assert light == strong[:8] + LIGHT_HALF
    assert len(strong) == DIGEST_BYTES
    assert are_strong([light, strong]) == b"\0\1"


def test_words_that_change_places_and_blocks_at_other_places_are_noticed() -> None:
    words = [BLOCK[at : at + 8] for at in range(0, len(BLOCK), 8)]
    swapped = b"".join([words[1], words[0], *words[2:]])
    assert digest(swapped) != digest(BLOCK)
    assert len({digest(BLOCK, ordinal) for ordinal in range(100)}) == 100
    assert len({int(key) for ordinal in range(1000) for key in block_keys(ordinal)}) == 2000


def test_equal_changes_to_two_words_do_not_cancel() -> None:
    words = len(BLOCK) // 8
    for bit in range(64):
        changed = bytearray(BLOCK)
        for word in (0, words // 2):
            changed[8 * word + bit // 8] ^= 1 << bit % 8
        assert digest(bytes(changed))[:8] != digest(BLOCK)[:8]
        assert digest(bytes(changed))[8:] != digest(BLOCK)[8:]


def test_slots_that_are_not_filled_do_not_count() -> None:
    slot = LAYOUT.head_dim * 4
    run = slot * LAYOUT.block_size
    for filled in (1, 2, 3):
        other = bytearray(BLOCK)
        for start in range(0, len(BLOCK), run):
            other[start + slot * filled : start + run] = bytes(slot * (LAYOUT.block_size - filled))
        assert digest(bytes(other), filled=filled) == digest(BLOCK, filled=filled)
        assert digest(bytes(other)) != digest(BLOCK)
        other[slot * filled - 1] ^= 1
        assert digest(bytes(other), filled=filled) != digest(BLOCK, filled=filled)


def test_the_definition_does_not_drift() -> None:
    """Two versions of Baton compare these: a change of the definition needs another protocol version."""
    assert digest(bytes(range(256)) * (LAYOUT.block_bytes // 256)).hex() == "54f4ae87bd512847703134c2c0201ab9"


def test_slots_of_whole_words_fit() -> None:
    assert fits_words(LAYOUT, 16)
    assert not fits_words(KvFormat("bfloat16", block_size=4, layers=1, kv_heads=1, head_dim=4), 16)
