"""A worker's own KV pool in the hands of its front, which reads blocks there and fills them with what came by wire."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

from baton.core.errors import TransferRejected, TransportUnavailable
from baton.core.types import KvFormat
from baton.engine.native.block_copy import best_block_copy
from baton.engine.sharedpool import MADV_POPULATE_WRITE, copy_block, is_resident, packed_digest, seal, spread_block


class OwnPool:
    """Satisfies ``baton.core.api.SharedPool``. Owns ``fd``, from which other processes can be given the pool.

    This mapping is the last one for writing: whoever is given the pool afterwards can only read it. Where the engine
    has all pages, they are mapped at once: the first write to one here would cost three times what it costs to fill it.
    """

    def __init__(self, fd: int, layout: KvFormat) -> None:
        """TransportUnavailable, with ``fd`` closed, when it cannot be mapped."""
        self.fd = fd
        self._layout = layout
        self._block_copy = best_block_copy()
        try:
            has_pages = is_resident(fd)
            self._map = mmap.mmap(fd, os.fstat(fd).st_size)
            seal(fd)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise TransportUnavailable(f"shared memory: the engine's pool cannot be mapped: {error}") from error
        if has_pages:
            with suppress(OSError):  # before Linux 5.14 they come one by one
                self._map.madvise(MADV_POPULATE_WRITE)
        self._blocks = memoryview(self._map)
        self.view = self._blocks.toreadonly()

    def fill(
        self, blocks: Sequence[int], payload: bytes | memoryview, first_ordinal: int, filled: int
    ) -> tuple[bytes, ...]:
        """Copy ``payload``, blocks as they travel, into ``blocks``; a digest of each as it is stored now.

        ``first_ordinal`` is the first one's place in its sequence; the last one has ``filled`` slots, and gets zeros in
        the others. TransferRejected, with nothing written, when the payload is no such blocks. Other threads go on
        meanwhile.
        """
        layout, size, data = self._layout, self._layout.block_bytes, memoryview(payload)
        expected = (len(blocks) - 1) * size + filled * layout.token_bytes
        if not 0 < filled <= layout.block_size or len(data) != expected:
            raise TransferRejected(
                f"payload: {len(blocks)} blocks, {filled} slots of the last, are {expected} bytes, got {len(data)}"
            )
        whole = blocks if filled == layout.block_size else blocks[:-1]
        cut = len(whole) * size
        digests: tuple[bytes, ...] = ()
        if whole:
            digests = self._block_copy.copy(self._blocks, whole, data[:cut], range(len(whole)), size, first_ordinal)
        if len(whole) == len(blocks):
            return digests
        last = self._blocks[blocks[-1] * size : (blocks[-1] + 1) * size]
        spread_block(data[cut:], last, layout, filled)
        return (*digests, packed_digest(last, first_ordinal + len(whole), layout, filled))

    def copy(
        self,
        blocks: Sequence[int],
        source: memoryview,
        source_blocks: Sequence[int],
        first_ordinal: int,
        filled: int,
    ) -> tuple[bytes, ...]:
        """As ``fill``, out of ``source_blocks`` of a whole pool of this layout. TransportUnavailable, with nothing
        written, for blocks that it has not."""
        layout, size = self._layout, self._layout.block_bytes
        held = len(source) // size
        if not 0 < filled <= layout.block_size or not all(0 <= block < held for block in source_blocks):
            raise TransportUnavailable(f"shared memory: the pool has {held} blocks, others were named")
        whole = len(blocks) if filled == layout.block_size else len(blocks) - 1
        digests: tuple[bytes, ...] = ()
        if whole:
            into, out_of = blocks[:whole], source_blocks[:whole]
            digests = self._block_copy.copy(self._blocks, into, source, out_of, size, first_ordinal)
        if whole == len(blocks):
            return digests
        last, origin = (
            view[number * size : (number + 1) * size]
            for view, number in ((self._blocks, blocks[-1]), (source, source_blocks[-1]))
        )
        copy_block(origin, last, layout, filled)
        return (*digests, packed_digest(last, first_ordinal + whole, layout, filled))

    def close(self) -> None:
        """Nobody is given it any more. It is unmapped when nothing refers to ``view`` any more, which readers may."""
        fd, self.fd = self.fd, -1
        os.close(fd)
