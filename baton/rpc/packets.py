"""Offers and confirmations between two workers of one host, as packets over the socket that joins them.

A hand-over inside a host takes less time than two gRPC calls. A packet is a kind, the number that the sender gave the
call, and an offer or a confirmation as ``baton.rpc.packed`` writes it, or the ``ErrorDetail`` that the call ended with.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Awaitable
from contextlib import suppress
from enum import IntEnum
from itertools import count
from typing import Final, TypeGuard

from google.protobuf.message import DecodeError

from baton.core.api import KvReceiverApi
from baton.core.errors import BatonError, InvalidRequest, PeerUnavailable
from baton.core.telemetry import log_context
from baton.core.types import KvChunk, KvConfirmation, KvHandshake
from baton.rpc.errors import from_detail, to_detail, unexpected
from baton.rpc.packed import confirmation_of, offer_of, packed_confirmation, packed_offer
from protos.baton.v1 import types_pb2

MAX_PACKET: Final = 64 * 1024  # a larger message takes the usual way
MAX_WAITING: Final = 16 << 20  # bytes that the other end does not take

_HEAD = struct.Struct("<BQ")


class Kind(IntEnum):
    OFFER = 1
    CONFIRM = 2
    CANCEL = 3  # the sender waits for the call's answer no more
    DONE = 4
    REFUSED = 5


def received(sock: socket.socket) -> bytes | None:
    """The next packet; empty when the connection has ended, None when there is none yet."""
    try:
        return sock.recv(MAX_PACKET)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class Packets:
    """What goes out over one socket; what does not fit in now goes when it can. For one event loop."""

    def __init__(self, sock: socket.socket) -> None:
        """``sock`` keeps the bounds of packets (SOCK_SEQPACKET) and does not block."""
        self._sock = sock
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0

    def send(self, packet: bytes) -> None:
        """OSError when the connection has ended, or its other end takes nothing any more."""
        if self._waiting_bytes + len(packet) > MAX_WAITING:
            raise BlockingIOError(f"{self._waiting_bytes} of at most {MAX_WAITING} bytes wait already")
        if not self._waiting and self._went(packet):
            return
        if not self._waiting:
            asyncio.get_running_loop().add_writer(self._sock, self._go_on)
        self._waiting.append(packet)
        self._waiting_bytes += len(packet)

    def end(self) -> None:
        """Before the socket is closed."""
        if self._waiting:
            self._forget_waiting()
            asyncio.get_running_loop().remove_writer(self._sock)

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    def _went(self, packet: bytes) -> bool:
        try:
            self._sock.send(packet)
        except BlockingIOError:
            return False
        return True

    def _go_on(self) -> None:
        try:
            while self._waiting and self._went(self._waiting[0]):
                self._waiting_bytes -= len(self._waiting.popleft())
        except OSError:  # who reads the socket is told, too
            self._forget_waiting()
        if not self._waiting:
            asyncio.get_running_loop().remove_writer(self._sock)


class PacketCalls:
    """A sender's end of one connection. Who watches the socket hands over what came in by ``take``."""

    def __init__(self, packets: Packets, peer: str) -> None:
        """``peer``: for messages."""
        self._packets = packets
        self._peer = peer
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def call(self, kind: Kind, message: bytes) -> asyncio.Future[None]:
        """The packet goes at once. What is returned ends, or fails, as the receiver answers, with PeerUnavailable when
        the connection has ended; cancelling it cancels the call."""
        number = next(self._numbers)
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self._ended(number, answer))
        try:
            self._packets.send(_HEAD.pack(kind, number) + message)
        except OSError as error:
            lost = PeerUnavailable(f"{self._peer}: the connection has ended: {error}")
            lost.__cause__ = error
            answer.set_exception(lost)
        return answer

    def _ended(self, number: int, answer: asyncio.Future[None]) -> None:
        del self._waiting[number]
        if answer.cancelled():
            with suppress(OSError):  # the connection has ended, and the call with it
                self._packets.send(_HEAD.pack(Kind.CANCEL, number))

    def take(self, packet: bytes) -> None:
        """An answer. InvalidRequest when it is none."""
        kind, number, body = _parts(packet)
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():
            return
        if kind is Kind.DONE:
            waiting.set_result(None)
        else:
            waiting.set_exception(_error(body))

    def end(self) -> None:
        """The connection has ended: nobody is to wait for an answer."""
        self._packets.end()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(PeerUnavailable(f"{self._peer}: the connection has ended"))


