"""Real models through the whole system over gRPC: split, resumed, retried and fanned out, an answer stays the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.client.answer import collect
from baton.core.errors import CorruptTransfer
from baton.core.streams import closing
from baton.core.types import DecodeRequest, GenerateRequest, KvChunk, PrefillMode, StopRules, TokenRequest
from baton.engine.config import EngineConfig
from gateway.fanout import choice_seed
from services.kvtransfer.config import KvTransferConfig
from tests.answers import Answer
from tests.chunks import swapped, with_last_block_of
from tests.gates import GENEROUS_SECONDS
from tests.networks import StackWorker, WireNetwork
from tests.real_engines import SAMPLINGS, UNLIKE, VOCABULARY, alone, gated, prompt, real_config, request, varied
from tests.stack import PRINCIPAL, Stack

PROMPT = prompt(70, salt=5)  # four blocks of 16 and a part; longer than the sliding window
MESSAGES = KvTransferConfig(  # some blocks each
    max_message_bytes=200_000, max_mapped_bytes=200_000, acknowledge_seconds=GENEROUS_SECONDS
)


def small(name: str) -> EngineConfig:
    return real_config(name, max_step_tokens=48, max_running=16)


def real_stack(
    engine: EngineConfig, kvtransfer: KvTransferConfig = MESSAGES, *, prefill: int = 1, decode: int = 1
) -> Stack:
    return Stack(prefill, decode, engine, kvtransfer, runner=gated, network=WireNetwork)


def content(found: Answer) -> tuple[object, ...]:
    return (*found.content, found.usage and found.usage.completion_tokens)


@pytest.mark.parametrize("name", UNLIKE)
def test_a_batch_of_16_sampled_requests_is_exact_split_and_local(name: str) -> None:
    wanted = [varied(index, 20, logprobs=index % 3) for index in range(16)]

    async def run() -> None:
        async with real_stack(small(name)) as stack:
            for mode, threshold in ((PrefillMode.REMOTE, 0), (PrefillMode.LOCAL, 1000)):
                salted = [replace(each, salt=mode.value.encode()) for each in wanted]
                calls = [stack.generate(each, local_prefill_max_tokens=threshold) for each in salted]
                for each, found in zip(wanted, await asyncio.gather(*calls), strict=True):
                    assert content(found) == content(alone(name, each)), (mode, each.request_id)
                    assert found.placement and found.placement.prefill_mode is mode
                if mode is PrefillMode.REMOTE:
                    assert stack.workers["decode-0"].stats.prompt_tokens_computed == 0
            await stack.assert_idle()

    asyncio.run(run())


@pytest.mark.parametrize("name", UNLIKE)
def test_what_either_worker_has_cached_changes_no_answer_and_is_not_shipped(name: str) -> None:
    """Prefix hits on both sides, each at the boundaries of blocks and beside them."""
    wanted = request(PROMPT, 4, sampling=SAMPLINGS[4], logprobs=1)
    hits = [0, 15, 16, 17, 31, 32, 33, 63, 64, 65, len(PROMPT)]

    async def run() -> None:
        async with real_stack(small(name)) as stack:
            per_token = stack.workers["decode-0"].engine.card.format.block_bytes // 16
            for here, there in {*zip(hits, hits, strict=True), *zip(hits, reversed(hits), strict=True)}:
                each = replace(wanted, salt=f"{here}/{there}".encode())
                await _remember(stack.workers["decode-0"], _beginning(each, here))
                await _remember(stack.workers["prefill-0"], _beginning(each, there))
                found = await stack.generate(each)
                assert content(found) == content(alone(name, wanted)), (here, there)
                assert found.placement and found.usage
                held, computed = (min(hit, len(PROMPT) - 1) // 16 * 16 for hit in (here, there))
                assert found.placement.kv_bytes == (len(PROMPT) - held) * per_token
                assert found.usage.cached_tokens == computed
            await stack.assert_idle()

    asyncio.run(run())


async def _remember(worker: StackWorker, past: TokenRequest) -> None:
    """Let a worker compute a request by itself."""
    async with closing(worker.parts.decode.generate(DecodeRequest(past))) as chunks:
        assert [chunk async for chunk in chunks]


def _beginning(wanted: TokenRequest, length: int) -> TokenRequest:
    """A request that shares exactly ``length`` tokens with the prompt of ``wanted``."""
    other = ((token + 1) % VOCABULARY for token in wanted.prompt[length:])
    return replace(wanted, prompt=(*wanted.prompt[:length], *other, 1), stop=StopRules(max_tokens=1))


@pytest.mark.parametrize("name", UNLIKE)
def test_a_stream_taken_over_at_any_token_goes_on_exactly(name: str) -> None:
    """The next hop is sent the ids so far, and computes or is handed the KV of all of them."""
    stop = StopRules(max_tokens=18, min_tokens=12, stop_token_ids=tuple(range(60)))
    wanted = request(PROMPT, stop=stop, sampling=SAMPLINGS[3], logprobs=1)

    async def run() -> None:
        whole = alone(name, wanted)
        assert len(whole.token_ids) > 12
        async with real_stack(small(name)) as stack:
            for cut in range(1, len(whole.token_ids)):
                hop = replace(wanted, request_id=f"r{cut}", generated=whole.token_ids[:cut])
                rest = await stack.generate(hop, local_prefill_max_tokens=1000 * (cut % 2))
                assert rest.token_ids == whole.token_ids[cut:], cut
                assert rest.logprobs == whole.logprobs[cut:]
                assert rest.finish == whole.finish
            await stack.assert_idle()

    asyncio.run(run())


@pytest.mark.parametrize("name", UNLIKE)
def test_prompt_logprobs_are_the_same_local_split_and_chunked(name: str) -> None:
    wanted = request(PROMPT, 3, prompt_logprobs=3, logprobs=3)

    async def run() -> None:
        expected = alone(name, wanted)
        assert [entry is None for entry in expected.prompt_logprobs] == [True] + [False] * (len(PROMPT) - 1)
        for chunk in (7, 512):
            async with real_stack(replace(small(name), max_step_tokens=chunk)) as stack:
                for again in range(2):  # the second time with the prompt in both prefix caches
                    for threshold in (0, 1000):
                        each = replace(wanted, request_id=f"{again}{threshold}")
                        found = await stack.generate(each, local_prefill_max_tokens=threshold)
                        assert content(found) == content(expected), (chunk, again, threshold)
                await stack.assert_idle()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["mistral-window", "qwen3-moe"])
def test_several_choices_are_the_requests_with_the_derived_seeds(name: str) -> None:
    asked = GenerateRequest(
        prompt_token_ids=PROMPT,
        max_tokens=16,
        n=4,
        seed=99,
        sampling=SAMPLINGS[2],
        stop=StopRules(ignore_eos=True),
        logprobs=2,
        prompt_logprobs=1,
    )

    async def run() -> None:
        async with real_stack(small(name), decode=2) as stack:
            async with asyncio.timeout(GENEROUS_SECONDS), closing(stack.gateway.generate(asked, PRINCIPAL)) as chunks:
                found = await collect(chunks, asked.n)
            for index, choice in enumerate(found.choices):
                sampling = replace(asked.sampling, seed=choice_seed(99, index))
                separate = request(PROMPT, 16, sampling=sampling, logprobs=2, prompt_logprobs=None if index else 1)
                assert content(alone(name, separate)) == (
                    choice.token_ids,
                    choice.logprobs,
                    choice.prompt_logprobs,
                    choice.finish,
                    choice.usage.completion_tokens,
                )
            assert len({choice.token_ids for choice in found.choices}) == asked.n
            await stack.assert_idle()

    asyncio.run(run())


# --- wrong bytes ------------------------------------------------------------------------------------------------------

WHOLE = replace(MESSAGES, checksums="off")  # with one step and one message a prompt, so that an offer holds all blocks


class Exchange:
    """Holds an offer until another one has come, and gives each the last block of the other."""

    def __init__(self) -> None:
        self._offers: list[KvChunk] = []
        self._both = asyncio.Event()

    async def __call__(self, chunk: KvChunk) -> KvChunk:
        mine = len(self._offers)
        self._offers.append(chunk)
        if len(self._offers) == 2:
            self._both.set()
        await self._both.wait()
        return with_last_block_of(chunk, self._offers[1 - mine])


@pytest.mark.parametrize("name", UNLIKE)
def test_swapped_blocks_of_two_requests_change_both_answers_when_nobody_checks(name: str) -> None:
    """So decode computes from the bytes that it was sent, and from nothing else."""
    wanted = [request(prompt(64, salt), 16, logprobs=1, request_id=f"r{salt}") for salt in (5, 6)]

    async def run() -> None:
        async with real_stack(replace(small(name), max_step_tokens=512), WHOLE) as stack:
            decode = stack.workers["decode-0"]
            decode.offers.on_offer = Exchange()
            wrong = await asyncio.gather(*(stack.generate(replace(each, salt=b"swapped")) for each in wanted))
            decode.offers.on_offer = None
            for each, found in zip(wanted, wrong, strict=True):
                expected = alone(name, each)
                assert found.token_ids[0] == expected.token_ids[0], "drawn by prefill, from the right bytes"
                assert abs(found.logprobs[1].logprob - expected.logprobs[1].logprob) > 1e-3
                assert found.token_ids != expected.token_ids
                assert content(await stack.generate(each)) == content(expected), "the same way, unchanged"
            assert decode.stats.prompt_tokens_computed == 0
            await stack.assert_idle()

    asyncio.run(run())


@pytest.mark.parametrize("name", UNLIKE)
def test_swapped_blocks_of_one_request_change_its_answer_when_nobody_checks(name: str) -> None:
    """Keys carry their position already: where every token sees all blocks, their order only changes the rounding of
    sums; where the window cuts some of them off, it changes everything."""
    wanted = request(prompt(64, 5), 16, logprobs=1)

    async def run() -> None:
        expected = alone(name, wanted)
        async with real_stack(replace(small(name), max_step_tokens=512), WHOLE) as stack:
            stack.workers["decode-0"].offers.on_offer = swapped
            wrong = await stack.generate(wanted)
            assert wrong.logprobs[0] == expected.logprobs[0]
            assert wrong.logprobs[1:] != expected.logprobs[1:]
            assert (wrong.token_ids != expected.token_ids) or name != "mistral-window"
            await stack.assert_idle()

    asyncio.run(run())


@pytest.mark.parametrize("name", UNLIKE)
def test_swapped_blocks_are_refused_by_checksum_and_the_next_attempt_is_exact(name: str) -> None:
    wanted = request(prompt(64, 5), 16, logprobs=1)

    async def run() -> None:
        async with real_stack(replace(small(name), max_step_tokens=512), prefill=2) as stack:
            decode = stack.workers["decode-0"]
            decode.offers.on_offer = lambda chunk: chunk if chunk.ticket.attempt.retry > 1 else swapped(chunk)
            found = await stack.generate(wanted)
            assert content(found) == content(alone(name, wanted))
            assert found.placement and found.placement.prefill_mode is PrefillMode.REMOTE
            assert [type(error) for error in decode.offers.refused] == [CorruptTransfer]
            assert {chunk.ticket.attempt.retry for chunk in decode.offers.offers} == {1, 2}
            assert decode.stats.prompt_tokens_computed == 0
            await stack.assert_idle()

    asyncio.run(run())
