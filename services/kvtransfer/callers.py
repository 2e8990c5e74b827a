"""A sender's connections to the doors of receivers of its host: as long as one lasts, its pool stays mapped there."""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict

from baton.core.api import SharedPool
from baton.core.errors import TransportUnavailable
from baton.core.types import DevicePool, KvHandshake, LocalDoor
from services.kvtransfer.door import MAX_ANSWER, WELCOME, greeting, is_own_user

MAX_CALLS = 1024


class DoorCalls:
    """Brings ``pool`` to each door once. When a connection ends, it was the receiver's end, or its wish."""

    def __init__(self, epoch: int, host: str, pool: SharedPool | DevicePool, limit: float) -> None:
        """``epoch``: of this worker's life; ``limit``: seconds that a receiver may take to answer."""
        self._epoch = epoch
        self._host = host
        self._pool = pool
        self._limit = limit
        self._calls: OrderedDict[LocalDoor, socket.socket] = OrderedDict()
        self._opening = asyncio.Lock()

    def reaches(self, receiver: KvHandshake) -> bool:
        return receiver.door is not None and receiver.host == self._host

    async def open(self, receiver: KvHandshake) -> None:
        """At once when it is open. TransportUnavailable when the pool was not taken."""
        door = receiver.door
        if door is None:
            raise TransportUnavailable(f"{receiver.worker_id} has no door")
        async with self._opening:
            if door in self._calls:
                self._calls.move_to_end(door)
                return
            self._calls[door] = sock = await self._greet(door)
        asyncio.get_running_loop().add_reader(sock, self._drop, door)  # nothing more is said: it is the end
        while len(self._calls) > MAX_CALLS:
            self._drop(next(iter(self._calls)))

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
            if answer != WELCOME:
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

    def _drop(self, door: LocalDoor) -> None:
        sock = self._calls.pop(door, None)
        if sock is not None:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
