"""Each directive from the planner's settings to what the engines do, through gateway, planner, prefill and decode."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.client.answer import Choice, collect
from baton.core.errors import Expired
from baton.core.streams import closing
from baton.core.types import FinishReason, GenerateRequest, PrefillMode, Principal, StopRules
from baton.engine.runner import Part
from services.planner.config import PlannerConfig
from tests.networks import DirectNetwork, NetworkFactory, WireNetwork
from tests.stack import ENGINE, PRINCIPAL, Stack

SYSTEM = tuple(range(10, 58))  # 3 blocks of 16
URGENT = replace(PRINCIPAL, priority=5)
both_networks = pytest.mark.parametrize("network", [DirectNetwork, WireNetwork])


def asked(tail: int, max_tokens: int = 24) -> GenerateRequest:
    """The system prompt, 3 blocks that end in ``tail``, and a token."""
    prompt = (*SYSTEM, *(60 + (i * tail) % 300 for i in range(48)), tail)
    return GenerateRequest(prompt_token_ids=prompt, max_tokens=max_tokens, seed=5, stop=StopRules(ignore_eos=True))


async def ask(stack: Stack, request: GenerateRequest, principal: Principal = PRINCIPAL) -> Choice:
    async with asyncio.timeout(30), closing(stack.gateway.generate(request, principal)) as chunks:
        [choice] = (await collect(chunks, 1)).choices
    await stack.assert_idle()
    return choice


def policy(**settings: object) -> PlannerConfig:
    return PlannerConfig(local_prefill_max_tokens=0, **settings)  # type: ignore[arg-type]


def cached(stack: Stack) -> list[int]:
    return [worker.stats.cached_blocks for worker in stack.workers.values() if not worker.dead]


@both_networks
def test_limits_shorten_the_answer_and_the_prompts_chunks_and_change_no_token(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            whole = await ask(stack, asked(1))
        async with Stack(network=network, policy=policy(max_tokens=9, max_chunk_tokens=20)) as stack:
            choice = await ask(stack, asked(1))
            assert (choice.token_ids, choice.finish, choice.limit) == (
                whole.token_ids[:9],
                FinishReason.LENGTH,
                "max_tokens",
            )
            assert choice.usage.completion_tokens == 9
            assert choice.placement.prefill_mode is PrefillMode.REMOTE
            chunks = [end - start for step in stack.workers["prefill-0"].gate.steps for start, end in step]
            assert chunks == [20, 20, 20, 20, 17]
            short = await ask(stack, asked(1, max_tokens=5))
            assert (short.token_ids, short.limit) == (whole.token_ids[:5], "")

    asyncio.run(run())


@both_networks
def test_the_time_limit_ends_a_request_that_hangs_and_is_named(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, policy=policy(max_seconds=0.3)) as stack:
            gate = stack.workers["decode-0"].gate
            gate.hold()
            with pytest.raises(Expired, match=r"the plan's time limit of 0\.3 s"):
                async with closing(stack.gateway.generate(asked(1), PRINCIPAL)) as chunks:
                    await collect(chunks, 1)
            gate.release()
            await stack.assert_idle()

    asyncio.run(run())


@both_networks
def test_limits_and_cache_class_go_with_a_stream_that_moves(network: NetworkFactory) -> None:
    async def run() -> None:
        settings = policy(max_tokens=12, cache_classes=("0=none",))
        async with Stack(decode=2, network=network, policy=settings) as stack:

            def is_late(parts: list[Part]) -> bool:
                return any(part.start > len(asked(1).prompt_token_ids or ()) + 4 for part in parts)

            for name in ("decode-0", "decode-1"):
                stack.workers[name].gate.hold(is_late)  # type: ignore[arg-type]
            answer = asyncio.ensure_future(ask(stack, asked(1)))
            first, other = ("decode-0", "decode-1")
            await stack.until(
                lambda: any(stack.workers[name].gate._reached.is_set() for name in (first, other)), "a stream goes"
            )
            if stack.workers[other].gate._reached.is_set():
                first, other = other, first
            stack.workers[other].gate.release()
            await stack.kill(first)
            choice = await answer
            assert (len(choice.token_ids), choice.limit, choice.migrations) == (12, "max_tokens", 1)
            assert choice.placement.decode_worker == other
            assert cached(stack) == [0, 0]

    asyncio.run(run())


@both_networks
def test_class_none_leaves_nothing_behind_and_priorities_choose_the_class(network: NetworkFactory) -> None:
    async def run() -> None:
        settings = policy(cache_classes=("0=none", "5=normal"))
        async with Stack(network=network, policy=settings) as stack:
            for _ in range(2):
                assert (await ask(stack, asked(1))).usage.cached_tokens == 0
                assert cached(stack) == [0, 0]
            assert (await ask(stack, asked(1), URGENT)).usage.cached_tokens == 0
            assert (await ask(stack, asked(1), URGENT)).usage.cached_tokens == 96
            left = cached(stack)
            assert (await ask(stack, asked(1))).usage.cached_tokens == 96
            assert cached(stack) == left

    asyncio.run(run())


@both_networks
@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, 0),
        ({"cache_classes": (f"5=normal:{len(SYSTEM)}",)}, len(SYSTEM)),
        ({"cache_classes": (f"5=none:{len(SYSTEM) - 1}",)}, 32),
        ({"cache_classes": ("5=keep",)}, 96),
    ],
)
def test_what_is_kept_is_found_after_a_flood_of_other_prompts(
    network: NetworkFactory, settings: dict[str, object], found: int
) -> None:
    async def run() -> None:
        engine = replace(ENGINE, kv_blocks=24, cache_keep_share=0.5)
        async with Stack(network=network, engine=engine, policy=policy(**settings)) as stack:
            first = await ask(stack, asked(1), URGENT)
            for salt in range(2, 8):
                other = GenerateRequest(
                    prompt_token_ids=tuple(7 * salt + i % 50 for i in range(97)),
                    max_tokens=24,
                    stop=StopRules(ignore_eos=True),
                )
                await ask(stack, other)
            again = await ask(stack, asked(1), URGENT)
            assert (again.usage.cached_tokens, again.token_ids) == (found, first.token_ids)

    asyncio.run(run())
