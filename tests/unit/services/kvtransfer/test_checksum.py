"""Block checksums: equal bytes at the equal place, and nothing else, verify."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import CorruptTransfer
from services.kvtransfer.checksum import block_checksums, verify

PAYLOAD = bytes(range(240))


def test_one_digest_of_128_bits_a_block() -> None:
    assert [len(digest) for digest in block_checksums(PAYLOAD, 3, 5, 48)] == [16] * 5


@given(position=st.integers(0, len(PAYLOAD) - 1), flip=st.integers(1, 255))
def test_any_changed_byte_is_found_in_its_block(position: int, flip: int) -> None:
    checksums = block_checksums(PAYLOAD, 3, 5, 48)
    broken = bytearray(PAYLOAD)
    broken[position] ^= flip
    with pytest.raises(CorruptTransfer, match=f"block {3 + position // 48} does not match its checksum as received"):
        verify(bytes(broken), 3, checksums, 48, when="as received")


def test_swapped_blocks_are_found_even_with_their_checksums() -> None:
    one, two = block_checksums(PAYLOAD[:96], 0, 2, 48)
    swapped = PAYLOAD[48:96] + PAYLOAD[:48]
    with pytest.raises(CorruptTransfer):
        verify(swapped, 0, (one, two), 48, when="as received")
    with pytest.raises(CorruptTransfer):
        verify(swapped, 0, (two, one), 48, when="as received")


def test_the_same_bytes_verify() -> None:
    verify(PAYLOAD, 3, block_checksums(PAYLOAD, 3, 5, 48), 48, when="as received")
