"""How blocks travel: whole, but for the last one of a prompt, of which only the filled token slots are sent.

A block is [layers, 2 (K, V), kv_heads, block_size, head_dim]; with ``filled`` slots it travels as
[layers, 2, kv_heads, filled, head_dim]. So a hand-over costs exactly the KV of the tokens that are not there yet.
"""

from __future__ import annotations

from baton.core.errors import TransferRejected
from baton.core.types import KvFormat
from baton.engine.sharedpool import packed_block


def pack(blocks: bytes, layout: KvFormat, filled: int) -> bytes:
    """Whole blocks as they travel; ``filled`` counts the token slots in use of the last one."""
    if filled == layout.block_size:
        return blocks
    view = memoryview(blocks)
    return b"".join((view[: -layout.block_bytes], packed_block(view[-layout.block_bytes :], layout, filled)))


def unpack(payload: bytes | memoryview, layout: KvFormat, block_count: int) -> bytes | memoryview:
    """The whole blocks again; slots that did not travel are zero. TransferRejected when the length fits no fill."""
    filled = filled_slots(payload, layout, block_count)
    if filled == layout.block_size:
        return payload
    view = memoryview(payload)
    whole, last = view[: (block_count - 1) * layout.block_bytes], view[(block_count - 1) * layout.block_bytes :]
    kept = layout.slot_bytes * filled
    padding = bytes(layout.slot_bytes * (layout.block_size - filled))
    return b"".join(
        [whole, *(part for start in range(0, len(last), kept) for part in (last[start : start + kept], padding))]
    )


def filled_slots(payload: bytes | memoryview, layout: KvFormat, block_count: int) -> int:
    """How many token slots of the last of ``block_count`` blocks ``payload`` holds; TransferRejected when none fits."""
    per_token = layout.token_bytes
    rest = len(payload) - (block_count - 1) * layout.block_bytes
    if rest % per_token or not 0 < rest <= layout.block_bytes:
        least = (block_count - 1) * layout.block_bytes + per_token
        most = block_count * layout.block_bytes
        raise TransferRejected(
            f"payload: {block_count} blocks are {least} to {most} bytes in steps of {per_token}, got {len(payload)}"
        )
    return rest // per_token
