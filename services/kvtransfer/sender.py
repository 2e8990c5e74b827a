"""The sending end of a hand-over: a prefill's blocks go out while the next ones, or its first token, are computed."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from baton.core.api import KvReceiverApi, PrefillRun
from baton.core.clock import Clock
from baton.core.errors import BatonError, InvalidRequest, PeerUnavailable, TransferRejected, TransportUnavailable
from baton.core.streams import closing
from baton.core.tasks import beside, end
from baton.core.telemetry import SILENT_TRACER, Meter, Tracer
from baton.core.types import FilledBlocks, KvHandshake, Ticket
from services.kvtransfer.circuit import Circuit
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.conversion import Conversion
from services.kvtransfer.handshake import compare, late_ways
from services.kvtransfer.routes import Routes
from services.kvtransfer.series import SenderSeries
from services.kvtransfer.shipment import Peering, Shipment
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
        self._known: OrderedDict[Peer, Peering] = OrderedDict()
        self._circuit = Circuit(clock, config.peer_rest_seconds)
        self._routes = Routes(
            transports, identity.format, rest_seconds=config.transport_rest_seconds, meter=meter, clock=clock
        )
        self._series = SenderSeries(meter)

    async def connect(self, ticket: Ticket) -> Peering:
        """Shake hands with the ticket's receiver unless that was done before.

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
        conversion = Conversion(self._identity.format, answer.format)
        self._known[peer] = peering = Peering(answer, conversion, late_ways(self._identity, answer))
        while len(self._known) > MAX_KNOWN_PEERS:
            self._known.popitem(last=False)
        return peering

    async def ship(self, ticket: Ticket, run: PrefillRun, skip_blocks: int) -> int:
        """Offer every block of ``run`` but the first ``skip_blocks`` of the receiver's, and confirm them; returns the
        bytes shipped.

        May return before the first token is there. One confirmation is enough for all: the caller keeps ``run`` open
        until this returns, and cancels it when the run fails, so every block is still pinned when it is confirmed. With
        checksums of all of them it need not wait for acknowledgements: they were made of pinned blocks, so a copy that
        equals them is right, whatever becomes of the source. On any failure all that is under way is cancelled first.
        """
        peering = await self.connect(ticket)
        best = await self._routes.choose(peering.receiver)
        shipment = Shipment(ticket, peering, run, skip_blocks)
        confirming: asyncio.Future[None] | None = None
        try:
            async with asyncio.TaskGroup() as group:
                await self._offer_all(shipment, best, group)
                if await shipment.all_digested():
                    confirming = asyncio.ensure_future(self._confirm(shipment, best))
            if shipment.tokens:
                await self._answered(ticket, best.name, confirming or self._confirm(shipment, best))
        except ExceptionGroup as failures:
            cause = _cause(failures)
            if isinstance(cause, TransportUnavailable):  # there is no way to what it said it was: ask it anew
                self._known.pop((ticket.receiver_address, ticket.receiver_epoch), None)
            raise cause from failures
        finally:
            if confirming is not None:
                await end(confirming)
        return shipment.size

    async def _offer_all(self, shipment: Shipment, best: Outgoing, group: asyncio.TaskGroup) -> None:
        """Until the last offer has begun."""
        slots = asyncio.Semaphore(self._config.offers_in_flight)
        conversion, size = shipment.peering.conversion, self._identity.format.block_size
        most, skipped = self._most_blocks(shipment, best), conversion.first_block(shipment.skip_blocks)

        async def hand_over(blocks: FilledBlocks) -> None:
            try:
                await self._hand_over(shipment, blocks)
            finally:
                slots.release()

        async with closing(conversion.grouped(shipment.run.filled())) as groups:
            async for group_of_blocks in groups:
                for blocks in _pieces(group_of_blocks, skipped, most, size):
                    await slots.acquire()
                    shipment.begin(blocks)
                    group.create_task(hand_over(blocks))
                    await asyncio.sleep(0)  # the offer goes before anything else is seen to

    def _confirm(self, shipment: Shipment, best: Outgoing) -> Awaitable[None]:
        return self._receiver(shipment, best).confirm(shipment.confirmation)

    async def _hand_over(self, shipment: Shipment, blocks: FilledBlocks) -> None:
        """Offer blocks, by the next transport if one turns out not to work, which may take smaller offers."""
        layout = self._identity.format
        size = (blocks.tokens - blocks.first_block * layout.block_size) * layout.token_bytes
        while True:
            transport = await self._routes.choose(shipment.peering.receiver)
            most = self._most_blocks(shipment, transport)
            if blocks.block_count > most:
                for piece in _pieces(blocks, blocks.first_block, most, layout.block_size):
                    await self._hand_over(shipment, piece)
                return
            began = self._clock.now()
            try:
                await self._offer(shipment, transport, blocks, size)
            except TransportUnavailable as error:
                self._routes.fail(shipment.peering.receiver, transport, error)
            else:
                self._series.sent(transport.name, size, self._clock.now() - began)
                shipment.size += size
                return

    async def _offer(self, shipment: Shipment, transport: Outgoing, blocks: FilledBlocks, size: int) -> None:
        """Have the receiver take blocks; those of their checksums that it is told later become the shipment's."""
        ticket, run = shipment.ticket, shipment.run
        early = transport.early_chunk(ticket, run, blocks) if transport.name in shipment.peering.late_ways else None
        if early is not None:  # on its way before anything else is seen to
            offer = self._receiver(shipment, transport).offer(early.chunk)
            with self._watched(ticket, transport, blocks, size):
                async with beside(_digest(shipment, blocks, early)) as digesting:
                    await self._answered(ticket, transport.name, offer, early.chunk.part_count())
                    await digesting
            return
        with self._watched(ticket, transport, blocks, size):
            shipment.digested(blocks)
            chunk = await transport.chunk(ticket, run, blocks)
            if shipment.peering.conversion.is_needed:
                chunk = replace(chunk, format=self._identity.format)
            offer = self._receiver(shipment, transport).offer(chunk)
            await self._answered(ticket, transport.name, offer, chunk.part_count())

    def _receiver(self, shipment: Shipment, transport: Outgoing) -> KvReceiverApi:
        """Asked for each call: a channel on which nothing runs may be closed meanwhile."""
        return transport.receiver(shipment.peering.receiver, self._receivers(shipment.ticket))

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

    def _most_blocks(self, shipment: Shipment, transport: Outgoing) -> int:
        """Of one offer. What is converted passes the receiver's front, which serves others meanwhile."""
        config, conversion = self._config, shipment.peering.conversion
        most = config.most_bytes(transport.name)
        if conversion.is_needed:
            most = min(most, config.max_message_bytes)
        elif transport.is_streamed(shipment.peering.receiver):
            most = config.max_mapped_bytes
        return conversion.at_most(self._blocks_of(most))

    def _blocks_of(self, size: int) -> int:
        return max(1, size // self._identity.format.block_bytes)

    async def _answered(self, ticket: Ticket, transport: str, call: Awaitable[T], messages: int = 1) -> T:
        """The receiver's answer. A receiver that is gone or silent is PeerUnavailable and left alone for a while.

        ``messages``: that the call sends, each of which may take as long as an answer.
        """
        seconds = messages * self._config.acknowledge_seconds
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await call
        except TimeoutError as error:
            if not limit.expired():
                raise
            silent = f"receiver {ticket.receiver_address}: no answer within {seconds:g} s"
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


def _pieces(blocks: FilledBlocks, skipped: int, most: int, block_size: int) -> Iterator[FilledBlocks]:
    """The same blocks without those before ordinal ``skipped``, ``most`` at a time."""
    stop = blocks.first_block + blocks.block_count
    for first in range(max(blocks.first_block, skipped), stop, most):
        yield blocks.part(first, min(most, stop - first), block_size)


def _cause(failures: ExceptionGroup[Exception]) -> Exception:
    """The failure to answer with: the first typed one, else the first."""
    typed = (failure for failure in failures.exceptions if isinstance(failure, BatonError))
    return next(typed, failures.exceptions[0])
