"""The sending end of a hand-over: a prefill's blocks go out while the next ones are computed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from baton.core.api import KvReceiverApi, PrefillRun
from baton.core.clock import Clock
from baton.core.errors import BatonError, InvalidRequest, PeerUnavailable, TransferRejected
from baton.core.streams import closing
from baton.core.telemetry import Meter
from baton.core.types import FilledBlocks, KvChunk, KvConfirmation, KvHandshake, Ticket
from services.kvtransfer.checksum import block_checksums
from services.kvtransfer.circuit import Circuit
from services.kvtransfer.config import ChecksumPolicy, KvTransferConfig
from services.kvtransfer.handshake import compare
from services.kvtransfer.layout import pack

MAX_KNOWN_PEERS = 1024

Peer = tuple[str, int]  # address, epoch
T = TypeVar("T")


class KvSender:
    """Ships blocks to the receivers that tickets name. ``receivers`` gives the receiver's API for a ticket."""

    def __init__(
        self,
        identity: KvHandshake,
        receivers: Callable[[Ticket], KvReceiverApi],
        *,
        config: KvTransferConfig,
        meter: Meter,
        clock: Clock,
    ) -> None:
        self._identity = identity
        self._receivers = receivers
        self._config = config
        self._clock = clock
        self._known: OrderedDict[Peer, None] = OrderedDict()
        self._circuit = Circuit(clock, config.peer_rest_seconds)
        self._sent = meter.counter("kv_sent_bytes", "KV bytes acknowledged by receivers")
        self._seconds = meter.histogram("kv_transfer_latency_seconds", "From reading a chunk to its confirmation")
        self._failures = meter.counter("kv_send_failures", "Failed hand-overs", ("cause",))

    async def connect(self, ticket: Ticket) -> None:
        """Shake hands with the ticket's receiver unless that was done before.

        TransferRejected names the field that does not fit, PeerUnavailable a receiver that is gone or was so just now.
        """
        peer = (ticket.receiver_address, ticket.receiver_epoch)
        if self._circuit.is_open(peer):
            raise PeerUnavailable(f"receiver {ticket.receiver_address} was lost a moment ago")
        if peer in self._known:
            self._known.move_to_end(peer)
            return
        answer = await self._answered(ticket, self._receivers(ticket).handshake(self._identity))
        compare(self._identity, answer)
        if answer.epoch != ticket.receiver_epoch:
            raise TransferRejected(
                f"receiver_epoch: the ticket names {ticket.receiver_epoch}, {ticket.receiver_address} is {answer.epoch}"
            )
        self._known[peer] = None
        while len(self._known) > MAX_KNOWN_PEERS:
            self._known.popitem(last=False)

    async def ship(self, ticket: Ticket, run: PrefillRun, skip_blocks: int) -> int:
        """Offer and confirm every block of ``run`` from ordinal ``skip_blocks`` on; returns the bytes shipped.

        Returns after the last confirmation. The caller keeps ``run`` open meanwhile, so a block is still pinned
        whenever this confirms it. On any failure all offers under way are cancelled first.
        """
        slots = asyncio.Semaphore(self._config.offers_in_flight)
        shipped = 0

        async def hand_over(blocks: FilledBlocks) -> None:
            nonlocal shipped
            try:
                sent = await self._hand_over(ticket, run, blocks)
                shipped += sent
            finally:
                slots.release()

        try:
            async with asyncio.TaskGroup() as group, aclosing(self._messages(run, skip_blocks)) as messages:
                async for blocks in messages:
                    await slots.acquire()
                    group.create_task(hand_over(blocks))
        except ExceptionGroup as failures:
            raise _cause(failures) from failures
        return shipped

    async def _hand_over(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> int:
        began = self._clock.now()
        layout = self._identity.format
        first, count = blocks.first_block, blocks.block_count
        filled = blocks.tokens - (first + count - 1) * layout.block_size
        payload = pack(bytes(await run.read_blocks(first, count)), layout, filled)  # no copy if it is bytes already
        checksums: tuple[bytes, ...] = ()
        if self._config.checksum_policy is not ChecksumPolicy.OFF:
            checksums = block_checksums(payload, first, count, layout.block_bytes)
        receiver = self._receivers(ticket)  # only now: a channel on which nothing runs may be closed meanwhile
        await self._answered(ticket, receiver.offer(KvChunk(ticket, first, count, payload, checksums)))
        await self._answered(ticket, receiver.confirm(KvConfirmation(ticket, first, count)))
        self._sent.add(len(payload))
        self._seconds.observe(self._clock.now() - began)
        return len(payload)

    async def _messages(self, run: PrefillRun, skip_blocks: int) -> AsyncGenerator[FilledBlocks, None]:
        """The blocks of each offer: finished ones, without the skipped ones, cut to the message size."""
        layout = self._identity.format
        most = max(1, self._config.max_message_bytes // layout.block_bytes)
        async with closing(run.filled()) as filled:
            async for blocks in filled:
                start, stop = max(blocks.first_block, skip_blocks), blocks.first_block + blocks.block_count
                for first in range(start, stop, most):
                    count = min(most, stop - first)
                    yield FilledBlocks(first, count, min(blocks.tokens, (first + count) * layout.block_size))

    async def _answered(self, ticket: Ticket, call: Awaitable[T]) -> T:
        """The receiver's answer. A receiver that is gone or silent is PeerUnavailable and left alone for a while."""
        limit = asyncio.timeout(self._config.acknowledge_seconds)
        try:
            async with limit:
                return await call
        except TimeoutError as error:
            if not limit.expired():
                raise
            silent = f"receiver {ticket.receiver_address}: no answer within {self._config.acknowledge_seconds} s"
            raise self._lost(ticket, PeerUnavailable(silent)) from error
        except PeerUnavailable as error:
            raise self._lost(ticket, error) from error.__cause__
        except InvalidRequest as error:  # our message arrived damaged; it is no verdict on the client's request
            self._failures.add(cause=error.reason)
            raise TransferRejected(f"receiver {ticket.receiver_address}: {error.message}") from error
        except BatonError as error:
            self._failures.add(cause=error.reason)
            raise

    def _lost(self, ticket: Ticket, error: PeerUnavailable) -> PeerUnavailable:
        peer = (ticket.receiver_address, ticket.receiver_epoch)
        self._failures.add(cause=error.reason)
        self._known.pop(peer, None)
        self._circuit.trip(peer, error.message)
        return error


def _cause(failures: ExceptionGroup[Exception]) -> Exception:
    """The failure to answer with: the first typed one, else the first."""
    typed = (failure for failure in failures.exceptions if isinstance(failure, BatonError))
    return next(typed, failures.exceptions[0])
