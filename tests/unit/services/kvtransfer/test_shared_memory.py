"""What is peculiar to KV in shared memory. The rest: ``tests/contract/test_mapped_transports.py``."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.core.errors import ConfigError
from baton.engine.client import threaded_engine
from baton.engine.fake import FakeRunner, fake_card
from services.kvtransfer.transport import TransportName
from tests.contract.mapped_workers import ON_HOST, SETTINGS, sharing


def test_a_worker_that_can_share_nothing_falls_back_or_says_so() -> None:
    async def main() -> None:
        runner = FakeRunner(fake_card(block_size=4), 32)
        async with threaded_engine(runner, ON_HOST) as engine:
            assert engine.pool is None
            with sharing(TransportName.SHM, engine, 1) as shared:
                assert shared is None
            with (
                pytest.raises(ConfigError, match=r"kvtransfer\.transports"),
                sharing(TransportName.SHM, engine, 1, replace(SETTINGS, transports=("shm",))),
            ):
                pass

    asyncio.run(main())
