"""The worker's end of the link: DecodeApi behind one stream a gateway.

Each request runs in a task of its own; what they yield in the same turn of the event loop leaves in one message. When
the link ends, for whatever reason, all its requests are cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Final

import grpc.aio

from baton.core.api import DecodeApi
from baton.core.clock import Clock, SystemClock
from baton.core.deadline import Deadline
from baton.core.errors import BatonError, InvalidRequest
from baton.core.streams import closing
from baton.core.telemetry import SILENT_TRACER, Tracer, log_context
from baton.core.types import DecodeRequest
from baton.rpc.calls import Calls
from baton.rpc.errors import being_cancelled, unexpected
from baton.rpc.link import (
    DEFAULT_LINK_POLICY,
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    EnginePulse,
    LinkPolicy,
    PeerHealth,
    first_of,
)
from baton.rpc.serving import Service
from baton.rpc.wire.decode import chunk_to_wire, end_to_wire, request_from_wire
from protos.baton.v1 import decode_pb2 as pb
from protos.baton.v1 import decode_pb2_grpc

NAME: Final = "baton.v1.DecodeService"
METHOD: Final = "DecodeService/Generate"  # what a request inside a link is called in metrics
MESSAGE_BYTES: Final = 4 * 1024 * 1024  # one message never comes near the receive limit


def decode_service(
    decode: DecodeApi,
    *,
    worker_id: str,
    epoch: int,
    pulse: Callable[[], EnginePulse],
    policy: LinkPolicy = DEFAULT_LINK_POLICY,
    clock: Clock | None = None,
    tracer: Tracer = SILENT_TRACER,
) -> Service:
    """``pulse`` is read for every heartbeat: the engine's step counter and what it works on."""
    welcome = pb.LinkWelcome(worker_id=worker_id, epoch=epoch, protocol_version=PROTOCOL_VERSION)

    def mount(server: grpc.aio.Server, calls: Calls) -> None:
        servicer = _Servicer(decode, welcome, pulse, policy, clock or SystemClock(), calls, tracer)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)

    return Service(NAME, mount, counted=False)


