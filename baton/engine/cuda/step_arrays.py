"""The integers of one step: how many there can be, and where each array lies in the one buffer that is uploaded.

Pure: the arrays may be numpy's or tensors on the device.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Array = TypeVar("Array")

HOST = -1  # as a source: the token is on the host, no row of the previous step drew it
NOWHERE = -1  # as a slot: the row's keys and values are written nowhere; as a position: it draws nothing
_ALIGNMENT = 64  # elements; arrays begin at multiples of 256 bytes


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The largest step. ``buckets`` are the row counts that decode batches are padded to, ascending, up to ``rows``."""

    rows: int  # sequences in one step
    tokens: int  # rows of one step, prefill chunks included
    block_size: int
    blocks: int  # of one sequence
    dummy_block: int  # what padding rows attend to where they must attend to something; nobody writes it
    buckets: tuple[int, ...]
    padding_blocks: int  # that a padding row has: 0, or 1 where attention does not take rows without any
    window: int | None = None  # the model's own: tokens that a row sees at most, itself included

    def bucket(self, rows: int) -> int:
        """The smallest bucket that holds ``rows``; 0 for none."""
        return self.buckets[bisect_left(self.buckets, rows)] if rows else 0


def decode_buckets(max_rows: int) -> tuple[int, ...]:
    """Row counts to capture: 1, 2, 4, 8, then multiples of 8 to 256 and of 32 beyond, up to ``max_rows``."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_rows + 32, 32)]
    return (*(size for size in sizes if size < max_rows), max_rows)


@dataclass(frozen=True, slots=True)
class StepArrays(Generic[Array]):
    """Views into the step's one int32 buffer. The ``row_`` arrays are the decode batch, padded to its bucket."""

    token_ids: Array  # [tokens] of every row of the step; anything where a source is given
    sources: Array  # [tokens] the row of the previous step that drew the token, or HOST
    positions: Array  # [tokens]
    slots: Array  # [tokens] block * block_size + offset, or NOWHERE
    logit_rows: Array  # [rows] rows of the step whose logits are drawn from
    logit_positions: Array  # [rows] their positions
    chunk_starts: Array  # [2 * rows] where each chunk begins and the last one ends, from 0 in each group of chunks
    chunk_pages: Array  # [rows + 1] where each chunk's blocks begin in its part of ``block_ids``
    chunk_last_page: Array  # [rows] tokens in the last block
    row_token_ids: Array  # [rows]
    row_sources: Array  # [rows]
    row_positions: Array  # [rows], or NOWHERE
    row_slots: Array  # [rows]
    row_pages: Array  # [rows + 1] where each row's blocks begin in ``block_ids``
    row_last_page: Array  # [rows] tokens in the last block
    row_hidden: Array  # [rows] tokens at the start of the first block that the row does not see
    block_ids: Array  # of the decode rows, then (aligned) of the chunks


class StepLayout:
    """Where the arrays of ``StepArrays`` lie in the buffer. What a decode step needs is one run at its end."""

    def __init__(self, shape: BatchShape) -> None:
        rows = shape.rows
        lengths = {
            "chunk_starts": 2 * rows,
            "chunk_pages": rows + 1,
            "row_pages": rows + 1,
            "block_ids": rows * (shape.blocks + 1) + _ALIGNMENT,
        }
        lengths |= dict.fromkeys(("token_ids", "sources", "positions", "slots"), shape.tokens)
        self._offsets: dict[str, tuple[int, int]] = {}
        end = 0
        for field in fields(StepArrays):
            start = aligned(end)
            end = start + lengths.get(field.name, rows)
            self._offsets[field.name] = (start, end)
        self.size = end
        self.decode_start = self._offsets["row_token_ids"][0]
        self.block_ids_start = self._offsets["block_ids"][0]

    def views(self, buffer: Any) -> StepArrays[Any]:
        """The arrays inside ``buffer``, a numpy array or a tensor of ``size`` int32."""
        return StepArrays(**{name: buffer[start:end] for name, (start, end) in self._offsets.items()})


def aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
