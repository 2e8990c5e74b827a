"""Gateways over scripted workers, served at addresses of their own, and what the client asks them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.client import GenerateRequest, ResumePolicy
from baton.core.telemetry import SilentMeter
from baton.rpc.serving import RunningServer, ServerPolicy, serve
from gateway.doors.native import native_door
from tests.unit.gateway.doubles import MODEL, Fleet

ASK = GenerateRequest(model=MODEL, prompt_token_ids=(7,), max_tokens=24, seed=5, logprobs=0)
PATIENT = ResumePolicy(attempts=50, attempts_unanswered=50, first_pause=0.01, longest_pause=0.05)


@asynccontextmanager
async def door(fleet: Fleet, address: str = "127.0.0.1:0", drain: float = 5.0) -> AsyncIterator[RunningServer]:
    service = native_door(fleet.gateway, fleet.callers, stall_seconds=20)
    async with serve([service], address, SilentMeter(), ServerPolicy(drain=drain)) as server:
        yield server


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)
