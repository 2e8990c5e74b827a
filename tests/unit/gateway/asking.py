"""The request that the tests of the gateway ask, and its answer when nothing goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from hypothesis import settings

from baton.core.types import GenerateRequest
from tests.unit.gateway.doubles import MODEL, Answer, Fleet, ScriptedDecode, answer, draw, spelling

Drawn = Callable[[int, Sequence[int]], int]
ASK = GenerateRequest(model=MODEL, prompt_token_ids=(7,), max_tokens=24, seed=5, logprobs=0)
SLOW = settings(max_examples=60, deadline=None)


def complete(request: GenerateRequest, drawn: Drawn = draw, step: int = 1) -> Answer:
    """The answer of a fleet in which nothing goes wrong."""
    return answer(asyncio.run(Fleet(ScriptedDecode("w0", step=step, drawn=drawn)).ask(request)))


def spelled(text: str) -> Drawn:
    return spelling(Fleet().tokenizer, text)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)
