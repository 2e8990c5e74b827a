"""Which blocks of a sequence a front may write, read or call valid, for a hand-over or from the cache tier. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Blocks

from baton.core.errors import TransferRejected
from baton.engine.blocks import BlockPool
from baton.engine.messages import Import, Read, Write
from baton.engine.sequence import Sequence, Stage


def writable_blocks(sequence: Sequence | None, command: Write, block_bytes: int) -> Blocks[int]:
    """The blocks a write goes to: only the reservation's own, only before it decodes, only whole ones.

    Raises TransferRejected.
    """
    if sequence is None or sequence.stage is not Stage.HELD:
        raise TransferRejected("the request holds no blocks that wait to be written")
    count, rest = divmod(len(command.payload), block_bytes)
    if rest or not count:
        raise TransferRejected(f"payload: {len(command.payload)} bytes are not whole blocks of {block_bytes}")
    first, last = command.first_block, command.first_block + count
    if first < sequence.hits or last > sequence.context_blocks():
        raise TransferRejected(
            f"blocks {first}..{last - 1}: only {sequence.hits}..{sequence.context_blocks() - 1} may be written"
        )
    return sequence.blocks[first:last]


def readable_blocks(sequence: Sequence | None, command: Read) -> Blocks[int]:
    """The blocks that are read, which the request must hold. Raises TransferRejected."""
    held = len(sequence.blocks) if sequence is not None else 0
    first, last = command.first_block, command.first_block + command.block_count
    if sequence is None or not 0 <= first < last <= held:
        raise TransferRejected(f"blocks {first}..{last - 1} cannot be read: the request holds {held}")
    return sequence.blocks[first:last]


def import_blocks(sequence: Sequence | None, command: Import, pool: BlockPool) -> tuple[Sequence, int]:
    """The first blocks of a held request are valid from now on, and in the prefix cache. Returns the request and how
    many more tokens of its prompt count as cached. Raises TransferRejected."""
    if sequence is None or sequence.stage is not Stage.HELD:
        raise TransferRejected("the request holds no blocks that wait to be written")
    before = min(sequence.computed, sequence.prompt_length)
    for block, name in sequence.import_prefix(command.block_count):
        pool.publish(block, name)
    return sequence, min(sequence.computed, sequence.prompt_length) - before
