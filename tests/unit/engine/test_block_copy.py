"""Both ways of copying blocks do the same, and find the digests that xxhash finds."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import xxhash

from baton.engine.blockcopy import PLAIN, BlockCopy
from baton.engine.native import build as build_module
from baton.engine.native.block_copy import NativeBlockCopy, best_block_copy
from baton.engine.native.build import COMPILERS, KV_COPY, build

# Below, at and above what the native code takes, and at the edges of its stripes and rounds.
SIZES = [8, 192, 240, 256, 320, 1000, 1024, 1088, 2048, 4160, 65_536]
BLOCKS, COUNT = 7, 5
FIRST = 2**40

native = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler")


def ways() -> list[object]:
    return [pytest.param(lambda: PLAIN, id="plain"), pytest.param(NativeBlockCopy, id="native", marks=native)]


def pool_of(size: int, seed: int) -> bytearray:
    return bytearray(random.Random(seed).randbytes(BLOCKS * size))


def block(pool: bytes | bytearray, number: int, size: int) -> bytes:
    return bytes(pool[number * size : (number + 1) * size])


def check(way: BlockCopy, size: int, into: Sequence[int], out_of: Sequence[int], skew: int = 0) -> None:
    """``skew``: by how many bytes the target's memory is off."""
    source, memory = pool_of(size, 1), bytearray(skew) + pool_of(size, 2)
    target, before = memoryview(memory)[skew:], bytes(memory[skew:])
    digests = way.copy(target, into, memoryview(bytes(source)), out_of, size, FIRST)
    for number in range(BLOCKS):
        copied = out_of[into.index(number)] if number in into else None
        expected = block(before, number, size) if copied is None else block(source, copied, size)
        assert block(bytes(target), number, size) == expected
    expected_digests = [
        xxhash.xxh3_128_digest(block(source, number, size), seed=FIRST + index) for index, number in enumerate(out_of)
    ]
    assert list(digests) == expected_digests
    assert way.digests(memoryview(bytes(source)), out_of, size, FIRST) == digests
    assert digests[0] != way.digests(memoryview(bytes(source)), out_of, size, FIRST + 1)[0], "its place counts"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ways())
def test_blocks_are_copied_to_their_places_with_the_digests_of_xxhash(way: type[BlockCopy], size: int) -> None:
    check(way(), size, [6, 0, 3, 2, 5], [1, 4, 0, 6, 2])


@native
@pytest.mark.parametrize("skew", [1, 8, 16])
def test_memory_need_not_be_aligned(skew: int) -> None:
    check(NativeBlockCopy(), 4160, [6, 0], [1, 4], skew)


@native
@pytest.mark.parametrize("machine", ["x86-64", "x86-64-v3"])
def test_kernels_of_other_machines_find_the_same(machine: str) -> None:
    if machine == "x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    check(NativeBlockCopy(build(machine=machine, name=KV_COPY)), 4160, [6, 0, 3], [1, 4, 0])


@native
def test_every_flipped_bit_changes_the_digest() -> None:
    size, way = 1088, NativeBlockCopy()
    data = pool_of(size, 3)
    right = way.digests(memoryview(data), [2], size, 0)
    for bit in range(2 * size * 8, 3 * size * 8):
        data[bit // 8] ^= 1 << bit % 8
        assert way.digests(memoryview(data), [2], size, 0) != right
        data[bit // 8] ^= 1 << bit % 8


@native
@pytest.mark.parametrize(
    ("into", "out_of"), [([0], [BLOCKS]), ([BLOCKS], [0]), ([-1], [0]), ([0], [-1]), ([0, 1], [0])]
)
def test_blocks_that_a_pool_has_not_are_refused_before_anything_is_written(into: list[int], out_of: list[int]) -> None:
    target = pool_of(256, 2)
    before = bytes(target)
    with pytest.raises(ValueError):
        NativeBlockCopy().copy(memoryview(target), into, memoryview(pool_of(256, 1)), out_of, 256, 0)
    assert bytes(target) == before


def test_without_a_compiler_blocks_are_copied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "COMPILERS", ("no-such-compiler",))
    way = best_block_copy()
    assert way is PLAIN
    check(way, 4160, [6, 0], [1, 4])
