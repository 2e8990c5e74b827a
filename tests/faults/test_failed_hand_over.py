"""Whatever fails on the way from prefill to decode, the answer comes all the same, exact, from the same reservation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from baton.core.errors import BatonError, InvalidRequest, Overloaded, PeerUnavailable, TransferRejected, UnknownModel
from baton.core.types import KvChunk, KvConfirmation, PrefillMode, PrefillRequest, PrefillResult
from baton.engine.runner import Part
from services.kvtransfer.checksum import block_checksums
from services.kvtransfer.config import KvTransferConfig
from tests.chunks import swapped
from tests.networks import NetworkFactory
from tests.stack import ENGINE, Answer, OfferGate, Stack, tokens
from tests.stack_modes import steps_ahead, transport

__all__ = ["steps_ahead", "transport"]  # fixtures of every test here

REQUEST = tokens(200, seed=5, logprobs=2)


async def check(stack: Stack, answer: Answer, *, by: str | None) -> None:
    """The answer is exact, its prompt was computed ``by`` that worker (None: by decode), and nothing is left."""
    assert answer.content == (await stack.alone(REQUEST)).content
    assert answer.placement is not None
    remote = answer.placement.prefill_mode is PrefillMode.REMOTE
    assert (answer.placement.prefill_worker if remote else None) == by
    await stack.assert_idle()


def plan_order(stack: Stack, *ids: str) -> dict[str, object]:
    return {"prefill": tuple(stack.candidate(worker_id) for worker_id in ids)}


@pytest.mark.parametrize("at", [0, 64, 192])
def test_prefill_dies_in_any_chunk_and_the_next_one_takes_over(network: NetworkFactory, at: int) -> None:
    async def run() -> None:
        async with Stack(network=network, prefill=2) as stack:
            gate = stack.workers["prefill-0"].gate

            def first_row(parts: Sequence[Part]) -> bool:
                return any(part.start == at for part in parts)

            gate.hold(first_row)
            task = asyncio.create_task(stack.generate(REQUEST, **plan_order(stack, "prefill-0", "prefill-1")))
            await gate.reached()
            reserved = stack.workers["decode-0"].stats.held_blocks
            await stack.kill("prefill-0")
            answer = await task
            assert reserved > 0
            await check(stack, answer, by="prefill-1")
            attempts = {str(chunk.ticket.attempt) for chunk in stack.workers["decode-0"].offers.offers}
            assert "0.2" in attempts

    asyncio.run(run())


def test_blocks_stay_at_the_sender_until_acknowledged_however_short_of_blocks_it_is(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, engine=replace(ENGINE, kv_blocks=20)) as stack:
            prefill, offers, go_on = stack.workers["prefill-0"], stack.workers["decode-0"].offers, asyncio.Event()

            async def slow(chunk: KvChunk) -> KvChunk:
                await go_on.wait()
                return chunk

            async def compute_another() -> None:
                async with prefill.engine.prefill(tokens(200, request_id="other", first=9)) as run:
                    await run.first_token()

            offers.on_offer = slow
            task = asyncio.create_task(stack.generate(REQUEST))
            await stack.until(lambda: prefill.stats.prompt_tokens_computed == 200, "the prompt is computed")
            other = asyncio.create_task(compute_another())
            await stack.until(lambda: prefill.stats.waiting == 1, "the other prompt waits for blocks")
            go_on.set()
            await check(stack, await task, by="prefill-0")
            await other

    asyncio.run(run())


def test_dead_prefill_is_left_alone_by_the_next_request(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, prefill=2) as stack:
            await stack.kill("prefill-0")
            order = plan_order(stack, "prefill-0", "prefill-1")
            await check(stack, await stack.generate(REQUEST, **order), by="prefill-1")
            await stack.generate(replace(REQUEST, request_id="next"), **order)
            attempts = [str(chunk.ticket.attempt) for chunk in stack.workers["decode-0"].offers.offers]
            assert attempts[-1] == "0.1"  # prefill-0 was not asked again

    asyncio.run(run())


def test_without_any_prefill_left_decode_computes_the_prompt(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, prefill=2) as stack:
            await stack.kill("prefill-0")
            await stack.kill("prefill-1")
            await check(stack, await stack.generate(REQUEST), by=None)

    asyncio.run(run())


def test_restarted_prefill_serves_the_first_request(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            await stack.generate(REQUEST)
            await stack.kill("prefill-0")
            await stack.generate(replace(REQUEST, request_id="meanwhile"))
            await stack.add_worker("prefill-0", stack.workers["prefill-0"].role, epoch=77)
            fresh = replace(REQUEST, request_id="fresh", prompt=REQUEST.prompt[::-1])
            answer = await stack.generate(fresh)
            assert answer.placement and answer.placement.prefill_mode is PrefillMode.REMOTE

    asyncio.run(run())


def test_overloaded_prefill_is_passed_over(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, prefill=2, engine=replace(ENGINE, max_running=1, max_waiting=1)) as stack:
            busy = stack.workers["prefill-0"].engine
            async with busy.prefill(tokens(20, request_id="x")) as held:
                await held.first_token()
                waiting = asyncio.create_task(_admitted(busy.prefill(tokens(20, request_id="y"))))
                await stack.until(lambda: busy.stats.waiting == 1, "the queue is full")
                answer = await stack.generate(REQUEST, **plan_order(stack, "prefill-0", "prefill-1"))
                waiting.cancel()
            await check(stack, answer, by="prefill-1")

    asyncio.run(run())


async def _admitted(engine_call: AbstractAsyncContextManager[object]) -> None:
    async with engine_call:
        pass


class Failing:
    """A prefill peer that raises."""

    def __init__(self, error: BatonError) -> None:
        self.error = error

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        raise self.error


class Lying:
    """A prefill peer that returns a first token without having shipped anything."""

    def __init__(self, result: PrefillResult) -> None:
        self.result = result

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        return self.result


def test_bad_request_is_not_tried_elsewhere(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, prefill=1) as stack:
            worker = stack.workers["prefill-0"]
            worker.parts = replace(worker.parts, prefill=Failing(InvalidRequest("top_p: no", field="top_p")))
            with pytest.raises(InvalidRequest, match="top_p: no"):
                await stack.generate(REQUEST)
            await stack.assert_idle()

    asyncio.run(run())


@pytest.mark.parametrize(
    "error", [PeerUnavailable("x"), Overloaded("x"), TransferRejected("x"), UnknownModel("x"), BatonError("bug")]
)
def test_every_failure_of_the_peer_is_survived(network: NetworkFactory, error: BatonError) -> None:
    async def run() -> None:
        async with Stack(network=network, prefill=2) as stack:
            worker = stack.workers["prefill-0"]
            worker.parts = replace(worker.parts, prefill=Failing(error))
            answer = await stack.generate(REQUEST, **plan_order(stack, "prefill-0", "prefill-1"))
            await check(stack, answer, by="prefill-1")

    asyncio.run(run())


def test_result_without_all_blocks_confirmed_is_not_believed(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, prefill=2) as stack:
            worker = stack.workers["prefill-0"]
            async with worker.engine.prefill(REQUEST) as held:
                first = await held.first_token()
            lying = Lying(PrefillResult(first, "prefill-0", 13 * 256))
            worker.parts = replace(worker.parts, prefill=lying)
            answer = await stack.generate(REQUEST, **plan_order(stack, "prefill-0", "prefill-1"))
            await check(stack, answer, by="prefill-1")

    asyncio.run(run())


def test_corrupt_chunk_is_refused_and_another_prefill_asked(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, prefill=2) as stack:
            offers = stack.workers["decode-0"].offers
            offers.on_offer = lambda chunk: swapped(chunk) if chunk.ticket.attempt.retry == 1 else chunk
            answer = await stack.generate(REQUEST, **plan_order(stack, "prefill-0", "prefill-1"))
            await check(stack, answer, by="prefill-1")

    asyncio.run(run())


def test_chunk_that_arrives_damaged_is_no_verdict_on_the_request(network: NetworkFactory) -> None:
    """A flipped bit may leave no message at all: the receiver then calls it invalid, but the client did nothing."""

    def damaged(chunk: KvChunk) -> KvChunk:
        if chunk.ticket.attempt.retry == 1:
            raise InvalidRequest("cannot decode baton.v1.OfferRequest", field="OfferRequest")
        return chunk

    async def run() -> None:
        async with Stack(network=network, prefill=2) as stack:
            stack.workers["decode-0"].offers.on_offer = damaged
            answer = await stack.generate(REQUEST, **plan_order(stack, "prefill-0", "prefill-1"))
            await check(stack, answer, by="prefill-1")

    asyncio.run(run())


def test_without_checksums_wrong_bytes_are_what_decode_computes_from(network: NetworkFactory) -> None:
    """Decode does not quietly recompute: with checksums off it meets exchanged blocks (the fake engine notices)."""

    async def run() -> None:
        unchecked = KvTransferConfig(checksums="off", max_message_bytes=512, max_mapped_bytes=512)
        async with Stack(network=network, kvtransfer=unchecked) as stack:
            offers = stack.workers["decode-0"].offers
            offers.on_offer = lambda chunk: swapped(chunk) if chunk.first_block == 0 else chunk
            with pytest.raises(BatonError, match="is wrong"):
                await stack.generate(REQUEST)
            assert stack.workers["decode-0"].stats.prompt_tokens_computed == 0
            await stack.assert_idle()

    asyncio.run(run())


def test_chunk_that_comes_late_is_refused_and_changes_nothing(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            offers = stack.workers["decode-0"].offers
            await stack.generate(REQUEST)
            late = offers.offers[0]
            other = asyncio.create_task(stack.generate(replace(REQUEST, request_id="other")))
            with pytest.raises(TransferRejected, match="no ticket is open"):
                await offers.inner.offer(late)
            with pytest.raises(TransferRejected, match="no ticket is open"):
                await offers.inner.confirm(KvConfirmation(late.ticket, late.first_block, late.block_count))
            await other
            await stack.assert_idle()

    asyncio.run(run())


def test_chunk_of_a_given_up_attempt_is_refused_while_the_next_one_runs(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, prefill=2) as stack:
            offers = stack.workers["decode-0"].offers
            refused: list[str] = []

            async def on_offer(chunk: KvChunk) -> KvChunk:
                if chunk.ticket.attempt.retry == 1:
                    raise PeerUnavailable("the first prefill dies here")
                old = next(each for each in offers.offers if each.ticket.attempt.retry == 1)
                wrong = bytes(len(old.body))
                size = len(wrong) // old.block_count
                checksums = block_checksums(wrong, old.first_block, old.block_count, size)
                late = replace(old, payload=wrong, checksums=checksums, pieces=()) if wrong else swapped(old)
                with pytest.raises(TransferRejected) as error:
                    await offers.inner.offer(late)
                refused.append(error.value.message)
                return chunk

            offers.on_offer = on_offer
            answer = await stack.generate(REQUEST, **plan_order(stack, "prefill-0", "prefill-1"))
            await check(stack, answer, by="prefill-1")
            assert set(refused) == {"attempt: 0.1 of request r is closed, open is 0.2"}

    asyncio.run(run())


def test_ticket_of_a_receivers_former_life_is_refused_by_the_sender(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, decode=1) as stack:
            await stack.generate(REQUEST)
            ticket = stack.workers["decode-0"].offers.offers[0].ticket
            await stack.kill("decode-0")
            await stack.add_worker("decode-0", stack.workers["decode-0"].role, epoch=99)
            prefill = stack.workers["prefill-0"].parts.prefill
            ticket = replace(ticket, receiver_address=stack.candidate("decode-0").address)
            with pytest.raises(TransferRejected, match=r"receiver_epoch: the ticket names \d+, .*is 99"):
                await prefill.prefill(PrefillRequest(replace(REQUEST, attempt=ticket.attempt), ticket))
            fresh = replace(ticket, receiver_epoch=12345)
            with pytest.raises(TransferRejected, match=r"the ticket names 12345, \S+ is 99"):
                await prefill.prefill(PrefillRequest(replace(REQUEST, attempt=ticket.attempt), fresh))
            await stack.assert_idle()

    asyncio.run(run())


def test_receiver_without_room_answers_overloaded_before_any_prefill(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, engine=replace(ENGINE, max_running=1, max_waiting=1)) as stack:
            decode = stack.workers["decode-0"].engine
            async with decode.reserve(tokens(20, request_id="x")):
                waiting = asyncio.create_task(_admitted(decode.reserve(tokens(20, request_id="y"))))
                await stack.until(lambda: decode.stats.waiting == 1, "the queue is full")
                with pytest.raises(Overloaded):
                    await stack.generate(REQUEST)
                assert stack.workers["prefill-0"].stats.steps == 0
                waiting.cancel()
            await stack.assert_idle()

    asyncio.run(run())


def test_silent_receiver_frees_prefill(network: NetworkFactory) -> None:
    async def run() -> None:
        impatient = KvTransferConfig(acknowledge_seconds=0.05)
        async with Stack(network=network, kvtransfer=impatient) as stack:
            never = asyncio.Event()

            async def silent(chunk: KvChunk) -> KvChunk:
                await never.wait()
                return chunk

            offers: OfferGate = stack.workers["decode-0"].offers
            offers.on_offer = silent
            await check(stack, await stack.generate(REQUEST), by=None)

    asyncio.run(run())


def test_prefill_worker_that_takes_decode_work_never_asks_itself(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, prefill=1, decode=0) as stack:
            answer = await stack.generate(REQUEST, **plan_order(stack, "prefill-0"))
            await check(stack, answer, by=None)
            assert answer.placement and answer.placement.decode_worker == "prefill-0"

    asyncio.run(run())
