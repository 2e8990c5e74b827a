"""What a front may do with the bytes of a request's blocks: read those it holds, fill those that wait to be filled, for
a hand-over or from the cache tier."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Blocks

from baton.core.errors import BatonError, TransferRejected
from baton.engine.blocks import BlockPool
from baton.engine.messages import (
    Attach,
    BlockCommand,
    BlocksRead,
    Detach,
    Event,
    Import,
    Pull,
    Pulled,
    Read,
    ReadCached,
    Refused,
    Write,
    Written,
)
from baton.engine.runner import Runner
from baton.engine.sequence import Sequence, Stage
from baton.engine.sharedpool import PeerPools


class BlockAccess:
    """Answers one command at a time, between two steps. Never raises for a request's sake."""

    def __init__(self, runner: Runner, pool: BlockPool, peers: PeerPools, live: Mapping[int, Sequence]) -> None:
        """``live``: the sequences that have not ended, by key; another keeps it up to date."""
        self._runner = runner
        self._pool = pool
        self._peers = peers
        self._live = live
        self._block_bytes = runner.card.format.block_bytes

    def answer(self, command: BlockCommand) -> tuple[Event, ...]:
        match command:
            case Attach(source):
                self._peers.attach(source)
            case Detach(source):
                self._peers.detach(source)
            case ReadCached(op, names):
                return (BlocksRead(op, self._runner.read_blocks(self._pool.leading(names))),)
            case Write() | Read() | Pull() | Import():
                return (self._answered(command, self._live.get(command.key)),)
        return ()

    def _answered(
        self, command: Write | Read | Pull | Import, sequence: Sequence | None
    ) -> Written | BlocksRead | Pulled | Refused:
        try:
            match command:
                case Write():
                    return self._write(command, sequence)
                case Read():
                    return self._read(command, sequence)
                case Pull():
                    return self._pull(command, sequence)
                case Import():
                    return self._import(command, sequence)
        except BatonError as error:
            return Refused(command.op, error)

    def _write(self, command: Write, sequence: Sequence | None) -> Written:
        count, rest = divmod(len(command.payload), self._block_bytes)
        if rest:
            raise TransferRejected(f"payload: {len(command.payload)} bytes are not whole blocks of {self._block_bytes}")
        self._runner.write_blocks(_writable(sequence, command.first_block, count), command.payload)
        return Written(command.op)

    def _read(self, command: Read, sequence: Sequence | None) -> BlocksRead:
        held = len(sequence.blocks) if sequence is not None else 0
        first, last = command.first_block, command.first_block + command.block_count
        if sequence is None or not 0 <= first < last <= held:
            raise TransferRejected(f"blocks {first}..{last - 1} cannot be read: the request holds {held}")
        return BlocksRead(command.op, self._runner.read_blocks(sequence.blocks[first:last]))

    def _pull(self, command: Pull, sequence: Sequence | None) -> Pulled:
        first, source_blocks = command.first_block, command.source_blocks
        blocks = _writable(sequence, first, len(source_blocks))
        memory = self._runner.memory
        return Pulled(
            command.op, self._peers.pull(memory, blocks, command.source, source_blocks, first, command.filled)
        )

    def _import(self, command: Import, sequence: Sequence | None) -> Written:
        """The first blocks are valid from now on, and in the prefix cache."""
        for block, name, cache_class in _held(sequence).import_prefix(command.block_count):
            self._pool.publish(block, name, cache_class)
        return Written(command.op)


def _held(sequence: Sequence | None) -> Sequence:
    if sequence is None or sequence.stage is not Stage.HELD:
        raise TransferRejected("the request holds no blocks that wait to be written")
    return sequence


def _writable(sequence: Sequence | None, first: int, count: int) -> Blocks[int]:
    """The blocks that are filled: only the request's own, and only before it is computed."""
    held, last = _held(sequence), first + count
    if not count or first < held.hits or last > held.context_blocks():
        raise TransferRejected(
            f"blocks {first}..{last - 1}: only {held.hits}..{held.context_blocks() - 1} may be written"
        )
    return held.blocks[first:last]
