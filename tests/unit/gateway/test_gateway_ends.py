"""How a request ends before its answer does: closed, cancelled, late, or taken over."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.core.errors import Cancelled, Expired
from baton.core.streams import closing
from gateway.service import GatewayPolicy
from tests.unit.gateway.asking import ASK, complete, eventually
from tests.unit.gateway.doubles import Answer, Fleet, ScriptedDecode, answer


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("chunks_read", [1, 4])
def test_closing_the_stream_frees_everything(n: int, chunks_read: int) -> None:
    fleet = Fleet(ScriptedDecode("a"))

    async def read() -> None:
        async with closing(fleet.gateway.generate(replace(ASK, n=n), fleet.caller)) as chunks:
            left = chunks_read
            async for _ in chunks:
                left -= 1
                if not left:
                    break

    asyncio.run(read())
    fleet.assert_idle()


@pytest.mark.parametrize("after", [0, 3])
def test_cancelling_the_call_frees_everything(after: int) -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = after
    fleet = Fleet(worker)

    async def ask() -> None:
        task = asyncio.create_task(fleet.ask(ASK))
        await eventually(lambda: worker.open == 1 and worker.sent >= after)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(ask())
    fleet.assert_idle()


@pytest.mark.parametrize("after", [0, 3])
def test_the_deadline_ends_a_request_with_expired(after: int) -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = after
    fleet = Fleet(worker)
    with pytest.raises(Expired):
        asyncio.run(fleet.ask(replace(ASK, timeout=0.05)))
    fleet.assert_idle()


def test_a_call_without_deadline_has_the_default_one() -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = 0
    fleet = Fleet(worker, policy=GatewayPolicy(default_timeout=0.05))
    with pytest.raises(Expired):
        asyncio.run(fleet.ask(ASK))


def test_a_second_call_with_the_same_id_takes_the_request_over() -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = 2
    fleet = Fleet(worker)

    async def ask() -> Answer:
        older = asyncio.create_task(fleet.ask(replace(ASK, request_id="r")))
        await eventually(lambda: worker.sent >= 2)
        worker.hang_after = None
        newer = await fleet.ask(replace(ASK, request_id="r"))
        with pytest.raises(Cancelled, match="taken over"):
            await older
        return answer(newer)

    assert asyncio.run(ask()).ids == complete(ASK).ids
    fleet.assert_idle()


def test_the_same_id_of_another_tenant_is_another_request() -> None:
    worker = ScriptedDecode("a")
    fleet = Fleet(worker)
    stranger = replace(fleet.caller, tenant="zeta")

    async def ask() -> None:
        async with closing(fleet.gateway.generate(replace(ASK, request_id="r"), fleet.caller)) as mine:
            await anext(mine)
            async for _ in fleet.gateway.generate(replace(ASK, request_id="r"), stranger):
                pass
            async for _ in mine:
                pass

    asyncio.run(ask())
    fleet.assert_idle()
