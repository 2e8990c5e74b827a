"""How src/mid_rows.cu cuts a product into blocks, and src/mid_rows_results.h brings their parts together, in Python."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from baton.engine.cuda.mid_rows import Cut, split_counts

WARP, GROUP_THREADS, GROUP_ROWS, VECTOR = 32, 128, 64, 8
PROCESSORS = 132  # of an H200
BANKS = 32

CUTS = [Cut(32, 1, 1, 2), Cut(64, 2, 1, 2), Cut(64, 2, 2, 2), Cut(96, 2, 2, 1), Cut(128, 4, 1, 1), Cut(128, 1, 2, 2)]


@dataclass(frozen=True)
class Block:
    """The arithmetic of ``Block``, ``leave_part`` and ``write_share``, for one block of a launch."""

    cut: Cut
    splits: int
    rank: int  # in its cluster
    cluster: int

    @property
    def weight_rows(self) -> int:
        return GROUP_ROWS * self.cut.groups

    @property
    def consumers(self) -> int:
        return GROUP_THREADS * self.cut.groups

    @property
    def pitch(self) -> int:
        return self.weight_rows + 4

    @property
    def pair(self) -> int:
        return self.rank % self.cut.pair

    @property
    def split(self) -> int:
        return self.rank // self.cut.pair

    @property
    def first(self) -> int:
        return (self.cluster * self.cut.pair + self.pair) * self.weight_rows

    def units(self, count: int) -> range:
        return range(count * self.split // self.splits, count * (self.split + 1) // self.splits)

    def places(self, thread: int) -> list[tuple[int, int, int]]:
        """(place in the part, weight row of the tile, row of x) of each sum that a thread holds, in their order."""
        lane, warp, group = thread % WARP, thread % GROUP_THREADS // WARP, thread // GROUP_THREADS
        first = group * GROUP_ROWS
        to = lane % 4 * 2 * self.pitch + first + warp * 16 + lane // 4
        row, column = first + 16 * warp + lane // 4, 2 * (lane % 4)  # where the matrix instruction leaves its sums
        found: list[tuple[int, int, int]] = []
        for j in range(self.cut.columns // 8):
            found.append((to + 8 * j * self.pitch, row, 8 * j + column))
            found.append((to + (8 * j + 1) * self.pitch, row, 8 * j + column + 1))
            found.append((to + 8 * j * self.pitch + 8, row + 8, 8 * j + column))
            found.append((to + (8 * j + 1) * self.pitch + 8, row + 8, 8 * j + column + 1))
        return found

    def part(self, product: np.ndarray) -> np.ndarray:
        """The part as it lies in shared memory, of all tiles' sums [n, columns] over this block's k."""
        place = np.full(self.cut.columns * self.pitch, np.nan)
        for thread in range(self.consumers):
            for at, weight_row, row in self.places(thread):
                assert np.isnan(place[at])
                place[at] = product[self.first + weight_row, row]
        return place

    def share(self, rows: int, n: int) -> list[tuple[int, int, int]]:
        """(place in the part, row, first of eight columns of the output) of all that this block finishes."""
        vectors = self.weight_rows // VECTOR
        found: list[tuple[int, int, int]] = []
        for thread in range(self.consumers):
            for i in range(self.split * self.consumers + thread, rows * vectors, self.splits * self.consumers):
                row, in_tile = i // vectors, i % vectors * VECTOR
                if self.first + in_tile < n:
                    found.append((row * self.pitch + in_tile, row, self.first + in_tile))
        return found


def blocks_of(cut: Cut, splits: int, n: int) -> list[list[Block]]:
    """The blocks of a launch by cluster, in the order of their ranks."""
    clusters = -(-n // (GROUP_ROWS * cut.groups * cut.pair))
    return [[Block(cut, splits, rank, cluster) for rank in range(cut.pair * splits)] for cluster in range(clusters)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("n", "units"), [(24, 1), (1000, 5), (512, 32)])
def test_every_output_is_the_sum_of_all_parts_and_written_once(cut: Cut, n: int, units: int) -> None:
    rng = np.random.default_rng(n)
    rows = cut.columns - 3
    for splits in split_counts(cut, n, units * 128, PROCESSORS):
        clusters = blocks_of(cut, splits, n)
        padded = len(clusters) * cut.pair * cut.groups * GROUP_ROWS
        sums = rng.integers(-8, 8, (units, padded, cut.columns)).astype(float)  # of each unit of k; exact in any order
        out, written = np.zeros((rows, n)), Counter[tuple[int, int]]()
        for cluster in clusters:
            parts = [block.part(sums[list(block.units(units))].sum(axis=0)) for block in cluster]
            for block in cluster:
                same_tile = parts[block.pair :: cut.pair]
                assert len(same_tile) == splits
                for at, row, column in block.share(rows, n):
                    out[row, column : column + VECTOR] = sum(part[at : at + VECTOR] for part in same_tile)
                    written[row, column] += 1
        assert set(written.values()) == {1}
        assert np.array_equal(out, sums.sum(axis=0)[:n, :rows].T)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_lanes_that_write_a_part_do_not_meet_in_a_bank(cut: Cut) -> None:
    block = Block(cut, 1, 0, 0)
    for warp in range(block.consumers // WARP):
        lanes = [block.places(warp * WARP + lane) for lane in range(WARP)]
        for stored in zip(*lanes, strict=True):
            assert len({at % BANKS for at, _, _ in stored}) == WARP


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("units", [1, 3, 32, 64, 112, 224])
def test_blocks_of_a_tile_share_its_k_evenly(cut: Cut, units: int) -> None:
    for splits in split_counts(cut, 4096, units * 128, PROCESSORS):
        ranges = [Block(cut, splits, split * cut.pair, 0).units(units) for split in range(splits)]
        assert [unit for part in ranges for unit in part] == list(range(units))
        lengths = {len(part) for part in ranges}
        assert min(lengths) >= 1
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("n", "k_bytes"), [(6144, 4096), (4096, 28672), (28672, 8192), (1024, 2048), (128256, 8192)])
def test_split_counts_keep_all_blocks_of_a_product_resident(cut: Cut, n: int, k_bytes: int) -> None:
    counts = split_counts(cut, n, k_bytes, PROCESSORS)
    tiles = -(-n // (GROUP_ROWS * cut.groups * cut.pair)) * cut.pair
    assert counts
    assert all(splits * cut.pair <= 8 for splits in counts)
    if tiles <= cut.resident * PROCESSORS:
        assert all(tiles * splits <= cut.resident * PROCESSORS for splits in counts)
    else:
        assert counts == [1]


def test_split_counts_of_few_tiles_are_as_many_as_a_cluster_has_blocks() -> None:
    assert split_counts(Cut(64, 2, 1, 2), 1024, 4096, PROCESSORS) == [8]
    assert split_counts(Cut(64, 2, 2, 2), 1024, 4096, PROCESSORS) == [4]
    assert split_counts(Cut(64, 2, 1, 2), 1024, 384, PROCESSORS) == [3]
