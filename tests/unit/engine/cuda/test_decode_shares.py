"""How src/decode_shares.h cuts a decode batch into shares, step by step in Python, over tables as they are packed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from baton.core.types import Sampling
from baton.engine.cuda.batch import Batch
from baton.engine.cuda.step_arrays import BatchShape, Ints, StepArrays, StepLayout, decode_buckets
from baton.engine.runner import Draw, Part

PIECE, WARPS, LEAST_PIECES = 16, 4, 8
ROWS, BLOCKS, LONGEST = 24, 40, 600


@dataclass
class Pair:
    row: int
    head: int
    begin: int
    end: int
    length: int
    hidden: int


@dataclass
class Kernel:
    """The arithmetic of ``Shares``, ``pair_of`` and the loops over pieces."""

    arrays: StepArrays[Ints]
    rows: int
    kv_heads: int
    block_size: int

    @property
    def pieces(self) -> int:
        return int(self.arrays.row_pages[self.rows]) * self.kv_heads * (self.block_size // PIECE)

    def pair_of(self, piece: int) -> Pair:
        per_page, indptr = self.block_size // PIECE, self.arrays.row_pages
        page = piece // (per_page * self.kv_heads)
        row = int(np.searchsorted(indptr[: self.rows + 1], page, side="right")) - 1
        first, pages = int(indptr[row]), int(indptr[row + 1] - indptr[row])
        head = (piece // per_page - first * self.kv_heads) // pages
        begin = (first * self.kv_heads + head * pages) * per_page
        length = (pages - 1) * self.block_size + int(self.arrays.row_last_page[row])
        return Pair(row, head, begin, begin + pages * per_page, length, int(self.arrays.row_hidden[row]))

    def taken(self, blocks: int) -> Iterator[tuple[int, int, int]]:
        """(row, head, slot) of every token that enters a sum, by ``blocks`` blocks of threads."""
        size = max(LEAST_PIECES, -(-self.pieces // blocks))
        for share in range(blocks):
            for piece in range(share * size, min((share + 1) * size, self.pieces)):
                yield from self._take(self.pair_of(piece), piece)

    def _take(self, pair: Pair, piece: int) -> Iterator[tuple[int, int, int]]:
        within, per_page = piece - pair.begin, self.block_size // PIECE
        page, position = within // per_page, within * PIECE
        block = int(self.arrays.block_ids[int(self.arrays.row_pages[pair.row]) + page])
        copied = min(max(pair.length - position, 0), PIECE) if position + PIECE > pair.hidden else 0
        assert (position < pair.length and position + PIECE > pair.hidden) == (copied > 0)
        for token in range(max(pair.hidden - position, 0), min(pair.length - position, PIECE)):
            assert token < copied, "a token enters a sum that was not copied"
            yield pair.row, pair.head, block * self.block_size + (within - page * per_page) * PIECE + token


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("padding_blocks", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_every_token_that_a_row_sees_is_summed_once_and_no_other(
    block_size: int, seed: int, padding_blocks: int
) -> None:
    chance = random.Random(seed)
    buckets, window = decode_buckets(ROWS), chance.choice([None, 200])
    shape = BatchShape(ROWS, 64, block_size, BLOCKS, 9999, buckets, padding_blocks, window)
    layout = StepLayout(shape)
    arrays = layout.views(np.full(layout.size, -1, np.int32))
    parts: list[Part] = []
    for key in range(chance.randrange(1, ROWS + 1)):
        end, window = chance.randrange(1, LONGEST), chance.choice([None, 1, 15, 16, 17, 100, 590])
        table = list(range(key * BLOCKS, (key + 1) * BLOCKS))
        parts.append(Part(key, [0] * end, end - 1, end, table, Draw(Sampling(), 1), window=window))
    packed = Batch(shape).pack(parts, arrays)
    expected: set[tuple[int, int, int]] = set()
    kv_heads = chance.choice([1, 3, 8])
    for part, row in zip(parts, packed.logit_row.tolist(), strict=True):
        seen = min(window for window in (part.window, shape.window, part.end) if window is not None)
        slots = [part.blocks[p // block_size] * block_size + p % block_size for p in range(part.end - seen, part.end)]
        expected |= {(row, head, slot) for head in range(kv_heads) for slot in slots}
    rows_of_padding = range(packed.rows, packed.bucket) if padding_blocks else range(0)
    padding = {(row, head, 9999 * block_size) for row in rows_of_padding for head in range(kv_heads)}
    taken = Counter(Kernel(arrays, packed.bucket, kv_heads, block_size).taken(blocks=chance.choice([1, 7, 264])))
    assert set(taken) == expected | padding
    assert set(taken.values()) == {1}
