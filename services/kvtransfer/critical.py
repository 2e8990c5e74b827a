"""Which blocks of a hand-over get the strong digest, where a light one covers the rest: pure."""

from __future__ import annotations

from baton.core.types import FilledBlocks


def critical_blocks(blocks: FilledBlocks, block_size: int) -> bytes:
    """A byte for each block, 1 for the critical ones.

    Critical is where every answer begins and where this one goes on: the prompt's first chunk, and the last block,
    which is the one that may be partly filled. Retrieved spans will be, once requests name them.
    """
    if blocks.first_block == 0:
        return b"\1" * blocks.block_count
    is_last = blocks.tokens < (blocks.first_block + blocks.block_count) * block_size
    return bytes(blocks.block_count - 1) + bytes([is_last])
