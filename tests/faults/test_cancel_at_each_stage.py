"""A request cancelled at any point of its path leaves nothing behind, on either worker, and others do not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from baton.core.errors import Expired, TransferRejected
from baton.core.types import KvChunk, TokenRequest
from baton.engine.runner import Part
from tests.networks import NetworkFactory
from tests.stack import ENGINE, Stack, tokens
from tests.stack_modes import steps_ahead

__all__ = ["steps_ahead"]  # a fixture of every test here

REQUEST = tokens(200, request_id="cancelled")


async def cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def check_sound(stack: Stack) -> None:
    await stack.assert_idle()
    after = replace(tokens(60, first=77), request_id="after")
    assert (await stack.generate(after)).content == (await stack.alone(after)).content
    await stack.assert_idle()


def begin(stack: Stack, request: TokenRequest = REQUEST) -> asyncio.Task[object]:
    return asyncio.create_task(stack.generate(request))


def chunk_at(start: int) -> Callable[[Sequence[Part]], bool]:
    return lambda parts: any(part.start == start for part in parts)


def test_queued_for_a_place_at_decode(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, engine=replace(ENGINE, max_running=1)) as stack:
            decode = stack.workers["decode-0"]
            async with decode.engine.reserve(tokens(20, request_id="in front")):
                task = begin(stack)
                await stack.until(lambda: decode.stats.waiting == 1, "the request waits")
                await cancel(task)
                await stack.until(lambda: decode.stats.waiting == 0, "the queue is empty")
            assert stack.workers["prefill-0"].stats.steps == 0
            await check_sound(stack)

    asyncio.run(run())


def test_queued_at_prefill_is_never_computed(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, engine=replace(ENGINE, max_running=1)) as stack:
            prefill = stack.workers["prefill-0"]
            async with prefill.engine.prefill(tokens(20, request_id="in front")) as run:
                await run.first_token()
                task = begin(stack)
                await stack.until(lambda: prefill.stats.waiting == 1, "the request waits")
                await cancel(task)
                await stack.until(lambda: prefill.stats.waiting == 0, "the queue is empty")
            await stack.assert_idle()
            assert prefill.stats.prompt_tokens_computed == 20
            await check_sound(stack)

    asyncio.run(run())


def test_mid_prefill_stops_within_the_step_in_flight(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            prefill = stack.workers["prefill-0"]
            prefill.gate.hold(chunk_at(64))
            task = begin(stack)
            await prefill.gate.reached()
            await cancel(task)
            await stack.until(lambda: prefill.engine_calls == 0, "prefill has let go")
            prefill.gate.release()
            await stack.assert_idle()
            assert prefill.stats.prompt_tokens_computed == 128  # the step that was held, and no other
            await check_sound(stack)

    asyncio.run(run())


def test_mid_transfer_with_an_offer_on_its_way(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            offers = stack.workers["decode-0"].offers
            on_its_way, never = asyncio.Event(), asyncio.Event()

            async def stuck(chunk: KvChunk) -> KvChunk:
                on_its_way.set()
                await never.wait()
                return chunk

            offers.on_offer = lambda chunk: stuck(chunk) if chunk.first_block >= 2 else chunk
            task = begin(stack)
            await on_its_way.wait()
            await cancel(task)
            offers.on_offer = None
            await check_sound(stack)

    asyncio.run(run())


def test_blocks_return_only_after_a_write_that_has_begun_has_ended(
    network: NetworkFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over a wire: the sender's call is cancelled, but the receiver is in the middle of storing the chunk, which its
    engine does, as the pool is on a device."""
    monkeypatch.setattr(Stack, "fake_pool", "device")
    monkeypatch.setattr(Stack, "transports", ("tcp",))

    async def run() -> None:
        async with Stack(network=network) as stack:
            decode, prefill = stack.workers["decode-0"], stack.workers["prefill-0"]
            writes: list[asyncio.Task[None]] = []

            async def detached(chunk: KvChunk) -> KvChunk:
                writes.append(asyncio.ensure_future(decode.offers.inner.offer(chunk)))
                await asyncio.Event().wait()
                return chunk

            decode.offers.on_offer = detached
            async with decode.engine.reserve(tokens(20, request_id="busy")) as busy:
                prefill.gate.hold()
                task = begin(stack)
                await prefill.gate.reached()  # so decode has admitted it
                decode.gate.hold()
                step = asyncio.ensure_future(anext(busy.decode(None)))
                await decode.gate.reached()  # from here on the decode engine stores nothing
                prefill.gate.release()
                await stack.until(lambda: len(writes) > 0, "a write has begun")
                task.cancel()
                await stack.until(lambda: prefill.engine_calls == 0, "prefill has let go")
                await stack.until(lambda: decode.parts.receiver.open_tickets == 0, "the ticket is closed")
                assert decode.engine_calls == 2  # and yet the reservation stays
                decode.gate.release()
                await asyncio.wait([task, *writes])
                assert task.cancelled()
                await stack.until(lambda: decode.engine_calls == 1, "the reservation has ended")
                assert "closed during the write" in str(writes[0].exception())
                assert all(isinstance(write.exception(), TransferRejected) for write in writes)
                await step
            decode.offers.on_offer = None
            await check_sound(stack)

    asyncio.run(run())


