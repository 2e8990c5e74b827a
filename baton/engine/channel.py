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
from typing import Any

HEAD = struct.Struct("<II")
READ_AHEAD = 1 << 20  # bytes that the asyncio end buffers before it stops reading from the socket


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
        """Wait for one message; ChannelClosed at the end of the stream."""
        body_length, count = HEAD.unpack(self._exactly(HEAD.size))
        lengths = struct.unpack(f"<{count}Q", self._exactly(8 * count))
        body = self._exactly(body_length)
        return pickle.loads(body, buffers=[bytes(self._exactly(length)) for length in lengths])

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


class AsyncChannel:
    """The front's end. ``send`` never waits, so it may be called while unwinding from a cancellation."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> AsyncChannel:
        sock.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=sock, limit=READ_AHEAD))

    def send(self, message: object) -> None:
        """Queue one message. To a peer that has gone it is dropped: ``receive`` tells of that."""
        if not self._writer.is_closing():
            self._writer.writelines(_encode(message))

    async def drain(self) -> None:
        """Wait until what was sent is mostly on its way; for payloads."""
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise ChannelClosed("the engine has gone") from error

    async def receive(self) -> Any:
        """Wait for one message; ChannelClosed at the end of the stream."""
        try:
            body_length, count = HEAD.unpack(await self._reader.readexactly(HEAD.size))
            lengths = struct.unpack(f"<{count}Q", await self._reader.readexactly(8 * count)) if count else ()
            body = await self._reader.readexactly(body_length)
            buffers = [await self._reader.readexactly(length) for length in lengths]
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChannelClosed("the engine has gone") from error
        return pickle.loads(body, buffers=buffers)

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return  # the engine went first
