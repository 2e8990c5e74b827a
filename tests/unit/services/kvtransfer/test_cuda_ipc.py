"""What is peculiar to KV on devices of one host. The rest: ``tests/contract/test_mapped_transports.py``."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.core.errors import ConfigError
from baton.core.types import FilledBlocks
from baton.engine.client import threaded_engine
from baton.engine.config import EngineConfig
from baton.engine.digest import are_strong
from baton.engine.process import fake_runner
from services.kvtransfer.handshake import FEATURES, LATE_CHECKSUMS, LOCAL_PACKETS, OFFER_STREAMS
from services.kvtransfer.transport import TransportName
from services.kvtransfer.transports import open_transports
from tests.contract.mapped_workers import ON_DEVICE, ON_HOST, PROMPT, SETTINGS, TICKET, Worker, run_pair


def test_later_chunks_are_covered_by_light_digests_and_their_last_block_by_a_strong_one() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        await sender.kv.outgoing.open(receiver.answer)
        async with receiver.engine.reserve(PROMPT) as reservation, sender.engine.prefill(PROMPT) as source:
            await source.first_token()
            for blocks, strong in ((FilledBlocks(0, 2, 8), b"\1\1"), (FilledBlocks(2, 4, 22), b"\0\0\0\1")):
                chunk = await sender.kv.outgoing.chunk(TICKET, source, blocks)
                assert are_strong(chunk.checksums) == strong
                tokens = blocks.tokens - 4 * blocks.first_block
                await receiver.kv.incoming.store(chunk, reservation, tokens)

    run_pair(TransportName.CUDA_IPC, scenario)


def test_a_worker_s_transports_are_those_that_its_pool_has() -> None:
    async def main() -> None:
        async with threaded_engine(fake_runner(ON_DEVICE), ON_DEVICE) as engine:
            with open_transports(engine, "w", 1, SETTINGS) as found:
                assert found.hello.transports == ("cuda-ipc", "nccl", "tcp")
                assert found.answer.door is not None
                assert [each.name for each in found.incoming] == ["tcp", "cuda-ipc", "nccl"]
            only_shm = replace(SETTINGS, transports=("shm",))
            with pytest.raises(ConfigError, match=r"kvtransfer\.transports"), open_transports(engine, "w", 1, only_shm):
                pass
        async with threaded_engine(fake_runner(ON_HOST), ON_HOST) as engine:
            with open_transports(engine, "w", 1, SETTINGS) as found:
                assert found.hello.transports == ("shm", "tcp")

    asyncio.run(main())


def test_a_worker_asks_for_offers_in_streams_where_its_front_has_mapped_the_pool_that_they_go_into() -> None:
    async def main() -> None:
        for config, asks, streamed in ((ON_DEVICE, False, set[str]()), (ON_HOST, True, {"tcp"})):
            async with threaded_engine(fake_runner(config), config) as engine:
                with open_transports(engine, "w", 1, SETTINGS) as found:
                    assert (OFFER_STREAMS in found.answer.features) is asks
                    assert LATE_CHECKSUMS in found.answer.features
                    theirs = replace(found.answer, features=FEATURES)
                    assert {way.name for way in found.outgoing if way.is_streamed(theirs)} == streamed

    asyncio.run(main())


@pytest.mark.parametrize("local_calls", [True, False])
@pytest.mark.parametrize("config", [ON_DEVICE, ON_HOST])
def test_a_worker_says_that_it_answers_at_its_door_where_it_does(config: EngineConfig, *, local_calls: bool) -> None:
    async def main() -> None:
        async with threaded_engine(fake_runner(config), config) as engine:
            with open_transports(engine, "w", 1, replace(SETTINGS, local_calls=local_calls)) as found:
                assert (LOCAL_PACKETS in found.answer.features) is local_calls

    asyncio.run(main())


def test_a_worker_without_a_door_answers_at_none() -> None:
    async def main() -> None:
        async with threaded_engine(fake_runner(ON_HOST), ON_HOST) as engine:
            with open_transports(engine, "w", 1, replace(SETTINGS, transports=("tcp",))) as found:
                assert found.answer.door is None
                assert LOCAL_PACKETS not in found.answer.features

    asyncio.run(main())
