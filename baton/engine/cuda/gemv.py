"""Matrix products of 1 to 16 rows (``src/gemv.cu``), with what surrounds them in a decoder layer fused in."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from enum import IntEnum

import torch

from baton.engine.cuda.kernels import Overlap
from baton.engine.cuda.library import CudaLibrary, stream_lookup

MAX_ROWS = 16
_MOST_RESIDENT = 4


class Epilogue(IntEnum):
    """What becomes of a product. ADD adds it to what ``out`` holds."""

    STORE = 0
    ADD = 1
    SILU_MUL = 2


@dataclass(frozen=True, slots=True)
class GemvShape:
    """How a block is cut, and how many blocks run at a time on one multiprocessor."""

    k_warps: int  # share k
    columns: int  # groups of 8 weight rows in one tile; even for SILU_MUL
    unroll: int  # 16-byte loads that a lane issues at a time
    resident: int  # blocks on a multiprocessor


@dataclass(frozen=True, slots=True)
class Norm:
    """The RMS norm that comes before a product."""

    gain: torch.Tensor  # bf16 [k]
    eps: float


class Gemv:
    """Launches the kernels of ``src/gemv.cu`` on torch's current stream; no allocation, no synchronisation.

    With overlap the weights are read while the kernel before may still run: they must not be its output.
    """

    def __init__(self, library: CudaLibrary, device: torch.device, overlap: Overlap = Overlap.YES) -> None:
        """Raises CudaUnavailable when ``device`` is no GPU or ``library`` lacks the kernels."""
        self._stream = stream_lookup(device)
        self._overlap = int(overlap)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._launch = library.declare(
            "baton_gemv", (*(c_int,) * 5, c_void_p, c_void_p, c_float, *(c_void_p,) * 4, *(c_int,) * 3, c_void_p)
        )
        self._occupancy = library.declare("baton_gemv_occupancy", (*(c_int,) * 5, ctypes.POINTER(c_int)))
        with torch.cuda.device(device):
            library.declare("baton_gemv_prepare", ())()
        self._variants = _variants(library)

    def shapes(self, rows: int, k: int, epilogue: Epilogue, weight_dtype: torch.dtype) -> list[GemvShape]:
        """Every shape that can compute such a product; none when the rows do not fit on the chip.

        A norm may come before it, except with ADD.
        """
        values = 16 // weight_dtype.itemsize
        if not 1 <= rows <= MAX_ROWS or k % values:
            return []
        found: list[GemvShape] = []
        for index, (k_warps, columns, unroll) in enumerate(self._variants):
            if epilogue is Epilogue.SILU_MUL and columns % 2:
                continue
            most = min(self._resident(index, weight_dtype, rows, k, epilogue), _MOST_RESIDENT)
            found += [GemvShape(k_warps, columns, unroll, resident) for resident in range(1, most + 1)]
        return found

    def run(
        self,
        shape: GemvShape,
        epilogue: Epilogue,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        norm: Norm | None = None,
    ) -> None:
        """out = x @ weight^T, after ``norm`` of x and with ``epilogue``.

        x bf16 [M, K]; weight [N, K], bf16, or e4m3 with ``weight_scale`` float32 [N]; bias bf16 [N]; out bf16 [M, N],
        or [M, N / 2] for SILU_MUL, which takes the first N / 2 products as the gate. All contiguous. The product is
        rounded to bf16 before the bias is added, and the sum before anything else. Raises CudaFailed when ``shape``
        does not suit.
        """
        n, k = weight.shape
        self._launch(
            self._variants[shape.k_warps, shape.columns, shape.unroll],
            shape.resident * self._processors,
            self._overlap,
            weight_scale is not None,
            epilogue,
            x.data_ptr(),
            None if norm is None else norm.gain.data_ptr(),
            0.0 if norm is None else norm.eps,
            weight.data_ptr(),
            None if weight_scale is None else weight_scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            n,
            k,
            self._stream(),
        )

    def knows(self, shape: GemvShape) -> bool:
        """Whether the library has a kernel of this shape."""
        return (shape.k_warps, shape.columns, shape.unroll) in self._variants

    def _resident(self, index: int, weight_dtype: torch.dtype, rows: int, k: int, epilogue: Epilogue) -> int:
        blocks, normed = c_int(), epilogue is not Epilogue.ADD
        self._occupancy(index, weight_dtype.itemsize == 1, rows, k, normed, ctypes.byref(blocks))
        return blocks.value


def _variants(library: CudaLibrary) -> dict[tuple[int, int, int], int]:
    """The library's kernels by (k_warps, columns, unroll), in its order."""
    describe = library.declare("baton_gemv_variant", (c_int, ctypes.POINTER(c_int)))
    variants: dict[tuple[int, int, int], int] = {}
    shape = (c_int * 3)()
    describe(0, shape)
    while shape[0]:
        variants[shape[0], shape[1], shape[2]] = len(variants)
        describe(len(variants), shape)
    return variants
