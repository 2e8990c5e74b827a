"""DecodeApi over one long-lived stream that carries all requests from this gateway to one decode worker.

The reader never waits on a consumer. One heartbeat each way tells a stopped process and a hung engine from a slow one;
a peer that is down fails all its requests at once, and a later request connects again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import Self

import grpc.aio

from baton.core.api import DecodeApi
from baton.core.clock import Clock, Ids, RandomIds, SystemClock
from baton.core.deadline import Deadline
from baton.core.errors import BatonError, Cancelled, Expired, InvalidRequest, PeerUnavailable
from baton.core.telemetry import SILENT_TRACER, Tracer
from baton.core.types import Candidate, DecodeRequest, TokenChunk, TokenRequest
from baton.rpc.channels import NO_SECURITY, ClientSecurity, open_channel
from baton.rpc.chunk_buffer import ChunkBuffer
from baton.rpc.errors import from_detail, from_rpc_error, unexpected
from baton.rpc.link import (
    DEFAULT_LINK_POLICY,
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    EnginePulse,
    LinkPolicy,
    PeerHealth,
    first_of,
)
from baton.rpc.wire.decode import chunk_from_wire, open_to_wire
from protos.baton.v1 import decode_pb2 as pb
from protos.baton.v1 import decode_pb2_grpc

BARE_CHUNKS = 2  # chunks without a token that a request may have beside max_tokens others

_log = logging.getLogger(__name__)


class DecodeLink(DecodeApi):
    """Connects when the first request comes; ``aclose`` (or the end of ``async with``) ends all its requests.

    A worker whose epoch is not ``worker.epoch`` is another process at the same address, and refused.
    """

    def __init__(
        self,
        worker: Candidate,
        *,
        gateway_id: str,
        security: ClientSecurity = NO_SECURITY,
        policy: LinkPolicy = DEFAULT_LINK_POLICY,
        clock: Clock | None = None,
        ids: Ids | None = None,
        tracer: Tracer = SILENT_TRACER,
    ) -> None:
        self._worker = worker
        self._tracer = tracer
        self._security = security
        self._policy = policy
        self._clock = clock or SystemClock()
        self._hello = pb.LinkHello(
            session_id=(ids or RandomIds()).request_id(), gateway_id=gateway_id, protocol_version=PROTOCOL_VERSION
        )
        self._numbers = count(1)  # never used twice on one session, whatever number of connections it takes
        self._attachment: _Attachment | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = 0
        self._retry_at = self._clock.now()
        self._closed = False

    async def generate(self, request: DecodeRequest) -> AsyncIterator[TokenChunk]:
        deadline = Deadline.after(request.tokens.timeout)
        attachment = await deadline.within(self._attached(), f"a link to {self._worker.worker_id}")
        tokens = replace(request.tokens, timeout=deadline.remaining())
        opening = open_to_wire(next(self._numbers), replace(request, tokens=tokens), self._tracer.traceparent())
        with attachment.stream(opening, tokens) as buffer:
            while (chunk := await buffer.get()) is not None:
                yield chunk

    async def _attached(self) -> _Attachment:
        attachment = self._attachment
        if attachment is None or attachment.down is not None:
            attachment = self._attachment = self._attach()
        await attachment.settled.wait()
        if attachment.down is not None:
            raise PeerUnavailable(attachment.down)
        return attachment

    def _attach(self) -> _Attachment:
        name = f"{self._worker.worker_id} at {self._worker.address}"
        if self._closed:
            raise PeerUnavailable(f"the link to {name} is closed")
        if self._clock.now() < self._retry_at:
            raise PeerUnavailable(f"{name} could not be reached a moment ago, {self._failures} times in a row")
        attachment = _Attachment(self._worker, self._hello, self._security, self._policy, self._clock)
        # The link belongs to no request, not even to the one that was first to need it: neither do its log lines.
        task = asyncio.create_task(attachment.run(self._account_for), name=f"link to {name}", context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return attachment

    def _account_for(self, welcomed: bool) -> None:
        """A link that fell may be renewed at once; a worker that cannot be reached is left alone for a while."""
        if welcomed:
            self._failures = 0
            return
        pause = min(self._policy.first_backoff * 2**self._failures, self._policy.last_backoff)
        self._failures += 1
        self._retry_at = self._clock.now() + pause

    async def aclose(self) -> None:
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _Attachment:
    """One connection of a link, from hello to its end. ``settled``: welcomed, or ``down`` says why not."""

    def __init__(
        self, worker: Candidate, hello: pb.LinkHello, security: ClientSecurity, policy: LinkPolicy, clock: Clock
    ) -> None:
        self.settled = asyncio.Event()
        self.down: str | None = None
        self._worker = worker
        self._name = f"{worker.worker_id} at {worker.address}"
        self._security = security
        self._policy = policy
        self._clock = clock
        self._health = PeerHealth(self._name, policy, clock.now())
        self._streams: dict[int, ChunkBuffer] = {}
        self._outbox: deque[pb.AttachRequest] = deque([pb.AttachRequest(hello=hello)])
        self._outgoing = asyncio.Event()
        self._outgoing.set()

    @contextmanager
    def stream(self, opening: pb.OpenRequest, tokens: TokenRequest) -> Iterator[ChunkBuffer]:
        """Open a request; leaving the block before its end cancels it, answered or not."""
        number = opening.stream
        buffer = ChunkBuffer(max(0, tokens.stop.max_tokens) + BARE_CHUNKS, self._clock)
        self._streams[number] = buffer
        self._send(pb.AttachRequest(open=opening))
        timer: asyncio.TimerHandle | None = None
        if tokens.timeout is not None:
            expired = Expired(f"deadline passed while {self._name} answered")
            timer = asyncio.get_running_loop().call_later(tokens.timeout, buffer.close, expired)
        try:
            yield buffer
        finally:
            if timer is not None:
                timer.cancel()
            self._cancel(number)

    async def run(self, ended: Callable[[bool], None]) -> None:
        """Carry requests until the link ends, whoever ends it. ``ended`` learns whether there ever was a welcome."""
        reason = f"the link to {self._name} was closed"
        try:
            reason = await self._carry()
            if self.settled.is_set():
                _log.warning("decode link ended", extra={"worker": self._worker.worker_id, "cause": reason})
        finally:
            ended(self.settled.is_set())
            self._fail(reason)

    async def _carry(self) -> str:
        """Why the link ended, when it was not we who closed it."""
        try:
            await self._exchange()
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error, self._name).message
        except BatonError as error:
            return error.message
        except Exception as error:  # noqa: BLE001 - the edge: the requests of a broken link must not hang
            return unexpected(error, "").message
        return f"{self._name} closed the link"

    async def _exchange(self) -> None:
        peer = open_channel(self._worker.address, self._security)
        try:
            call = decode_pb2_grpc.DecodeServiceStub(peer.channel).Attach(self._messages(), metadata=peer.metadata())
            try:
                await first_of(self._receive(call), self._beat())
            finally:
                call.cancel()
        finally:
            await peer.close()

    def _fail(self, reason: str) -> None:
        self.down = reason
        self.settled.set()
        self._outbox.clear()
        self._outgoing.set()
        for buffer in self._streams.values():
            buffer.close(PeerUnavailable(reason))
        self._streams.clear()

    # --- out --------------------------------------------------------------------------------------------------------

    def _send(self, message: pb.AttachRequest) -> None:
        self._outbox.append(message)
        self._outgoing.set()

    def _cancel(self, number: int) -> None:
        """Tell the worker that nobody wants the rest, unless the answer has ended."""
        if self._streams.pop(number, None) is not None:
            self._send(pb.AttachRequest(cancel=pb.CancelRequest(stream=number)))

    async def _messages(self) -> AsyncIterator[pb.AttachRequest]:
        """Ends with the link: gRPC goes on waiting for requests to send even if the call has long failed."""
        while self.down is None:
            await self._outgoing.wait()
            self._outgoing.clear()
            while self._outbox:
                yield self._outbox.popleft()

    async def _beat(self) -> None:
        while True:
            await self._clock.sleep(self._policy.heartbeat)
            now = self._clock.now()
            self._health.tick(now)
            self._cancel_idle_readers(now)
            # Nothing is written before the welcome: a refusal that crosses a write can reach us without its reason.
            if self.settled.is_set() and not self._outbox:
                self._send(pb.AttachRequest(heartbeat=pb.LinkHeartbeat(unfinished=len(self._streams))))

    def _cancel_idle_readers(self, now: float) -> None:
        bound = self._policy.idle_reader
        for number, buffer in list(self._streams.items()):
            if buffer.idle(now) > bound:
                buffer.drop(Cancelled(f"the answer was not read for {bound:g} s"))
                self._cancel(number)

    # --- in ---------------------------------------------------------------------------------------------------------

    async def _receive(self, call: grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]) -> None:
        async for message in call:
            now = self._clock.now()
            self._health.heard(now)
            if message.HasField("welcome"):
                self._check(message.welcome)
                self.settled.set()
            if message.HasField("heartbeat"):
                self._health.pulse(EnginePulse(message.heartbeat.step, message.heartbeat.unfinished), now)
            if message.chunks:
                self._health.progressed(now)
            for chunk in message.chunks:
                self._deliver(chunk)

    def _check(self, welcome: pb.LinkWelcome) -> None:
        if welcome.epoch != self._worker.epoch:
            raise PeerUnavailable(f"{self._name} was restarted: epoch {welcome.epoch}, expected {self._worker.epoch}")
        if welcome.protocol_version < OLDEST_PROTOCOL_VERSION:
            known = f"protocol version {welcome.protocol_version}, oldest understood {OLDEST_PROTOCOL_VERSION}"
            raise PeerUnavailable(f"{self._name} is too old: {known}")

    def _deliver(self, message: pb.StreamChunk) -> None:
        buffer = self._streams.get(message.stream)
        if buffer is None:
            return  # cancelled a moment ago
        if message.last:
            del self._streams[message.stream]
            buffer.close(from_detail(message.error) if message.HasField("error") else None)
            return
        try:
            fits = buffer.put(chunk_from_wire(message))
        except InvalidRequest as error:
            self._refuse(message.stream, buffer, f"an incomplete chunk: {error.message}")
        else:
            if not fits:
                self._refuse(message.stream, buffer, "more chunks than the request has tokens")

    def _refuse(self, number: int, buffer: ChunkBuffer, what: str) -> None:
        buffer.drop(BatonError(f"{self._name} sent {what}"))
        self._cancel(number)
