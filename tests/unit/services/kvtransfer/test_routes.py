from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from baton.core.api import KvReceiverApi, PrefillRun
from baton.core.clock import ManualClock
from baton.core.errors import TransferRejected, TransportUnavailable
from baton.core.telemetry import Counter, SilentMeter
from baton.core.types import FilledBlocks, KvChunk, KvFormat, KvHandshake, Ticket
from services.kvtransfer.routes import Routes
from services.kvtransfer.transport import EarlyChunk, TransportName

RECEIVER = KvHandshake("d", 2, "m", "h", KvFormat("fake", 4, 1, 1, 8), transports=("shm", "tcp"))
REST = 30.0


class Way:
    """An ``Outgoing`` that opens or not."""

    def __init__(self, name: TransportName, *, reaching: bool = True) -> None:
        self.name = name
        self.opens = True
        self.opened = 0
        self.forgotten = 0
        self.reaching = reaching

    def reaches(self, receiver: KvHandshake) -> bool:
        return self.reaching

    async def open(self, receiver: KvHandshake) -> None:
        self.opened += 1
        if not self.opens:
            raise TransportUnavailable("it is shut")

    def forget(self, receiver: KvHandshake) -> None:
        self.forgotten += 1

    def receiver(self, hello: KvHandshake, usual: KvReceiverApi) -> KvReceiverApi:
        return usual

    def is_streamed(self, receiver: KvHandshake) -> bool:
        raise NotImplementedError

    async def chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> KvChunk:
        raise NotImplementedError

    def early_chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> EarlyChunk | None:
        raise NotImplementedError


class CountedMeter(SilentMeter):
    def __init__(self) -> None:
        self.counted: list[dict[str, str]] = []

    def counter(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
        return self

    def add(self, amount: float = 1.0, **labels: str) -> None:
        self.counted.append(labels)


class Fixture:
    def __init__(self, **changes: bool) -> None:
        self.ipc, self.shm = Way(TransportName.CUDA_IPC), Way(TransportName.SHM, **changes)
        self.tcp = Way(TransportName.TCP)
        self.clock, self.meter = ManualClock(), CountedMeter()
        ways = [self.ipc, self.shm, self.tcp]
        self.routes = Routes(ways, RECEIVER.format, rest_seconds=REST, meter=self.meter, clock=self.clock)

    def choose(self, receiver: KvHandshake = RECEIVER) -> TransportName:
        return asyncio.run(self.routes.choose(receiver)).name


def test_the_best_one_that_both_have_is_taken() -> None:
    fixture = Fixture()
    assert fixture.choose() is TransportName.SHM
    assert fixture.choose(replace(RECEIVER, transports=("tcp",))) is TransportName.TCP


def test_a_peer_that_names_no_transport_is_sent_bytes() -> None:
    """It is of an older version, which knew nothing else."""
    assert Fixture().choose(replace(RECEIVER, transports=())) is TransportName.TCP


def test_a_transport_that_does_not_reach_the_peer_is_not_tried() -> None:
    fixture = Fixture(reaching=False)
    assert fixture.choose() is TransportName.TCP
    assert fixture.shm.opened == 0
    assert fixture.meter.counted == [], "that is no failure"


@pytest.mark.parametrize("change", [{"block_size": 8}, {"shards": 2}])
def test_blocks_that_have_to_be_converted_take_a_transport_that_does(change: dict[str, int]) -> None:
    fixture = Fixture()
    other = replace(RECEIVER, format=replace(RECEIVER.format, **change), transports=("cuda-ipc", "shm", "tcp"))
    assert fixture.choose(replace(other, format=RECEIVER.format)) is TransportName.CUDA_IPC
    assert fixture.choose(other) is TransportName.SHM
    fixture.routes.fail(other, fixture.shm, TransportUnavailable("x"))
    assert fixture.choose(other) is TransportName.TCP
    with pytest.raises(TransportUnavailable, match="no more"):
        fixture.routes.fail(other, fixture.tcp, TransportUnavailable("no more"))


def test_workers_without_a_transport_in_common_are_told_so() -> None:
    with pytest.raises(TransferRejected, match="transports: here cuda-ipc, shm, tcp, d has pigeon"):
        Fixture().choose(replace(RECEIVER, transports=("pigeon",)))


def test_one_that_fails_gives_way_to_the_next_and_rests(caplog: pytest.LogCaptureFixture) -> None:
    fixture = Fixture()
    fixture.shm.opens = False
    with caplog.at_level(logging.WARNING):
        assert [fixture.choose() for _ in range(3)] == [TransportName.TCP] * 3
    assert fixture.shm.opened == 1
    assert fixture.meter.counted == [{"from": "shm", "to": "tcp", "cause": "open"}]
    assert [record.message for record in caplog.records] == ["transport fallback"]
    fixture.shm.opens = True
    fixture.clock.advance(REST)
    assert fixture.choose() is TransportName.SHM


def test_it_rests_towards_that_peer_alone() -> None:
    fixture = Fixture()
    fixture.routes.fail(RECEIVER, fixture.shm, TransportUnavailable("x"))
    assert fixture.choose() is TransportName.TCP
    assert fixture.choose(replace(RECEIVER, epoch=3)) is TransportName.SHM


def test_offers_that_fail_together_count_as_one_fallback() -> None:
    fixture = Fixture()
    for _ in range(3):
        fixture.routes.fail(RECEIVER, fixture.shm, TransportUnavailable("x"))
    assert fixture.meter.counted == [{"from": "shm", "to": "tcp", "cause": "offer"}]


def test_the_last_one_left_fails_with_its_own_error() -> None:
    fixture = Fixture()
    fixture.shm.opens = fixture.tcp.opens = False
    with pytest.raises(TransportUnavailable, match="it is shut"):
        fixture.choose()
