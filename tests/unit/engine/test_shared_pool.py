from __future__ import annotations

import mmap
import os
import socket

import pytest

from baton.core.errors import TransportUnavailable
from baton.core.types import KvFormat
from baton.engine.sharedpool import Descriptors, MappedPool, PeerPools, PoolMemory, packed_digest, seal
from services.kvtransfer.checksum import block_checksums
from services.kvtransfer.layout import pack

LAYOUT = KvFormat("fake", 4, 3, 2, 8)  # 12 planes a block
SIZE = LAYOUT.block_bytes


def pool_of(blocks: int, *, first_byte: int = 0) -> PoolMemory:
    memory = PoolMemory(blocks, LAYOUT)
    memory.view[:] = bytes((first_byte + i * 7) % 251 for i in range(blocks * SIZE))
    seal(memory.fd)
    return memory


def resident_bytes(memory: PoolMemory) -> int:
    return os.fstat(memory.fd).st_blocks * 512


def block(memory: PoolMemory, number: int) -> bytes:
    return bytes(memory.view[number * SIZE : (number + 1) * SIZE])


class Peers:
    """An engine's end, and the front's that hands it pools."""

    def __init__(self) -> None:
        near, far = socket.socketpair()
        self.front, self._engine = Descriptors(near), Descriptors(far)
        self.pools = PeerPools(self._engine)

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        self.pools.close()
        self.front.close()
        self._engine.close()


def test_pulled_blocks_are_those_of_the_source_with_the_digests_of_a_chunk() -> None:
    source, target = pool_of(8), PoolMemory(6, LAYOUT)
    with Peers() as peers:
        peers.front.send(source.fd)
        peers.pools.attach(3)
        digests = peers.pools.pull(target, [5, 0, 2], 3, [7, 1, 4], 10, 4)
    assert [block(target, number) for number in (5, 0, 2)] == [block(source, number) for number in (7, 1, 4)]
    assert block(target, 1) == bytes(SIZE), "no other block was written"
    assert digests == block_checksums(b"".join(block(source, number) for number in (7, 1, 4)), 10, 3, SIZE)
    source.close()
    target.close()


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_that_share_a_pull_do_what_one_does(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.sharedpool.SHARE_BYTES", 2 * SIZE)
    source, target = pool_of(9), PoolMemory(9, LAYOUT, threads)
    into, out_of = [3, 8, 0, 1, 2, 7, 5], [7, 1, 4, 8, 6, 0, 2]
    with Peers() as peers:
        peers.front.send(source.fd)
        peers.pools.attach(3)
        digests = peers.pools.pull(target, into, 3, out_of, 10, 3)
    *whole, last = zip(into, out_of, strict=True)
    assert all(block(target, number) == block(source, origin) for number, origin in whole)
    assert pack(block(target, last[0]), LAYOUT, 3) == pack(block(source, last[1]), LAYOUT, 3)
    packed = pack(b"".join(block(source, number) for number in out_of), LAYOUT, 3)
    assert digests == block_checksums(packed, 10, 7, SIZE)
    assert block(target, 4) == block(target, 6) == bytes(SIZE), "no other block was written"
    source.close()
    target.close()


def test_a_populated_pool_is_resident_and_unchanged() -> None:
    memory = PoolMemory(400, LAYOUT)
    memory.view[:SIZE] = b"\5" * SIZE
    assert resident_bytes(memory) < len(memory.view)
    memory.populate()
    assert resident_bytes(memory) >= len(memory.view)
    assert block(memory, 0) == b"\5" * SIZE and block(memory, 399) == bytes(SIZE)
    memory.close()


@pytest.mark.parametrize("filled", [1, 2, 3])
def test_of_the_last_block_only_the_filled_slots_are_copied(filled: int) -> None:
    """What else stands there is of other requests, and goes nowhere."""
    source, target = pool_of(2, first_byte=1), pool_of(2, first_byte=9)
    with Peers() as peers:
        peers.front.send(source.fd)
        peers.pools.attach(1)
        digests = peers.pools.pull(target, [0, 1], 1, [1, 0], 0, filled)
    packed = pack(block(source, 1) + block(source, 0), LAYOUT, filled)
    assert pack(block(target, 0) + block(target, 1), LAYOUT, filled) == packed
    plane = SIZE // 12
    kept = plane // 4 * filled
    for start in range(0, SIZE, plane):
        assert block(target, 1)[start + kept : start + plane] == bytes(plane - kept)
    assert digests == block_checksums(packed, 0, 2, SIZE)
    source.close()
    target.close()


def test_a_pool_that_is_not_attached_or_blocks_that_it_has_not_are_refused() -> None:
    source, target = pool_of(2), pool_of(2, first_byte=9)
    before = bytes(target.view)
    with Peers() as peers:
        peers.front.send(source.fd)
        peers.pools.attach(1)
        for number, blocks in ((2, [0]), (1, [2]), (1, [-1])):
            with pytest.raises(TransportUnavailable):
                peers.pools.pull(target, [0], number, blocks, 0, 4)
        with pytest.raises(TransportUnavailable):
            peers.pools.pull(None, [0], 1, [0], 0, 4)
        peers.pools.detach(1)
        with pytest.raises(TransportUnavailable):
            peers.pools.pull(target, [0], 1, [0], 0, 4)
    assert bytes(target.view) == before
    source.close()
    target.close()


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
