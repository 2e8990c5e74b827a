"""A sender's connections to the doors of receivers of its host: as long as one lasts, its pool stays mapped there, and
offers may take the short way."""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakValueDictionary

from baton.core.api import KvReceiverApi, SharedPool
from baton.core.errors import InvalidRequest, TransportUnavailable
from baton.core.types import DevicePool, KvHandshake, LocalDoor
from baton.rpc.packets import PacketCalls, PacketReceiver, Packets, received
from services.kvtransfer.door import MAX_ANSWER, WELCOME, greeting, is_own_user
from services.kvtransfer.handshake import LOCAL_PACKETS

MAX_CALLS = 1024


@dataclass(frozen=True, slots=True)
class _Connection:
    sock: socket.socket
    packets: PacketCalls


class DoorCalls:
    """Brings ``pool`` to each door once. When a connection ends, it was the receiver's end, or its wish."""

    def __init__(self, epoch: int, host: str, pool: SharedPool | DevicePool, limit: float) -> None:
        """``epoch``: of this worker's life; ``limit``: seconds that a receiver may take to answer."""
        self._epoch = epoch
        self._host = host
        self._pool = pool
        self._limit = limit
        self._calls: OrderedDict[LocalDoor, _Connection] = OrderedDict()
        # One for each door that is being opened: a receiver that does not answer keeps nobody from another one's.
        self._opening = WeakValueDictionary[LocalDoor, asyncio.Lock]()

    def reaches(self, receiver: KvHandshake) -> bool:
        return receiver.door is not None and receiver.host == self._host

    async def open(self, receiver: KvHandshake) -> None:
        """At once when it is open. TransportUnavailable when the pool was not taken."""
        door = receiver.door
        if door is None:
            raise TransportUnavailable(f"{receiver.worker_id} has no door")
        if door in self._calls:
            self._calls.move_to_end(door)
            return
        async with self._opening.setdefault(door, asyncio.Lock()):
            if door in self._calls:  # another one's call has opened it meanwhile
                return
            sock = await self._greet(door)
            connection = _Connection(sock, PacketCalls(Packets(sock), receiver.worker_id))
            self._calls[door] = connection
        asyncio.get_running_loop().add_reader(sock, self._on_packet, door, connection)
        while len(self._calls) > MAX_CALLS:
            self._drop(next(iter(self._calls)))

    def receiver(self, hello: KvHandshake, usual: KvReceiverApi) -> KvReceiverApi:
        """Who takes offers to the receiver that says ``hello``: ``usual``, or the same one by an open connection."""
        connection = None if hello.door is None else self._calls.get(hello.door)
        if connection is None or LOCAL_PACKETS not in hello.features:
            return usual
        return PacketReceiver(connection.packets, usual)

    def close(self) -> None:
        for door in list(self._calls):
            self._drop(door)

    async def _greet(self, door: LocalDoor) -> socket.socket:
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(self._limit):
                await loop.sock_connect(sock, f"\0{door.address}")
                if not is_own_user(sock):
                    raise TransportUnavailable("the door belongs to another user")
                self._say(sock, door)
                answer = await loop.sock_recv(sock, MAX_ANSWER)
            if not answer.startswith(WELCOME):
                raise TransportUnavailable(answer.decode(errors="replace") or "the door was shut")
        except (OSError, TimeoutError) as error:
            sock.close()
            raise TransportUnavailable(f"the door cannot be reached: {error!r}") from error
        except BaseException:
            sock.close()
            raise
        return sock

    def _say(self, sock: socket.socket, door: LocalDoor) -> None:
        if isinstance(self._pool, DevicePool):
            sock.send(greeting(door.token, self._epoch, self._pool))
        else:
            socket.send_fds(sock, [greeting(door.token, self._epoch)], [self._pool.fd])

    def _on_packet(self, door: LocalDoor, connection: _Connection) -> None:
        packet = received(connection.sock)
        if packet is None:
            return
        try:
            if packet:
                connection.packets.take(packet)
                return
        except InvalidRequest:
            pass  # not a receiver that can be understood
        self._drop(door)

    def _drop(self, door: LocalDoor) -> None:
        connection = self._calls.pop(door, None)
        if connection is not None:
            asyncio.get_running_loop().remove_reader(connection.sock)
            connection.packets.end()
            connection.sock.close()
