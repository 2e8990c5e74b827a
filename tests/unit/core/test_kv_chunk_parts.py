"""A chunk whose blocks are sent a few at a time: every part is an offer by itself, together they are the chunk."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baton.core.types import Attempt, KvChunk, KvFormat, Ticket

TICKET = Ticket("r", Attempt(0, 1), "d:1", 2)


def chunk_of(count: int, size: int, last: int) -> KvChunk:
    sizes = [size] * (count - 1) + [last]
    pieces = tuple(bytes([index + 1]) * each for index, each in enumerate(sizes))
    checksums = tuple(bytes([index]) * 16 for index in range(count))
    return KvChunk(TICKET, 7, count, b"", checksums, pieces=pieces, late_checksums=bytes(range(count)))


@given(count=st.integers(1, 30), size=st.integers(1, 20), last=st.integers(1, 20), most=st.integers(1, 100))
def test_parts_are_the_chunk_in_order_and_no_larger_than_allowed(count: int, size: int, last: int, most: int) -> None:
    whole = chunk_of(count, size, min(last, size))
    parts = list(whole.parts(most))
    assert len(parts) == whole.part_count(most)
    ordinals = [block for part in parts for block in range(part.first_block, part.first_block + part.block_count)]
    assert ordinals == list(range(7, 7 + count))
    assert sum((part.pieces for part in parts), ()) == whole.pieces
    assert sum((part.checksums for part in parts), ()) == whole.checksums
    assert b"".join(part.late_checksums for part in parts) == whole.late_checksums
    for part in parts:
        assert len(part.pieces) == len(part.checksums) == len(part.late_checksums) == part.block_count
        assert part.ticket == TICKET
        assert len(part.body) <= most or part.block_count == 1


def test_a_block_larger_than_a_part_goes_alone() -> None:
    assert [part.block_count for part in chunk_of(3, 9, 9).parts(4)] == [1, 1, 1]


def test_checksums_that_are_off_or_come_later_are_none_in_any_part() -> None:
    bare = replace(chunk_of(4, 2, 2), checksums=(), late_checksums=b"")
    assert [(part.checksums, part.late_checksums) for part in bare.parts(4)] == [((), b"")] * 2


def test_what_is_not_in_pieces_of_the_receivers_blocks_is_one_part() -> None:
    in_pieces = chunk_of(4, 2, 2)
    of_another_layout = replace(in_pieces, format=KvFormat("fake", 4, 1, 1, 8))
    in_one_piece = replace(in_pieces, payload=in_pieces.body, pieces=())
    with_fewer_pieces = replace(in_pieces, pieces=(b"ab", b"cdefgh"))
    elsewhere = KvChunk(TICKET, 0, 0, b"")
    for each in (of_another_layout, in_one_piece, with_fewer_pieces, elsewhere):
        assert list(each.parts(2)) == [each]
        assert each.part_count(2) == 1
