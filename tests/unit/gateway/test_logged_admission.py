"""Admission with a delivery log: what a gateway had delivered when it was killed is charged, whoever finds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from baton.core.streams import closing
from baton.core.types import Delivered, LedgerReason, StopRules
from gateway.admission import AdmissionPolicy
from tests.unit.gateway.asking import ASK
from tests.unit.gateway.delivery_logs import SOME, Desk, files, opened
from tests.unit.gateway.doubles import Fleet, ScriptedDecode
from tests.unit.gateway.quota_doubles import Gate, claim

RARE = AdmissionPolicy(lease_seconds=90, renew_seconds=30)


@asynccontextmanager
async def logged_gate(directory: Path) -> AsyncIterator[Gate]:
    with opened(directory) as log:
        built = Gate(RARE, deliveries=log)
        async with built.admission.running():
            yield built


def test_what_was_written_is_logged_and_what_is_under_way_is_not(tmp_path: Path) -> None:
    async def body() -> None:
        desk = Desk(tmp_path)
        with opened(tmp_path) as log:
            dead = Gate(RARE, desk.books, deliveries=log)
            stream = dead.admitted(claim("a"))
            grant = await stream.__aenter__()
            grant.note(SOME)
            grant.written()
            grant.note(Delivered(10, 2, 9))
        await desk.recovery.once()
        assert await desk.charged() == {"a": SOME.output_tokens}

    asyncio.run(body())


def test_a_settled_request_leaves_no_trace(tmp_path: Path) -> None:
    async def body() -> None:
        async with logged_gate(tmp_path) as built:
            for number in range(3):
                async with built.admitted(claim(f"a{number}")) as grant:
                    grant.note(SOME)
                    grant.written()
        assert files(tmp_path) == []
        assert [entry.reason for entry in await built.ledger()] == [LedgerReason.SETTLED] * 3

    asyncio.run(body())


def test_a_settlement_that_waits_for_redis_outlives_its_gateway(tmp_path: Path) -> None:
    async def body() -> None:
        async with logged_gate(tmp_path) as built:
            async with built.admitted(claim("a")) as grant:
                grant.note(SOME)
                grant.written()
                built.shared.is_away = True
            assert built.admission.waiting == 1
        assert len(files(tmp_path)) == 1
        desk = Desk(tmp_path)
        desk.line = built.shared
        built.shared.is_away = False
        await desk.another().once()
        built.clock.advance(100)
        await built.books.expire()
        assert [entry.output_tokens for entry in await built.ledger()] == [SOME.output_tokens]
        assert files(tmp_path) == []

    asyncio.run(body())


def test_a_settlement_that_is_told_later_frees_its_slot(tmp_path: Path) -> None:
    async def body() -> None:
        async with logged_gate(tmp_path) as built:
            async with built.admitted(claim("a")) as grant:
                grant.note(SOME)
                built.shared.is_away = True
            built.shared.is_away = False
            await built.pass_time(1)
            assert built.admission.waiting == 0
        assert files(tmp_path) == []

    asyncio.run(body())


def test_a_chunk_counts_as_written_once_the_door_asks_for_more() -> None:
    async def body() -> None:
        fleet = Fleet(ScriptedDecode("w0"))
        admission, told, seen = fleet.gateway._parts.admission, list[int](), list[int]()
        async with closing(
            fleet.gateway.generate(replace(ASK, stop=StopRules(ignore_eos=True)), fleet.caller)
        ) as chunks:
            async for chunk in chunks:
                [grant] = admission._open.values()
                told.append(grant.progress().delivered.output_tokens)
                seen.append(len(chunk.token_ids))
        assert len(seen) > 1
        assert told == [0, *accumulate(seen)][:-1]

    asyncio.run(body())
