"""Requests that find their prefix in the cache tier: nothing of it is computed, and no answer is another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import BatonError, CorruptTransfer, InvalidRequest, PeerUnavailable
from baton.core.types import PrefillMode, TierBlock, TokenRequest
from services.kvtransfer.config import KvTransferConfig
from tests.gates import GENEROUS_SECONDS
from tests.joined_tier import Joined, offload
from tests.stack import Stack, WireNetwork, tokens

LENGTH = 200  # twelve full blocks of 16 tokens, and 8 tokens
FULL = 192
KVTRANSFER = KvTransferConfig(
    acknowledge_seconds=GENEROUS_SECONDS,
    tier_message_bytes=2 * 16 * 16,
    tier_answer_seconds=GENEROUS_SECONDS,
    tier_min_tokens=32,
    tier_mb_per_second=1e6,  # however quick the fake engine is, fetching pays
)


def stack(joined: Joined, *, local: bool, **changes: Any) -> Stack:
    """With ``local`` one worker that computes its prompts itself, else one of each role."""
    made = Stack(prefill=0 if local else 1, decode=1, kvtransfer=KVTRANSFER, tiers=joined)
    return replace(made, **changes)


async def fill(joined: Joined, asked: TokenRequest) -> tuple[int, ...]:
    """Have one worker compute the request and offload it; returns its tokens."""
    async with stack(joined, local=True) as first:
        answer = await first.generate(asked)
        await offload(first.workers["decode-0"], joined)
        await first.assert_idle()
    return answer.token_ids


def request(**fields: Any) -> TokenRequest:
    return tokens(LENGTH, **fields)


def test_a_fresh_worker_fetches_the_prefix_instead_of_computing_it() -> None:
    async def main() -> None:
        joined = Joined()
        expected = await fill(joined, request())
        async with stack(joined, local=True) as fresh:
            worker = fresh.workers["decode-0"]
            answer = await fresh.generate(request())
            assert answer.token_ids == expected
            assert answer.usage is not None and answer.usage.cached_tokens == FULL
            assert worker.stats.prompt_tokens_computed == LENGTH - FULL
            assert worker.stats.prompt_tokens_cached == FULL
            gets = len(joined.gets)
            again = await fresh.generate(request(request_id="again"))
            assert again.token_ids == expected
            assert len(joined.gets) == gets  # by now it is in the worker's own cache
            await fresh.assert_idle()

    asyncio.run(main())


def test_in_the_split_path_both_workers_fetch_and_no_block_is_shipped() -> None:
    async def main() -> None:
        joined = Joined()
        expected = await fill(joined, request())
        async with stack(joined, local=False, network=WireNetwork) as fresh:
            answer = await fresh.generate(request())
            assert answer.token_ids == expected
            assert answer.placement is not None and answer.placement.prefill_mode is PrefillMode.REMOTE
            assert answer.usage is not None and answer.usage.cached_tokens == FULL
            assert fresh.workers["prefill-0"].stats.prompt_tokens_computed == LENGTH - FULL
            assert answer.placement.kv_bytes == (LENGTH - FULL) * 16
            await fresh.assert_idle()

    asyncio.run(main())


@pytest.mark.parametrize("shared", [0, 16, 33, 48, 112, 191, 192, 199])
def test_whatever_part_of_the_prefix_is_in_the_tier_the_answer_is_the_same(shared: int) -> None:
    async def main() -> None:
        joined = Joined()
        other = tuple(400 - n for n in range(LENGTH - shared))
        await fill(joined, replace(request(), prompt=request().prompt[:shared] + other))
        async with stack(joined, local=True) as fresh:
            expected = (await fresh.alone(request())).token_ids
            answer = await fresh.generate(request())
            assert answer.token_ids == expected
            fetched = shared // 16 * 16 if shared // 16 * 16 >= KVTRANSFER.tier_min_tokens else 0
            assert answer.usage is not None and answer.usage.cached_tokens == fetched
            await fresh.assert_idle()

    asyncio.run(main())


def test_two_tenants_with_the_same_prompt_share_nothing() -> None:
    async def main() -> None:
        joined = Joined()
        await fill(joined, request(salt=b"salt of one"))
        held = joined.tier.stats
        async with stack(joined, local=True) as fresh:
            answer = await fresh.generate(request(salt=b"salt of the other"))
            assert answer.usage is not None and answer.usage.cached_tokens == 0
            assert fresh.workers["decode-0"].stats.prompt_tokens_computed == LENGTH
            assert joined.gets == []
            await offload(fresh.workers["decode-0"], joined)
            assert joined.tier.stats.memory_blocks > held.memory_blocks
            own = await fresh.generate(request(salt=b"salt of one", request_id="own"))
            assert own.usage is not None and own.usage.cached_tokens == FULL

    asyncio.run(main())


def flipped(block: TierBlock) -> TierBlock:
    return replace(block, payload=bytes([block.payload[0] ^ 1]) + block.payload[1:])


def renamed(block: TierBlock) -> TierBlock:
    return replace(block, name=bytes(16))


def shortened(block: TierBlock) -> TierBlock:
    return replace(block, payload=block.payload[:-16])


@pytest.mark.parametrize("spoil", [flipped, renamed, shortened])
@pytest.mark.parametrize("sound", [0, 4])
def test_a_corrupt_block_is_computed_and_so_is_all_after_it(
    spoil: Callable[[TierBlock], TierBlock], sound: int
) -> None:
    async def main() -> None:
        joined = Joined()
        expected = await fill(joined, request())
        async with stack(joined, local=True) as fresh:
            seen: list[bytes] = []

            def later(block: TierBlock) -> TierBlock:
                seen.append(block.name)
                return spoil(block) if len(seen) > sound else block

            joined.spoil = later
            answer = await fresh.generate(request())
            assert answer.token_ids == expected
            assert answer.usage is not None and answer.usage.cached_tokens == sound * 16
            await fresh.assert_idle()

    asyncio.run(main())


@pytest.mark.parametrize("error", [PeerUnavailable("gone"), CorruptTransfer("rot"), BatonError("bug")])
@pytest.mark.parametrize("local", [True, False])
def test_a_tier_that_fails_in_the_middle_costs_no_token(error: BatonError, local: bool) -> None:
    async def main() -> None:
        joined = Joined()
        expected = await fill(joined, request())

        async def fails(names: Sequence[bytes]) -> None:
            if len(joined.gets) > 2:
                raise error

        async with stack(joined, local=local) as fresh:
            joined.on_get = fails
            answer = await fresh.generate(request())
            assert answer.token_ids == expected
            assert joined.is_lost == isinstance(error, PeerUnavailable)
            await fresh.assert_idle()

    asyncio.run(main())


def test_a_silent_tier_is_given_up_and_left_alone() -> None:
    async def main() -> None:
        joined = Joined()
        expected = await fill(joined, request())

        async def silent(names: Sequence[bytes]) -> None:
            await asyncio.Event().wait()

        joined.on_get = silent
        quick = replace(KVTRANSFER, tier_answer_seconds=0.05)
        async with stack(joined, local=True, kvtransfer=quick) as fresh:
            assert (await fresh.generate(request())).token_ids == expected
            assert joined.is_lost
            await fresh.assert_idle()

    asyncio.run(main())


def test_a_request_cancelled_in_a_fetch_leaves_nothing_behind() -> None:
    async def main() -> None:
        joined = Joined()
        await fill(joined, request())
        reached = asyncio.Event()

        async def held(names: Sequence[bytes]) -> None:
            reached.set()
            await asyncio.Event().wait()

        joined.on_get = held
        for local in (True, False):
            async with stack(joined, local=local) as fresh:
                reached.clear()
                asking = asyncio.create_task(fresh.generate(request()))
                await reached.wait()
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
                await fresh.assert_idle()

    asyncio.run(main())


def test_prompt_logprobs_and_short_prefixes_never_ask_the_tier() -> None:
    async def main() -> None:
        joined = Joined()
        await fill(joined, request())
        asked = joined.tier.stats
        async with stack(joined, local=True) as fresh:
            answer = await fresh.generate(request(prompt_logprobs=0))
            assert answer.usage is not None and answer.usage.cached_tokens == 0
            await fresh.generate(tokens(31, request_id="short"))
            assert joined.gets == []
            assert (joined.tier.stats.hits, joined.tier.stats.misses) == (asked.hits, asked.misses)

    asyncio.run(main())


def test_warming_puts_a_prompt_into_the_tier_and_refuses_another_model() -> None:
    async def main() -> None:
        joined = Joined()
        async with stack(joined, local=True) as warming:
            warmer = warming.workers["decode-0"].parts.warmer
            names = await warmer.warm(request())
            assert len(names) == FULL // 16
            assert await joined.missing(names) == ()
            assert await warmer.warm(request(request_id="again")) == names
            with pytest.raises(InvalidRequest):
                await warmer.warm(replace(request(), prompt=()))
            joined.is_lost = True
            with pytest.raises(PeerUnavailable):
                await warmer.warm(request())
            await warming.assert_idle()
            joined.is_lost = False
        async with stack(joined, local=True) as fresh:
            answer = await fresh.generate(request())
            assert answer.usage is not None and answer.usage.cached_tokens == FULL

    asyncio.run(main())
