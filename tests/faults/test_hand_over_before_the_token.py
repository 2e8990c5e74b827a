"""A prompt's KV is handed over while its first token is still being computed, and that may come to nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.core.errors import BatonError
from baton.core.types import PrefillMode
from baton.engine.config import EngineConfig
from baton.engine.fake import FakeRunner, fake_card
from baton.engine.runner import PartDetail, StepResult
from baton.engine.sharedpool import shared_pool_memory
from tests.gates import StepGate
from tests.held_runner import HeldRunner
from tests.real_engines import RunnerAround
from tests.stack import Answer, Stack, tokens

REQUEST = tokens(200, seed=5, logprobs=2)


@pytest.fixture(params=[0, 1], ids=["in step", "one step ahead"], autouse=True)
def steps_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stack, "steps_ahead", request.param)


@pytest.fixture(params=["shm", "tcp"], autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stack, "transports", ("shm", "tcp") if request.param == "shm" else ("tcp",))


def fake(config: EngineConfig, gate: StepGate) -> FakeRunner:
    card = fake_card(block_size=config.block_size)
    memory = shared_pool_memory(config.kv_blocks, card.format)
    return FakeRunner(card, config.kv_blocks, steps_ahead=Stack.steps_ahead, on_step=gate, memory=memory)


class FailsAtTheEnd(RunnerAround):
    """While it is broken, what follows a prompt of 200 tokens fails once the prompt's KV has been told of."""

    is_broken = True

    def collect(self) -> StepResult:
        assert isinstance(self._inner, FakeRunner)
        ends = [part.end for part in self._inner._flights[0]]
        result = super().collect()
        if not self.is_broken or 200 not in ends:
            return result
        at = ends.index(200)
        token_ids = [None if index == at else token for index, token in enumerate(result.token_ids)]
        return StepResult(token_ids, {**result.details, at: PartDetail(error=BatonError("the logits are not finite"))})


async def check(stack: Stack, answer: Answer, mode: PrefillMode) -> None:
    """The answer is exact, and nothing is left."""
    assert answer.content == (await replace(stack, runner=None).alone(REQUEST)).content
    assert answer.placement is not None
    assert answer.placement.prefill_mode is mode
    await stack.assert_idle()


def test_all_blocks_are_confirmed_before_the_first_token_is_there() -> None:
    async def run() -> None:
        held: list[HeldRunner] = []

        def runner(config: EngineConfig, gate: StepGate) -> HeldRunner:
            held.append(HeldRunner(fake(config, gate)))
            return held[-1]

        async with Stack(runner=runner) as stack:
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
        async with Stack(runner=lambda config, gate: FailsAtTheEnd(fake(config, gate))) as stack:
            decode = stack.workers["decode-0"]
            assert isinstance(decode.runner, FailsAtTheEnd)
            decode.runner.is_broken = False
            answer = await stack.generate(REQUEST)
            assert len(decode.offers.confirmations) == 1
            await check(stack, answer, PrefillMode.LOCAL)
            assert stack.workers["prefill-0"].stats.cached_blocks == 0, "what is in doubt is found by nobody"

    asyncio.run(run())
