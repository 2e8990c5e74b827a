"""Offers and confirmations over the connection that a sender keeps to its receiver's door."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace

import pytest

from baton.core.api import KvReceiverApi
from baton.core.errors import PeerUnavailable, TransferRejected
from baton.core.types import DevicePool, KvChunk, KvConfirmation, KvHandshake, KvSource, LocalDoor
from services.kvtransfer import door
from services.kvtransfer.door import GREETING, greeting
from services.kvtransfer.handshake import LOCAL_PACKETS
from services.kvtransfer.transport import TransportName
from tests.contract.mapped_workers import TICKET, Scenario, Worker, run_pair, until

CONFIRMATION = KvConfirmation(TICKET, 0, 3)
CHUNK = KvChunk(TICKET, 0, 3, b"", source=KvSource(7, (4, 5, 6), "shm"))


class Recorder(KvReceiverApi):
    """``gate`` held: answers nothing."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        return hello

    async def offer(self, chunk: KvChunk) -> None:
        self.seen.append(chunk)
        await self.gate.wait()
        raise TransferRejected("blocks 0..2")

    async def confirm(self, confirmation: KvConfirmation) -> None:
        self.seen.append(confirmation)
        await self.gate.wait()


def answering(receiver: Worker) -> KvHandshake:
    """What it says when its door answers."""
    return replace(receiver.answer, features=(*receiver.answer.features, LOCAL_PACKETS))


def run(scenario: Scenario) -> None:
    run_pair(TransportName.SHM, scenario)


def test_a_receiver_that_answers_at_its_door_is_told_there() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        told, usual = Recorder(), Recorder()
        receiver.kv.door.answer(told)
        await sender.kv.outgoing.open(receiver.answer)
        way = sender.kv.outgoing.receiver(answering(receiver), usual)
        await way.confirm(CONFIRMATION)
        with pytest.raises(TransferRejected, match=r"blocks 0\.\.2"):
            await way.offer(CHUNK)
        assert told.seen == [CONFIRMATION, CHUNK]
        assert usual.seen == []

    run(scenario)


def test_a_receiver_that_does_not_answer_there_is_told_as_usual() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        usual = Recorder()
        await sender.kv.outgoing.open(receiver.answer)
        assert sender.kv.outgoing.receiver(receiver.answer, usual) is usual

    run(scenario)


def test_nobody_waits_for_a_door_that_does_not_answer_though_its_worker_said_so() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        usual = Recorder()
        await sender.kv.outgoing.open(receiver.answer)
        way = sender.kv.outgoing.receiver(answering(receiver), usual)
        calls = [asyncio.ensure_future(way.offer(CHUNK)), asyncio.ensure_future(way.confirm(CONFIRMATION))]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ends] == [PeerUnavailable] * 2
        assert usual.seen == []

    run(scenario)


def test_nobody_waits_for_a_receiver_whose_door_has_gone() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        told = Recorder()
        told.gate.clear()
        receiver.kv.door.answer(told)
        await sender.kv.outgoing.open(receiver.answer)
        way = sender.kv.outgoing.receiver(answering(receiver), Recorder())
        waiting = asyncio.ensure_future(way.confirm(CONFIRMATION))
        await until(lambda: len(told.seen) == 1)
        receiver.kv.door.close()
        with pytest.raises(PeerUnavailable, match="the connection has ended"):
            await waiting
        with pytest.raises(PeerUnavailable, match="the connection has ended"):
            await way.confirm(CONFIRMATION)

    run(scenario)


def test_a_caller_that_talks_nonsense_after_its_greeting_loses_its_place() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        receiver.kv.door.answer(Recorder())
        await sender.kv.outgoing.open(receiver.answer)
        assert receiver.kv.door.sources == 1
        [connection] = sender.kv.outgoing._calls._calls.values()
        connection.sock.send(b"\xff nonsense")
        await until(lambda: receiver.kv.door.sources == 0)

    run(scenario)


def greetings_that_are_not_whole(kind: TransportName, sender: Worker, token: bytes) -> list[bytes]:
    """A pool's descriptor is missing, or what maps a device's pool is wrong."""
    if kind is TransportName.SHM:
        return [greeting(token, 9), b"hello"]
    pool = sender.engine.device_pool
    assert pool is not None
    whole = greeting(token, 9, pool)
    odd_size = greeting(token, 9, replace(pool, size=pool.size + 1))
    nameless = greeting(token, 9, DevicePool(b"", 0, pool.size, "fake"))
    return [whole[:-1], whole + b"x", whole[: GREETING.size], odd_size, nameless]


@pytest.mark.parametrize("kind", [TransportName.SHM, TransportName.CUDA_IPC])
def test_a_greeting_that_is_not_whole_is_sent_away(kind: TransportName) -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        invitation = receiver.kv.door.invitation
        loop = asyncio.get_running_loop()
        for said in greetings_that_are_not_whole(kind, sender, invitation.token):
            with ExitStack() as calls:
                caller = await called(receiver, calls)
                caller.send(said)
                assert (await loop.sock_recv(caller, 1024)).startswith(b"door: ")
                assert await loop.sock_recv(caller, 1024) == b"", "the door was shut"
        assert receiver.kv.door.sources == 0

    run_pair(kind, scenario)


