"""Copies beside the steps: when they begin, what they are told of, and what they hold on to. On a fake device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import TransferRejected, TransportUnavailable
from baton.core.types import StopRules, TokenRequest
from baton.engine.blocks import Allocation
from baton.engine.device_access import DeviceAccess
from baton.engine.digest import block_digest
from baton.engine.fake import fake_card
from baton.engine.fake_device import FakeCopies
from baton.engine.messages import (
    Answered,
    Attach,
    Detach,
    DeviceCommand,
    Digest,
    Event,
    Invite,
    Join,
    Pull,
    Receive,
    Refused,
    Send,
)
from baton.engine.sequence import Sequence, Stage, Work
from baton.engine.sharedpool import shared_pool_memory

CARD = fake_card(block_size=4)
LAYOUT = CARD.format
BLOCKS = 16
KEY, SOURCE = 5, 9


@dataclass
class Engine:
    """The part of an engine that copies, with one request that holds blocks 2, 7 and 4."""

    copies: FakeCopies
    held: bool = False
    requests: dict[int, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        asked = TokenRequest("r", tuple(range(10)), stop=StopRules(max_tokens=1))
        request = Sequence(KEY, Work.DECODE, asked, CARD, deadline=None)
        request.give_blocks(Allocation([2, 7, 4], 0))
        request.stage = Stage.HELD
        self.requests[KEY] = request
        self.copies.is_held = lambda: self.held
        self.access = DeviceAccess(self.copies, LAYOUT, self.requests.get, ManualClock())

    def tell(self, command: DeviceCommand) -> list[Event]:
        return list(self.access.handle(command))

    def look(self) -> list[Event]:
        return list(self.access.look())

    def fill(self, block: int, value: int) -> bytes:
        data = bytes([value]) * LAYOUT.block_bytes
        size = LAYOUT.block_bytes
        self.copies.memory.view[block * size : (block + 1) * size] = data
        return data

    def block(self, block: int) -> bytes:
        size = LAYOUT.block_bytes
        return bytes(self.copies.memory.view[block * size : (block + 1) * size])


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    made: list[Engine] = []
    for _ in range(2):
        memory = shared_pool_memory(BLOCKS, LAYOUT)
        assert memory is not None
        made.append(Engine(FakeCopies(memory, lambda _: None)))
    yield made[0], made[1]
    for engine in made:
        engine.access.close()
        engine.copies.close()


def attached(engine: Engine, other: Engine) -> None:
    assert other.copies.pool is not None
    assert engine.tell(Attach(SOURCE, other.copies.pool)) == []


def require_not_mapped(engine: Engine) -> None:
    [event] = engine.tell(Pull(KEY, 77, 0, SOURCE, (1,), 4, b"\0"))
    assert isinstance(event, Refused)
    assert isinstance(event.error, TransportUnavailable)


def test_a_pull_is_answered_when_the_copy_has_ended_and_not_before(engines: tuple[Engine, Engine]) -> None:
    engine, other = engines
    attached(engine, other)
    data = [other.fill(block, 10 + block) for block in (1, 3)]
    engine.held = True
    assert engine.tell(Pull(KEY, 1, 1, SOURCE, (1, 3), 4, b"\0\1")) == []
    assert engine.access.is_busy
    assert engine.look() == []
    assert engine.block(7) != data[0]
    engine.held = False
    light, strong = (block_digest(data[index], 1 + index, LAYOUT, 4, is_strong=bool(index)) for index in range(2))
    assert engine.look() == [Answered(1, light + strong)]
    assert (engine.block(7), engine.block(4)) == (data[0], data[1])
    assert not engine.access.is_busy


def test_only_filled_slots_of_the_last_block_are_copied(engines: tuple[Engine, Engine]) -> None:
    engine, other = engines
    attached(engine, other)
    data = other.fill(1, 0xFF)
    engine.fill(4, 0x11)
    engine.tell(Pull(KEY, 1, 2, SOURCE, (1,), 2, b"\1"))
    assert engine.look() == [Answered(1, block_digest(data, 2, LAYOUT, 2, is_strong=True))]
    assert sum(byte == 0xFF for byte in engine.block(4)) == LAYOUT.block_bytes // 2
    assert sum(byte == 0 for byte in engine.block(4)) == LAYOUT.block_bytes // 2


def test_a_pool_is_unmapped_when_the_last_copy_from_it_has_ended(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = engines
    attached(engine, other)
    closed: list[bool] = []
    mapping = engine.access._pools[SOURCE]
    monkeypatch.setattr(mapping, "close", lambda close=mapping.close: (closed.append(True), close()))
    engine.held = True
    engine.tell(Pull(KEY, 1, 0, SOURCE, (1,), 4, b"\0"))
    assert engine.tell(Detach(SOURCE)) == []
    require_not_mapped(engine)
    assert closed == []
    engine.held = False
    assert [type(event) for event in engine.look()] == [Answered]
    assert closed == [True]


def test_blocks_that_are_not_the_request_s_or_the_pool_s_are_refused(engines: tuple[Engine, Engine]) -> None:
    engine, other = engines
    attached(engine, other)
    wrong = (
        Pull(KEY, 1, 2, SOURCE, (1, 2), 4, b"\0\0"),  # past the context
        Pull(KEY + 1, 1, 0, SOURCE, (1,), 4, b"\0"),  # no such request
        Pull(KEY, 1, 0, SOURCE, (1,), 5, b"\0"),  # more slots than a block has
        Pull(KEY, 1, 0, SOURCE, (1, 2), 4, b"\0"),
        Digest(KEY, 1, 2, 4, b"\0\0"),
        Digest(KEY, 1, 0, 4, b""),
    )
    for command in wrong:
        [event] = engine.tell(command)
        assert isinstance(event, Refused)
        assert isinstance(event.error, TransferRejected)
    [event] = engine.tell(Pull(KEY, 1, 0, SOURCE, (BLOCKS,), 4, b"\0"))
    assert isinstance(event, Refused)
    assert isinstance(event.error, TransportUnavailable)
    assert not engine.access.is_busy


def test_a_pool_that_cannot_be_mapped_is_just_not_there(engines: tuple[Engine, Engine]) -> None:
    engine, other = engines
    assert other.copies.pool is not None
    for pool in (replace(other.copies.pool, device="elsewhere"), replace(other.copies.pool, handle=b"\0" * 16)):
        assert engine.tell(Attach(SOURCE, pool)) == []
        require_not_mapped(engine)


def test_steps_wait_for_a_copy_into_blocks_that_are_given_back(engines: tuple[Engine, Engine]) -> None:
    engine, other = engines
    attached(engine, other)
    engine.access.fence(KEY)
    assert engine.copies.fences == 0, "nothing is under way"
    engine.held = True
    engine.tell(Pull(KEY, 1, 0, SOURCE, (1,), 4, b"\0"))
    engine.access.fence(KEY + 1)
    assert engine.copies.fences == 0, "others decode on"
    engine.access.fence(KEY)
    assert engine.copies.fences == 1


def linked(sender: Engine, receiver: Engine) -> None:
    [invited] = sender.tell(Invite(1))
    assert isinstance(invited, Answered)
    assert sender.tell(Join(77, 0, invited.payload, 5.0)) == []
    assert receiver.tell(Join(77, 1, invited.payload, 5.0)) == []


def until(engine: Engine, other: Engine) -> list[Event]:
    """What ``engine`` tells next; both go on."""
    for _ in range(1000):
        other.look()
        told = engine.look()
        if told:
            return told
    raise AssertionError("nothing was told")


def test_a_message_gets_from_blocks_to_blocks(engines: tuple[Engine, Engine]) -> None:
    sender, receiver = engines
    linked(sender, receiver)
    data = [sender.fill(block, 20 + block) for block in (2, 7)]
    sender.tell(Send(KEY, 1, 77, 0, 0, 4, b"\1\0"))
    [sent] = until(sender, receiver)
    receiver.tell(Receive(KEY, 2, 77, 0, 0, 4, b"\1\0"))
    [received] = until(receiver, sender)
    assert isinstance(sent, Answered)
    assert received == Answered(2, sent.payload)
    assert (receiver.block(2), receiver.block(7)) == (data[0], data[1])


def test_what_arrives_for_nobody_is_thrown_away_and_the_next_gets_through(engines: tuple[Engine, Engine]) -> None:
    sender, receiver = engines
    linked(sender, receiver)
    before = receiver.block(2)
    sender.fill(2, 1)
    sender.tell(Send(KEY, 1, 77, 0, 0, 4, b"\0"))
    sender.fill(7, 2)
    sender.tell(Send(KEY, 2, 77, 1, 1, 4, b"\0"))
    receiver.tell(Receive(0, 0, 77, 0, 0, 1, b"\0"))
    receiver.tell(Receive(KEY, 3, 77, 1, 1, 4, b"\0"))
    told: list[Event] = []
    while Answered not in [type(event) for event in told]:
        told += until(receiver, sender)
    assert receiver.block(2) == before
    assert receiver.block(7) == sender.block(7)


def test_the_other_engine_s_end_breaks_the_link(engines: tuple[Engine, Engine]) -> None:
    sender, receiver = engines
    linked(sender, receiver)
    sender.tell(Send(KEY, 1, 77, 0, 0, 4, b"\0"))
    until(sender, receiver)
    receiver.tell(Receive(KEY, 2, 77, 0, 0, 4, b"\0"))
    until(receiver, sender)
    sender.access.close()
    receiver.tell(Receive(KEY, 3, 77, 1, 0, 4, b"\0"))
    [event] = until(receiver, sender)
    assert isinstance(event, Refused)
    assert isinstance(event.error, TransportUnavailable)
    [event] = receiver.tell(Receive(KEY, 4, 77, 2, 0, 4, b"\0"))
    assert isinstance(event, Refused)
    assert not receiver.access._links, "nothing of it is held on the device"
    assert not receiver.access.is_busy
