"""Files of dead gateways: taken over by one of those that live, told to Redis, deleted; and no gateway hurt by any."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import StateUnavailable
from baton.core.types import Delivered, LedgerReason
from baton.telemetry.metrics import PrometheusMeter
from gateway.delivery_log import ENDING, PIECE
from gateway.delivery_slots import PAGE, SLOT, header_page
from tests.unit.gateway.delivery_logs import SOME, Desk, files, left_behind, opened, order, streaming_process


def test_what_a_killed_process_had_delivered_is_charged_and_its_file_deleted(tmp_path: Path) -> None:
    streams = PIECE // SLOT + 40  # more than a file begins with

    async def body() -> None:
        desk = Desk(tmp_path)
        for number in range(streams):
            await desk.books.reserve(order(f"r{number}"))
        with streaming_process(tmp_path, streams) as process:
            await desk.recovery.once()
            assert (len(files(tmp_path)), desk.line.calls) == (1, 0)  # its process lives
            process.kill()
            process.wait()
            await desk.recovery.once()
        assert files(tmp_path) == []
        assert await desk.charged() == {f"r{number}": number % 21 for number in range(streams)}
        assert {entry.reason for entry in await desk.books.entries("umbrella")} == {LedgerReason.EXPIRED}

    asyncio.run(body())


def test_a_log_whose_process_lives_is_not_touched(tmp_path: Path) -> None:
    async def body() -> None:
        with opened(tmp_path) as log:
            slot = log.slot(order())
            assert slot is not None
            slot.note(SOME)
            desk = Desk(tmp_path)
            await desk.recovery.once()
            assert (len(files(tmp_path)), desk.line.calls) == (1, 0)
            slot.free()

    asyncio.run(body())


def test_of_several_gateways_one_tells(tmp_path: Path) -> None:
    async def body() -> None:
        desk = Desk(tmp_path)
        for request_id in ("r1", "r2"):
            await desk.books.reserve(order(request_id))
            left_behind(tmp_path, (order(request_id), SOME))
        desk.line.thawed.clear()
        looking = asyncio.gather(*(desk.another().once() for _ in range(4)))
        while desk.line.calls < 2:
            await asyncio.sleep(0)
        desk.line.thawed.set()
        await looking
        assert desk.line.calls == 2
        assert (files(tmp_path), await desk.charged()) == ([], {"r1": 7, "r2": 7})

    asyncio.run(body())


def test_a_file_waits_for_redis_and_what_was_told_before_is_not_charged_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        desk = Desk(tmp_path)
        await desk.books.reserve(order())
        left_behind(tmp_path, (order(), SOME))
        for is_away, is_deaf in ((True, False), (False, True)):
            desk.line.is_away, desk.line.is_deaf = is_away, is_deaf
            with pytest.raises(StateUnavailable):
                await desk.recovery.once()
            assert len(files(tmp_path)) == 1
        desk.line.is_deaf = False
        await desk.recovery.once()
        assert (files(tmp_path), await desk.charged()) == ([], {"r0": 7})

    asyncio.run(body())


def test_an_absence_of_redis_is_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        desk = Desk(tmp_path)
        left_behind(tmp_path, (order(), SOME))
        desk.line.is_away = True
        async with desk.recovery.running():
            while desk.line.calls < 5:
                await asyncio.sleep(0)
                desk.clock.advance(1)

    asyncio.run(body())
    waits = [record for record in caplog.records if "wait for Redis" in record.getMessage()]
    assert len(waits) == 1


def test_what_the_client_resumed_elsewhere_is_not_disturbed(tmp_path: Path) -> None:
    async def body() -> None:
        desk = Desk(tmp_path)
        await desk.books.reserve(order())
        successor = replace(order(), owner="gateway-2")
        await desk.books.reserve(successor)
        left_behind(tmp_path, (order(), SOME))
        await desk.recovery.once()
        await desk.books.settle(successor, Delivered(10, 2, 20))
        assert await desk.charged() == {"r0": 20}
        assert files(tmp_path) == []

    asyncio.run(body())


def test_a_stream_that_got_nothing_costs_no_call(tmp_path: Path) -> None:
    async def body() -> None:
        desk = Desk(tmp_path)
        left_behind(tmp_path, (order(), Delivered()))
        await desk.recovery.once()
        assert (files(tmp_path), desk.line.calls) == ([], 0)

    asyncio.run(body())


def test_a_log_of_other_counters_is_left_to_their_gateways(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        desk = Desk(tmp_path)
        path = left_behind(tmp_path, (order(), SOME), namespace="staging")
        caplog.clear()
        await desk.recovery.once()
        assert (files(tmp_path), desk.line.calls, caplog.records) == ([path], 0, [])

    asyncio.run(body())


def test_a_process_that_died_before_its_file_had_begun_leaves_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        (tmp_path / f"begun{ENDING}").touch()
        await Desk(tmp_path).recovery.once()
        assert files(tmp_path) == []

    asyncio.run(body())


@pytest.mark.parametrize("call", ["gateway.delivery_recovery.os.open", "gateway.delivery_recovery.fcntl.flock"])
def test_a_file_that_cannot_be_read_now_is_named_once_and_told_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def exhausted(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def body() -> None:
        desk = Desk(tmp_path)
        await desk.books.reserve(order())
        left_behind(tmp_path, (order(), SOME))
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(call, exhausted)
            for _ in range(3):
                await desk.recovery.once()
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        await desk.recovery.once()
        assert (files(tmp_path), await desk.charged()) == ([], {"r0": 7})

    asyncio.run(body())


def test_a_file_that_cannot_be_deleted_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    async def body() -> None:
        desk = Desk(tmp_path)
        await desk.books.reserve(order())
        left_behind(tmp_path, (order(), SOME))
        caplog.clear()
        monkeypatch.setattr("gateway.delivery_recovery.Path.unlink", read_only)
        for _ in range(3):
            await desk.recovery.once()
        assert desk.line.calls == 1
        assert await desk.charged() == {"r0": 7}
        assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1

    asyncio.run(body())


def foreign(path: Path) -> None:
    path.write_text("hello")


def newer(path: Path) -> None:
    path.write_bytes(b"BATONDL2" + bytes(PAGE))


def cut_in_its_header(path: Path) -> None:
    path.write_bytes(header_page("baton")[:100])


def folder(path: Path) -> None:
    path.mkdir()


def link(path: Path) -> None:
    path.with_name("target").write_bytes(header_page("baton"))
    path.symlink_to("target")


@pytest.mark.parametrize("make", [foreign, newer, cut_in_its_header, folder, link])
def test_what_is_no_log_of_ours_is_named_once_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    async def body() -> None:
        desk = Desk(tmp_path)
        await desk.books.reserve(order())
        make(strange := tmp_path / f"a{ENDING}")
        left_behind(tmp_path, (order(), SOME))
        caplog.clear()
        for _ in range(3):
            await desk.recovery.once()
        assert (files(tmp_path), await desk.charged()) == ([strange], {"r0": 7})
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert f"delivery log {strange} is not taken over" in warnings[0]

    asyncio.run(body())


@pytest.mark.parametrize("harm", ["changed", "cut"])
def test_what_is_damaged_is_left_out_and_counted_and_the_rest_is_charged(tmp_path: Path, harm: str) -> None:
    async def body() -> None:
        meter = PrometheusMeter()
        desk = Desk(tmp_path, meter=meter)
        for number in range(3):
            await desk.books.reserve(order(f"r{number}"))
        path = left_behind(tmp_path, *((order(f"r{number}"), SOME) for number in range(3)))
        data = bytearray(path.read_bytes())
        if harm == "changed":
            data[PAGE + SLOT + 70] ^= 1
        path.write_bytes(data if harm == "changed" else data[: PAGE + SLOT + 300])
        await desk.recovery.once()
        expected = {"r0": 7, "r1": 0, "r2": 7 if harm == "changed" else 0}
        assert (files(tmp_path), await desk.charged()) == ([], expected)
        assert "baton_quota_damaged_slots_total 1.0" in meter.exposition().decode()

    asyncio.run(body())


def test_a_directory_that_is_gone_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        recovery = Desk(tmp_path / "gone").recovery
        for _ in range(3):
            await recovery.once()

    asyncio.run(body())
    assert [record.getMessage() for record in caplog.records] == [
        f"delivery log {tmp_path / 'gone'} is not taken over: No such file or directory"
    ]
