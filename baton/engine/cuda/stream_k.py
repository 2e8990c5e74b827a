"""Matrix products of some ten to some hundred rows (``src/stream_k.cu``): equal work for every multiprocessor."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p
from dataclasses import dataclass

import torch

from baton.engine.cuda.kernels import Overlap
from baton.engine.cuda.library import CudaLibrary, stream_lookup

FEWEST_ROWS = 17
_WIDEST = 256
_TILE_WEIGHTS = 128


@dataclass(frozen=True, slots=True)
class StreamKShape:
    """A tile is 128 weight rows by ``columns`` rows of x; ``cluster`` blocks share what they read of x."""

    columns: int
    cluster: int


class StreamK:
    """Launches the kernels of ``src/stream_k.cu`` on torch's current stream; no allocation, no synchronisation.

    With overlap the weights are read while the kernel before may still run: they must not be its output. The workspace
    is one product's at a time: all calls must be on one stream, or in graphs that run on one.
    """

    def __init__(self, library: CudaLibrary, device: torch.device, overlap: Overlap = Overlap.YES) -> None:
        """Raises CudaUnavailable when ``device`` is no GPU or ``library`` lacks the kernels."""
        self._stream = stream_lookup(device)
        self._overlap = int(overlap)
        self._launch = library.declare("baton_stream_k", (*(c_int,) * 3, *(c_void_p,) * 9, *(c_int,) * 3, c_void_p))
        encode = c_void_p()
        with torch.cuda.device(device):
            library.declare("baton_stream_k_prepare", (ctypes.POINTER(c_void_p),))(ctypes.byref(encode))
            self._variants = _variants(library)
        self._encode = encode.value
        most = max(blocks for _, blocks in self._variants.values())
        self._parts = torch.empty(most * _TILE_WEIGHTS * _WIDEST, dtype=torch.float32, device=device)
        self._ready = torch.zeros(most * 2, dtype=torch.int32, device=device)
        self._parts_address, self._ready_address = self._parts.data_ptr(), self._ready.data_ptr()

    def shapes(self, rows: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> list[StreamKShape]:
        """The shapes worth trying for operands of ``dtype``; none where rows are too few, or rows of an operand are no
        multiple of 16 bytes, or n none of 8."""
        if rows < FEWEST_ROWS or n % 8 or k * dtype.itemsize % 16:
            return []
        return [
            shape
            for shape, value_bytes in self._variants
            if value_bytes == dtype.itemsize
            and shape.columns < 2 * rows
            and (rows <= 4 * shape.columns or shape.columns == _WIDEST)
        ]

    def run(
        self,
        shape: StreamKShape,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
    ) -> None:
        """out [M, N] = x [M, K] @ weight [N, K]^T (+ bias [N]); all contiguous, bf16.

        x and weight may be e4m3, with ``x_scale`` [M] and ``weight_scale`` [N], float32. The product is rounded to bf16
        before the bias is added. Raises CudaFailed when the sizes do not suit.
        """
        n, k = weight.shape
        index, blocks = self._variants[shape, weight.element_size()]
        self._launch(
            index,
            blocks,
            self._overlap,
            self._encode,
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if x_scale is None else x_scale.data_ptr(),
            None if weight_scale is None else weight_scale.data_ptr(),
            out.data_ptr(),
            self._parts_address,
            self._ready_address,
            x.shape[0],
            n,
            k,
            self._stream(),
        )


def _variants(library: CudaLibrary) -> dict[tuple[StreamKShape, int], tuple[int, int]]:
    """The index and the number of blocks of every kernel that the library has and the device can run, by shape and the
    bytes of an operand's value."""
    describe = library.declare("baton_stream_k_variant", (c_int, ctypes.POINTER(c_int)))
    count_blocks = library.declare("baton_stream_k_blocks", (c_int, ctypes.POINTER(c_int)))
    variants: dict[tuple[StreamKShape, int], tuple[int, int]] = {}
    shape, blocks, index = (c_int * 3)(), c_int(), 0
    describe(index, shape)
    while shape[0]:
        count_blocks(index, ctypes.byref(blocks))
        if blocks.value:
            variants[StreamKShape(shape[0], shape[1]), shape[2]] = (index, blocks.value)
        index += 1
        describe(index, shape)
    return variants