def test_the_token_is_not_printed() -> None:
    assert "secret" not in repr(LocalDoor("a", b"secret"))


def test_nobody_may_offer_without_a_greeting() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        told = Recorder()
        receiver.kv.door.answer(told)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(stranger, f"\0{receiver.kv.door.invitation.address}")
            stranger.send(b"\2" + bytes(8))
            answer = await loop.sock_recv(stranger, 1024)
            assert b"greeting was not understood" in answer
            assert await loop.sock_recv(stranger, 1024) == b""
        assert told.seen == []

    run(scenario)


def test_a_receiver_that_does_not_answer_keeps_nobody_from_another_one() -> None:
    """It was stopped, say: its system still takes calls."""

    async def scenario(sender: Worker, receiver: Worker) -> None:
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as stopped:
            stopped.bind(f"\0baton-test-{os.getpid()}")
            stopped.listen()
            nowhere = LocalDoor(f"baton-test-{os.getpid()}", bytes(16))
            waiting = asyncio.create_task(sender.kv.outgoing.open(replace(receiver.answer, door=nowhere)))
            await asyncio.sleep(0)
            await sender.kv.outgoing.open(receiver.answer)
            assert not waiting.done()
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting

    run(scenario)


async def called(receiver: Worker, calls: ExitStack) -> socket.socket:
    """A call without a greeting."""
    caller = calls.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    caller.setblocking(False)
    await asyncio.get_running_loop().sock_connect(caller, f"\0{receiver.kv.door.invitation.address}")
    return caller


def test_callers_that_say_nothing_do_not_fill_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_CALLERS", 3)

    async def scenario(sender: Worker, receiver: Worker) -> None:
        with ExitStack() as calls:
            silent = [await called(receiver, calls) for _ in range(3)]
            await until(lambda: len(receiver.kv.door._callers) == 3)
            await sender.kv.outgoing.open(receiver.answer)
            assert receiver.kv.door.sources == 1
            assert await asyncio.get_running_loop().sock_recv(silent[0], 1) == b"", "the first one had to go"

    run(scenario)


def test_a_descriptor_that_comes_with_nothing_is_closed() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        with ExitStack() as calls:
            caller = await called(receiver, calls)
            await until(lambda: len(receiver.kv.door._callers) == 1)
            reading, writing = os.pipe()
            with os.fdopen(reading, "rb", buffering=0) as pipe:
                os.set_blocking(reading, False)
                socket.send_fds(caller, [b""], [writing])
                os.close(writing)
                await until(lambda: pipe.read(1) == b"")  # None as long as somebody holds the other end

    run(scenario)


@contextmanager
def out_of_descriptors() -> Iterator[None]:
    """This process can open nothing more, as long as the block lasts."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class CountedListener(socket.socket):
    """A door's own listener, that counts how often somebody is asked for."""

    tries = 0

    def accept(self) -> tuple[socket.socket, str]:
        self.tries += 1
        return super().accept()


@contextmanager
def door_of_its_own(worker: Worker) -> Iterator[tuple[CountedListener, door.PoolDoor, socket.socket]]:
    """A door, and a socket connected to nothing yet."""
    address = f"baton-test-door-{os.getpid()}"
    with (
        CountedListener(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller,
    ):
        listener.bind(f"\0{address}")
        listener.listen()
        listener.setblocking(False)
        caller.setblocking(False)
        with closing(door.PoolDoor(worker.engine, listener, address)) as opened:
            yield listener, opened, caller


def test_a_door_without_descriptors_rests_says_so_once_and_goes_on_when_there_are_some(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(door, "REST_SECONDS", 0.05)

    async def scenario(sender: Worker, _other: Worker) -> None:
        with door_of_its_own(sender) as (listener, _, caller):
            with out_of_descriptors():
                caller.connect(listener.getsockname())
                await until(lambda: listener.tries >= 1)
                for _ in range(1000):
                    await asyncio.sleep(0)
                assert listener.tries < 100, "it tries now and then, not at every turn of the loop"
                await until(lambda: listener.tries >= 3)
            caller.send(b"hello")
            assert b"not understood" in await asyncio.get_running_loop().sock_recv(caller, 1024)

    with caplog.at_level(logging.WARNING, logger=door.__name__):
        run(scenario)
    assert [record.message for record in caplog.records] == ["kv door rests"]


def test_a_door_that_is_shut_while_it_rests_does_not_open_again() -> None:
    async def scenario(sender: Worker, _: Worker) -> None:
        with door_of_its_own(sender) as (listener, shut, caller), out_of_descriptors():
            caller.connect(listener.getsockname())
            await until(lambda: listener.tries >= 1)
        assert shut._rest is not None
        assert shut._rest.cancelled()

    run(scenario)
