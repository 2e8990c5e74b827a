"""KV handed over between two engine processes on one GPU by mapping the pool: tokens are those of one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch

from baton.core.errors import BatonError
from services.kvtransfer.config import KvTransferConfig
from tests.gpu.workers import Worker, alone, prompt, sender_to, split, worker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONFIG = KvTransferConfig(transports=("cuda-ipc",), acknowledge_seconds=30.0)
LIMIT_SECONDS = 280.0


OWN_KERNELS = {"dtype": "bfloat16", "backend": "auto"}  # which tell of a step's KV before its end


def run(scenario: Callable[[Worker, Worker], Awaitable[None]], **changes: object) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(LIMIT_SECONDS),
            worker(1, CONFIG, **changes) as prefill,
            worker(2, CONFIG, **changes) as decode,
        ):
            await scenario(prefill, decode)

    asyncio.run(main())


async def until_idle(each: Worker) -> None:
    while each.engine.stats.held_blocks:
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("changes", [{}, OWN_KERNELS], ids=["by the reference", "by the GPU's kernels"])
def test_split_tokens_equal_those_of_one_engine_for_every_fill_of_the_last_block(changes: dict[str, object]) -> None:
    async def scenario(prefill: Worker, decode: Worker) -> None:
        sender = sender_to(decode, prefill, CONFIG)
        for length in (1, 15, 16, 17, 100, 333):
            request = prompt(length, salt=length)
            assert await split(request, prefill, decode, sender) == await alone(request, prefill)
        assert decode.engine.stats.prompt_tokens_computed == 0, "all KV came from the other engine"
        for each in (prefill, decode):
            await until_idle(each)

    run(scenario, **changes)


def test_many_hand_overs_at_once_do_not_mix() -> None:
    async def scenario(prefill: Worker, decode: Worker) -> None:
        sender = sender_to(decode, prefill, CONFIG)
        requests = [prompt(40 + 9 * salt, salt) for salt in range(24)]
        answers = await asyncio.gather(*(split(each, prefill, decode, sender) for each in requests))
        for request, answer in zip(requests, answers, strict=True):
            assert answer == await alone(request, prefill)
        await until_idle(decode)

    run(scenario)


def test_a_killed_prefill_engine_leaves_the_decode_engine_whole_and_a_successor_is_mapped() -> None:
    async def main() -> None:
        request = prompt(200, 1)
        async with asyncio.timeout(LIMIT_SECONDS), worker(2, CONFIG) as decode:
            async with worker(1, CONFIG) as prefill:
                sender = sender_to(decode, prefill, CONFIG)
                first = await split(request, prefill, decode, sender)
                under_way = [asyncio.create_task(split(prompt(300, n), prefill, decode, sender)) for n in range(9)]
                await asyncio.sleep(0)
                prefill.kill_engine()
                for ended in await asyncio.gather(*under_way, return_exceptions=True):
                    assert isinstance(ended, BatonError | list), ended
            await until_idle(decode)
            async with worker(3, CONFIG) as successor:
                again = await split(prompt(200, 1), successor, decode, sender_to(decode, successor, CONFIG))
            assert again == first

    asyncio.run(main())
