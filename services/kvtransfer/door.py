"""Where senders of the same host bring their pools: a socket without a name in any file system.

A caller proves that it was told to come (the token, which travels in the authenticated handshake), and that it runs on
this host under the same user (it reached the socket, and the kernel says who it is). It hands over the descriptor of
its pool, or what maps a GPU's, and keeps the connection: when that ends, by whatever death, the pool is unmapped. Over
it it may also offer and confirm blocks, where the receiver said so in the handshake.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from baton.core.api import EngineApi, KvReceiverApi
from baton.core.errors import BatonError, InvalidRequest, TransportUnavailable
from baton.core.types import DevicePool, LocalDoor
from baton.engine.sharedpool import MappedPool
from baton.rpc.packets import MAX_PACKET, PacketAnswers, Packets, received

log = logging.getLogger(__name__)

TOKEN_BYTES = 16
GREETING = struct.Struct(f"<{TOKEN_BYTES}sQ")  # token, caller's epoch; the pool's descriptor goes with it, or follows
DEVICE_POOL = struct.Struct("<QQHH")  # what follows: offset, size, lengths of the handle and of the GPU's name
WELCOME = b"welcome"  # how the answer to a greeting begins; that of an older receiver may go on
MAX_ANSWER = 1024
MAX_CALLERS = 1024
TOUCH_BYTES = 4 << 20  # of a caller's pool at a time: some tenths of a millisecond
REST_SECONDS = 1.0  # between two tries of a process that has no descriptor, or no memory, for a caller
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def host_name() -> str:
    """The same for all processes of one running system and different for any other; empty where there is none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def is_own_user(sock: socket.socket) -> bool:
    """Whether the kernel says that the other end belongs to the user of this process."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid == os.getuid()


class Source(NamedTuple):
    """One life of a sender whose pool is mapped."""

    connection: socket.socket
    pool: MappedPool | int  # as this front sees it; a GPU's: as the engine calls it


class PoolDoor:
    """The receiving worker's. Runs on callbacks of the event loop; made by ``open_door``."""

    def __init__(self, engine: EngineApi, listener: socket.socket, address: str) -> None:
        self._engine = engine
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._callers: dict[socket.socket, int | None] = {}  # their epochs, once they have said them
        self._sources: dict[int, Source] = {}
        self._receiver: KvReceiverApi | None = None
        self._answers: dict[socket.socket, PacketAnswers] = {}
        self._rest: asyncio.TimerHandle | None = None
        self._is_short = False  # since the last caller that was let in
        self.invitation = LocalDoor(address, secrets.token_bytes(TOKEN_BYTES))
        self._listen()

    @property
    def sources(self) -> int:
        """Pools that are mapped now."""
        return len(self._sources)

    def source(self, epoch: int) -> Source:
        """TransportUnavailable when that life of a sender is over, or never called."""
        found = self._sources.get(epoch)
        if found is None:
            raise TransportUnavailable(f"door: no pool of epoch {epoch} is mapped")
        return found

    def answer(self, receiver: KvReceiverApi) -> None:
        """Let those who call from now on offer and confirm over their connections."""
        self._receiver = receiver

    def close(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
        self._loop.remove_reader(self._listener)
        for caller in list(self._callers):
            self._leave(caller)

    def _listen(self) -> None:
        self._rest = None
        self._loop.add_reader(self._listener, self._on_call)

    def _on_call(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._pause(error)
            return
        self._is_short = False
        caller.setblocking(False)
        if not is_own_user(caller) or not self._has_room():
            caller.close()
            return
        self._callers[caller] = None
        self._loop.add_reader(caller, self._on_message, caller)

    def _pause(self, error: OSError) -> None:
        """The caller stays in the system's queue, and with it the listener readable: without a pause the loop spins."""
        self._loop.remove_reader(self._listener)
        self._rest = self._loop.call_later(REST_SECONDS, self._listen)
        if not self._is_short:
            log.warning("kv door rests", extra={"error": str(error), "seconds": REST_SECONDS})
        self._is_short = True

    def _has_room(self) -> bool:
        """For one more caller, if need be in the place of who has called the longest without a greeting."""
        if len(self._callers) < MAX_CALLERS:
            return True
        silent = next((caller for caller, epoch in self._callers.items() if epoch is None), None)
        if silent is not None:
            self._leave(silent)
        return silent is not None

    def _on_message(self, caller: socket.socket) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(caller, MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        if not message:
            for fd in fds:  # an empty packet may bring one
                os.close(fd)
            self._leave(caller)
        else:
            self._on_greeting(caller, message, fds)

    def _on_packet(self, caller: socket.socket, answers: PacketAnswers) -> None:
        """From one who has been let in. A descriptor that comes with it is closed by the system."""
        packet = received(caller)
        if packet is None:
            return
        try:
            if packet:
                answers.take(packet)
                return
        except InvalidRequest as error:
            log.warning("kv door", extra={"error": error.message})
        self._leave(caller)

    def _on_greeting(self, caller: socket.socket, message: bytes, fds: list[int]) -> None:
        try:
            self._let_in(caller, message, fds)
            caller.send(WELCOME)
        except (BatonError, OSError) as error:
            with suppress(OSError):
                caller.send(str(error).encode()[:MAX_ANSWER])
            self._leave(caller)
        else:
            if self._receiver is not None:
                self._answers[caller] = answers = PacketAnswers(self._receiver, Packets(caller))
                self._loop.add_reader(caller, self._on_packet, caller, answers)

    def _let_in(self, caller: socket.socket, message: bytes, fds: list[int]) -> None:
        mapped = MappedPool(fds[0]) if fds else None
        try:
            pool = _device_pool(message) if mapped is None else mapped
            if pool is None or (mapped and len(message) != GREETING.size) or self._callers[caller] is not None:
                raise TransportUnavailable("door: the greeting was not understood")
            token, epoch = GREETING.unpack(message[: GREETING.size])
            if not hmac.compare_digest(token, self.invitation.token):
                raise TransportUnavailable("door: the token is not this worker's")
            size = pool.size if isinstance(pool, DevicePool) else pool.view.nbytes
            if not size or size % self._engine.card.format.token_bytes:
                raise TransportUnavailable("door: the pool is not made of this format's tokens")
            earlier = self._sources.get(epoch)
            if earlier is not None:  # its end has just not been seen yet
                self._leave(earlier.connection)
            found = self._engine.attach(pool) if isinstance(pool, DevicePool) else pool
        except BaseException:
            if mapped is not None:
                mapped.unmap()
            raise
        self._callers[caller] = epoch
        self._sources[epoch] = source = Source(caller, found)
        self._loop.call_soon(self._touch, epoch, source, 0)

    def _touch(self, epoch: int, source: Source, begin: int) -> None:
        """Map a caller's pages beside the front's other work, before blocks are copied out of them."""
        pool = source.pool
        if isinstance(pool, MappedPool) and self._sources.get(epoch) is source and begin < len(pool.view):
            self._loop.call_soon(self._touch, epoch, source, pool.touch(begin, TOUCH_BYTES))

    def _leave(self, caller: socket.socket) -> None:
        """The caller has gone, or has to go; nothing of it stays mapped."""
        epoch = self._callers.pop(caller)
        answers = self._answers.pop(caller, None)
        if answers is not None:
            answers.close()
        self._loop.remove_reader(caller)
        caller.close()
        source = self._sources.get(epoch) if epoch is not None else None
        if epoch is not None and source is not None and source.connection is caller:
            del self._sources[epoch]
            if isinstance(source.pool, MappedPool):
                source.pool.unmap()
            else:
                self._engine.detach(source.pool)


def greeting(token: bytes, epoch: int, pool: DevicePool | None = None) -> bytes:
    """What a caller says; without ``pool`` a descriptor goes with it."""
    said = GREETING.pack(token, epoch)
    if pool is None:
        return said
    device = pool.device.encode()
    lengths = DEVICE_POOL.pack(pool.offset, pool.size, len(pool.handle), len(device))
    return said + lengths + pool.handle + device


def _device_pool(message: bytes) -> DevicePool | None:
    """The one that a greeting brings; None where it is not whole."""
    said = message[GREETING.size :]
    if len(said) < DEVICE_POOL.size:
        return None
    offset, size, handle, device = DEVICE_POOL.unpack(said[: DEVICE_POOL.size])
    names = said[DEVICE_POOL.size :]
    if len(names) != handle + device or not handle:
        return None
    return DevicePool(names[:handle], offset, size, names[handle:].decode(errors="replace"))


@contextmanager
def open_door(engine: EngineApi) -> Iterator[PoolDoor]:
    """OSError where the system has no such sockets."""
    address = f"baton-kv-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{address}")
        listener.listen(MAX_CALLERS)
        listener.setblocking(False)
        door = PoolDoor(engine, listener, address)
        try:
            yield door
        finally:
            door.close()
