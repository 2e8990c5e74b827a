"""Frames over a local stream socket, between a front (asyncio) and its engine (a plain loop).

A frame is ``u32 pickle length, u32 buffer count, u64 length of each buffer``, then the pickle (protocol 5), then the
buffers: KV payloads travel as buffers and are not copied into the pickle. Both ends are Baton's own processes on one
machine, joined by a socket pair that nobody else can reach; nothing here is meant for a network.
"""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
import struct
from collections.abc import Generator
from typing import Any

from baton.engine.mailbox import Mailbox

HEAD = struct.Struct("<II")
READ_AHEAD = 1 << 16  # bytes that the asyncio end receives at once; pieces above half of it are received in place


class ChannelClosed(Exception):
    """The other end is gone."""


def _encode(message: object) -> list[bytes | memoryview]:
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    lengths = struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
    return [HEAD.pack(len(body), len(views)) + lengths + body, *views]


class SyncChannel:
    """The engine's end. Blocking; one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(True)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, message: object) -> None:
        """Write one message; ChannelClosed when nobody reads any more."""
        try:
            for piece in _encode(message):
                self._sock.sendall(piece)
        except OSError as error:
            raise ChannelClosed("the front has gone") from error

    def receive(self) -> Any:
        """Wait for one message, whose payloads are bytearrays; ChannelClosed at the end of the stream."""
        body_length, count = HEAD.unpack(self._exactly(HEAD.size))
        lengths = struct.unpack(f"<{count}Q", self._exactly(8 * count))
        body = self._exactly(body_length)
        return pickle.loads(body, buffers=[self._exactly(length) for length in lengths])

    def is_readable(self, timeout: float | None) -> bool:
        """Whether ``receive`` would find something (a message or the end) within ``timeout`` seconds; None: wait."""
        return bool(self._poll.poll(None if timeout is None else timeout * 1000))

    def close(self) -> None:
        self._sock.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._sock.recv_into(view)
            except OSError as error:
                raise ChannelClosed("the front has gone") from error
            if not count:
                raise ChannelClosed("the front has gone")
            view = view[count:]
        return data


class _Frames(asyncio.BufferedProtocol):
    """Takes frames off the socket as it has bytes. Large pieces are received where they stay, without a copy."""

    def __init__(self) -> None:
        self.messages: Mailbox[Any] = Mailbox()
        self.writable = asyncio.Event()
        self.writable.set()
        self.closed = asyncio.get_running_loop().create_future()
        self._ahead = bytearray(READ_AHEAD)
        self._begin = self._end = 0  # the part of ``_ahead`` that is received and not yet used
        self._piece: bytearray | None = None  # a large piece in progress
        self._filled = 0
        self._parser = self._parse()
        self._wanted = next(self._parser)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._piece is not None:
            return memoryview(self._piece)[self._filled :]
        return memoryview(self._ahead)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._piece is None:
            self._end += nbytes
        else:
            self._filled += nbytes
            if self._filled < len(self._piece):
                return
            piece, self._piece = self._piece, None
            self._wanted = self._parser.send(piece)
        self._advance()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.messages.fail(ChannelClosed("the engine has gone"))
        self.writable.set()
        self.closed.set_result(None)

    def _advance(self) -> None:
        """Hand the parser what it wants for as long as that is there; then make room for the rest."""
        while self._end - self._begin >= self._wanted:
            begin, self._begin = self._begin, self._begin + self._wanted
            self._wanted = self._parser.send(self._ahead[begin : self._begin])
        rest = self._ahead[self._begin : self._end]
        if self._wanted > READ_AHEAD // 2:
            self._piece, self._filled = bytearray(self._wanted), len(rest)
            self._piece[: len(rest)] = rest
            self._begin = self._end = 0
        elif self._begin:
            self._ahead[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)

    def _parse(self) -> Generator[int, bytearray, None]:
        """Asks for sizes, is sent pieces, and puts messages together."""
        while True:
            body_length, count = HEAD.unpack((yield HEAD.size))
            lengths = struct.unpack(f"<{count}Q", (yield 8 * count))
            body = yield body_length
            buffers: list[bytearray] = []
            for length in lengths:
                buffers.append((yield length))
            self.messages.put(pickle.loads(body, buffers=buffers))


class AsyncChannel:
    """The front's end. ``send`` never waits, so it may be called while unwinding from a cancellation."""

    def __init__(self, transport: asyncio.WriteTransport, frames: _Frames) -> None:
        self._transport = transport
        self._frames = frames

    @classmethod
    async def open(cls, sock: socket.socket) -> AsyncChannel:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, frames = await loop.create_unix_connection(_Frames, sock=sock)
        return cls(transport, frames)

    def send(self, message: object) -> None:
        """Queue one message. To a peer that has gone it is dropped: ``receive`` tells of that."""
        if not self._transport.is_closing():
            for piece in _encode(message):
                self._transport.write(piece)

    async def drain(self) -> None:
        """Wait until what was sent is mostly on its way, or never will be; for payloads."""
        await self._frames.writable.wait()

    async def receive(self) -> Any:
        """Wait for one message, whose payloads are bytearrays; ChannelClosed at the end of the stream."""
        return await self._frames.messages.get()

    async def close(self) -> None:
        self._transport.close()
        await asyncio.wait({self._frames.closed})
