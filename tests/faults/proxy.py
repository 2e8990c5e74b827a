"""A TCP proxy in front of one process, that knows frames of HTTP/2: it holds, breaks, slows or falsifies what passes.

A held connection stays alive: frames of calls wait, the connection's own (pings, settings) pass. So a test may hold a
phase for as long as it likes, and nobody takes the peer for stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from protos.baton.v1 import kvtransfer_pb2 as pb

PREFACE_BYTES: Final = 24  # what an HTTP/2 client sends before its first frame
HEAD_BYTES: Final = 9
DATA: Final = 0
REQUEST_BYTES: Final = 300  # from here on a frame holds a prompt; heartbeats and confirmations are smaller
KV_BYTES: Final = 1024  # from here on it holds KV: the tests' prompts are shorter as tokens, and longer as KV
MESSAGE_HEAD_BYTES: Final = 5  # gRPC's, before a message


class Towards(StrEnum):
    SERVER = "server"
    CLIENT = "client"


class Content(StrEnum):
    """What a frame carries to a worker."""

    PROMPT = "prompt"
    OFFER = "offer"  # of KV: the bytes, or a part of them, or the names of blocks in shared memory
    REST = "rest"


class Frame(NamedTuple):
    """One frame as it stands on the wire. ``stream`` 0 is the connection's own."""

    kind: int
    stream: int
    head: bytes
    body: bytes

    @property
    def payload_bytes(self) -> int:
        return len(self.body) if self.kind == DATA else 0

    @property
    def content(self) -> Content:
        if self.payload_bytes >= KV_BYTES or (self.kind == DATA and _names_blocks(self.body)):
            return Content.OFFER
        return Content.PROMPT if self.payload_bytes >= REQUEST_BYTES else Content.REST


def _names_blocks(body: bytes) -> bool:
    try:
        offer = pb.OfferRequest.FromString(body[MESSAGE_HEAD_BYTES:])
    except DecodeError:
        return False
    return bool(offer.ticket.request_id and offer.source.blocks)


@dataclass
class Barrier:
    """Holds a phase: from the first frame that fits, nothing of its connection's calls passes in this direction.

    The frame is DATA ``towards`` one end, with this ``content`` if one is given; the connection has carried ``after``
    to the server, at the latest with this frame. One barrier may stand at several proxies: the first frame that comes
    is held, and no other.
    """

    towards: Towards
    content: Content | None = None
    after: Content | None = None
    reached: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def holds(self, frame: Frame, pipe: _Pipe) -> bool:
        if self.reached.done() or pipe.towards is not self.towards:
            return False
        if not frame.payload_bytes or self.content not in (None, frame.content):
            return False
        return self.after is None or self.after in pipe.link.carried


@dataclass(eq=False)
class _Link:
    """One connection of a caller, and ours to the process behind."""

    caller: asyncio.StreamWriter
    server: asyncio.StreamWriter
    carried: set[Content] = field(default_factory=set[Content])  # to the server
    pipes: list[_Pipe] = field(default_factory=list)

    def reset(self) -> None:
        """Both ends see a connection reset, not an orderly end."""
        for writer in (self.caller, self.server):
            raw = writer.get_extra_info("socket")
            if raw is not None:
                with contextlib.suppress(OSError):
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


@dataclass(eq=False)
class _Pipe:
    """One direction of a link."""

    proxy: Proxy
    link: _Link
    towards: Towards
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_held: bool = False
    kept: list[bytes] = field(default_factory=list)

    async def run(self) -> None:
        if self.towards is Towards.SERVER:
            self.writer.write(await self.reader.readexactly(PREFACE_BYTES))
        while True:
            frame = await self._next()
            await self.proxy.slowed(len(frame.body))
            self._pass(frame)
            await self.writer.drain()

    async def _next(self) -> Frame:
        head = await self.reader.readexactly(HEAD_BYTES)
        body = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        return Frame(head[3], int.from_bytes(head[5:], "big") & 0x7FFF_FFFF, head, body)

    def _pass(self, frame: Frame) -> None:
        if self.towards is Towards.SERVER:
            self.link.carried.add(frame.content)
            self.proxy.note(frame)
        if self.proxy.barrier is not None and self.proxy.barrier.holds(frame, self):
            self.is_held = True
            self.proxy.barrier.reached.set_result(self.proxy.name)
        wire = frame.head + self.proxy.falsified(frame, self.towards)
        if self.is_held and frame.stream:
            self.kept.append(wire)
        else:
            self.writer.write(wire)

    def release(self) -> None:
        self.is_held = False
        self.writer.writelines(self.kept)
        self.kept.clear()


class Proxy:
    """Listens at ``host:port`` for ``target_host:port``. ``name`` is the process behind."""

    def __init__(self, name: str, host: str, port: int, target_host: str) -> None:
        self.name = name
        self._host = host
        self._port = port
        self._target_host = target_host
        self._links: set[_Link] = set()
        self.barrier: Barrier | None = None
        self.bytes_per_second: float | None = None
        self.prompts = 0  # frames with a prompt that went to the process since ``forget``
        self.corrupted = 0
        self._bits: random.Random | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, self._host, self._port, reuse_address=True)
        try:
            yield
        finally:
            server.close()
            self.reset()

    # --- what a test may do -------------------------------------------------------------------------------------------

    def hold(self, barrier: Barrier) -> None:
        self.barrier = barrier

    def heal(self) -> None:
        """Everything passes again, what was held first."""
        self.barrier = self.bytes_per_second = self._bits = None
        for link in self._links:
            for pipe in link.pipes:
                pipe.release()

    def reset(self) -> None:
        """All connections break."""
        for link in tuple(self._links):
            link.reset()

    def corrupt_next_offer(self, bits: random.Random) -> None:
        """One bit, chosen by ``bits``, of the next frame of an offer is flipped."""
        self._bits = bits

    def forget(self) -> None:
        self.prompts = self.corrupted = 0

    # --- called by the pipes ------------------------------------------------------------------------------------------

    def note(self, frame: Frame) -> None:
        self.prompts += frame.content is Content.PROMPT

    async def slowed(self, size: int) -> None:
        """The time that ``size`` bytes take on a slow link."""
        if self.bytes_per_second is not None:
            await asyncio.sleep(size / self.bytes_per_second)

    def falsified(self, frame: Frame, towards: Towards) -> bytes:
        if self._bits is None or towards is not Towards.SERVER or frame.content is not Content.OFFER:
            return frame.body
        bit, self._bits = self._bits.randrange(8 * len(frame.body)), None
        self.corrupted += 1
        body = bytearray(frame.body)
        body[bit // 8] ^= 1 << bit % 8
        return bytes(body)

    async def _serve(self, reader: asyncio.StreamReader, caller: asyncio.StreamWriter) -> None:
        try:
            answers, server = await asyncio.open_connection(self._target_host, self._port)
        except OSError:
            caller.transport.abort()
            return
        link = _Link(caller, server)
        link.pipes = [
            _Pipe(self, link, Towards.SERVER, reader, server),
            _Pipe(self, link, Towards.CLIENT, answers, caller),
        ]
        self._links.add(link)
        pipes = [asyncio.create_task(pipe.run()) for pipe in link.pipes]
        try:
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)
            self._links.discard(link)
            link.reset()
