"""A worker's own pool in the hands of its front."""

from __future__ import annotations

import mmap
import os

import pytest

from baton.core.errors import TransferRejected, TransportUnavailable
from baton.core.types import KvFormat
from baton.engine.ownpool import OwnPool
from baton.engine.sharedpool import MappedPool, PoolMemory
from services.kvtransfer.checksum import block_checksums
from services.kvtransfer.layout import pack

SMALL = KvFormat("fake", 4, 3, 2, 8)  # whose blocks are too small for native code
LARGE = KvFormat("bfloat16", 4, 3, 2, 16)
FILLED = 7  # what every block holds before


def pool_of(blocks: int, layout: KvFormat) -> tuple[PoolMemory, OwnPool]:
    memory = PoolMemory(blocks, layout)
    memory.view[:] = bytes([FILLED]) * len(memory.view)
    return memory, OwnPool(os.dup(memory.fd), layout)


def kv(blocks: int, layout: KvFormat) -> bytes:
    return bytes((1 + 7 * at + at // layout.block_bytes) % 251 for at in range(blocks * layout.block_bytes))


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["plain", "native"])
@pytest.mark.parametrize("filled", [1, 3, 4])
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_filled_stands_there_for_the_engine_and_nothing_else_is_written(
    layout: KvFormat, filled: int, count: int
) -> None:
    memory, own = pool_of(6, layout)
    size, numbers = layout.block_bytes, (4, 0, 2)[:count]
    packed = pack(kv(count, layout), layout, filled)
    unaligned = memoryview(b"x" + packed)[1:]  # as it lies in a message
    assert own.fill(numbers, unaligned, 5, filled) == block_checksums(packed, 5, count, size)
    stored = b"".join(memory.view[number * size : (number + 1) * size] for number in numbers)
    assert pack(stored, layout, filled) == packed
    assert sum(stored) == sum(packed), "slots that did not travel are zero"
    others = [number for number in range(6) if number not in numbers]
    assert all(bytes(memory.view[n * size : (n + 1) * size]) == bytes([FILLED]) * size for n in others)
    own.close()
    memory.close()


def test_a_payload_of_another_length_is_refused_before_a_byte_is_written() -> None:
    memory, own = pool_of(3, LARGE)
    payload, slot = kv(2, LARGE), LARGE.token_bytes
    for data, filled in ((payload[:-1], 4), (payload[:-slot], 4), (payload, 3), (payload, 5), (payload, 0), (b"", 4)):
        with pytest.raises(TransferRejected, match="payload"):
            own.fill((1, 2), data, 0, filled)
    assert set(memory.view) == {FILLED}
    own.close()
    memory.close()


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["plain", "native"])
@pytest.mark.parametrize("filled", [1, 3, 4])
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_copied_stands_there_as_in_the_other_pool_and_what_others_wrote_beside_it_goes_nowhere(
    layout: KvFormat, filled: int, count: int
) -> None:
    memory, own = pool_of(6, layout)
    size, numbers, origins = layout.block_bytes, (4, 0, 2)[:count], (7, 1, 4)[:count]
    source = memoryview(kv(8, layout)).toreadonly()
    packed = pack(b"".join(source[origin * size : (origin + 1) * size] for origin in origins), layout, filled)
    assert own.copy(numbers, source, origins, 5, filled) == block_checksums(packed, 5, count, size)
    stored = b"".join(memory.view[number * size : (number + 1) * size] for number in numbers)
    assert pack(stored, layout, filled) == packed
    assert sum(stored) == sum(packed), "slots that were not filled are zero"
    others = [number for number in range(6) if number not in numbers]
    assert all(bytes(memory.view[n * size : (n + 1) * size]) == bytes([FILLED]) * size for n in others)
    own.close()
    memory.close()


def test_blocks_that_the_other_pool_has_not_are_refused_before_a_byte_is_written() -> None:
    memory, own = pool_of(3, LARGE)
    source = memoryview(kv(2, LARGE))
    for origins, filled in (((0, 2), 4), ((-1, 1), 4), ((0, 1), 0), ((0, 1), 5)):
        with pytest.raises(TransportUnavailable, match="has 2 blocks"):
            own.copy((1, 2), source, origins, 0, filled)
    assert set(memory.view) == {FILLED}
    own.close()
    memory.close()


def test_whoever_is_given_the_pool_afterwards_can_only_read_it() -> None:
    memory, own = pool_of(2, LARGE)
    assert own.view.readonly
    with pytest.raises(OSError):
        mmap.mmap(own.fd, len(memory.view))
    mapped = MappedPool(os.dup(own.fd))
    own.fill((1,), kv(1, LARGE), 0, 4)
    assert bytes(mapped.view[LARGE.block_bytes :]) == kv(1, LARGE), "while its front still writes"
    mapped.unmap()
    own.close()
    memory.close()


def test_a_pool_that_was_given_away_before_is_not_taken_for_ones_own() -> None:
    memory, own = pool_of(1, LARGE)
    again = os.dup(own.fd)
    with pytest.raises(TransportUnavailable, match="cannot be mapped"):
        OwnPool(again, LARGE)
    with pytest.raises(OSError):
        os.fstat(again)  # it was closed
    own.close()
    memory.close()
