"""The sending end of a hand-over: a prefill's blocks go out while the next ones are computed."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from baton.core.api import KvReceiverApi, PrefillRun
from baton.core.clock import Clock
from baton.core.errors import BatonError, InvalidRequest, PeerUnavailable, TransferRejected, TransportUnavailable
from baton.core.streams import closing
from baton.core.telemetry import SILENT_TRACER, Meter, Tracer
from baton.core.types import FilledBlocks, KvHandshake, Ticket
from services.kvtransfer.circuit import Circuit
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.conversion import Conversion
from services.kvtransfer.handshake import compare, takes_late_checksums
from services.kvtransfer.routes import Routes
from services.kvtransfer.series import SenderSeries
from services.kvtransfer.shipment import Shipment
from services.kvtransfer.transport import EarlyChunk, Outgoing

log = logging.getLogger(__name__)

MAX_KNOWN_PEERS = 1024
NO_TRANSPORT = "none"  # what fails is no offer

Peer = tuple[str, int]  # address, epoch
T = TypeVar("T")


class KvSender:
    """Ships blocks to the receivers that tickets name. ``receivers`` gives the receiver's API for a ticket,
    ``transports``: those that there are from here, best first."""

    def __init__(
        self,
        identity: KvHandshake,
        receivers: Callable[[Ticket], KvReceiverApi],
        transports: Sequence[Outgoing],
        *,
        config: KvTransferConfig,
        meter: Meter,
        clock: Clock,
        tracer: Tracer = SILENT_TRACER,
    ) -> None:
        self._identity = identity
        self._receivers = receivers
        self._config = config
        self._clock = clock
        self._tracer = tracer
        self._known: OrderedDict[Peer, KvHandshake] = OrderedDict()
        self._circuit = Circuit(clock, config.peer_rest_seconds)
        self._routes = Routes(
            transports, identity.format, rest_seconds=config.transport_rest_seconds, meter=meter, clock=clock
        )
        self._series = SenderSeries(meter)

    async def connect(self, ticket: Ticket) -> KvHandshake:
        """Shake hands with the ticket's receiver unless that was done before; what it said.

        TransferRejected names the field that does not fit, PeerUnavailable a receiver that is gone or was so just now.
        """
        peer = (ticket.receiver_address, ticket.receiver_epoch)
        if self._circuit.is_open(peer):
            raise PeerUnavailable(f"receiver {ticket.receiver_address} was lost a moment ago")
        known = self._known.get(peer)
        if known is not None:
            self._known.move_to_end(peer)
            return known
        answer = await self._answered(ticket, NO_TRANSPORT, self._receivers(ticket).handshake(self._identity))
        compare(self._identity, answer)
        if answer.epoch != ticket.receiver_epoch:
            raise TransferRejected(
                f"receiver_epoch: the ticket names {ticket.receiver_epoch}, {ticket.receiver_address} is {answer.epoch}"
            )
        if answer.format != self._identity.format:
            formats = {"from": str(self._identity.format), "to": str(answer.format)}
            log.info("blocks to this peer are converted", extra={**formats, "peer": answer.worker_id})
        self._known[peer] = answer
        while len(self._known) > MAX_KNOWN_PEERS:
            self._known.popitem(last=False)
        return answer

    async def ship(self, ticket: Ticket, run: PrefillRun, skip_blocks: int) -> int:
        """Offer every block of ``run`` but the first ``skip_blocks`` of the receiver's, and confirm them; returns the
        bytes shipped.

        One confirmation is enough for all: the caller keeps ``run`` open until this returns, so every block is still
        pinned when it is confirmed. With checksums of all of them it need not wait for acknowledgements: they were made
        of pinned blocks, so a copy that equals them is right, whatever becomes of the source. On any failure all that
        is under way is cancelled first.
        """
        receiver = await self.connect(ticket)
        best = await self._routes.choose(receiver)
        shipment = Shipment(ticket, receiver, run, Conversion(self._identity.format, receiver.format), skip_blocks)
        confirming: Awaitable[None] | None = None
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.TaskGroup() as group:
                    await self._offer_all(shipment, best, group)
                    if await shipment.all_digested():
                        confirming = await stack.enter_async_context(_beside(self._confirm(shipment, best)))
            except ExceptionGroup as failures:
                cause = _cause(failures)
                if isinstance(cause, TransportUnavailable):  # there is no way to what it said it was: ask it anew
                    self._known.pop((ticket.receiver_address, ticket.receiver_epoch), None)
                raise cause from failures
            if shipment.tokens:
                await self._answered(ticket, best.name, confirming or self._confirm(shipment, best))
        return shipment.size

    async def _offer_all(self, shipment: Shipment, best: Outgoing, group: asyncio.TaskGroup) -> None:
        """Until the last offer has begun."""
        slots = asyncio.Semaphore(self._config.offers_in_flight)

        async def hand_over(blocks: FilledBlocks) -> None:
            try:
                await self._hand_over(shipment, blocks)
            finally:
                slots.release()

        async with aclosing(self._messages(shipment, best)) as messages:
            async for blocks in messages:
                await slots.acquire()
                shipment.begin(blocks)
                group.create_task(hand_over(blocks))

    async def _confirm(self, shipment: Shipment, best: Outgoing) -> None:
        await best.receiver(shipment.receiver, self._receivers(shipment.ticket)).confirm(shipment.confirmation)

    async def _hand_over(self, shipment: Shipment, blocks: FilledBlocks) -> None:
        """Offer blocks, by the next transport if one turns out not to work, which may take smaller offers."""
        layout = self._identity.format
        size = (blocks.tokens - blocks.first_block * layout.block_size) * layout.token_bytes
        while True:
            transport = await self._routes.choose(shipment.receiver)
            most = self._most_blocks(transport, shipment.conversion)
            if blocks.block_count > most:
                for piece in _pieces(blocks, most, layout.block_size):
                    await self._hand_over(shipment, piece)
                return
            began = self._clock.now()
            try:
                with self._watched(shipment.ticket, transport, blocks, size):
                    await self._offer(shipment, transport, blocks)
            except TransportUnavailable as error:
                self._routes.fail(shipment.receiver, transport, error)
            else:
                self._series.sent(transport.name, size, self._clock.now() - began)
                shipment.size += size
                return

    async def _offer(self, shipment: Shipment, transport: Outgoing, blocks: FilledBlocks) -> None:
        """Have the receiver take blocks; those of their checksums that it is told later become the shipment's."""
        ticket, receiver, run = shipment.ticket, shipment.receiver, shipment.run
        early = None
        if takes_late_checksums(self._identity, receiver, transport.name):
            early = transport.early_chunk(ticket, run, blocks)
        if early is None:
            shipment.digested(blocks)
            chunk = await transport.chunk(ticket, run, blocks)
        else:
            chunk = early.chunk
        if shipment.conversion.is_needed:
            chunk = replace(chunk, format=self._identity.format)
        # Only now: a channel on which nothing runs may be closed meanwhile.
        offer = self._answered(
            ticket, transport.name, transport.receiver(receiver, self._receivers(ticket)).offer(chunk)
        )
        if early is None:
            await offer
            return
        async with _beside(_digest(shipment, blocks, early)) as digesting:  # once the offer is on its way
            await offer
            await digesting

    @contextmanager
    def _watched(self, ticket: Ticket, transport: Outgoing, blocks: FilledBlocks, size: int) -> Iterator[None]:
        """One message's way, in numbers and as a span."""
        span = self._tracer.span(
            "kv hand-over",
            request_id=ticket.request_id,
            transport=transport.name.value,
            first_block=blocks.first_block,
            blocks=blocks.block_count,
            bytes=size,
        )
        with self._series.in_flight(transport.name, blocks.block_count), span:
            yield

    async def _messages(self, shipment: Shipment, transport: Outgoing) -> AsyncGenerator[FilledBlocks, None]:
        """The blocks of each offer: finished ones, without the skipped ones, as many as ``transport`` takes at most.

        To a receiver of another block size those that fill whole blocks there.
        """
        conversion = shipment.conversion
        most = self._most_blocks(transport, conversion)
        skipped = conversion.first_block(shipment.skip_blocks)
        async with closing(shipment.run.filled()) as filled, aclosing(conversion.grouped(filled)) as groups:
            async for blocks in groups:
                first, stop = max(blocks.first_block, skipped), blocks.first_block + blocks.block_count
                if first < stop:
                    size = self._identity.format.block_size
                    for piece in _pieces(blocks.part(first, stop - first, size), most, size):
                        yield piece

    def _most_blocks(self, transport: Outgoing, conversion: Conversion) -> int:
        """Of one offer. What is converted passes the receiver's front, which serves others meanwhile."""
        most = self._config.most_bytes(transport.name)
        most = min(most, self._config.max_message_bytes) if conversion.is_needed else most
        return conversion.at_most(self._blocks_of(most))

    def _blocks_of(self, size: int) -> int:
        return max(1, size // self._identity.format.block_bytes)

    async def _answered(self, ticket: Ticket, transport: str, call: Awaitable[T]) -> T:
        """The receiver's answer. A receiver that is gone or silent is PeerUnavailable and left alone for a while."""
        limit = asyncio.timeout(self._config.acknowledge_seconds)
        try:
            async with limit:
                return await call
        except TimeoutError as error:
            if not limit.expired():
                raise
            silent = f"receiver {ticket.receiver_address}: no answer within {self._config.acknowledge_seconds} s"
            raise self._lost(ticket, transport, PeerUnavailable(silent)) from error
        except PeerUnavailable as error:
            raise self._lost(ticket, transport, error) from error.__cause__
        except InvalidRequest as error:  # our message arrived damaged; it is no verdict on the client's request
            self._series.failed(transport, error.reason)
            raise TransferRejected(f"receiver {ticket.receiver_address}: {error.message}") from error
        except BatonError as error:
            self._series.failed(transport, error.reason)
            raise

    def _lost(self, ticket: Ticket, transport: str, error: PeerUnavailable) -> PeerUnavailable:
        peer = (ticket.receiver_address, ticket.receiver_epoch)
        self._series.failed(transport, error.reason)
        self._known.pop(peer, None)
        self._circuit.trip(peer, error.message)
        return error


async def _digest(shipment: Shipment, blocks: FilledBlocks, early: EarlyChunk) -> None:
    shipment.digested(blocks, await early.checksums())


def _pieces(blocks: FilledBlocks, most: int, block_size: int) -> Iterator[FilledBlocks]:
    """The same blocks, ``most`` at a time."""
    stop = blocks.first_block + blocks.block_count
    for first in range(blocks.first_block, stop, most):
        yield blocks.part(first, min(most, stop - first), block_size)


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Work that goes on beside the block, and no longer."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _cause(failures: ExceptionGroup[Exception]) -> Exception:
    """The failure to answer with: the first typed one, else the first."""
    typed = (failure for failure in failures.exceptions if isinstance(failure, BatonError))
    return next(typed, failures.exceptions[0])
