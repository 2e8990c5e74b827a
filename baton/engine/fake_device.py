"""A device without a device: the torch-free twin of ``baton.engine.cuda.copies``, over memory that processes can map.

A copy is made when it is asked whether it is done, as late as can be, so blocks that are given away too early are seen
to be wrong. A pool's handle names a memfd of a process; like a GPU's it cannot be opened any more once that process is
dead, while what was mapped before stays readable. A pair of communicators is a local socket.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from baton.core.errors import TransportUnavailable
from baton.core.types import DevicePool, KvFormat
from baton.engine.device_copies import SLOT_BYTES, Copy, PoolMapping, Span
from baton.engine.digest import block_digest
from baton.engine.sharedpool import MappedPool, PoolMemory, copy_block, seal

DEVICE = "fake"
SLOTS = 2

_HANDLE = struct.Struct("<qq")  # process id, file descriptor


def _never() -> bool:
    return False


class FakeCopies:
    """Satisfies ``DeviceCopies`` over ``memory``. ``is_held`` True: no copy ends, as on a device that is busy."""

    def __init__(
        self,
        memory: PoolMemory,
        on_written: Callable[[Sequence[int]], None],
        is_held: Callable[[], bool] = _never,
    ) -> None:
        self.memory = memory
        self.fences = 0
        self.communicators = FakeCommunicators(self)
        self.is_held = is_held
        self._on_written = on_written
        self._begun: list[FakeCopy] = []
        size = memory.view.nbytes
        seal(memory.fd)
        self.pool = DevicePool(_HANDLE.pack(os.getpid(), memory.fd), 0, size, DEVICE)

    def open(self, pool: DevicePool) -> FakeMapping:
        if pool.device != DEVICE or len(pool.handle) != _HANDLE.size:
            raise TransportUnavailable(f"fake device: {pool.device} cannot be mapped here")
        pid, fd = _HANDLE.unpack(pool.handle)
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TransportUnavailable(f"fake device: the pool cannot be mapped: {error}") from error
        return FakeMapping(MappedPool(opened), self.memory.layout)

    def pull(self, blocks: Sequence[int], source: PoolMapping, source_blocks: Sequence[int], span: Span) -> Copy:
        assert isinstance(source, FakeMapping)
        return self.begin(lambda: self._fill(blocks, source.pool.view, source_blocks, span))

    def digest(self, blocks: Sequence[int], span: Span) -> Copy:
        return self.begin(lambda: digests_of(self.memory.view, blocks, span, self.memory.layout))

    def fence(self) -> None:
        """What has begun ends here, since steps follow."""
        self.fences += 1
        for copy in self._begun:
            copy.finish()
        self._begun.clear()

    def drain(self) -> None:
        """None ends by itself."""

    def close(self) -> None:
        self.memory.close()

    def begin(self, make: Callable[[], bytes]) -> FakeCopy:
        self._begun = [copy for copy in self._begun if not copy.is_finished]
        copy = FakeCopy(make, self.is_held)
        self._begun.append(copy)
        return copy

    def _fill(self, blocks: Sequence[int], source: memoryview, source_blocks: Sequence[int], span: Span) -> bytes:
        layout, size = self.memory.layout, self.memory.layout.block_bytes
        self._on_written(blocks)
        for index, (block, origin) in enumerate(zip(blocks, source_blocks, strict=True)):
            target = self.memory.view[block * size : (block + 1) * size]
            slots = span.filled if index == span.count - 1 else layout.block_size
            copy_block(source[origin * size : (origin + 1) * size], target, layout, slots)
        return digests_of(self.memory.view, blocks, span, layout)

    def unpack(self, blocks: Sequence[int], staged: memoryview, span: Span) -> FakeCopy:
        return self.begin(lambda: self._fill(blocks, staged, range(span.count), span))


class FakeMapping:
    """Satisfies ``PoolMapping``."""

    def __init__(self, pool: MappedPool, layout: KvFormat) -> None:
        self.pool = pool
        self.blocks = pool.view.nbytes // layout.block_bytes

    def close(self) -> None:
        self.pool.unmap()


class FakeCopy:
    """Satisfies ``Copy``."""

    def __init__(self, make: Callable[[], bytes], is_held: Callable[[], bool]) -> None:
        self._make = make
        self._is_held = is_held
        self._digests = b""
        self.is_finished = False

    def is_done(self) -> bool:
        if not self._is_held():
            self.finish()
        return self.is_finished

    def finish(self) -> None:
        if not self.is_finished:
            self._digests = self._make()
            self.is_finished = True

    def digests(self) -> bytes:
        return self._digests


def digests_of(view: memoryview, blocks: Sequence[int], span: Span, layout: KvFormat) -> bytes:
    size, last = layout.block_bytes, span.count - 1
    return b"".join(
        block_digest(
            view[block * size : (block + 1) * size],
            span.first_ordinal + index,
            layout,
            span.filled if index == last else layout.block_size,
            is_strong=bool(span.strong[index]),
        )
        for index, block in enumerate(blocks)
    )


class FakeCommunicators:
    """Satisfies ``Communicators``."""

    def __init__(self, copies: FakeCopies) -> None:
        self._copies = copies
        self._listeners: dict[bytes, socket.socket] = {}

    def invite(self) -> bytes:
        invitation = f"baton-link-{secrets.token_hex(16)}".encode()
        listener = _local_socket()
        listener.bind(b"\0" + invitation)
        listener.listen(1)
        self._listeners[invitation] = listener
        return invitation

    def join(self, invitation: bytes, rank: int) -> FakeCommunicator:
        listener = self._listeners.pop(invitation, None) if rank == 0 else None
        if rank == 0 and listener is None:
            raise TransportUnavailable("fake communicator: this engine did not invite")
        return FakeCommunicator(self._copies, invitation, listener)


class FakeCommunicator:
    """Satisfies ``Communicator``; rank 0 is the one with a ``listener``."""

    slots = SLOTS
    slot_bytes = SLOT_BYTES

    def __init__(self, copies: FakeCopies, invitation: bytes, listener: socket.socket | None) -> None:
        self._copies = copies
        self._invitation = invitation
        self._listener = listener
        self._size = copies.memory.layout.block_bytes
        self._slots = [memoryview(bytearray(self.slot_bytes)) for _ in range(self.slots)]
        self._connection: socket.socket | None = None
        self._moves: deque[tuple[memoryview, bool]] = deque()  # what is left of each, and whether it goes out
        self._begun = self.done = 0
        self.is_aborted = False

    def is_settled(self) -> bool:
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._move()
        except BlockingIOError:
            return self._connection is not None
        except OSError as error:
            raise TransportUnavailable(f"fake communicator: {error}") from error
        return True

    def pack(self, slot: int, blocks: Sequence[int], span: Span) -> FakeCopy:
        def gather() -> bytes:
            for index, block in enumerate(blocks):
                whole = self._copies.memory.view[block * self._size : (block + 1) * self._size]
                self._slots[slot][index * self._size : (index + 1) * self._size] = whole
            return digests_of(self._slots[slot], range(span.count), span, self._copies.memory.layout)

        return self._copies.begin(gather)

    def unpack(self, slot: int, blocks: Sequence[int], span: Span) -> FakeCopy:
        return self._copies.unpack(blocks, self._slots[slot], span)

    def send(self, slot: int, size: int) -> None:
        self._begin(self._slots[slot][:size], is_sent=True)

    def receive(self, slot: int, size: int) -> None:
        self._begin(self._slots[slot][:size], is_sent=False)

    def mark(self) -> FakeMark:
        return FakeMark(self, self._begun)

    def abort(self) -> None:
        self.is_aborted = True
        for sock in (self._listener, self._connection):
            if sock is not None:
                sock.close()

    def _begin(self, view: memoryview, *, is_sent: bool) -> None:
        self._moves.append((view, is_sent))
        self._begun += 1

    def _connect(self) -> socket.socket:
        if self._listener is not None:
            connection, _ = self._listener.accept()
            self._listener.close()
            connection.setblocking(False)
            return connection
        connection = _local_socket()
        connection.connect(b"\0" + self._invitation)
        return connection

    def _move(self) -> None:
        """As far as it goes now. OSError when the other end is gone."""
        assert self._connection is not None
        while self._moves:
            view, is_sent = self._moves[0]
            count = self._connection.send(view) if is_sent else self._connection.recv_into(view)
            if not count:
                raise ConnectionResetError("the other end has gone")
            if count == view.nbytes:
                self._moves.popleft()
                self.done += 1
            else:
                self._moves[0] = (view[count:], is_sent)


class FakeMark:
    """Satisfies ``Mark``."""

    def __init__(self, communicator: FakeCommunicator, number: int) -> None:
        self._communicator = communicator
        self._number = number

    def is_done(self) -> bool:
        return self._communicator.done >= self._number


def _local_socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock
