"""Launches of the kernels and copy engines that move KV blocks (``src/block_copy.cu``, ``block_engine.cpp``)."""

from __future__ import annotations

from ctypes import c_int, c_size_t, c_void_p
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.core.types import KvFormat
from baton.engine.cuda.build import CudaUnavailable
from baton.engine.cuda.library import CudaLibrary
from baton.engine.digest import LANES, fits_words

_VECTOR = 16
_KEY_BYTES = 8 * len(LANES)
_BLOCK_BYTES = _KEY_BYTES + 4 + 4 + 1  # of a table, for each block: keys, both ids, and whether the digest is strong


@dataclass(frozen=True, slots=True)
class CopyTable:
    """Which blocks go where, on the device: one run of bytes, keys first, for any number of blocks."""

    address: int
    count: int

    @property
    def keys(self) -> int:
        return self.address

    @property
    def source_ids(self) -> int:
        return self.address + _KEY_BYTES * self.count

    @property
    def target_ids(self) -> int:
        return self.source_ids + 4 * self.count

    @property
    def strong(self) -> int:
        return self.target_ids + 4 * self.count

    @staticmethod
    def bytes_for(count: int) -> int:
        return _BLOCK_BYTES * count


def write_table(
    table: NDArray[np.uint8],
    keys: NDArray[np.uint64],
    source_ids: NDArray[np.int32],
    target_ids: NDArray[np.int32],
    strong: bytes,
) -> int:
    """Lay a table out as ``CopyTable`` finds it; returns its bytes. ``keys`` [count, lanes], the others [count]."""
    at = 0
    for part in (keys, source_ids, target_ids, np.frombuffer(strong, np.uint8)):
        piece = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        table[at : at + piece.size] = piece
        at += piece.size
    return at


class BlockCopier:
    """Blocks of one layout. Nothing here waits or allocates; addresses are of device memory."""

    def __init__(self, library: CudaLibrary, layout: KvFormat) -> None:
        """CudaUnavailable for a layout whose token slots are not made of whole 16-byte vectors."""
        if not fits_words(layout, _VECTOR):
            raise CudaUnavailable(f"KV blocks: a head's token slot must be a multiple of {_VECTOR} bytes, got {layout}")
        self._copy = library.declare("baton_copy_blocks", (*(c_void_p,) * 7, c_int, c_size_t, *(c_int,) * 4, c_void_p))
        self._by_engine = library.declare("baton_copy_blocks_by_engine", (*(c_void_p,) * 4, c_int, c_size_t, c_void_p))
        self._block_bytes = layout.block_bytes
        self._block_size = layout.block_size
        self._slot_bytes = layout.slot_bytes
        self._run_bytes = layout.slot_bytes * layout.block_size

    def launch(
        self,
        table: CopyTable,
        source: int,
        target: int | None,
        digests: int | None,
        filled: int,
        ctas: int,
        stream: int,
        *,
        from_ids: bool = True,
        to_ids: bool = True,
    ) -> None:
        """Blocks at ``source`` to ``target``, by the table's ids; in order where ``from_ids`` or ``to_ids`` is False.

        ``digests``: uint64 [count, lanes], overwritten; None: copy only. ``target`` None: digest only. Of the last
        block ``filled`` token slots are copied and digested; the others are zeroed.
        """
        self._copy(
            source,
            target,
            table.source_ids if from_ids else None,
            table.target_ids if to_ids else None,
            table.keys,
            table.strong,
            digests,
            table.count,
            self._block_bytes,
            self._run_bytes,
            self._slot_bytes,
            0 if filled == self._block_size else filled,
            ctas,
            stream,
        )

    def launch_by_engine(
        self, source: int, target: int, source_ids: NDArray[np.int32], target_ids: NDArray[np.int32], stream: int
    ) -> None:
        """Whole blocks by the copy engines; the ids are read before this returns."""
        self._by_engine(
            source, target, source_ids.ctypes.data, target_ids.ctypes.data, len(source_ids), self._block_bytes, stream
        )
