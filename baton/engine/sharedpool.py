"""A KV pool as memory that other processes of this host may map, and blocks as they stand in it and as they travel.

The pool lies in a memfd: it has no name, so nothing is left of it once the last process that mapped it has ended, by
whatever signal. It is sealed: nobody can shrink it (a reader would be killed by SIGBUS) and, once engine and front have
mapped it, whoever is handed the descriptor can map it for reading only. Linux 5.1 or newer; elsewhere a pool is private
memory. No torch here.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Sequence

from baton.core.errors import TransportUnavailable
from baton.core.types import KvFormat
from baton.engine.blockcopy import xxh3_digest

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034  # <linux/fcntl.h>; the names are not in every Python's fcntl
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # <linux/mman.h>
_SIZE_SEALS = _SEAL_SHRINK | _SEAL_GROW
_SEALS = _SIZE_SEALS | _SEAL_FUTURE_WRITE | _SEAL_SEAL
_STATUS_BLOCK = 512  # bytes, whatever the file system's are

Written = Callable[[Sequence[int]], None]


def _ignore(blocks: Sequence[int]) -> None:
    """For pools whose runner need not know."""


def is_resident(fd: int) -> bool:
    """Whether a pool has all of its pages already."""
    status = os.fstat(fd)
    return status.st_blocks * _STATUS_BLOCK >= status.st_size


class PoolMemory:
    """The owner's memory of one pool, zeroed; ``view`` is all of it, for reading and writing.

    ``on_fill`` is called with blocks that are filled by other means than the runner's. It is not ``seal``ed yet.
    """

    def __init__(self, blocks: int, layout: KvFormat) -> None:
        """Raises OSError where the system has no such memory; MemoryError when it does not fit."""
        self.layout = layout
        self.on_fill: Written = _ignore
        self.fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = blocks * layout.block_bytes
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
            self.view = memoryview(self._map)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SIZE_SEALS)
        except BaseException:
            os.close(self.fd)
            raise

    def populate(self) -> None:
        """Have every page now: the first write to one costs several times what it costs to fill it again.

        MemoryError when they are not there. Does nothing before Linux 5.14.
        """
        try:
            self._map.madvise(MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise MemoryError(str(error)) from error

    def close(self) -> None:
        """The memory itself goes when nothing refers to ``view`` any more."""
        os.close(self.fd)


class MappedPool:
    """Somebody's pool, mapped for reading. Owns ``fd``, from which other processes can be given the same."""

    def __init__(self, fd: int) -> None:
        """TransportUnavailable, with ``fd`` closed, when it is no sealed pool or cannot be mapped."""
        self.fd = fd
        try:
            if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
                raise TransportUnavailable("shared memory: the pool could be changed in size or by others")
            self._map = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise TransportUnavailable(f"shared memory: the pool cannot be mapped: {error}") from error
        except TransportUnavailable:
            os.close(fd)
            raise
        self.view = memoryview(self._map)

    def touch(self, begin: int, size: int) -> int:
        """Have these pages now: whoever reads one for the first time waits longer than its copying takes. Returns where
        to go on, which is the pool's end when nothing is left to do. ``begin`` and ``size`` are whole pages.

        A pool whose owner takes its pages as it needs them is left alone: they would all be taken for it here."""
        end = min(begin + size, len(self.view))
        if not is_resident(self.fd):
            return len(self.view)
        try:
            self._map.madvise(MADV_POPULATE_READ, begin, end - begin)
        except OSError:  # before Linux 5.14 they come one by one
            return len(self.view)
        return end

    def close(self) -> None:
        """Nobody is given it any more. It is unmapped when nothing refers to ``view`` any more, which readers may."""
        fd, self.fd = self.fd, -1
        os.close(fd)

    def unmap(self) -> None:
        """``close``, and nothing can be read any more."""
        self.close()
        self.view.release()
        self._map.close()


class Descriptors:
    """Hands open files from one process to another, in order, beside a channel that says what they are."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(True)

    def send(self, fd: int) -> None:
        """OSError when the other end is gone."""
        socket.send_fds(self._sock, [b"\0"], [fd])

    def receive(self) -> int:
        """The next one; TransportUnavailable when none came."""
        _, received, _, _ = socket.recv_fds(self._sock, 1, 1)
        if not received:
            raise TransportUnavailable("shared memory: no descriptor came")
        return received[0]

    def close(self) -> None:
        self._sock.close()


def shared_pool_memory(blocks: int, layout: KvFormat) -> PoolMemory | None:
    """Memory for a pool that can be shared; None where the system has none."""
    try:
        return PoolMemory(blocks, layout)
    except (OSError, AttributeError):
        return None


def seal(fd: int) -> None:
    """From now on this pool can be mapped for reading only; mappings that there are stay as they are. OSError when it
    is sealed already, or no such memory."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)


def packed_digest(block: memoryview, ordinal: int, layout: KvFormat, filled: int) -> bytes:
    """16 bytes: XXH3 of the ``filled`` slots as they travel, seeded with the block's place in the sequence."""
    return xxh3_digest(packed_block(block, layout, filled), ordinal)


def packed_block(block: memoryview, layout: KvFormat, filled: int) -> bytes | memoryview:
    """One block as it travels: [layers, 2, kv_heads, filled, head_dim]."""
    if filled == layout.block_size:
        return block
    run, kept = layout.slot_bytes * layout.block_size, layout.slot_bytes * filled
    return b"".join(block[start : start + kept] for start in range(0, len(block), run))


def copy_block(source: memoryview, target: memoryview, layout: KvFormat, filled: int) -> None:
    """The ``filled`` slots of one block; the others are zeroed."""
    if filled == layout.block_size:
        target[:] = source
    else:
        _copy_slots(target, source, layout, filled)


def spread_block(packed: memoryview, target: memoryview, layout: KvFormat, filled: int) -> None:
    """The opposite of ``packed_block``, into a block; the slots that did not travel are zeroed."""
    run, kept = layout.slot_bytes * layout.block_size, layout.slot_bytes * filled
    target[:] = bytes(len(target))
    for index, start in enumerate(range(0, len(target), run)):
        target[start : start + kept] = packed[index * kept : (index + 1) * kept]


def _copy_slots(target: memoryview, source: memoryview, layout: KvFormat, filled: int) -> None:
    run, kept = layout.slot_bytes * layout.block_size, layout.slot_bytes * filled
    target[:] = bytes(len(target))
    for start in range(0, len(target), run):
        target[start : start + kept] = source[start : start + kept]
