"""What a front may do with the bytes of a request's blocks: read those it holds, fill those that wait to be filled."""

from __future__ import annotations

from collections.abc import Sequence as Blocks

from baton.core.errors import BatonError, TransferRejected
from baton.engine.messages import BlocksRead, Pull, Pulled, Read, Refused, Write, Written
from baton.engine.runner import Runner
from baton.engine.sequence import Sequence, Stage
from baton.engine.sharedpool import PeerPools


class BlockAccess:
    """Answers one command at a time, between two steps. Never raises for a request's sake."""

    def __init__(self, runner: Runner, peers: PeerPools) -> None:
        self._runner = runner
        self._peers = peers
        self._block_bytes = runner.card.format.block_bytes

    def answer(
        self, command: Write | Read | Pull, sequence: Sequence | None
    ) -> Written | BlocksRead | Pulled | Refused:
        """``sequence``: whose blocks are meant; None when it has ended."""
        try:
            match command:
                case Write():
                    return self._write(command, sequence)
                case Read():
                    return self._read(command, sequence)
                case Pull():
                    return self._pull(command, sequence)
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


def _writable(sequence: Sequence | None, first: int, count: int) -> Blocks[int]:
    """The blocks that are filled: only the reservation's own, and only before it decodes."""
    if sequence is None or sequence.stage is not Stage.HELD:
        raise TransferRejected("the request holds no blocks that wait to be written")
    last = first + count
    if not count or first < sequence.hits or last > sequence.context_blocks():
        raise TransferRejected(
            f"blocks {first}..{last - 1}: only {sequence.hits}..{sequence.context_blocks() - 1} may be written"
        )
    return sequence.blocks[first:last]
