"""Matrix products of 17 to 128 rows (``src/mid_rows.cu``): weights read once, k shared by the blocks of a cluster."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p
from dataclasses import dataclass

import torch

from baton.engine.cuda.kernels import Overlap
from baton.engine.cuda.library import CudaLibrary, stream_lookup

FEWEST_ROWS, MOST_ROWS = 17, 128
_GROUP_ROWS = 64  # weight rows of one warpgroup
_UNIT_BYTES = 128  # of k, which a block multiplies at a time
_MOST_BLOCKS = 8  # in a cluster
_LEAST_FILLED = 0.6  # of the multiprocessors: with fewer blocks than that too few bytes are under way
_MOST_SPLITS_TRIED = 4  # of one cut


@dataclass(frozen=True, slots=True)
class Cut:
    """What is compiled: a tile is 64 * ``groups`` weight rows by up to ``columns`` rows of x."""

    columns: int
    groups: int
    pair: int  # blocks of a cluster that bring rows of x to each other, 1 or 2
    resident: int  # blocks that fit on a multiprocessor


@dataclass(frozen=True, slots=True)
class MidRowsShape:
    """A compiled cut, and how many blocks share the k of a tile."""

    cut: Cut
    splits: int


def split_counts(cut: Cut, n: int, k_bytes: int, processors: int) -> list[int]:
    """The numbers of blocks to share each tile's k that are worth trying, fewest first; at least one.

    All blocks of a product shall run at a time, and be enough to keep the memory busy.
    """
    tiles = -(-n // (_GROUP_ROWS * cut.groups * cut.pair)) * cut.pair
    most = min(_MOST_BLOCKS // cut.pair, -(-k_bytes // _UNIT_BYTES))
    fitting = [splits for splits in range(1, most + 1) if tiles * splits <= cut.resident * processors]
    filling = [splits for splits in fitting if tiles * splits >= _LEAST_FILLED * processors]
    return filling[:_MOST_SPLITS_TRIED] or fitting[-1:] or [1]


class MidRows:
    """Launches the kernels of ``src/mid_rows.cu`` on torch's current stream; no allocation, no synchronisation.

    With overlap the weights are read while the kernel before may still run: they must not be its output.
    """

    def __init__(self, library: CudaLibrary, device: torch.device, overlap: Overlap = Overlap.YES) -> None:
        """Raises CudaUnavailable when ``device`` is no GPU or ``library`` lacks the kernels."""
        self._stream = stream_lookup(device)
        self._overlap = int(overlap)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._launch = library.declare("baton_mid_rows", (*(c_int,) * 3, *(c_void_p,) * 7, *(c_int,) * 3, c_void_p))
        encode = c_void_p()
        with torch.cuda.device(device):
            library.declare("baton_mid_rows_prepare", (ctypes.POINTER(c_void_p),))(ctypes.byref(encode))
        self._encode = encode.value
        self._variants = _variants(library)

    def shapes(self, rows: int, n: int, k: int, dtype: torch.dtype) -> list[MidRowsShape]:
        """The shapes worth trying for operands of ``dtype``.

        None where rows are too few or too many, a row of an operand is no multiple of 16 bytes, or n is none of 8.
        """
        if not self.supports(rows, n, k, dtype):
            return []
        columns = min(cut.columns for _, cut in self._variants if cut.columns >= rows)
        return [
            MidRowsShape(cut, splits)
            for value_bytes, cut in self._variants
            if value_bytes == dtype.itemsize and cut.columns == columns
            for splits in split_counts(cut, n, k * value_bytes, self._processors)
        ]

    def supports(self, rows: int, n: int, k: int, dtype: torch.dtype) -> bool:
        """Whether there are kernels for such a product."""
        return FEWEST_ROWS <= rows <= MOST_ROWS and n % 8 == 0 and k * dtype.itemsize % 16 == 0

    def accepts(self, shape: MidRowsShape, rows: int, n: int, k: int, dtype: torch.dtype) -> bool:
        """Whether ``shape`` can compute such a product."""
        known = (dtype.itemsize, shape.cut) in self._variants
        return known and rows <= shape.cut.columns and self.supports(rows, n, k, dtype)

    def run(
        self,
        shape: MidRowsShape,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
    ) -> None:
        """out [M, N] = x [M, K] @ weight [N, K]^T (+ bias [N]); all contiguous, bf16.

        x and weight may be e4m3, with ``x_scale`` [M] and ``weight_scale`` [N], float32. The bias is added in float32.
        Raises CudaFailed when ``shape`` does not suit.
        """
        n, k = weight.shape
        self._launch(
            self._variants[weight.element_size(), shape.cut],
            shape.splits,
            self._overlap,
            self._encode,
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if x_scale is None else x_scale.data_ptr(),
            None if weight_scale is None else weight_scale.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            n,
            k,
            self._stream(),
        )


def _variants(library: CudaLibrary) -> dict[tuple[int, Cut], int]:
    """The index of every kernel that the library has, by the bytes of an operand's value and the cut."""
    describe = library.declare("baton_mid_rows_variant", (c_int, ctypes.POINTER(c_int)))
    variants: dict[tuple[int, Cut], int] = {}
    numbers = (c_int * 5)()
    describe(0, numbers)
    while numbers[0]:
        value_bytes, columns, groups, pair, resident = numbers
        variants[value_bytes, Cut(columns, groups, pair, resident)] = len(variants)
        describe(len(variants), numbers)
    return variants
