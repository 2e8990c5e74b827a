from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import ClassVar

import pytest

from baton.core.errors import CorruptTransfer
from baton.core.types import CacheClass, CachePolicy
from baton.engine.client import EngineClient, spawn_engine, threaded_engine
from baton.engine.config import EngineConfig
from baton.engine.fake import FakeRunner, fake_card
from baton.engine.process import fake_runner
from tests.contract.engine_contract import EngineContract
from tests.contract.engine_driving import answer, assert_idle, drain, prompt, request, tokens_of


class FakeContract(EngineContract):
    """What the fake promises beyond the rest: it notices wrong KV."""

    def test_swapped_blocks_are_noticed_and_not_found_again(self) -> None:
        async def main() -> None:
            async with self.open(self.config()) as source, self.open(self.config()) as target:
                wanted = request(prompt(3 * self.block_size))
                async with target.reserve(wanted) as reservation, source.prefill(wanted) as run:
                    first = await run.first_token()
                    for ordinal, taken in ((0, 1), (1, 0), (2, 2)):
                        await reservation.write_blocks(ordinal, await run.read_blocks(taken, 1))
                    with pytest.raises(CorruptTransfer):
                        await drain(reservation, first)
                await assert_idle(target)
                again = await answer(target, wanted)
                assert again[0].usage is not None
                assert again[0].usage.cached_tokens == 0
                assert tokens_of(again) == tokens_of(await answer(source, wanted))

        asyncio.run(main())

    def test_wrong_bytes_filled_into_blocks_that_held_the_right_ones_are_noticed(self) -> None:
        async def main() -> None:
            async with self.open(self.config()) as source, self.open(self.config()) as target:
                if target.pool is None:
                    pytest.skip("this engine's pool is not shared memory")
                wanted = request(prompt(3 * self.block_size + 1), 3, cache=CachePolicy(CacheClass.NONE))
                async with source.prefill(wanted) as run:
                    first = await run.first_token()
                    payload = bytes(await run.read_blocks(0, 3)), bytes(await run.read_blocks(3, 1))
                for right in (True, False):  # the same blocks, with the same tokens
                    async with target.reserve(wanted) as reservation:
                        data = payload[0] if right else bytes(len(payload[0]))
                        reservation.fill_blocks(0, data, self.block_size)
                        reservation.fill_blocks(3, payload[1], self.block_size)
                        if right:
                            await drain(reservation, first)
                        else:
                            with pytest.raises(CorruptTransfer):
                                await drain(reservation, first)
                    await assert_idle(target)

        asyncio.run(main())


class TestThreadedFake(FakeContract):
    chunk_sizes: ClassVar[tuple[int, ...]] = tuple(range(1, 23))

    def open(self, config: EngineConfig) -> AbstractAsyncContextManager[EngineClient]:
        return threaded_engine(fake_runner(config), config)


class TestFakeOneStepAhead(FakeContract):
    chunk_sizes: ClassVar[tuple[int, ...]] = tuple(range(1, 23))

    def open(self, config: EngineConfig) -> AbstractAsyncContextManager[EngineClient]:
        card = fake_card(block_size=config.block_size)
        return threaded_engine(FakeRunner(card, config.kv_blocks, steps_ahead=1), config)


class TestFakeOnADevice(FakeContract):
    def open(self, config: EngineConfig) -> AbstractAsyncContextManager[EngineClient]:
        on_device = replace(config, fake_pool="device")
        return threaded_engine(fake_runner(on_device), on_device)


class TestSpawnedFake(FakeContract):
    def open(self, config: EngineConfig) -> AbstractAsyncContextManager[EngineClient]:
        return spawn_engine(config)