@pytest.mark.parametrize("received", [0, 1, 2, 5])
def test_mid_decode(network: NetworkFactory, received: int) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            request = replace(REQUEST, stop=replace(REQUEST.stop, max_tokens=500))
            gate = stack.workers["decode-0"].gate
            gate.hold(lambda parts: any(part.start > len(REQUEST.prompt) + 100 for part in parts))  # it must not end
            async with stack.stream(request) as chunks:
                tokens_seen = 0
                while tokens_seen < received:
                    tokens_seen += len((await anext(chunks)).token_ids)
            gate.release()
            await check_sound(stack)

    asyncio.run(run())


def test_task_cancelled_at_every_loop_turn(network: NetworkFactory) -> None:
    """Wherever the cancellation falls: all await points of the path are hit in turn."""

    async def cancelled_after(stack: Stack, turns: int) -> bool:
        task = begin(stack, tokens(40, request_id=f"turn-{turns}", first=turns, max_tokens=3))
        for _ in range(turns):
            await asyncio.sleep(0)
        done = task.done()
        task.cancel()
        await asyncio.wait([task])
        return done

    async def run() -> None:
        async with Stack(network=network) as stack:
            turns = 0
            while not await cancelled_after(stack, turns):
                await stack.assert_idle()
                turns += 1 + turns // 60
            assert turns > 5  # a busy machine does more in each turn
            await check_sound(stack)

    asyncio.run(run())


async def _expire_in_prefill(stack: Stack) -> None:
    gate = stack.workers["prefill-0"].gate
    gate.hold(chunk_at(64))
    try:
        with pytest.raises(Expired):
            await stack.generate(replace(REQUEST, timeout=0.2))
    finally:
        gate.release()


async def _expire_in_transfer(stack: Stack) -> None:
    offers = stack.workers["decode-0"].offers

    async def silent(chunk: KvChunk) -> KvChunk:
        await asyncio.Event().wait()
        return chunk

    offers.on_offer = silent
    with pytest.raises(Expired):
        await stack.generate(replace(REQUEST, timeout=0.2))
    offers.on_offer = None


async def _expire_in_decode(stack: Stack) -> None:
    gate = stack.workers["decode-0"].gate
    gate.hold()
    try:
        with pytest.raises(Expired):
            await stack.generate(replace(REQUEST, timeout=0.5))
    finally:
        gate.release()


@pytest.mark.parametrize("expire", [_expire_in_prefill, _expire_in_transfer, _expire_in_decode])
def test_deadline_frees_everything_at_each_stage(
    network: NetworkFactory, expire: Callable[[Stack], Awaitable[None]]
) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            await expire(stack)
            await check_sound(stack)

    asyncio.run(run())
