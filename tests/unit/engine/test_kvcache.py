"""The KV pool: its size is known beforehand, and its blocks travel as bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import ConfigError, CorruptTransfer
from baton.core.types import KvFormat
from baton.engine import kvcache
from baton.engine.weights.source import load_spec

SPEC = load_spec("random:tiny-llama")
CPU = torch.device("cpu")


def filled_pool(dtype: torch.dtype, blocks: int = 6) -> torch.Tensor:
    pool = kvcache.allocate_pool(SPEC, blocks, 8, dtype, CPU)
    return pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(1)))


def test_a_pool_is_zero_block_major_and_as_large_as_announced() -> None:
    pool = kvcache.allocate_pool(SPEC, 6, 8, torch.bfloat16, CPU)
    assert pool.shape == (6, SPEC.layers, 2, SPEC.kv_heads, 8, SPEC.head_dim)
    assert pool.is_contiguous()
    assert not pool.any()
    assert pool.numel() * 2 == 6 * kvcache.block_bytes(SPEC, 8, torch.bfloat16)


def test_too_large_a_pool_is_refused_with_both_sizes() -> None:
    blocks = 1 << 40
    needed = blocks * kvcache.block_bytes(SPEC, 16, torch.float32)
    with pytest.raises(ConfigError, match=rf"\d+ MB available on cpu, got {needed / 1e6:.0f} MB for {blocks} blocks"):
        kvcache.allocate_pool(SPEC, blocks, 16, torch.float32, CPU)


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert kvcache._cgroup_headroom(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert kvcache._cgroup_headroom(tmp_path) == float("inf")
    assert kvcache._cgroup_headroom(tmp_path / "absent") == float("inf")


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 5), unique=True), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_blocks_survive_the_way_from_one_pool_to_another(ids: list[int], dtype: torch.dtype) -> None:
    source, target = filled_pool(dtype), kvcache.allocate_pool(SPEC, 6, 8, dtype, CPU)
    data = kvcache.read_blocks(source, ids)
    assert len(data) == len(ids) * kvcache.block_bytes(SPEC, 8, dtype)
    places = [5 - block for block in ids]
    kvcache.write_blocks(target, places, data)
    for block in range(6):
        expected = source[5 - block] if block in places else torch.zeros_like(source[0])
        assert torch.equal(target[block], expected)


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_takes_any_bytes(form: type) -> None:
    source, target = filled_pool(torch.float32), kvcache.allocate_pool(SPEC, 6, 8, torch.float32, CPU)
    kvcache.write_blocks(target, [2, 0], form(kvcache.read_blocks(source, [2, 0])))
    assert torch.equal(target[[0, 2]], source[[0, 2]])


def test_data_of_another_length_is_refused_before_anything_is_written() -> None:
    pool = kvcache.allocate_pool(SPEC, 6, 8, torch.float32, CPU)
    size = kvcache.block_bytes(SPEC, 8, torch.float32)
    with pytest.raises(CorruptTransfer, match=f"2 KV blocks take {2 * size} bytes, got {2 * size - 1}"):
        kvcache.write_blocks(pool, [0, 1], b"\x01" * (2 * size - 1))
    assert not pool.any()


@pytest.mark.parametrize("block", [-1, 6])
def test_blocks_outside_the_pool_are_refused(block: int) -> None:
    pool = kvcache.allocate_pool(SPEC, 6, 8, torch.float32, CPU)
    with pytest.raises(ValueError, match=f"block id {block} is not in a pool of 6 blocks"):
        kvcache.read_blocks(pool, [0, block])
    with pytest.raises(ValueError, match=f"block id {block} is not in a pool of 6 blocks"):
        kvcache.write_blocks(pool, [block], bytes(kvcache.block_bytes(SPEC, 8, torch.float32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_format_counts_the_bytes_that_its_blocks_take(dtype: torch.dtype) -> None:
    layout = KvFormat(str(dtype).removeprefix("torch."), 16, SPEC.layers, SPEC.kv_heads, SPEC.head_dim)
    pool = kvcache.allocate_pool(SPEC, 3, 16, dtype, CPU)
    assert layout.block_bytes == pool[0].nbytes
    data = bytes(range(256)) * (2 * pool[0].nbytes // 256)
    kvcache.write_blocks(pool, [2, 0], data)
    assert kvcache.read_blocks(pool, [2, 0]) == data
