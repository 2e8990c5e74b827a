"""Requests for a decode worker, and the streams that a scripted one answers with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from baton.core.types import DecodeRequest, StopRules, TokenChunk
from tests.contract.wire_doubles import PATIENT, TOKENS

REQUEST = DecodeRequest(TOKENS)
HANGS_SOON = replace(PATIENT, stall=0.3)


def request(name: str, max_tokens: int = 16, timeout: float | None = None) -> DecodeRequest:
    tokens = replace(TOKENS, request_id=name, stop=StopRules(max_tokens=max_tokens), timeout=timeout)
    return DecodeRequest(tokens)


async def counting(asked: DecodeRequest) -> AsyncIterator[TokenChunk]:
    for index in range(asked.tokens.stop.max_tokens):
        yield TokenChunk(token_ids=(index,))
        await asyncio.sleep(0)


async def endless(asked: DecodeRequest) -> AsyncIterator[TokenChunk]:
    """One token, then nothing until it is cancelled."""
    yield TokenChunk(token_ids=(1,))
    await asyncio.Event().wait()


async def silent(asked: DecodeRequest) -> AsyncIterator[TokenChunk]:
    await asyncio.Event().wait()
    yield TokenChunk()


async def collected_ids(stream: AsyncIterator[TokenChunk]) -> list[int]:
    """A link may put tokens together that their reader has not taken yet."""
    return [token_id async for chunk in stream for token_id in chunk.token_ids]


async def collected(stream: AsyncIterator[TokenChunk]) -> list[TokenChunk]:
    return [chunk async for chunk in stream]