class PacketReceiver(KvReceiverApi):
    """Another worker of this host, told of offers and confirmations by packets.

    ``usual`` leads to the same worker and takes the rest.
    """

    def __init__(self, calls: PacketCalls, usual: KvReceiverApi) -> None:
        self._calls = calls
        self._usual = usual

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        return await self._usual.handshake(hello)

    def offer(self, chunk: KvChunk) -> Awaitable[None]:
        message = packed_offer(chunk)
        return self._calls.call(Kind.OFFER, message) if _fits(message) else self._usual.offer(chunk)

    def confirm(self, confirmation: KvConfirmation) -> Awaitable[None]:
        message = packed_confirmation(confirmation)
        return self._calls.call(Kind.CONFIRM, message) if _fits(message) else self._usual.confirm(confirmation)


class PacketAnswers:
    """A receiver's end of one connection: ``take`` begins or cancels a call."""

    def __init__(self, receiver: KvReceiverApi, packets: Packets) -> None:
        self._receiver = receiver
        self._packets = packets
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, packet: bytes) -> None:
        """InvalidRequest for what no sender says."""
        kind, number, body = _parts(packet)
        if kind is Kind.CANCEL:
            if number in self._tasks:
                self._tasks[number].cancel()
            return
        if number in self._tasks:
            raise InvalidRequest.out_of_range("packet.number", number, "must not be that of a call under way")
        self._tasks[number] = task = asyncio.create_task(self._answer(kind, number, body))
        task.add_done_callback(lambda _: self._tasks.pop(number))

    def close(self) -> None:
        """The sender has gone: nothing goes on for it."""
        self._packets.end()
        for task in self._tasks.values():
            task.cancel()

    async def _answer(self, kind: Kind, number: int, body: bytes) -> None:
        answer = _HEAD.pack(Kind.DONE, number)
        try:
            await self._carry_out(kind, body)
        except BatonError as error:
            answer = _refusal(number, error)
        except Exception as error:  # noqa: BLE001 - the edge: whoever waits for the answer must not hang
            answer = _refusal(number, unexpected(error, f"packet {number}"))
        with suppress(OSError):  # it has gone; the socket's reader sees that, too
            self._packets.send(answer)

    async def _carry_out(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.OFFER:
            chunk = offer_of(body)
            with log_context(request_id=chunk.ticket.request_id):
                await self._receiver.offer(chunk)
        elif kind is Kind.CONFIRM:
            await self._receiver.confirm(confirmation_of(body))
        else:
            raise InvalidRequest.out_of_range("packet.kind", kind.name, "must be that of a call")


def _fits(message: bytes | None) -> TypeGuard[bytes]:
    return message is not None and len(message) + _HEAD.size <= MAX_PACKET


def _parts(packet: bytes) -> tuple[Kind, int, bytes]:
    try:
        kind, number = _HEAD.unpack_from(packet)
        return Kind(kind), number, packet[_HEAD.size :]
    except (struct.error, ValueError) as error:
        raise InvalidRequest(f"packet: its {len(packet)} bytes begin with no kind and number") from error


def _refusal(number: int, error: BatonError) -> bytes:
    return _HEAD.pack(Kind.REFUSED, number) + to_detail(error).SerializeToString()


def _error(body: bytes) -> BatonError:
    try:
        return from_detail(types_pb2.ErrorDetail.FromString(body))
    except DecodeError:
        return BatonError("the receiver refused, with an answer that means nothing")
