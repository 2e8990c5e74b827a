"""A prompt's KV is handed over while its first token is still being computed, and that may come to nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import BatonError, InvalidRequest
from baton.core.types import KvChunk, PrefillMode
from baton.engine.config import EngineConfig
from baton.engine.fake import FakeRunner, fake_card
from baton.engine.runner import Runner
from baton.engine.sharedpool import shared_pool_memory
from tests.failing_runner import FailingRunner, ends_at, nobody
from tests.gates import GENEROUS_SECONDS, StepGate
from tests.held_runner import HeldRunner
from tests.stack import ENGINE, SMALL_MESSAGES, Answer, Stack, tokens
from tests.stack_modes import steps_ahead, transport

__all__ = ["steps_ahead", "transport"]  # fixtures of every test here

LENGTH = 200
REQUEST = tokens(LENGTH, seed=5, logprobs=2)
IN_ONE_CHUNK = replace(ENGINE, max_step_tokens=256)

MakeRunner = Callable[[EngineConfig, StepGate], Runner]


def fake(config: EngineConfig, gate: StepGate, pool: str = "mapped") -> FakeRunner:
    """``pool``: mapped by its front, on a device, or plain memory of the engine."""
    card = fake_card(block_size=config.block_size)
    where = {"mapped": "memory", "device": "device"}.get(pool)
    held: dict[str, Any] = {} if where is None else {where: shared_pool_memory(config.kv_blocks, card.format)}
    return FakeRunner(card, config.kv_blocks, steps_ahead=Stack.steps_ahead, on_step=gate, **held)


def held_by(runners: list[HeldRunner]) -> MakeRunner:
    def make(config: EngineConfig, gate: StepGate) -> HeldRunner:
        runners.append(HeldRunner(fake(config, gate)))
        return runners[-1]

    return make


def failing(error: BatonError | None = None, pool: str = "mapped") -> MakeRunner:
    return lambda config, gate: FailingRunner(fake(config, gate, pool), ends_at(LENGTH), error)


def mend_decode(stack: Stack) -> None:
    """Only prefill fails."""
    runner = stack.workers["decode-0"].runner
    assert isinstance(runner, FailingRunner)
    runner.fails = nobody


async def check(stack: Stack, answer: Answer, mode: PrefillMode) -> None:
    """The answer is exact, and nothing is left."""
    assert answer.content == (await replace(stack, runner=None).alone(REQUEST)).content
    assert answer.placement is not None
    assert answer.placement.prefill_mode is mode
    await stack.assert_idle()


def test_all_blocks_are_confirmed_before_the_first_token_is_there() -> None:
    async def run() -> None:
        held: list[HeldRunner] = []
        async with Stack(runner=held_by(held)) as stack:
            answering = asyncio.create_task(stack.generate(REQUEST))
            door = stack.workers["decode-0"].offers
            await stack.until(lambda: bool(door.confirmations), "the hand-over is confirmed")
            assert stack.workers["prefill-0"].stats.tokens_generated == 0
            assert not answering.done()
            for each in held:
                each.release()
            await check(stack, await answering, PrefillMode.REMOTE)
            assert (len(door.confirmations), door.refused) == (1, [])

    asyncio.run(run())


def test_a_prompt_whose_kv_was_confirmed_and_whose_token_never_came_is_computed_again() -> None:
    async def run() -> None:
        held: list[HeldRunner] = []
        make = held_by(held)
        async with Stack(runner=lambda config, gate: FailingRunner(make(config, gate), ends_at(LENGTH))) as stack:
            mend_decode(stack)
            answering = asyncio.create_task(stack.generate(REQUEST))
            door = stack.workers["decode-0"].offers
            await stack.until(lambda: bool(door.confirmations), "the hand-over is confirmed")
            for each in held:
                each.release()
            await check(stack, await answering, PrefillMode.LOCAL)
            assert stack.workers["prefill-0"].stats.cached_blocks == 0, "what is in doubt is found by nobody"

    asyncio.run(run())


def test_blocks_that_a_failed_prompt_has_left_to_another_are_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    kvtransfer = replace(SMALL_MESSAGES, offers_in_flight=1)
    small = replace(IN_ONE_CHUNK, kv_blocks=16)

    async def run() -> None:
        async with Stack(engine=small, kvtransfer=kvtransfer, runner=failing()) as stack:
            mend_decode(stack)
            prefill, door = stack.workers["prefill-0"], stack.workers["decode-0"].offers
            go_on, offer = asyncio.Event(), door.inner.offer

            async def acknowledged_late(chunk: KvChunk) -> None:
                await offer(chunk)
                await go_on.wait()

            monkeypatch.setattr(door.inner, "offer", acknowledged_late)
            answering = asyncio.create_task(stack.generate(REQUEST))
            await stack.until(lambda: prefill.stats.steps >= 1 and prefill.stats.held_blocks == 0, "blocks are freed")
            async with prefill.engine.prefill(tokens(240, request_id="other", first=9)) as other:
                await other.first_token()
                go_on.set()
                answer = await answering
            assert door.confirmations == []
            await check(stack, answer, PrefillMode.LOCAL)

    asyncio.run(run())


def test_a_hand_over_is_given_up_as_soon_as_its_prompt_has_failed() -> None:
    patient = replace(SMALL_MESSAGES, acknowledge_seconds=10 * GENEROUS_SECONDS)

    async def run() -> None:
        async with Stack(kvtransfer=patient, runner=failing()) as stack:
            mend_decode(stack)

            async def never_answered(chunk: KvChunk) -> KvChunk:
                await asyncio.Event().wait()
                return chunk

            stack.workers["decode-0"].offers.on_offer = never_answered
            await check(stack, await stack.generate(REQUEST), PrefillMode.LOCAL)

    asyncio.run(run())


@pytest.mark.parametrize("pool", ["mapped", "device", "plain"])
def test_a_prompts_own_error_ends_it_at_the_first_worker(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if pool == "device":
        monkeypatch.setattr(Stack, "transports", ("cuda-ipc", *(way for way in Stack.transports if way != "shm")))

    async def run() -> None:
        error = InvalidRequest("logit_bias: too many", field="logit_bias")
        async with Stack(prefill=2, engine=IN_ONE_CHUNK, runner=failing(error, pool)) as stack:
            with pytest.raises(InvalidRequest, match="too many"):
                await stack.generate(REQUEST)
            computing = [name for name, worker in stack.workers.items() if worker.gate.steps]
            assert len(computing) == 1, computing
            await stack.assert_idle()

    asyncio.run(run())
