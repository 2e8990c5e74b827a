from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import TransferRejected
from baton.core.types import KvFormat
from services.kvtransfer.layout import filled_slots, pack, unpack

LAYOUT = KvFormat("bfloat16", 4, 3, 2, 8)


def blocks_of(count: int, filled: int) -> bytes:
    """Blocks whose every byte says which slot it belongs to; unused slots of the last one are zero."""
    rows, slot = LAYOUT.layers * 2 * LAYOUT.kv_heads, LAYOUT.head_dim * 2
    whole = b"".join(bytes([1 + index]) * slot for _ in range(rows) for index in range(4))
    last = b"".join(bytes([1 + index if index < filled else 0]) * slot for _ in range(rows) for index in range(4))
    return whole * (count - 1) + last


@given(st.integers(1, 4), st.integers(1, 4))
def test_only_filled_slots_travel_and_all_of_them(count: int, filled: int) -> None:
    blocks = blocks_of(count, filled)
    payload = pack(blocks, LAYOUT, filled)
    assert len(payload) == ((count - 1) * 4 + filled) * LAYOUT.block_bytes // 4
    assert 0 not in payload
    assert filled_slots(payload, LAYOUT, count) == filled
    assert unpack(payload, LAYOUT, count) == blocks


@pytest.mark.parametrize("length", [0, 1, LAYOUT.block_bytes, 2 * LAYOUT.block_bytes + 1, 3 * LAYOUT.block_bytes])
def test_lengths_that_fit_no_fill_are_refused(length: int) -> None:
    with pytest.raises(TransferRejected, match=f"got {length}"):
        unpack(bytes(length), LAYOUT, 2)
