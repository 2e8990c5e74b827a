"""Which links a worker makes, keeps and leaves; what happens on them is the engine's."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import TransferRejected, TransportUnavailable
from baton.core.types import Attempt, KvChunk, KvFormat, KvHandshake, KvSource, Ticket
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.nccl import IDLE_SECONDS, MAX_LINKS, NcclIncoming, NcclOutgoing

RECEIVER = KvHandshake("d", 2, "m", "h", KvFormat("fake", 4, 1, 1, 8), transports=("nccl",))
TICKET = Ticket("r", Attempt(0, 1), "d:1", 2)


class Links:
    """Satisfies ``KvLinks``; remembers what is joined."""

    def __init__(self) -> None:
        self.joined: dict[int, int] = {}
        self.discarded: list[tuple[int, int, int]] = []

    async def invite(self) -> bytes:
        await asyncio.sleep(0)
        return b"come"

    def join(self, link: int, rank: int, invitation: bytes, seconds: float) -> None:
        assert invitation == b"come"
        assert seconds > 0
        self.joined[link] = rank

    def leave(self, link: int) -> None:
        del self.joined[link]

    def discard(self, link: int, number: int, block_count: int) -> None:
        self.discarded.append((link, number, block_count))


class Sender:
    def __init__(self) -> None:
        self.links, self.clock = Links(), ManualClock()
        numbers = count(100)
        self.way = NcclOutgoing(1, 4, self.links, KvTransferConfig(), lambda: next(numbers), self.clock)

    def open(self, *epochs: int) -> None:
        async def main() -> None:
            await asyncio.gather(*(self.way.open(replace(RECEIVER, epoch=epoch)) for epoch in epochs))

        asyncio.run(main())


def chunk(link: int, epoch: int = 1, number: int = 0) -> KvChunk:
    return KvChunk(TICKET, 0, 3, b"", (), KvSource(epoch, (), "nccl", link, number, b"come"))


def test_a_receiver_has_one_link_however_many_open_it_at_once() -> None:
    sender = Sender()
    sender.open(2, 2, 3, 2)
    assert sender.links.joined == {100: 0, 101: 0}


def test_a_link_that_failed_is_left_and_the_next_one_is_another() -> None:
    sender = Sender()
    sender.open(2)
    sender.way.forget(RECEIVER)
    sender.way.forget(RECEIVER)
    assert sender.links.joined == {}
    sender.open(2)
    assert sender.links.joined == {101: 0}


def test_links_that_nobody_uses_are_left_and_so_is_the_oldest_of_too_many() -> None:
    sender = Sender()
    sender.open(2)
    sender.clock.advance(IDLE_SECONDS - 1)
    sender.open(3)
    sender.open(2)
    sender.clock.advance(IDLE_SECONDS - 1)
    sender.open(2)
    assert set(sender.links.joined) == {100, 101}
    sender.clock.advance(2)
    sender.open(2)
    assert set(sender.links.joined) == {100}, "the other one was idle"
    sender.open(*range(10, 10 + MAX_LINKS))
    assert len(sender.links.joined) == MAX_LINKS
    assert 100 not in sender.links.joined
    sender.way.close()
    assert sender.links.joined == {}


def test_a_receiver_joins_a_sender_s_newest_link_and_no_former_one_again() -> None:
    links = Links()
    way = NcclIncoming(4, links, KvTransferConfig(), ManualClock())
    way.decline(chunk(7))
    way.decline(chunk(7, number=1))
    assert links.joined == {7: 1}
    assert links.discarded == [(7, 0, 3), (7, 1, 3)]
    way.decline(chunk(8))
    assert links.joined == {8: 1}
    with pytest.raises(TransportUnavailable, match="left before"):
        way.decline(chunk(7, number=2))
    assert links.joined == {8: 1}
    way.close()
    assert links.joined == {}


def test_a_receiver_leaves_links_of_senders_that_are_silent_for_long() -> None:
    links, clock = Links(), ManualClock()
    way = NcclIncoming(4, links, KvTransferConfig(), clock)
    way.decline(chunk(7, epoch=1))
    clock.advance(2 * IDLE_SECONDS)
    way.decline(chunk(8, epoch=2))
    assert set(links.joined) == {7, 8}, "its sender leaves a link before that"
    clock.advance(1)
    way.decline(chunk(8, epoch=2, number=1))
    assert set(links.joined) == {8}


def test_a_chunk_that_is_no_message_is_refused() -> None:
    way = NcclIncoming(4, Links(), KvTransferConfig(), ManualClock())
    for bad in (replace(chunk(7), source=None), replace(chunk(7), payload=b"x")):
        with pytest.raises(TransferRejected):
            way.decline(bad)
