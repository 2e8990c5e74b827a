"""Blocks copied on the device beside the steps: the seam between an engine's loop and a GPU's copy streams.

Everything here begins at once and is done later; nothing waits. The engine asks between two steps, and while it waits
for one, what is done. Satisfied by ``baton.engine.cuda.copies`` and by the torch-free ``baton.engine.fake_device``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.types import DevicePool

SLOT_BYTES = 64 << 20  # of a communicator's staging slots, at both ends: no message is larger


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive blocks of a sequence: the first one's ordinal, the filled token slots of the last one, and a byte for
    each block, 1 where both lanes of the digest are wanted."""

    first_ordinal: int
    filled: int
    strong: bytes

    @property
    def count(self) -> int:
        return len(self.strong)


class Copy(Protocol):
    """A copy, or a digest alone, that is under way."""

    def is_done(self) -> bool: ...

    def digests(self) -> bytes:
        """16 bytes a block (``baton.engine.digest``). Called once, when it is done."""
        ...


class PoolMapping(Protocol):
    """Another process's pool."""

    blocks: int

    def close(self) -> None:
        """Nothing copies from it any more."""
        ...


class Mark(Protocol):
    """A point in a communicator's stream."""

    def is_done(self) -> bool:
        """Whether all that was begun before has ended."""
        ...


class Communicator(Protocol):
    """One end of a pair, with staging slots of its own that bytes are sent from and received into.

    After ``join``, ``send`` and ``receive`` nothing else may be begun until ``is_settled``.
    """

    slots: int
    slot_bytes: int  # SLOT_BYTES

    def is_settled(self) -> bool:
        """Raises TransportUnavailable when the pair is broken."""
        ...

    def pack(self, slot: int, blocks: Sequence[int], span: Span) -> Copy:
        """Gather own blocks into a slot, digested."""
        ...

    def unpack(self, slot: int, blocks: Sequence[int], span: Span) -> Copy:
        """Scatter a slot into own blocks, digested; the unfilled slots of the last block are zeroed."""
        ...

    def send(self, slot: int, size: int) -> None: ...

    def receive(self, slot: int, size: int) -> None: ...

    def mark(self) -> Mark: ...

    def abort(self) -> None:
        """End everything that is under way, whether the other end lives or not. Never waits, never raises."""
        ...


class Communicators(Protocol):
    def invite(self) -> bytes: ...

    def join(self, invitation: bytes, rank: int) -> Communicator:
        """Begin to join. TransportUnavailable when that cannot even begin."""
        ...


class DeviceCopies(Protocol):
    """One runner's. Blocks are numbers in its pool; they are what a caller may touch, which is checked elsewhere."""

    @property
    def pool(self) -> DevicePool | None:
        """None where other processes cannot map it."""
        ...

    @property
    def communicators(self) -> Communicators | None: ...

    def open(self, pool: DevicePool) -> PoolMapping:
        """TransportUnavailable when it cannot be mapped here."""
        ...

    def pull(self, blocks: Sequence[int], source: PoolMapping, source_blocks: Sequence[int], span: Span) -> Copy:
        """Copy another pool's blocks into ``blocks``; what is digested is what was read and stored, in one pass."""
        ...

    def digest(self, blocks: Sequence[int], span: Span) -> Copy: ...

    def fence(self) -> None:
        """Steps launched from now on begin when the copies begun until now have ended."""
        ...

    def drain(self) -> None:
        """Wait for what has begun."""
        ...

    def close(self) -> None:
        """Let go of the pool."""
        ...
