"""What warming promises of a prompt that cannot be computed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.core.errors import BatonError
from baton.engine.client import threaded_engine
from baton.engine.config import EngineConfig
from baton.engine.process import fake_runner
from services.kvtransfer.tier import Tier
from services.kvtransfer.tier_peer import NoTier
from services.kvtransfer.warm import WorkerWarmer
from tests.failing_runner import FailingRunner, ends_at, nobody
from tests.unit.engine.core_driver import prompt, request

LENGTH = 14  # three blocks and two tokens
CONFIG = EngineConfig(model="fake", kv_blocks=64, block_size=4)


class OneTier(NoTier):
    """There is this one."""

    def __init__(self) -> None:
        self.tier = Tier(memory_bytes=1 << 20, disk=None, message_bytes=1 << 20)

    def find(self) -> Tier:
        return self.tier


@pytest.mark.parametrize("step_tokens", [12, 16], ids=["fails after all blocks", "fails with all blocks"])
@pytest.mark.parametrize("is_there", [False, True], ids=["the tier lacks them", "the tier has them"])
def test_a_prompt_whose_step_fails_is_not_warm(step_tokens: int, is_there: bool) -> None:
    wanted, tiers = request(prompt(LENGTH), timeout=20.0), OneTier()
    config = replace(CONFIG, max_step_tokens=step_tokens)
    runner = FailingRunner(fake_runner(config), nobody if is_there else ends_at(LENGTH), BatonError("not finite"))

    async def run() -> None:
        async with threaded_engine(runner, config) as engine:
            warmer = WorkerWarmer(engine, tiers, message_bytes=1 << 20)
            if is_there:
                assert not await tiers.tier.missing(await warmer.warm(wanted))
                runner.fails = ends_at(LENGTH)
            with pytest.raises(BatonError, match="not finite"):
                await warmer.warm(wanted)

    asyncio.run(run())
