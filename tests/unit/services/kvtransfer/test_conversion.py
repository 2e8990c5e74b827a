"""KV between layouts whose block sizes and shards differ: every token's bytes once, and where they belong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.core.errors import TransferRejected
from baton.core.types import FilledBlocks, KvFormat
from services.kvtransfer.conversion import Conversion, Landing, require_convertible
from services.kvtransfer.layout import pack, unpack

WHOLE = KvFormat("float32", block_size=4, layers=2, kv_heads=4, head_dim=2)
SIZES, SHARDS = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4)

Tokens = NDArray[np.float32]
"""[tokens, layers, 2, all heads, head_dim], whatever the layout."""


def form(block_size: int, shards: int = 1) -> KvFormat:
    return replace(WHOLE, block_size=block_size, shards=shards)


def drawn(tokens: int) -> Tokens:
    shape = (tokens, WHOLE.layers, 2, WHOLE.kv_heads, WHOLE.head_dim)
    return np.random.default_rng(tokens).random(shape, np.float32)


def blocks_of(values: Tokens, layout: KvFormat) -> bytes:
    """As they travel; the values begin where a block does."""
    size, shards = layout.block_size, layout.shards
    count = -(-len(values) // size)
    padded = np.zeros((count * size, *values.shape[1:]), np.float32)
    padded[: len(values)] = values
    shape = (count, size, layout.layers, 2, shards, layout.kv_heads // shards, layout.head_dim)
    whole = np.ascontiguousarray(padded.reshape(shape).transpose(0, 4, 2, 3, 5, 1, 6)).tobytes()
    return pack(whole, layout, len(values) - (count - 1) * size)


def tokens_of(payload: bytes, layout: KvFormat) -> Tokens:
    """What travels in ``payload``."""
    tokens, size, shards = len(payload) // layout.token_bytes, layout.block_size, layout.shards
    count = -(-tokens // size)
    shape = (count, shards, layout.layers, 2, layout.kv_heads // shards, size, layout.head_dim)
    ordered = np.frombuffer(unpack(payload, layout, count), np.float32).reshape(shape).transpose(0, 5, 2, 3, 1, 4, 6)
    return ordered.reshape(count * size, layout.layers, 2, layout.kv_heads, layout.head_dim)[:tokens]


def test_the_reference_is_its_own_inverse() -> None:
    for shards in SHARDS:
        assert np.array_equal(tokens_of(blocks_of(drawn(21), form(8, shards)), form(8, shards)), drawn(21))


@pytest.mark.parametrize("seed", range(200))
def test_tokens_are_the_same_in_any_other_layout(seed: int) -> None:
    """A prompt of any length, some blocks of which the receiver holds, in offers of any size."""
    draw = random.Random(seed)
    source, target = (form(draw.choice(SIZES), draw.choice(SHARDS)) for _ in range(2))
    conversion, context = Conversion(source, target), draw.randint(1, 200)
    held = draw.randint(0, (context - 1) // target.block_size)
    values, most = drawn(context), conversion.at_most(draw.randint(1, 8))
    first, landed = conversion.first_block(held), held
    assert held * target.block_size - first * source.block_size < max(source.block_size, 1), "too much travels"
    while first * source.block_size < context:
        count = min(most, -(-context // source.block_size) - first)
        landing = conversion.landing(first, count, context, held)
        assert landing.first_block == landed, "neither a gap nor a block twice"
        found = conversion.convert(blocks_of(values[landing.begin : landing.end], source), landing)
        start = landing.first_block * target.block_size
        assert found == blocks_of(values[start : landing.end], target)
        assert np.array_equal(tokens_of(found, target), values[start : landing.end])
        landed, first = landing.first_block + landing.block_count, first + most
    assert landed == conversion.target_blocks(context)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("size", [4, 16, 64])
def test_there_and_back_is_exact(size: int, shards: int) -> None:
    there, back = Conversion(form(16), form(size, shards)), Conversion(form(size, shards), form(16))
    payload = blocks_of(drawn(37), form(16))
    between = there.convert(payload, there.landing(0, 3, 37, 0))
    assert (between == payload) is (size == 16 and shards == 1)
    assert back.convert(between, back.landing(0, there.target_blocks(37), 37, 0)) == payload


def test_an_offer_that_leaves_a_block_of_the_receiver_unfinished_is_refused() -> None:
    conversion = Conversion(form(4), form(16))
    assert conversion.landing(4, 4, 64, 0) == Landing(1, 1, 16, 32)
    for first, count in ((0, 3), (1, 3), (2, 4), (4, 5)):
        with pytest.raises(TransferRejected, match=rf"first_block: blocks {first}\.\..* of 4 tokens fill no whole"):
            conversion.landing(first, count, 64, 0)
    assert conversion.landing(4, 2, 23, 0) == Landing(1, 1, 16, 23), "but the prompt's last one is filled by its end"
    with pytest.raises(TransferRejected):
        conversion.landing(4, 1, 23, 0)


@pytest.mark.parametrize(("first", "count"), [(0, 7), (4, 3), (6, 1), (0, 2**32 - 1)])
def test_no_more_blocks_are_offered_than_the_prompt_has(first: int, count: int) -> None:
    """They would be read and digested before anybody saw that they are too many."""
    with pytest.raises(TransferRejected, match=r"block_count: 23 tokens are 6 blocks of 4, offered are"):
        Conversion(form(4), form(16)).landing(first, count, 23, 0)


def test_blocks_that_the_receiver_holds_are_not_written_again() -> None:
    conversion = Conversion(form(64), form(8))
    assert conversion.first_block(3) == 0 and conversion.first_block(8) == 1
    assert conversion.landing(0, 1, 100, 3) == Landing(3, 5, 0, 64)
    assert conversion.landing(1, 1, 100, 3) == Landing(8, 5, 64, 100)


def test_sizes_that_do_not_divide_each_other_meet_where_both_begin_a_block() -> None:
    conversion = Conversion(form(12), form(8))
    assert (conversion.group, conversion.first_block(2), conversion.first_block(3)) == (2, 0, 2)
    landing = conversion.landing(2, 2, 48, 4)
    assert landing == Landing(4, 2, 24, 48)
    values = drawn(48)
    assert conversion.convert(blocks_of(values[24:], form(12)), landing) == blocks_of(values[32:], form(8))


@pytest.mark.parametrize("seed", range(50))
def test_blocks_are_passed_on_as_soon_as_they_fill_whole_ones_of_the_receiver(seed: int) -> None:
    draw = random.Random(seed)
    size, other = draw.choice(SIZES), draw.choice(SIZES)
    conversion, tokens = Conversion(form(size), form(other)), draw.randint(1, 300)
    pieces = list(filled_in_pieces(tokens, size, draw))
    found = asyncio.run(collected(conversion, pieces))
    assert [each.first_block for each in found] == [0, *(each.first_block + each.block_count for each in found[:-1])]
    assert found[-1].tokens == tokens and found[-1].first_block + found[-1].block_count == -(-tokens // size)
    for each in found[:-1]:
        assert each.tokens == (each.first_block + each.block_count) * size
        assert each.tokens % other == 0
    if conversion.group == 1:
        assert found == pieces


def filled_in_pieces(tokens: int, size: int, draw: random.Random) -> Sequence[FilledBlocks]:
    """As an engine tells of them: whole blocks, and the last one with the end of the prompt."""
    first, last, pieces = 0, -(-tokens // size), list[FilledBlocks]()
    while first < last:
        stop = min(last, first + draw.randint(1, 6))
        pieces.append(FilledBlocks(first, stop - first, min(tokens, stop * size)))
        first = stop
    return pieces


async def collected(conversion: Conversion, pieces: Sequence[FilledBlocks]) -> list[FilledBlocks]:
    async def filled() -> AsyncIterator[FilledBlocks]:
        for piece in pieces:
            yield piece

    return [blocks async for blocks in conversion.grouped(filled())]


def test_layouts_that_do_not_fit_are_refused_by_name() -> None:
    for field, value in (("dtype", "bfloat16"), ("layers", 3), ("kv_heads", 8), ("head_dim", 4), ("layout", "x")):
        with pytest.raises(TransferRejected, match=rf"format\.{field}"):
            require_convertible(replace(WHOLE, **{field: value}), WHOLE)
    for field, value in (("shards", 3), ("shards", 0), ("block_size", 0)):
        with pytest.raises(TransferRejected, match=rf"format\.{field}: must .*, got {value}"):
            require_convertible(replace(WHOLE, **{field: value}), WHOLE)


def test_blocks_of_unequal_layouts_never_share_a_name() -> None:
    assert str(WHOLE) == "block-major/1:float32:2x2x4x4x2"
    assert len({str(form(size, shards)) for size in SIZES for shards in SHARDS}) == len(SIZES) * len(SHARDS)
