"""Launches of the kernels and copy engines that move KV blocks (``src/block_copy.cu``, ``block_engine.cpp``)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int, c_size_t, c_void_p
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.core.types import KvFormat
from baton.engine.cuda.build import CudaUnavailable
from baton.engine.cuda.library import CudaLibrary
from baton.engine.device_copies import Span
from baton.engine.digest import fits_words

_VECTOR = 16
_ID_BYTES = 4
_BLOCK_BYTES = 2 * _ID_BYTES + 1  # of a table, for each block: both ids, and whether the digest is strong


@dataclass(frozen=True, slots=True)
class CopyTable:
    """Which blocks go where, on the device: one run of bytes, with room for ``room`` blocks."""

    address: int
    room: int

    @property
    def source_ids(self) -> int:
        return self.address

    @property
    def target_ids(self) -> int:
        return self.address + _ID_BYTES * self.room

    @property
    def strong(self) -> int:
        return self.address + 2 * _ID_BYTES * self.room

    @staticmethod
    def bytes_for(room: int) -> int:
        return _BLOCK_BYTES * room


class HostTable:
    """A ``CopyTable`` before its upload. The views are made once: a copy of a few blocks takes less time than they."""

    def __init__(self, table: NDArray[np.uint8], room: int) -> None:
        """``table``: ``CopyTable.bytes_for(room)`` bytes."""
        ids = table[: 2 * _ID_BYTES * room].view(np.int32)
        self._source_ids, self._target_ids = ids[:room], ids[room:]
        self._strong = table[2 * _ID_BYTES * room :]

    def write(self, source_ids: Sequence[int] | None, target_ids: Sequence[int] | None, strong: bytes) -> None:
        """Ids None: in order, which the table need not say."""
        count = len(strong)
        if source_ids is not None:
            self._source_ids[:count] = source_ids
        if target_ids is not None:
            self._target_ids[:count] = target_ids
        self._strong[:count] = np.frombuffer(strong, np.uint8)


class BlockCopier:
    """Blocks of one layout. Nothing here waits or allocates; addresses are of device memory."""

    def __init__(self, library: CudaLibrary, layout: KvFormat) -> None:
        """CudaUnavailable for a layout whose token slots are not made of whole 16-byte vectors."""
        if not fits_words(layout, _VECTOR):
            raise CudaUnavailable(f"KV blocks: a head's token slot must be a multiple of {_VECTOR} bytes, got {layout}")
        sizes = (c_int, c_int, c_size_t, *(c_int,) * 4)
        self._copy = library.declare("baton_copy_blocks", (*(c_void_p,) * 6, *sizes, c_void_p))
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
        span: Span,
        ctas: int,
        stream: int,
        *,
        from_ids: bool = True,
        to_ids: bool = True,
    ) -> None:
        """The span's blocks at ``source`` to ``target`` by the table's ids; in order where ``from_ids`` or ``to_ids``
        is False.

        ``digests``: uint64 [count, lanes], overwritten; None: copy only. ``target`` None: digest only. Of the last
        block only the filled token slots are copied and digested; the others are zeroed.
        """
        self._copy(
            source,
            target,
            table.source_ids if from_ids else None,
            table.target_ids if to_ids else None,
            table.strong,
            digests,
            span.count,
            span.first_ordinal,
            self._block_bytes,
            self._run_bytes,
            self._slot_bytes,
            0 if span.filled == self._block_size else span.filled,
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
