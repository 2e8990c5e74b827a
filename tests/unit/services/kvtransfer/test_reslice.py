"""KV between layouts whose block sizes and tensor parallelism differ: every byte once, and where it belongs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton.core.errors import TransferRejected
from baton.core.types import KvFormat
from services.kvtransfer.reslice import Side, apply, reslice

WHOLE = KvFormat("float32", block_size=4, layers=2, kv_heads=4, head_dim=2)
SHARDS, SIZES = st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8, 16])


class Pools:
    """A request's blocks on one side: [shards, blocks, layers, 2, heads of a shard, block_size, head_dim]."""

    def __init__(self, side: Side, tokens: int) -> None:
        shard = side.shard
        blocks = -(-tokens // shard.block_size)
        shape = (side.shards, blocks, shard.layers, 2, shard.kv_heads, shard.block_size, shard.head_dim)
        self.values: NDArray[np.float32] = np.full(shape, np.nan, np.float32)

    def block(self, shard: int, ordinal: int) -> memoryview:
        return memoryview(self.values[shard, ordinal].reshape(-1).view(np.uint8)).cast("B")

    def tokens(self) -> NDArray[np.float32]:
        """[tokens, layers, 2, all heads, head_dim], whatever the layout."""
        shards, blocks, layers, parts, heads, size, dim = self.values.shape
        ordered = self.values.transpose(1, 5, 2, 3, 0, 4, 6)
        return ordered.reshape(blocks * size, layers, parts, shards * heads, dim)


def side(block_size: int, shards: int) -> Side:
    return Side(replace(WHOLE, block_size=block_size), shards)


def filled(where: Side, tokens: int) -> Pools:
    pools = Pools(where, tokens)
    pools.values[:] = np.random.default_rng(tokens).random(pools.values.shape, np.float32)
    return pools


@settings(max_examples=150, deadline=None)
@given(SIZES, SHARDS, SIZES, SHARDS, st.integers(1, 40), st.data())
def test_tokens_are_the_same_on_both_sides_and_nothing_else_is_touched(
    size: int, shards: int, other_size: int, other_shards: int, tokens: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, tokens - 1))
    source, target = side(size, shards), side(other_size, other_shards)
    before, after = filled(source, tokens), Pools(target, tokens)
    apply(reslice(source, target, first, tokens - first), before.block, after.block)
    assert np.array_equal(after.tokens()[first:tokens], before.tokens()[first:tokens])
    assert np.isnan(after.tokens()[:first]).all()
    assert np.isnan(after.tokens()[tokens:]).all()


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_there_and_back_is_exact(shards: int) -> None:
    one, other = side(16, shards), side(4, 2)
    before, between, after = filled(one, 37), Pools(other, 37), Pools(one, 37)
    apply(reslice(one, other, 0, 37), before.block, between.block)
    apply(reslice(other, one, 0, 37), between.block, after.block)
    assert np.array_equal(after.tokens()[:37], before.tokens()[:37])


def test_every_byte_is_in_one_run() -> None:
    source, target = side(8, 4), side(4, 2)
    written = [
        (run.target_shard, run.target_block, byte)
        for run in reslice(source, target, 0, 24)
        for byte in range(run.target_offset, run.target_offset + run.size)
    ]
    assert len(written) == len(set(written)) == 24 * WHOLE.block_bytes // WHOLE.block_size


def test_equal_sides_are_copied_block_by_block_and_heads_in_common_together() -> None:
    assert [run.size for run in reslice(side(4, 2), side(4, 2), 0, 8)] == [WHOLE.block_bytes // 2] * 4
    half_the_heads = WHOLE.block_bytes // (WHOLE.layers * 2) // 2
    assert {run.size for run in reslice(side(4, 1), side(4, 2), 0, 4)} == {half_the_heads}


def test_sides_that_do_not_fit_are_refused_by_name() -> None:
    for field, value in (("dtype", "bfloat16"), ("layers", 3), ("kv_heads", 8), ("head_dim", 4), ("layout", "x")):
        other = Side(replace(WHOLE, **{field: value}), 1)
        with pytest.raises(TransferRejected, match=rf"format\.{field}"):
            list(reslice(Side(WHOLE, 1), other, 0, 1))
    with pytest.raises(TransferRejected, match="must divide 4 heads, got 3"):
        Side(WHOLE, 3)
