"""Real models through the cache tier: what was fetched is what would have been computed, bit for bit."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.core.types import PrefillMode
from services.kvtransfer.config import KvTransferConfig
from tests.gates import GENEROUS_SECONDS
from tests.integration.test_real_engine_split import PROMPT, content, small
from tests.joined_tier import Joined, offload
from tests.networks import WireNetwork
from tests.real_engines import SAMPLINGS, UNLIKE, alone, gated, request
from tests.stack import Stack

KVTRANSFER = KvTransferConfig(
    acknowledge_seconds=GENEROUS_SECONDS,
    tier_answer_seconds=GENEROUS_SECONDS,
    tier_min_tokens=16,
    tier_mb_per_second=1e6,  # whatever the shape, fetching pays
)


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize("mode", [PrefillMode.LOCAL, PrefillMode.REMOTE])
def test_every_hit_length_from_the_tier_gives_the_same_tokens_and_logprobs(name: str, mode: PrefillMode) -> None:
    wanted = request(PROMPT, 6, sampling=SAMPLINGS[4], logprobs=1)
    joined = Joined()
    threshold = 0 if mode is PrefillMode.REMOTE else 1000

    def stack() -> Stack:
        return Stack(1, 1, small(name), KVTRANSFER, runner=gated, network=WireNetwork, tiers=joined)

    async def run() -> None:
        async with stack() as filling, stack() as fresh:
            for hit in (16, 33, 64, len(PROMPT)):
                each = replace(wanted, salt=f"{hit}".encode())
                worker = filling.workers["decode-0"]
                begun = replace(each, prompt=each.prompt[:hit], logprobs=None)
                await filling.generate(begun, local_prefill_max_tokens=1000)
                await offload(worker, joined)
                found = await fresh.generate(each, local_prefill_max_tokens=threshold)
                assert content(found) == content(alone(name, wanted)), hit
                assert found.placement and found.placement.prefill_mode is mode
                assert found.usage and found.usage.cached_tokens == hit // 16 * 16
            await fresh.assert_idle()

    asyncio.run(run())
