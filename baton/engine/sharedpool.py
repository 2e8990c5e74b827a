"""A KV pool as memory that other processes of this host may map, and blocks copied out of their pools into ours.

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
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise

from baton.core.errors import TransportUnavailable
from baton.core.types import KvFormat
from baton.engine.blockcopy import PLAIN, BlockCopy, xxh3_digest

SHARE_BYTES = 8 << 20  # at least, of a pull that several threads share: to wake one takes as long as to copy 2 MiB

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034  # <linux/fcntl.h>; the names are not in every Python's fcntl
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
MADV_POPULATE_WRITE = 23  # <linux/mman.h>
_SIZE_SEALS = _SEAL_SHRINK | _SEAL_GROW
_SEALS = _SIZE_SEALS | _SEAL_FUTURE_WRITE | _SEAL_SEAL

Written = Callable[[Sequence[int]], None]


def _ignore(blocks: Sequence[int]) -> None:
    """For pools whose runner need not know."""


class PoolMemory:
    """The owner's memory of one pool, zeroed; ``view`` is all of it, for reading and writing.

    ``on_fill`` is called with blocks that are filled by other means than the runner's. It is not ``seal``ed yet.
    """

    def __init__(self, blocks: int, layout: KvFormat, threads: int = 1, block_copy: BlockCopy = PLAIN) -> None:
        """``threads`` copy, by ``block_copy``.

        Raises OSError where the system has no such memory; MemoryError when it does not fit.
        """
        self.layout = layout
        self._threads = threads
        self._block_copy = block_copy
        # None is started before the first large pull, of which the caller's thread takes a share itself.
        self._copying = ThreadPoolExecutor(max(1, threads - 1), "kv-copy")
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
        self._copying.shutdown()

    def pull(
        self, blocks: Sequence[int], source: memoryview, source_blocks: Sequence[int], first_ordinal: int, filled: int
    ) -> tuple[bytes, ...]:
        """Copy ``source_blocks`` of another pool into ``blocks``; a digest of each as it is stored now.

        ``first_ordinal`` is the first one's place in its sequence; of the last one ``filled`` slots are copied, and the
        others zeroed.
        """
        self.on_fill(blocks)
        if filled == self.layout.block_size:
            return self._copied(blocks, source, source_blocks, first_ordinal)
        whole = self._copied(blocks[:-1], source, source_blocks[:-1], first_ordinal)
        size, last = self.layout.block_bytes, first_ordinal + len(blocks) - 1
        target = self.view[blocks[-1] * size : (blocks[-1] + 1) * size]
        _copy_slots(target, source[source_blocks[-1] * size : (source_blocks[-1] + 1) * size], self.layout, filled)
        return (*whole, packed_digest(target, last, self.layout, filled))

    def _copied(
        self, blocks: Sequence[int], source: memoryview, source_blocks: Sequence[int], first_ordinal: int
    ) -> tuple[bytes, ...]:
        """Whole blocks, by several threads if that is worth their while."""
        size = self.layout.block_bytes

        def copy(begin: int, end: int) -> tuple[bytes, ...]:
            into, out_of = blocks[begin:end], source_blocks[begin:end]
            return self._block_copy.copy(self.view, into, source, out_of, size, first_ordinal + begin)

        shares = min(self._threads, len(blocks) * size // SHARE_BYTES)
        if shares < 2:
            return copy(0, len(blocks))
        bounds = [len(blocks) * share // shares for share in range(shares + 1)]
        others = [self._copying.submit(copy, *ends) for ends in pairwise(bounds[1:])]
        own = copy(*bounds[:2])
        return tuple(chain(own, *(other.result() for other in others)))


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


class PeerPools:
    """The pools of other workers that an engine may copy from, by the numbers that its front gave them."""

    def __init__(self, descriptors: Descriptors | None) -> None:
        self._descriptors = descriptors
        self._pools: dict[int, MappedPool] = {}

    def attach(self, source: int) -> None:
        """Map the pool whose descriptor is next. One that cannot be mapped is missing when it is copied from."""
        if self._descriptors is None:
            return
        try:
            self._pools[source] = MappedPool(self._descriptors.receive())
        except TransportUnavailable:
            self.detach(source)

    def detach(self, source: int) -> None:
        pool = self._pools.pop(source, None)
        if pool is not None:
            pool.unmap()

    def pull(
        self,
        memory: PoolMemory | None,
        blocks: Sequence[int],
        source: int,
        source_blocks: Sequence[int],
        first_ordinal: int,
        filled: int,
    ) -> tuple[bytes, ...]:
        """See ``PoolMemory.pull``. TransportUnavailable when there is no such pool, or none of our own to copy into."""
        pool = self._pools.get(source)
        if memory is None or pool is None:
            raise TransportUnavailable(f"shared memory: pool {source} is not mapped here")
        layout = memory.layout
        held = len(pool.view) // layout.block_bytes
        if not all(0 <= block < held for block in source_blocks) or not 0 < filled <= layout.block_size:
            raise TransportUnavailable(f"shared memory: pool {source} has {held} blocks, others were named")
        return memory.pull(blocks, pool.view, source_blocks, first_ordinal, filled)

    def close(self) -> None:
        for source in list(self._pools):
            self.detach(source)


def shared_pool_memory(
    blocks: int, layout: KvFormat, threads: int = 1, block_copy: BlockCopy = PLAIN
) -> PoolMemory | None:
    """Memory for a pool that can be shared; None where the system has none."""
    try:
        return PoolMemory(blocks, layout, threads, block_copy)
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