class _Servicer(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(
        self,
        decode: DecodeApi,
        welcome: pb.LinkWelcome,
        pulse: Callable[[], EnginePulse],
        policy: LinkPolicy,
        clock: Clock,
        calls: Calls,
        tracer: Tracer,
    ) -> None:
        self._decode = decode
        self._tracer = tracer
        self._welcome = welcome
        self._pulse = pulse
        self._policy = policy
        self._clock = clock
        self._calls = calls
        self._sessions: dict[str, _Requests] = {}

    async def Attach(
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.AttachResponse]:
        hello = await self._hello(request_iterator)
        outbox = _Outbox()
        replaced = self._sessions.get(hello.session_id)
        requests = _Requests(self._decode, outbox, self._calls, self._tracer, replaced)
        self._sessions[hello.session_id] = requests
        patience = replace(self._policy, silence=self._policy.gateway_silence)
        health = PeerHealth(f"gateway {hello.gateway_id}", patience, self._clock.now())
        watch = asyncio.create_task(
            first_of(self._read(request_iterator, requests, health), self._beat(outbox, health), self._closing())
        )
        watch.add_done_callback(lambda _: outbox.wake())
        try:
            yield pb.AttachResponse(welcome=self._welcome)
            while not watch.done():
                if (message := await outbox.next_message()) is not None:
                    yield message
            while (message := outbox.message()) is not None:  # a server that closes has said all it had to say
                yield message
            watch.result()
        finally:
            watch.cancel()
            requests.cancel_all()
            if self._sessions.get(hello.session_id) is requests:
                del self._sessions[hello.session_id]
            await requests.gone()

    async def _hello(self, messages: AsyncIterator[pb.AttachRequest]) -> pb.LinkHello:
        limit = Deadline.after(self._policy.silence)
        first = await limit.within(anext(messages, None), "the link's hello")
        if first is None or not first.HasField("hello") or not first.hello.session_id:
            raise InvalidRequest(
                "AttachRequest.hello: a link begins with a hello that names its session", field="hello"
            )
        version = first.hello.protocol_version
        if version < OLDEST_PROTOCOL_VERSION:
            raise InvalidRequest.out_of_range(
                "protocol_version", version, f"must be at least {OLDEST_PROTOCOL_VERSION}"
            )
        return first.hello

    async def _read(self, messages: AsyncIterator[pb.AttachRequest], requests: _Requests, health: PeerHealth) -> None:
        async for message in messages:
            health.heard(self._clock.now())
            kind = message.WhichOneof("message")
            if kind == "open":
                requests.open(message.open)
            elif kind == "cancel":
                requests.cancel(message.cancel.stream)
            elif kind == "hello":
                raise InvalidRequest("AttachRequest.hello: sent twice on one link", field="hello")
            # Anything else is a heartbeat or of a newer version: being heard is all it does here.

    async def _beat(self, outbox: _Outbox, health: PeerHealth) -> None:
        while True:
            pulse = self._pulse()
            outbox.beat(pb.LinkHeartbeat(step=pulse.step, unfinished=pulse.unfinished))
            await self._clock.sleep(self._policy.heartbeat)
            health.tick(self._clock.now())

    async def _closing(self) -> None:
        await self._calls.closing.wait()


class _Outbox:
    """What waits to be sent on one link. Bounded by the requests: each yields at most its max_tokens chunks."""

    def __init__(self) -> None:
        self._chunks: deque[pb.StreamChunk] = deque()
        self._heartbeat: pb.LinkHeartbeat | None = None
        self._filled = asyncio.Event()

    def add(self, chunk: pb.StreamChunk) -> None:
        self._chunks.append(chunk)
        self._filled.set()

    def beat(self, heartbeat: pb.LinkHeartbeat) -> None:
        """The newest replaces one that has not left yet."""
        self._heartbeat = heartbeat
        self._filled.set()

    def wake(self) -> None:
        self._filled.set()

    async def next_message(self) -> pb.AttachResponse | None:
        """Wait until there is something to send, or ``wake`` was called."""
        await self._filled.wait()
        await asyncio.sleep(0)  # one turn, so that all requests that got a token of this engine step have added theirs
        return self.message()

    def message(self) -> pb.AttachResponse | None:
        """All that waits, up to ``MESSAGE_BYTES``; None when nothing does."""
        chunks: list[pb.StreamChunk] = []
        size = 0
        while self._chunks and size < MESSAGE_BYTES:
            chunk = self._chunks.popleft()
            size += chunk.ByteSize()
            chunks.append(chunk)
        heartbeat, self._heartbeat = self._heartbeat, None
        if not self._chunks:
            self._filled.clear()
        if not chunks and heartbeat is None:
            return None
        return pb.AttachResponse(chunks=chunks, heartbeat=heartbeat)


class _Requests:
    """The requests of one link, each in its task.

    ``replaced`` are those of the same session's former link: they are cancelled at once, and no request of this link
    begins before they have ended.
    """

    def __init__(
        self, decode: DecodeApi, outbox: _Outbox, calls: Calls, tracer: Tracer, replaced: _Requests | None
    ) -> None:
        self._decode = decode
        self._outbox = outbox
        self._calls = calls
        self._tracer = tracer
        self._replaced = replaced
        self._tasks: dict[int, asyncio.Task[None]] = {}
        if replaced is not None:
            replaced.cancel_all()

    def open(self, message: pb.OpenRequest) -> None:
        if message.stream in self._tasks:
            raise InvalidRequest(f"OpenRequest.stream: {message.stream} is in use already", field="OpenRequest.stream")
        task = asyncio.create_task(self._answer(message), name=f"request {message.tokens.request_id}")
        self._tasks[message.stream] = task
        task.add_done_callback(lambda _: self._tasks.pop(message.stream, None))

    def cancel(self, number: int) -> None:
        if number in self._tasks:
            self._tasks[number].cancel()

    def cancel_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def gone(self) -> None:
        """Wait until no request of this link, or of those it replaced, holds anything."""
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        if self._replaced is not None:
            await self._replaced.gone()
            self._replaced = None

    async def _answer(self, message: pb.OpenRequest) -> None:
        error: BatonError | None = None
        request_id = message.tokens.request_id
        about = log_context(request_id=request_id, tenant=message.tokens.tenant)
        try:
            with about, self._tracer.span(METHOD, parent=message.traceparent, request_id=request_id):
                await self._stream(message)
        except BatonError as raised:
            error = raised
        except (Exception, asyncio.CancelledError) as bug:  # the edge: one request's bug must not end its link
            if being_cancelled():
                raise
            error = unexpected(bug, request_id)
        self._outbox.add(end_to_wire(message.stream, error))

    async def _stream(self, message: pb.OpenRequest) -> None:
        with self._calls.measured(METHOD):
            request = request_from_wire(message)
            deadline = Deadline.after(request.tokens.timeout)
            if self._replaced is not None:
                await deadline.within(self._replaced.gone(), "the session's former requests")
            with self._calls.admitted():
                await deadline.within(self._relay(message.stream, request), "the answer")

    async def _relay(self, number: int, request: DecodeRequest) -> None:
        async with closing(self._decode.generate(request)) as chunks:
            async for chunk in chunks:
                self._outbox.add(chunk_to_wire(number, chunk))
