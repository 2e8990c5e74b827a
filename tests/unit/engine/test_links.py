"""A link between two engines, by a communicator that does what a test says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import TransferRejected, TransportUnavailable
from baton.engine.device_copies import Span
from baton.engine.links import RECEIVER, SENDER, PairLink
from baton.engine.messages import Answered, Event, Refused

SECONDS = 5.0
SPAN = Span(0, 4, b"\0\1")


class Done:
    """A copy or a mark that is over when the test says so."""

    def __init__(self, answer: bytes = b"") -> None:
        self.over = False
        self.answer = answer

    def is_done(self) -> bool:
        return self.over

    def digests(self) -> bytes:
        assert self.over
        return self.answer


class Scripted:
    """Satisfies ``Communicator``; refuses what the protocol forbids."""

    slots = 2
    slot_bytes = 100

    def __init__(self) -> None:
        self.settled = False
        self.broken = ""
        self.aborted = 0
        self.calls: list[tuple[str, int]] = []
        self.copies: list[Done] = []
        self.marks: list[Done] = []
        self.used: set[int] = set()

    def is_settled(self) -> bool:
        if self.broken:
            raise TransportUnavailable(self.broken)
        return self.settled

    def pack(self, slot: int, blocks: Sequence[int], span: Span) -> Done:
        self._take(slot)
        return self._copy("pack", slot, b"packed %d" % blocks[0])

    def unpack(self, slot: int, blocks: Sequence[int], span: Span) -> Done:
        return self._copy("unpack", slot, b"stored %d" % blocks[0])

    def send(self, slot: int, size: int) -> None:
        self._begin("send", size)

    def receive(self, slot: int, size: int) -> None:
        self._take(slot)
        self._begin("receive", size)

    def mark(self) -> Done:
        assert self.settled, "nothing may be begun before the last call has settled"
        self.marks.append(Done())
        return self.marks[-1]

    def abort(self) -> None:
        self.aborted += 1

    def _take(self, slot: int) -> None:
        assert 0 <= slot < self.slots

    def _begin(self, name: str, size: int) -> None:
        assert self.settled, "nothing may be begun before the last call has settled"
        self.calls.append((name, size))

    def _copy(self, name: str, slot: int, answer: bytes) -> Done:
        self.calls.append((name, slot))
        self.copies.append(Done(answer))
        return self.copies[-1]


class Fixture:
    def __init__(self, rank: int) -> None:
        self.communicator = Scripted()
        self.clock = ManualClock()
        self.link = PairLink(self.communicator, rank, SECONDS, self.clock)
        self.told: list[Event] = []

    def add(self, number: int, size: int = 50, *, held: bool = True) -> None:
        def blocks() -> Sequence[int]:
            if not held:
                raise TransferRejected("the request has ended")
            return (number, 7)

        self.link.add(number + 1, 100 + number, number, size, SPAN, blocks)

    def look(self) -> list[Event]:
        return list(self.link.look())

    def join(self) -> None:
        self.communicator.settled = True
        self.look()

    def names(self) -> list[str]:
        return [name for name, _ in self.communicator.calls]


def test_a_sender_packs_at_once_and_sends_when_both_have_joined() -> None:
    fixture = Fixture(SENDER)
    fixture.add(0)
    assert fixture.look() == []
    fixture.communicator.copies[0].over = True
    assert fixture.look() == [Answered(100, b"packed 0")], "the offer needs digests before anybody joins"
    fixture.look()
    assert fixture.names() == ["pack"]
    fixture.join()
    assert fixture.names() == ["pack", "send"]
    assert fixture.link.is_busy
    fixture.communicator.marks[0].over = True
    assert fixture.look() == []
    assert not fixture.link.is_busy, "a link with nothing to do is left alone"


def test_messages_go_in_the_order_of_their_numbers_and_one_at_a_time() -> None:
    fixture = Fixture(RECEIVER)
    fixture.join()
    fixture.add(1)
    fixture.look()
    assert fixture.names() == [], "number 0 comes first"
    fixture.add(0)
    fixture.communicator.settled = True
    fixture.look()
    fixture.look()
    assert fixture.names() == ["receive", "receive"]
    fixture.add(2)
    fixture.look()
    assert fixture.names() == ["receive", "receive"], "there are two slots"
    fixture.communicator.marks[0].over = True
    fixture.look()
    assert fixture.names()[2:] == ["unpack"]
    fixture.communicator.copies[0].over = True
    assert fixture.look() == [Answered(100, b"stored 0")]
    assert fixture.names()[-1] == "receive"


def test_nothing_is_begun_before_the_last_call_has_settled() -> None:
    fixture = Fixture(RECEIVER)
    fixture.join()
    fixture.add(0)
    fixture.add(1)
    fixture.communicator.settled = True

    def settle_late(slot: int, size: int) -> None:
        fixture.communicator.calls.append(("receive", size))
        fixture.communicator.settled = False

    fixture.communicator.receive = settle_late  # type: ignore[method-assign]
    fixture.look()
    fixture.look()
    assert fixture.names() == ["receive"]
    assert fixture.communicator.marks == []
    fixture.communicator.settled = True
    fixture.look()
    assert fixture.names() == ["receive", "receive"]


def test_what_comes_for_a_request_that_has_ended_is_thrown_away() -> None:
    fixture = Fixture(RECEIVER)
    fixture.join()
    fixture.add(0, held=False)
    fixture.look()
    fixture.communicator.marks[0].over = True
    [event] = fixture.look()
    assert isinstance(event, Refused)
    assert isinstance(event.error, TransferRejected)
    assert fixture.names() == ["receive"], "nothing was unpacked"
    assert not fixture.link.is_busy


def test_an_abandoned_message_keeps_its_place_and_lands_nowhere() -> None:
    fixture = Fixture(RECEIVER)
    fixture.join()
    fixture.add(0)
    fixture.add(1)
    fixture.look()
    fixture.link.abandon(100)
    for _ in range(3):
        for mark in fixture.communicator.marks:
            mark.over = True
        fixture.look()
    assert fixture.names() == ["receive", "receive", "unpack"]


def test_a_request_s_blocks_are_being_filled_from_unpacking_to_its_end() -> None:
    fixture = Fixture(RECEIVER)
    fixture.join()
    fixture.add(0)
    fixture.look()
    assert not fixture.link.is_filling(1)
    fixture.communicator.marks[0].over = True
    fixture.look()
    assert fixture.link.is_filling(1)
    assert not fixture.link.is_filling(2)
    fixture.communicator.copies[0].over = True
    fixture.look()
    assert not fixture.link.is_filling(1)


@pytest.mark.parametrize("rank", [SENDER, RECEIVER])
def test_a_broken_communicator_is_aborted_once_and_everybody_is_told(rank: int) -> None:
    fixture = Fixture(rank)
    fixture.join()
    for number in range(3):
        fixture.add(number)
    fixture.look()
    fixture.communicator.broken = "the other GPU fell off"
    told = fixture.look()
    assert [type(event) for event in told] == [Refused] * 3
    assert all(isinstance(event, Refused) and "fell off" in event.error.message for event in told)
    assert fixture.communicator.aborted == 1
    assert not fixture.link.is_busy
    with pytest.raises(TransportUnavailable, match="fell off"):
        fixture.add(3)
    assert fixture.look() == []
    assert fixture.communicator.aborted == 1


def test_one_who_never_joins_ends_the_link_at_its_limit() -> None:
    fixture = Fixture(SENDER)
    fixture.look()
    fixture.clock.advance(SECONDS)
    assert fixture.look() == []
    assert fixture.communicator.aborted == 0
    fixture.clock.advance(0.1)
    fixture.look()
    assert fixture.communicator.aborted == 1


@pytest.mark.parametrize("rank", [SENDER, RECEIVER])
def test_a_message_that_does_not_get_through_ends_the_link_at_its_limit(rank: int) -> None:
    fixture = Fixture(rank)
    fixture.join()
    fixture.clock.advance(100.0)
    assert fixture.look() == [], "idle for long is no failure"
    fixture.add(0)
    fixture.look()
    fixture.clock.advance(SECONDS + 0.1)
    [event] = fixture.look()
    assert isinstance(event, Refused)
    assert fixture.communicator.aborted == 1


def test_a_receiver_waits_for_a_missing_number_no_longer_than_the_limit() -> None:
    fixture = Fixture(RECEIVER)
    fixture.join()
    fixture.add(1)
    fixture.look()
    fixture.clock.advance(SECONDS + 0.1)
    assert [type(event) for event in fixture.look()] == [Refused]


def test_a_sender_s_queue_is_not_against_the_clock() -> None:
    """What waits for a slot waits for messages that have limits of their own."""
    fixture = Fixture(SENDER)
    fixture.join()
    for number in range(3):
        fixture.add(number)
    fixture.look()
    fixture.clock.advance(SECONDS - 0.1)
    for copy in fixture.communicator.copies:
        copy.over = True
    for _ in range(3):
        fixture.look()
        for mark in fixture.communicator.marks:
            mark.over = True
    fixture.clock.advance(1.0)
    fixture.look()
    assert fixture.communicator.aborted == 0
    assert fixture.names().count("pack") == 3


def test_messages_that_cannot_be_on_the_link_are_refused_at_once() -> None:
    fixture = Fixture(RECEIVER)
    fixture.join()
    with pytest.raises(TransportUnavailable, match="100 bytes at most, got 101"):
        fixture.add(0, 101)
    fixture.add(0)
    with pytest.raises(TransportUnavailable, match="begun before"):
        fixture.add(0)
