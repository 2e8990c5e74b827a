"""What a front may do with the bytes of a request's blocks: read those it holds, fill those that wait to be filled, for
a hand-over or from the cache tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from baton.core.clock import Clock
from baton.core.errors import BatonError, TransferRejected
from baton.engine.blocks import BlockPool
from baton.engine.device_access import DeviceAccess, Find, held, writable
from baton.engine.messages import (
    BlocksRead,
    DeviceCommand,
    Event,
    Import,
    Read,
    ReadCached,
    Refused,
    Write,
    Written,
)
from baton.engine.runner import Runner


class BlockAccess:
    """Takes one command at a time. What the host copies itself is done between two steps, and answered at once; what a
    device does is answered by ``look``. Never raises for a request's sake."""

    def __init__(self, runner: Runner, pool: BlockPool, find: Find, clock: Clock) -> None:
        """``find`` gives the request of a key, or None when it has ended."""
        self._runner = runner
        self._pool = pool
        self._find = find
        self._device = DeviceAccess(runner.copies, runner.card.format, find, clock)
        self._block_bytes = runner.card.format.block_bytes

    @property
    def look_within(self) -> float | None:
        """Seconds after which ``look`` may tell something; None when nothing is under way."""
        return self._device.look_within

    def look(self) -> Iterator[Event]:
        """What has ended on the device."""
        return self._device.look()

    def fence(self, key: int) -> None:
        """Others than copies are to touch the request's blocks."""
        self._device.fence(key)

    def filled(self, blocks: Sequence[int]) -> None:
        """What a request goes on from was written to these blocks, perhaps by the front, which says so only now."""
        if self._runner.memory is not None:
            self._runner.memory.on_fill(blocks)

    def close(self) -> None:
        """Let go of other engines and their pools."""
        self._device.close()

    def handle(self, command: Write | Read | ReadCached | Import | DeviceCommand) -> Iterator[Event]:
        match command:
            case ReadCached(op, names):
                yield BlocksRead(op, self._runner.read_blocks(self._pool.leading(names)))
            case Write() | Read() | Import():
                yield self._answer(command)
            case _:
                yield from self._device.handle(command)

    def _answer(self, command: Write | Read | Import) -> Written | BlocksRead | Refused:
        try:
            match command:
                case Write():
                    return self._write(command)
                case Read():
                    return self._read(command)
                case Import():
                    return self._import(command)
        except BatonError as error:
            return Refused(command.op, error)

    def _write(self, command: Write) -> Written:
        count, rest = divmod(len(command.payload), self._block_bytes)
        if rest:
            raise TransferRejected(f"payload: {len(command.payload)} bytes are not whole blocks of {self._block_bytes}")
        blocks = writable(self._find(command.key), command.first_block, count)
        self._device.fence(command.key)
        arrived: Any = command.payload  # as a bytearray, whatever it was sent as
        self._runner.write_blocks(blocks, arrived)
        return Written(command.op)

    def _read(self, command: Read) -> BlocksRead:
        sequence = self._find(command.key)
        held = len(sequence.blocks) if sequence is not None else 0
        first, last = command.first_block, command.first_block + command.block_count
        if sequence is None or not 0 <= first < last <= held:
            raise TransferRejected(f"blocks {first}..{last - 1} cannot be read: the request holds {held}")
        return BlocksRead(command.op, self._runner.read_blocks(sequence.blocks[first:last]))

    def _import(self, command: Import) -> Written:
        """The first blocks are valid from now on, and in the prefix cache."""
        sequence = held(self._find(command.key))
        self.filled(sequence.blocks[sequence.hits : command.block_count])
        for block, name, cache_class in sequence.import_prefix(command.block_count):
            self._pool.publish(block, name, cache_class)
        return Written(command.op)
