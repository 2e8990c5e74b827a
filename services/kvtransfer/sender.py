"""The sending end of a hand-over: a prefill's blocks go out while the next ones are computed."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TypeVar

from baton.core.api import KvReceiverApi, PrefillRun
from baton.core.clock import Clock
from baton.core.errors import BatonError, InvalidRequest, PeerUnavailable, TransferRejected, TransportUnavailable
from baton.core.streams import closing
from baton.core.telemetry import SILENT_TRACER, Meter, Tracer
from baton.core.types import FilledBlocks, KvConfirmation, KvHandshake, Ticket
from services.kvtransfer.circuit import Circuit
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.conversion import Conversion
from services.kvtransfer.handshake import compare
from services.kvtransfer.routes import Routes
from services.kvtransfer.series import SenderSeries
from services.kvtransfer.transport import Outgoing

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
        """Offer every block of ``run`` but the first ``skip_blocks`` of the receiver's, then confirm them; returns the
        bytes shipped.

        One confirmation is enough for all: the caller keeps ``run`` open until this returns, so every block is still
        pinned when it is confirmed. On any failure all offers under way are cancelled first.
        """
        receiver = await self.connect(ticket)
        best = await self._routes.choose(receiver)
        conversion = Conversion(self._identity.format, receiver.format)
        slots = asyncio.Semaphore(self._config.offers_in_flight)
        shipped = reached = 0

        async def hand_over(blocks: FilledBlocks) -> None:
            nonlocal shipped, reached
            try:
                sent = await self._hand_over(ticket, receiver, run, blocks)
                shipped += sent
                reached = max(reached, blocks.tokens)
            finally:
                slots.release()

        try:
            async with (
                asyncio.TaskGroup() as group,
                aclosing(self._messages(run, conversion, skip_blocks, best)) as messages,
            ):
                async for blocks in messages:
                    await slots.acquire()
                    group.create_task(hand_over(blocks))
        except ExceptionGroup as failures:
            cause = _cause(failures)
            if isinstance(cause, TransportUnavailable):  # there is no way to what it said it was: ask it anew
                self._known.pop((ticket.receiver_address, ticket.receiver_epoch), None)
            raise cause from failures
        if reached:
            confirmation = KvConfirmation(ticket, skip_blocks, conversion.target_blocks(reached) - skip_blocks)
            way = best.receiver(receiver, self._receivers(ticket))
            await self._answered(ticket, NO_TRANSPORT, way.confirm(confirmation))
        return shipped

    async def _hand_over(self, ticket: Ticket, receiver: KvHandshake, run: PrefillRun, blocks: FilledBlocks) -> int:
        """Offer blocks, by the next transport if one turns out not to work, which may take smaller offers.

        Returns their bytes.
        """
        layout = self._identity.format
        conversion = Conversion(layout, receiver.format)
        size = (blocks.tokens - blocks.first_block * layout.block_size) * layout.token_bytes
        while True:
            transport = await self._routes.choose(receiver)
            most = self._most_blocks(transport, conversion)
            if blocks.block_count > most:
                pieces = _pieces(blocks, most, layout.block_size)
                return sum([await self._hand_over(ticket, receiver, run, piece) for piece in pieces])
            began = self._clock.now()
            try:
                with self._watched(ticket, transport, blocks, size):
                    chunk = await transport.chunk(ticket, run, blocks)
                    if conversion.is_needed:
                        chunk = replace(chunk, format=layout)
                    # Only now: a channel on which nothing runs may be closed meanwhile.
                    offer = transport.receiver(receiver, self._receivers(ticket)).offer(chunk)
                    await self._answered(ticket, transport.name, offer)
            except TransportUnavailable as error:
                self._routes.fail(receiver, transport, error)
            else:
                self._series.sent(transport.name, size, self._clock.now() - began)
                return size

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

    async def _messages(
        self, run: PrefillRun, conversion: Conversion, skip_blocks: int, transport: Outgoing
    ) -> AsyncGenerator[FilledBlocks, None]:
        """The blocks of each offer: finished ones, without the skipped ones, as many as ``transport`` takes at most.

        To a receiver of another block size those that fill whole blocks there. Of many blocks that are there already
        the first offer is smaller: where fronts digest, the receiver begins early to copy while the next ones are
        digested. Each further offer would cost more than it brings.
        """
        most = self._most_blocks(transport, conversion)
        at_first = conversion.at_most(self._blocks_of(self._config.first_bytes(transport.name)))
        skipped = conversion.first_block(skip_blocks)
        async with closing(run.filled()) as filled, aclosing(conversion.grouped(filled)) as groups:
            async for blocks in groups:
                first, stop = max(blocks.first_block, skipped), blocks.first_block + blocks.block_count
                count = min(at_first if stop - first > 2 * at_first else most, most)
                while first < stop:
                    yield blocks.part(first, min(count, stop - first), self._identity.format.block_size)
                    first += count
                    count = most

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


def _pieces(blocks: FilledBlocks, most: int, block_size: int) -> Iterator[FilledBlocks]:
    """The same blocks, ``most`` at a time."""
    stop = blocks.first_block + blocks.block_count
    for first in range(blocks.first_block, stop, most):
        yield blocks.part(first, min(most, stop - first), block_size)


def _cause(failures: ExceptionGroup[Exception]) -> Exception:
    """The failure to answer with: the first typed one, else the first."""
    typed = (failure for failure in failures.exceptions if isinstance(failure, BatonError))
    return next(typed, failures.exceptions[0])
