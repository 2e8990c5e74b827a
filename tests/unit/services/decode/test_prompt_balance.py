"""A prompt that would wait too long for a prefill worker is computed where it is done first."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.core.errors import BatonError, Busy
from baton.core.types import Attempt, EngineStats, PrefillMode, PrefillRequest, Ticket, Tier, TierLoad
from services.decode import worker
from services.decode.balance import is_sooner_here
from services.planner.config import PlannerConfig
from tests.networks import NetworkFactory
from tests.stack import Answer, Stack, tokens

BALANCED = PlannerConfig(local_prefill_max_tokens=1, prefill_wait_ms=0.0)


@pytest.mark.parametrize(
    ("backlog", "rate", "elsewhere", "sooner"),
    [
        (0, 20_000.0, 0.15, True),
        (0, 20_000.0, 0.05, False),
        (4000, 20_000.0, 0.15, False),
        (0, 0.0, 0.001, True),  # not measured yet: this prompt will
    ],
)
def test_a_worker_compares_its_own_backlog_and_rate(backlog: int, rate: float, elsewhere: float, sooner: bool) -> None:
    silver = TierLoad(Tier.SILVER, backlog_tokens=backlog)
    stats = EngineStats(prompt_tokens_per_second=rate, tiers=(silver, TierLoad(Tier.BRONZE, backlog_tokens=10**6)))
    assert is_sooner_here(stats, Tier.SILVER, 2000, elsewhere) is sooner


async def held_prefill(stack: Stack) -> asyncio.Task[Answer]:
    """A prompt in the prefill engine, which stands still; how fast it computes is known from one before."""
    await stack.generate(tokens(60, request_id="measured", first=100))
    gate = stack.workers["prefill-0"].gate
    gate.hold()
    waiting = asyncio.create_task(stack.generate(tokens(60, request_id="before", first=200)))
    await gate.reached()
    engine = stack.workers["prefill-0"].engine
    await stack.until(lambda: engine.tokens_before(Tier.BRONZE) == 60, "the prefill worker knows of its backlog")
    return waiting


def mode(answer: Answer) -> PrefillMode:
    assert answer.placement is not None
    return answer.placement.prefill_mode


def test_decode_computes_a_prompt_that_would_wait_too_long(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, policy=BALANCED) as stack:
            waiting = await held_prefill(stack)
            request = tokens(50, request_id="behind", first=300)
            answer = await stack.generate(request)
            assert mode(answer) is PrefillMode.LOCAL
            stack.workers["prefill-0"].gate.release()
            assert mode(await waiting) is PrefillMode.REMOTE
            assert answer.content == (await stack.alone(request)).content
            await stack.assert_idle()

    asyncio.run(run())


@pytest.mark.parametrize("policy", [replace(BALANCED, balance=False), replace(BALANCED, local_prefill_max_tokens=0)])
def test_without_the_balance_a_prompt_waits_for_its_prefill_worker(policy: PlannerConfig) -> None:
    async def run() -> None:
        async with Stack(policy=policy) as stack:
            waiting = await held_prefill(stack)
            behind = asyncio.create_task(stack.generate(tokens(50, request_id="behind", first=300)))
            await stack.until(lambda: stack.workers["decode-0"].stats.running == 2, "both hold their blocks")
            stack.workers["prefill-0"].gate.release()
            assert [mode(answer) for answer in await asyncio.gather(waiting, behind)] == [PrefillMode.REMOTE] * 2
            await stack.assert_idle()

    asyncio.run(run())


def test_a_prompt_that_is_sooner_there_waits_for_the_prefill_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidate is asked again, without a limit."""
    asked: list[float] = []
    monkeypatch.setattr(worker, "is_sooner_here", lambda _stats, _tier, _tokens, seconds: asked.append(seconds))

    async def run() -> None:
        async with Stack(policy=BALANCED) as stack:
            waiting = await held_prefill(stack)
            behind = asyncio.create_task(stack.generate(tokens(50, request_id="behind", first=300)))
            prefill = stack.workers["prefill-0"].engine
            await stack.until(lambda: prefill.tokens_before(Tier.BRONZE) == 110, "both wait for the prefill worker")
            stack.workers["prefill-0"].gate.release()
            assert [mode(answer) for answer in await asyncio.gather(waiting, behind)] == [PrefillMode.REMOTE] * 2
            assert len(asked) == 1
            assert asked[0] > 0
            await stack.assert_idle()

    asyncio.run(run())


def test_a_busy_prefill_worker_says_when_it_would_be_done() -> None:
    async def run() -> None:
        async with Stack(policy=BALANCED) as stack:
            waiting = await held_prefill(stack)
            prefill = stack.workers["prefill-0"]
            request = tokens(50, request_id="asked", attempt=Attempt(0, 1))
            asked = PrefillRequest(request, Ticket("asked", Attempt(0, 1), "nowhere", 1), max_wait=0.0)
            with pytest.raises(Busy, match=r"60 tokens are to be computed before") as refused:
                await prefill.parts.prefill.prefill(asked)
            rate = prefill.stats.prompt_tokens_per_second
            assert refused.value.retry_after == pytest.approx(110 / rate)
            prefill.gate.release()
            await waiting
            await stack.assert_idle()

    asyncio.run(run())


@pytest.mark.parametrize(("tier", "is_told"), [(Tier.GOLD, False), (Tier.SILVER, True), (Tier.BRONZE, True)])
def test_a_prefill_worker_counts_only_prompts_that_go_before_the_requests_tier(tier: Tier, is_told: bool) -> None:
    """Silver prompts are in its way, admitted or not; a gold request goes before them."""

    async def run() -> None:
        async with Stack(policy=replace(BALANCED, balance=False)) as stack:
            await stack.generate(tokens(60, request_id="measured", first=100))
            prefill = stack.workers["prefill-0"]
            prefill.gate.hold()
            numbers = (1, 2)
            ahead = [
                asyncio.create_task(
                    stack.generate(tokens(60, request_id=f"s{number}", first=200 * number, tier=Tier.SILVER))
                )
                for number in numbers
            ]
            await stack.until(lambda: prefill.engine.tokens_before(Tier.SILVER) == 120, "both are known of")
            assert prefill.engine.tokens_before(Tier.BRONZE) == 120
            assert prefill.engine.tokens_before(Tier.GOLD) == 0
            request = tokens(50, request_id="asked", attempt=Attempt(0, 1), tier=tier)
            asked = PrefillRequest(request, Ticket("asked", Attempt(0, 1), "nowhere", 1), max_wait=0.0)
            with pytest.raises(Busy if is_told else BatonError) as refused:
                await asyncio.wait_for(prefill.parts.prefill.prefill(asked), 30)
            assert isinstance(refused.value, Busy) is is_told
            prefill.gate.release()
            await asyncio.gather(*ahead)
            await stack.assert_idle()

    asyncio.run(run())
