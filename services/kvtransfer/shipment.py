"""One hand-over under way, as its sender sees it: which blocks have been offered, and with which checksums to come."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton.core.api import PrefillRun
from baton.core.types import FilledBlocks, KvConfirmation, KvHandshake, Ticket
from services.kvtransfer.conversion import Conversion
from services.kvtransfer.transport import Digests, TransportName


@dataclass(frozen=True, slots=True)
class Peering:
    """What was found out once of a receiver. ``late_ways``: by which transports it takes checksums later."""

    receiver: KvHandshake
    conversion: Conversion
    late_ways: frozenset[TransportName]


@dataclass(slots=True)
class Shipment:
    """``skip_blocks``: the receiver's, which it has already."""

    ticket: Ticket
    peering: Peering
    run: PrefillRun
    skip_blocks: int
    size: int = 0  # bytes that were acknowledged
    tokens: int = 0  # the prompt position up to which blocks were offered
    _late: dict[int, bytes] = field(default_factory=dict[int, bytes])  # checksums, by the block's ordinal
    _undigested: set[int] = field(default_factory=set[int])
    _digested: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, blocks: FilledBlocks) -> None:
        """An offer of these blocks begins."""
        self.tokens = max(self.tokens, blocks.tokens)
        self._undigested.update(blocks.ordinals)
        self._digested.clear()

    def digested(self, blocks: FilledBlocks, late: Digests = ()) -> None:
        """Their checksums are in the offer, or these."""
        self._late.update(zip(blocks.ordinals, late, strict=False))
        self._undigested.difference_update(blocks.ordinals)
        if not self._undigested:
            self._digested.set()

    async def all_digested(self) -> bool:
        """Waits for the checksums of what was offered. Whether all blocks have some that were not in an offer."""
        if not self.tokens:
            return False
        await self._digested.wait()
        return all(block in self._late for block in self._blocks)

    @property
    def confirmation(self) -> KvConfirmation:
        """Of everything that was offered."""
        blocks, late = self._blocks, self._late
        checksums = tuple(late.get(block, b"") for block in blocks) if late else ()
        return KvConfirmation(self.ticket, blocks.start, len(blocks), checksums)

    @property
    def _blocks(self) -> range:
        """As the receiver counts them."""
        return range(self.skip_blocks, self.peering.conversion.target_blocks(self.tokens))
