"""Row-wise operations whose float32 results on the CPU do not depend on how many rows there are.

torch computes the tail of a tensor, and the seams between its threads, with scalar code that may round ``exp``
differently from the vector code. Pieces that one thread takes whole, in multiples of two vectors, have no tail.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# From 16 rows on, torch's float32 matrix product computes each row with the same bits (measured for M = 16 to 2048).
ROW_TILE = 16
# torch splits element-wise work over threads above 32,768 elements.
_PIECE = 32_768
# Two AVX-512 vectors of float32: the unrolled step of torch's element-wise loops.
_UNROLLED = 32


def pad_rows(x: torch.Tensor, tile: int) -> torch.Tensor:
    """``x`` [rows, ...] with zero rows appended up to a multiple of ``tile``."""
    missing = -x.shape[0] % tile
    return x if missing == 0 else torch.cat((x, x.new_zeros(missing, *x.shape[1:])))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x [rows, columns] times its sigmoid."""
    return _by_piece(torch.nn.functional.silu, x)


def exp(x: torch.Tensor) -> torch.Tensor:
    """e to the power of x [rows, columns]."""
    return _by_piece(torch.exp, x)


def _by_piece(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    rows, columns = x.shape
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return function(x)
    piece = 1 if columns % _UNROLLED else max(1, _PIECE // columns)
    if rows <= piece:
        return function(x)
    out = torch.empty_like(x)
    for start in range(0, rows, piece):
        out[start : start + piece] = function(x[start : start + piece])
    return out
