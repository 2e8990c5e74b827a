from __future__ import annotations

import asyncio

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import Overloaded
from baton.core.telemetry import SilentMeter
from baton.rpc.calls import Calls


def test_a_drain_waits_for_every_request() -> None:
    async def run() -> None:
        calls = Calls(SilentMeter(), ManualClock())
        with calls.admitted():
            with calls.admitted():
                assert calls.in_flight == 2
            calls.refuse_new()
            assert not await calls.drained(0.01)
        assert await calls.drained(10)
        assert calls.in_flight == 0

    asyncio.run(run())


def test_a_failed_request_is_not_in_flight() -> None:
    async def run() -> None:
        calls = Calls(SilentMeter(), ManualClock())
        with pytest.raises(ValueError, match="x"), calls.admitted():
            raise ValueError("x")
        assert calls.in_flight == 0

    asyncio.run(run())


def test_a_draining_server_refuses() -> None:
    async def run() -> None:
        calls = Calls(SilentMeter(), ManualClock())
        calls.refuse_new()
        with pytest.raises(Overloaded, match="draining"), calls.admitted():
            pass
        assert calls.in_flight == 0

    asyncio.run(run())
