from __future__ import annotations

import mmap
import os

import pytest

from baton.core.errors import TransportUnavailable
from baton.core.types import KvFormat
from baton.engine.sharedpool import MappedPool, PoolMemory, packed_digest, seal

LAYOUT = KvFormat("fake", 4, 3, 2, 8)  # 12 planes a block
SIZE = LAYOUT.block_bytes


def pool_of(blocks: int) -> PoolMemory:
    memory = PoolMemory(blocks, LAYOUT)
    memory.view[:] = bytes(i * 7 % 251 for i in range(blocks * SIZE))
    seal(memory.fd)
    return memory


def resident_bytes(memory: PoolMemory) -> int:
    return os.fstat(memory.fd).st_blocks * 512


def block(memory: PoolMemory, number: int) -> bytes:
    return bytes(memory.view[number * SIZE : (number + 1) * SIZE])


def test_a_populated_pool_is_resident_and_unchanged() -> None:
    memory = PoolMemory(400, LAYOUT)
    memory.view[:SIZE] = b"\5" * SIZE
    assert resident_bytes(memory) < len(memory.view)
    memory.populate()
    assert resident_bytes(memory) >= len(memory.view)
    assert block(memory, 0) == b"\5" * SIZE and block(memory, 399) == bytes(SIZE)
    memory.close()


def test_whoever_is_handed_a_pool_can_neither_write_to_it_nor_shrink_it() -> None:
    memory = pool_of(2)
    mapped = MappedPool(os.dup(memory.fd))
    assert bytes(mapped.view) == bytes(memory.view)
    assert mapped.view.readonly
    with pytest.raises(OSError):
        mmap.mmap(mapped.fd, 2 * SIZE)
    with pytest.raises(OSError):
        os.ftruncate(mapped.fd, SIZE)
    with pytest.raises(OSError):
        os.write(mapped.fd, b"x")
    memory.view[:4] = b"owns"
    assert bytes(mapped.view[:4]) == b"owns", "its owner still writes"
    mapped.unmap()
    memory.close()


def test_a_mapped_pool_that_is_touched_piece_by_piece_is_read_as_before() -> None:
    memory = pool_of(400)
    mapped, piece = MappedPool(os.dup(memory.fd)), 4 * mmap.PAGESIZE
    at, stops = 0, list[int]()
    while at < len(mapped.view):
        at = mapped.touch(at, piece)
        stops.append(at)
    assert stops[-1] == len(mapped.view)
    assert len(stops) in (1, -(-len(mapped.view) // piece)), "one where the system cannot do it"
    assert bytes(mapped.view) == bytes(memory.view)
    mapped.unmap()
    memory.close()


def test_a_mapped_pool_that_its_owner_fills_bit_by_bit_is_not_made_resident_by_touching_it() -> None:
    """A reader would cost its host all the memory that the owner has not needed yet."""
    memory = PoolMemory(400, LAYOUT)
    memory.view[-SIZE:] = b"\5" * SIZE
    seal(memory.fd)
    before = resident_bytes(memory)
    mapped = MappedPool(os.dup(memory.fd))
    assert mapped.touch(0, len(mapped.view)) == len(mapped.view)
    assert resident_bytes(memory) == before < len(mapped.view)
    assert bytes(mapped.view[-SIZE:]) == b"\5" * SIZE
    mapped.unmap()
    memory.close()


def test_memory_that_its_owner_could_take_away_is_not_mapped() -> None:
    """Reading a page that was cut off would kill the reader."""
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, SIZE)
    with pytest.raises(TransportUnavailable, match="could be changed"):
        MappedPool(fd)
    with pytest.raises(OSError):
        os.fstat(fd)  # it was closed


def test_a_digest_knows_the_place_of_its_block() -> None:
    view = memoryview(bytes(SIZE))
    assert packed_digest(view, 1, LAYOUT, 4) != packed_digest(view, 2, LAYOUT, 4)


def test_one_flipped_bit_anywhere_changes_the_digest() -> None:
    data = bytearray(SIZE)
    right = packed_digest(memoryview(data), 0, LAYOUT, 4)
    for bit in range(0, SIZE * 8, 5):
        data[bit // 8] ^= 1 << bit % 8
        assert packed_digest(memoryview(data), 0, LAYOUT, 4) != right
        data[bit // 8] ^= 1 << bit % 8
