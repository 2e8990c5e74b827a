"""Our own decode attention (src/decode_attention.cu): no plan, equal bytes for every multiprocessor, one launch.

Each row may have a window of its own: its row of the page table then begins with the first block it sees into.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray

from baton.core.errors import ConfigError
from baton.engine.cuda.attention_shape import AttentionShape, PageTable
from baton.engine.cuda.library import CudaLibrary, stream_lookup

_HEAD_DIMS = (64, 128)
_MOST_HEADS_PER_GROUP = 8
_PIECE = 16  # tokens: the least block size
# Shares of two pieces for each of a block's four warps. Smaller ones put more multiprocessors to work on few rows, but
# have more to put together: on an H200 4.8 us instead of 5.5 for one row of 1,024 tokens, and no difference for many.
_LEAST_PIECES = 8

_PREPARE = (c_int, c_int, c_int, c_int, ctypes.POINTER(c_int))
_RUN = (
    *(c_void_p, c_int64, c_void_p, c_void_p, c_int64),  # q, its stride, K, V, stride of blocks
    *(c_void_p,) * 4,  # page table
    *(c_void_p, c_void_p, c_void_p),  # out, parts, arrivals
    *(c_int,) * 7,  # rows, kv_heads, group, head_dim, block_size, kv_bytes, least pieces
    *(c_float, c_float, c_int, c_int, c_void_p),  # scale, v scale, blocks of threads, overlap, stream
)
_QUANTIZE = (c_void_p, c_int64, c_void_p, c_int, c_int, c_void_p)


class SplitDecode:
    """Decode attention of one batch size. Needs no plan, so it serves any lengths with one captured launch."""

    def __init__(
        self,
        shape: AttentionShape,
        rows: int,
        pool: torch.Tensor,
        table: PageTable[torch.Tensor],
        workspace: torch.Tensor,
        library: CudaLibrary,
        *,
        programmatic_launch: bool = True,
        least_pieces: int = _LEAST_PIECES,
    ) -> None:
        """``programmatic_launch`` lets it start, and read older KV, while its predecessor, a kernel, drains.

        What a row sees is what ``table`` names: the window of ``shape`` is not applied.

        Raises ConfigError for a shape that ``supports`` refuses, ValueError for another pool or too little workspace.
        """
        if not self.supports(shape):
            raise ConfigError(
                f"attention: this kernel needs head_dim in {_HEAD_DIMS}, at most {_MOST_HEADS_PER_GROUP} heads per KV "
                f"head and block_size a multiple of {_PIECE}, got {shape.head_dim}, {shape.group}, {shape.block_size}"
            )
        self._shape = shape
        self._rows = rows
        self._table = table
        no_windows = torch.zeros(rows, dtype=torch.int32, device=pool.device)
        self._hidden = no_windows if table.hidden is None else table.hidden
        self._views = shape.layer_views(pool)
        self._block_bytes = pool.stride(0) * pool.element_size()
        self._launch = library.declare("baton_decode_attention", _RUN)
        self._stream = stream_lookup(pool.device)
        self._blocks = self._blocks_of_threads(library, pool.device)
        part_floats = shape.group * shape.head_dim + (2 * shape.group + 3) // 4 * 4
        if self._blocks * 2 * part_floats * 4 > workspace.numel():
            raise ValueError(
                f"workspace: must hold {self._blocks * 2 * part_floats * 4} bytes, got {workspace.numel()}"
            )
        self._parts = workspace
        self._arrivals = torch.zeros(rows * shape.kv_heads, dtype=torch.int32, device=pool.device)
        self._programmatic_launch = int(programmatic_launch)
        self._least_pieces = least_pieces

    @staticmethod
    def supports(shape: AttentionShape) -> bool:
        """Whether the kernel is compiled for the shape."""
        return shape.head_dim in _HEAD_DIMS and shape.group <= _MOST_HEADS_PER_GROUP and shape.block_size % _PIECE == 0

    def plan(self, indptr: NDArray[np.int32]) -> None:
        """Nothing to do: the kernel reads all it needs from the page table on the device."""

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """``q`` and ``out`` bf16 [rows, heads, head_dim]; heads and columns of ``q`` contiguous, rows strided."""
        shape, table = self._shape, self._table
        k, v = self._views[layer]
        scale = shape.kv_scale(layer)
        self._launch(
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            v.data_ptr(),
            self._block_bytes,
            table.indptr.data_ptr(),
            table.indices.data_ptr(),
            table.last_page.data_ptr(),
            self._hidden.data_ptr(),
            out.data_ptr(),
            self._parts.data_ptr(),
            self._arrivals.data_ptr(),
            self._rows,
            shape.kv_heads,
            shape.group,
            shape.head_dim,
            shape.block_size,
            shape.kv_dtype.itemsize,
            self._least_pieces,
            shape.scale * scale.k,
            scale.v,
            self._blocks,
            self._programmatic_launch,
            self._stream(),
        )

    def _blocks_of_threads(self, library: CudaLibrary, device: torch.device) -> int:
        blocks, shape = c_int(), self._shape
        with torch.cuda.device(device):
            library.declare("baton_decode_attention_prepare", _PREPARE)(
                shape.kv_dtype.itemsize, shape.head_dim, shape.group, self._rows, ctypes.byref(blocks)
            )
        return blocks.value


class QueryQuantizer:
    """Casts query rows to e4m3, what is too large to the largest finite value, for kernels that take q in FP8."""

    def __init__(self, library: CudaLibrary, device: torch.device) -> None:
        self._launch = library.declare("baton_quantize_rows", _QUANTIZE)
        self._stream = stream_lookup(device)

    def quantize(self, q: torch.Tensor, out: torch.Tensor) -> None:
        """bf16 ``q`` [rows, width], rows strided, to e4m3 ``out`` [rows, width], contiguous."""
        rows, width = q.shape
        self._launch(q.data_ptr(), q.stride(0), out.data_ptr(), rows, width, self._stream())
