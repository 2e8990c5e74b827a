"""``BlockCopy`` by ``src/kv_copy.cpp``: bytes are read once, digested in registers and stored past the caches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from baton.engine.blockcopy import DIGEST_BYTES, PLAIN, BlockCopy
from baton.engine.native.build import KV_COPY, NativeUnavailable, build
from baton.engine.native.library import open_kv_copy

LEAST_BYTES, STRIPE_BYTES = 241, 64  # of a block; others are left to ``PlainBlockCopy``

_log = logging.getLogger(__name__)


class NativeBlockCopy:
    """Satisfies ``BlockCopy``. Safe for concurrent calls."""

    def __init__(self, library: Path | None = None) -> None:
        """``library`` is what ``build`` returned for it; by default it is built here. Raises NativeUnavailable."""
        self._library = open_kv_copy(build(name=KV_COPY) if library is None else library)
        self._plain = PLAIN

    def copy(
        self,
        target: memoryview,
        blocks: Sequence[int],
        source: memoryview,
        source_blocks: Sequence[int],
        size: int,
        first_ordinal: int,
    ) -> tuple[bytes, ...]:
        if not _is_taken(size):
            return self._plain.copy(target, blocks, source, source_blocks, size, first_ordinal)
        if len(blocks) != len(source_blocks):
            raise ValueError(f"{len(source_blocks)} blocks cannot be copied into {len(blocks)}")
        into, out_of = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
        to, origins = _numbers(blocks, into.size // size), _numbers(source_blocks, out_of.size // size)
        return self._moved(out_of, origins, size, first_ordinal, into.ctypes.data, to.ctypes.data)

    def digests(self, source: memoryview, blocks: Sequence[int], size: int, first_ordinal: int) -> tuple[bytes, ...]:
        if not _is_taken(size):
            return self._plain.digests(source, blocks, size, first_ordinal)
        out_of = np.frombuffer(source, np.uint8)
        return self._moved(out_of, _numbers(blocks, out_of.size // size), size, first_ordinal)

    def _moved(
        self,
        source: NDArray[np.uint8],
        origins: NDArray[np.uint64],
        size: int,
        first_ordinal: int,
        target: int | None = None,
        to: int | None = None,
    ) -> tuple[bytes, ...]:
        """``target`` and ``to`` are addresses. ctypes lets go of the interpreter's lock for the call."""
        digests = np.empty((origins.size, DIGEST_BYTES), np.uint8)
        refused = self._library.baton_kv_move(
            source.ctypes.data, origins.ctypes.data, target, to, origins.size, size, first_ordinal, digests.ctypes.data
        )
        assert not refused, size
        return tuple(row.tobytes() for row in digests)


def best_block_copy() -> BlockCopy:
    """The native one, or the plain one on a machine without a compiler."""
    try:
        return NativeBlockCopy()
    except NativeUnavailable as error:
        _log.info("KV blocks are copied without native code", extra={"cause": error.message})
        return PLAIN


def _is_taken(size: int) -> bool:
    return size >= LEAST_BYTES and size % STRIPE_BYTES == 0


def _numbers(blocks: Sequence[int], held: int) -> NDArray[np.uint64]:
    """For C, which looks at nothing: ValueError for blocks that the pool of ``held`` has not."""
    if blocks and not 0 <= min(blocks) <= max(blocks) < held:
        raise ValueError(f"blocks {min(blocks)}..{max(blocks)} are outside a pool of {held}")
    return np.array(blocks, np.uint64)
