"""Blocks copied between pools on GPUs: by the kernel, by the copy engines, and out of another process's pool."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

from baton.core.errors import TransportUnavailable
from baton.core.types import KvFormat
from baton.engine.digest import block_digest
from tests.gates import GENEROUS_SECONDS
from tests.gpu.copying import LLAMA_8B, TINY, copies_over, exporter, random_pool, span, waited

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FORMATS = (
    KvFormat("float32", block_size=4, layers=3, kv_heads=2, head_dim=8),  # 1.5 KiB: a part of one segment
    KvFormat("bfloat16", block_size=16, layers=30, kv_heads=3, head_dim=64),  # smollm2-135m
    KvFormat("float8_e4m3fn", block_size=32, layers=5, kv_heads=7, head_dim=96),  # no power of two
    KvFormat("bfloat16", block_size=16, layers=32, kv_heads=8, head_dim=128),
)


def block_of(pool: torch.Tensor, block: int) -> bytes:
    return pool[block].cpu().numpy().tobytes()


@pytest.mark.parametrize("layout", FORMATS, ids=str)
def test_the_kernel_digests_what_the_definition_says(layout: KvFormat) -> None:
    pool = random_pool(layout, 8, seed=1)
    copies = copies_over(pool, layout)
    for strong in (False, True):
        for filled in {1, layout.block_size // 2, layout.block_size - 1, layout.block_size}:
            blocks = [5, 0, 7]
            found = waited(copies.digest(blocks, span(3, first=9, filled=filled, strong=strong)))
            slots = (layout.block_size, layout.block_size, filled)
            expected = [
                block_digest(block_of(pool, block), 9 + index, layout, slots[index], is_strong=strong)
                for index, block in enumerate(blocks)
            ]
            assert found == expected
    copies.close()


@pytest.mark.parametrize("layout", FORMATS, ids=str)
@pytest.mark.parametrize("ctas", [1, 7, 396])
def test_a_gathering_copy_moves_every_bit_and_touches_nothing_else(layout: KvFormat, ctas: int) -> None:
    source, target = random_pool(layout, 24, seed=2), random_pool(layout, 24, seed=3)
    copies, before = copies_over(target, layout), target.clone()
    order = random.Random(4)
    from_ids, to_ids = order.sample(range(24), 11), order.sample(range(24), 11)
    filled = layout.block_size - 1
    wanted = span(11, first=3, filled=filled)
    found = waited(copies.begin(from_ids, to_ids, wanted, source.data_ptr(), target.data_ptr(), ctas))
    for origin, block in zip(from_ids[:-1], to_ids[:-1], strict=True):
        assert torch.equal(source[origin], target[block])
    shape = (layout.layers * 2 * layout.kv_heads, layout.block_size, -1)
    last, kept = target[to_ids[-1]].view(shape), source[from_ids[-1]].view(shape)
    assert torch.equal(last[:, :filled], kept[:, :filled])
    assert not last[:, filled:].any(), "slots that are not filled are zeroed"
    others = [block for block in range(24) if block not in to_ids]
    assert torch.equal(target[others], before[others])
    own = copies_over(source, layout)
    assert found == waited(own.digest(from_ids, wanted))
    for each in (own, copies):
        each.close()


def test_the_copy_engines_move_the_same() -> None:
    source, target = random_pool(LLAMA_8B, 24, seed=2), random_pool(LLAMA_8B, 24, seed=3)
    copies = copies_over(target, LLAMA_8B)
    from_ids = np.array([3, 4, 5, 11, 0, 23], np.int32)
    to_ids = np.array([8, 9, 10, 2, 1, 0], np.int32)
    stream = copies.stream
    copies.copier.launch_by_engine(source.data_ptr(), target.data_ptr(), from_ids, to_ids, stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(target[to_ids.tolist()], source[from_ids.tolist()])
    copies.close()


def test_many_copies_at_once_each_say_their_own() -> None:
    pool = random_pool(TINY, 64, seed=5)
    copies = copies_over(pool, TINY)
    begun = [copies.digest([block], span(1, first=block)) for block in range(64)]
    for block in reversed(range(64)):
        assert waited(begun[block]) == [block_digest(block_of(pool, block), block, TINY, 4, is_strong=True)]
    assert len(copies._slots) == 64
    waited(copies.digest([0], span(1)))
    assert len(copies._slots) == 64, "what a copy needs is used again"
    copies.close()


def test_blocks_of_another_process_arrive_bit_by_bit_and_with_its_digests() -> None:
    layout, blocks = LLAMA_8B, 64
    target = torch.zeros(blocks, layout.block_bytes, dtype=torch.uint8, device="cuda")
    copies = copies_over(target, layout)
    with exporter(layout, blocks, seed=6) as other:
        mapping = copies.open(other.pool)
        order = random.Random(7)
        from_ids, to_ids = order.sample(range(blocks), 40), order.sample(range(blocks), 40)
        wanted = span(40, first=0, layout=layout)
        assert waited(copies.pull(to_ids, mapping, from_ids, wanted)) == other.digests(from_ids, wanted)
        expected = random_pool(layout, blocks, seed=6)
        assert torch.equal(target[to_ids], expected[from_ids])
        mapping.close()
    copies.close()


def test_one_random_flipped_bit_is_caught_in_its_block_and_no_other() -> None:
    layout, blocks = LLAMA_8B, 16
    target = torch.zeros(blocks, layout.block_bytes, dtype=torch.uint8, device="cuda")
    copies, chance = copies_over(target, layout), random.Random()
    ids = list(range(blocks))
    with exporter(layout, blocks, seed=8) as other:
        mapping = copies.open(other.pool)
        for strong in (False, True):
            wanted = span(blocks, layout=layout, strong=strong)
            before = other.digests(ids, wanted)
            for _ in range(16):
                block, bit = chance.randrange(blocks), chance.randrange(8 * layout.block_bytes)
                other.flip(block, bit)
                found = waited(copies.pull(ids, mapping, ids, wanted))
                wrong = [index for index in ids if found[index] != before[index]]
                assert wrong == [block], f"bit {bit} of block {block}"
                other.flip(block, bit)
        mapping.close()
    copies.close()


def test_an_exporter_that_is_killed_amid_copies_leaves_the_importer_whole_and_its_memory_is_freed_at_the_end() -> None:
    layout, blocks = LLAMA_8B, 1024  # 2 GiB
    target = torch.zeros(128, layout.block_bytes, dtype=torch.uint8, device="cuda")
    copies = copies_over(target, layout)
    expected = random_pool(layout, blocks, seed=9)[:128].clone()
    torch.cuda.empty_cache()
    ids, wanted = list(range(128)), span(128, layout=layout)
    with exporter(layout, blocks, seed=9) as other:
        mapping = copies.open(other.pool)
        before = waited(copies.pull(ids, mapping, ids, wanted))
        begun = [copies.pull(ids, mapping, ids, wanted) for _ in range(200)]
        other.kill()
        assert all(waited(copy) == before for copy in begun)
        assert waited(copies.pull(ids, mapping, ids, wanted)) == before, "what was mapped stays readable"
        assert torch.equal(target, expected)
        held, _ = torch.cuda.mem_get_info()
        mapping.close()
        deadline = time.monotonic() + GENEROUS_SECONDS
        while torch.cuda.mem_get_info()[0] < held + blocks * layout.block_bytes * 9 // 10:
            assert time.monotonic() < deadline, "the dead process's memory stays taken"
    assert (torch.ones(1000, device="cuda").sum() == 1000).item(), "the context is sound"
    copies.close()


def test_what_cannot_be_mapped_is_said_and_harms_nothing() -> None:
    pool = random_pool(TINY, 8, seed=10)
    copies = copies_over(pool, TINY)
    assert copies.pool is not None
    with pytest.raises(TransportUnavailable, match="cannot be mapped"):
        copies.open(copies.pool)  # a process does not map its own
    with exporter(TINY, 8, seed=11) as other:
        other.kill()
        with pytest.raises(TransportUnavailable, match="cannot be mapped"):
            copies.open(other.pool)
    assert waited(copies.digest([1], span(1))) == [block_digest(block_of(pool, 1), 0, TINY, 4, is_strong=True)]
    copies.close()


def test_steps_wait_for_copies_that_were_given_up() -> None:
    source, target = random_pool(LLAMA_8B, 256, seed=12), random_pool(LLAMA_8B, 256, seed=13)
    copies = copies_over(target, LLAMA_8B)
    ids = list(range(256))
    begun = [
        copies.begin(ids, ids, span(256, layout=LLAMA_8B), source.data_ptr(), target.data_ptr(), 4) for _ in range(20)
    ]
    copies.fence()
    target.zero_()  # on torch's current stream, as a step would
    torch.cuda.synchronize()
    assert not target.any(), "no copy landed after the step"
    for copy in begun:
        waited(copy)
    copies.close()
