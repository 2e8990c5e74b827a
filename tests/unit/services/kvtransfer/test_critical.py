from __future__ import annotations

from baton.core.types import FilledBlocks
from services.kvtransfer.critical import critical_blocks

SIZE = 16


def test_the_first_chunk_and_a_partly_filled_last_block_are_critical() -> None:
    assert critical_blocks(FilledBlocks(0, 3, 48), SIZE) == b"\1\1\1"
    assert critical_blocks(FilledBlocks(3, 3, 96), SIZE) == b"\0\0\0"
    assert critical_blocks(FilledBlocks(3, 3, 90), SIZE) == b"\0\0\1"


def test_the_filled_slots_of_the_last_block_are_counted() -> None:
    assert FilledBlocks(3, 3, 96).filled_slots(SIZE) == 16
    assert FilledBlocks(3, 3, 81).filled_slots(SIZE) == 1
