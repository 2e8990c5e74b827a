"""What a network, a full receiver or a registry may do to real processes: answers stay whole and exact."""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import replace

import pytest

from baton.client import GenerateRequest
from baton.client.answer import Answer
from baton.core.errors import TransferRejected
from baton.core.types import Attempt, KvChunk, Role, Ticket
from baton.rpc.kvreceiver import KvReceiverClient
from tests.faults.conftest import Bench
from tests.faults.deployment import Deployment, content
from tests.faults.proxy import Barrier, Content, Towards

FROZEN_SECONDS = 10.0

by_shared_memory = pytest.mark.parametrize("bench", ["shm"], indirect=True)
by_each_transport = pytest.mark.parametrize("bench", ["shm", "tcp"], indirect=True)


async def exact(found: Deployment, request: GenerateRequest, answer: asyncio.Task[Answer] | None = None) -> None:
    """What came under the fault equals what comes after it."""
    got = await (answer or asyncio.create_task(found.client.ask(request)))
    await found.heal()
    assert content(got) == content(await found.client.ask(request))


@by_each_transport
@pytest.mark.parametrize("at", [Towards.SERVER, Towards.CLIENT])
def test_connection_reset_in_the_middle_of_a_hand_over_costs_no_token(bench: Bench, at: Towards) -> None:
    async def act(found: Deployment) -> None:
        request = bench.story()
        held = Content.OFFER if at is Towards.SERVER else None
        barrier = found.hold(Role.DECODE, Barrier(at, held, after=Content.OFFER))
        asking = asyncio.create_task(found.client.ask(request))
        await asyncio.wait({asking, barrier.reached}, return_when=asyncio.FIRST_COMPLETED)
        found.proxies[barrier.reached.result()].reset()
        found.unhold()
        await exact(found, request, asking)

    bench.run(act)


@by_shared_memory
def test_every_connection_reset_while_tokens_stream_costs_no_token(bench: Bench) -> None:
    async def act(found: Deployment) -> None:
        request = bench.story(max_tokens=200)
        stream = found.client.stream(request)
        first = await anext(stream)
        for proxy in found.proxies.values():
            proxy.reset()
        ids = first.token_ids + tuple([token async for chunk in stream for token in chunk.token_ids])
        await found.heal()
        assert ids == (await found.client.ask(request)).choices[0].token_ids

    bench.run(act)


@by_each_transport
@pytest.mark.parametrize("seed", range(3))
def test_one_flipped_bit_of_an_offer_is_never_decoded(bench: Bench, seed: int) -> None:
    async def act(found: Deployment) -> None:
        request = bench.story()
        decoders = [proxy for name, proxy in found.proxies.items() if found.roles[name] is Role.DECODE]
        for proxy in decoders:
            proxy.corrupt_next_offer(random.Random(seed))
        answer = await found.client.ask(request)
        assert sum(proxy.corrupted for proxy in decoders) >= 1
        await found.heal()
        assert content(answer) == content(await found.client.ask(request))

    bench.run(act)


@by_shared_memory
def test_chunk_for_a_former_life_of_the_process_at_this_address_is_refused(bench: Bench) -> None:
    async def act(found: Deployment) -> None:
        before = (await found.workers())["decode-0"]
        found.signal("decode-0", signal.SIGKILL)
        await found.heal()
        after = (await found.workers())["decode-0"]
        assert after.address == before.address and after.epoch != before.epoch
        receiver = KvReceiverClient(found.fleet.channels.get(after.address))
        ticket = Ticket("late", Attempt(0, 1), before.address, before.epoch)
        with pytest.raises(TransferRejected, match=f"receiver_epoch: the ticket names {before.epoch}"):
            await receiver.offer(KvChunk(ticket, 0, 1, bytes(256), (bytes(16),)))

    bench.run(act)


@by_each_transport
def test_slow_link_costs_time_and_no_token(bench: Bench) -> None:
    async def act(found: Deployment) -> None:
        request = bench.story()
        for proxy in found.proxies.values():
            proxy.bytes_per_second = 20_000
        await exact(found, request)

    bench.run(act)


@by_shared_memory
def test_more_requests_than_the_receivers_have_blocks_for_are_all_answered(bench: Bench) -> None:
    async def act(found: Deployment) -> None:
        requests = [bench.story(max_tokens=300) for _ in range(50)]  # 50 x 31 blocks, of 2 x 600
        answers = await asyncio.gather(*(found.client.ask(request) for request in requests))
        for request, answer in zip(requests[::10], answers[::10], strict=True):
            assert content(answer) == content(await found.client.ask(request))

    bench.run(act)


@by_shared_memory
def test_redis_frozen_for_ten_seconds_is_noticed_by_nobody(bench: Bench) -> None:
    async def act(found: Deployment) -> None:
        pids = {name: process.pid for name, process in found.fleet.started.items()}
        request = bench.story()
        expected = content(await found.client.ask(request))
        clock = asyncio.get_running_loop()
        found.signal("redis", signal.SIGSTOP)
        thaw, asked = clock.time() + FROZEN_SECONDS, 0
        while clock.time() < thaw:
            assert content(await found.client.ask(replace(request, request_id=f"frozen-{asked}"))) == expected
            asked += 1
        found.signal("redis", signal.SIGCONT)
        assert asked > 0
        await found.heal()
        assert {name: process.pid for name, process in found.fleet.started.items()} == pids

    bench.run(act)


@by_shared_memory
def test_redis_restarted_empty_is_filled_again_and_nothing_restarts(bench: Bench) -> None:
    async def act(found: Deployment) -> None:
        epochs = {name: record.epoch for name, record in (await found.fleet.records()).items()}
        request = bench.story(max_tokens=300)
        stream = found.client.stream(request)
        first = await anext(stream)
        found.redis.restart()
        ids = first.token_ids + tuple([token async for chunk in stream for token in chunk.token_ids])
        await found.heal()
        assert {name: record.epoch for name, record in (await found.fleet.records()).items()} == epochs
        assert ids == (await found.client.ask(request)).choices[0].token_ids

    bench.run(act)
