"""The gateway over real workers with fake engines, joined directly and over gRPC."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.client.answer import Answer, collect
from baton.core.errors import Cancelled
from baton.core.streams import closing
from baton.core.types import FinishReason, GenerateChunk, GenerateRequest, PrefillMode, Principal, Sampling, StopRules
from gateway.fanout import choice_seed
from tests.networks import DirectNetwork, NetworkFactory, WireNetwork
from tests.stack import PRINCIPAL, Stack

PROMPT = tuple(range(10, 110))  # 6 full blocks of 16 and a part
SAMPLED = Sampling(temperature=1.0, frequency_penalty=0.5, repetition_penalty=1.2)
ASK = GenerateRequest(
    prompt_token_ids=PROMPT, max_tokens=24, sampling=SAMPLED, seed=5, logprobs=2, stop=StopRules(ignore_eos=True)
)

both_networks = pytest.mark.parametrize("network", [DirectNetwork, WireNetwork])


async def ask(stack: Stack, request: GenerateRequest) -> Answer:
    async with asyncio.timeout(30), closing(stack.gateway.generate(request, PRINCIPAL)) as chunks:
        return await collect(chunks, request.n)


async def local_answer(request: GenerateRequest) -> Answer:
    async with Stack(prefill=0, decode=1) as stack:
        return await ask(stack, request)


def same(mine: Answer, wanted: Answer) -> None:
    for one, other in zip(mine.choices, wanted.choices, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        assert one.finish == other.finish
        assert one.usage.completion_tokens == other.usage.completion_tokens


@both_networks
def test_the_split_path_answers_as_one_worker_does_and_leaves_decode_without_prompt_work(
    network: NetworkFactory,
) -> None:
    async def run() -> None:
        wanted = await local_answer(ASK)
        async with Stack(network=network) as stack:
            answer = await ask(stack, ASK)
            same(answer, wanted)
            [choice] = answer.choices
            assert choice.placement.prefill_mode is PrefillMode.REMOTE
            assert (choice.placement.prefill_worker, choice.placement.decode_worker) == ("prefill-0", "decode-0")
            assert stack.workers["decode-0"].stats.prompt_tokens_computed == 0
            await stack.assert_idle()

    asyncio.run(run())


@both_networks
def test_later_choices_find_the_prompt_of_the_first_in_the_prefix_cache(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(decode=2, network=network) as stack:
            answer = await ask(stack, replace(ASK, n=3))
            for index, choice in enumerate(answer.choices):
                alone = await local_answer(replace(ASK, seed=choice_seed(5, index)))
                assert choice.token_ids == alone.choices[0].token_ids
            assert len({choice.placement.decode_worker for choice in answer.choices}) == 1
            assert [choice.usage.cached_tokens for choice in answer.choices] == [0, 96, 96]
            await stack.assert_idle()

    asyncio.run(run())


@both_networks
def test_one_id_names_a_request_in_every_process(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            answer = await ask(stack, ASK)
            offers = stack.workers["decode-0"].offers.offers
            assert answer.request_id
            assert {chunk.ticket.request_id for chunk in offers} == {answer.request_id}
            named = await ask(stack, replace(ASK, request_id="mine", prompt_token_ids=PROMPT[::-1]))
            assert named.request_id == "mine"
            assert {chunk.ticket.request_id for chunk in offers} == {answer.request_id, "mine"}

    asyncio.run(run())


@both_networks
def test_a_tenant_finds_its_own_prompts_in_the_cache_and_nobody_elses(network: NetworkFactory) -> None:
    stranger = Principal("zeta", "tests", salt=b"salt of zeta")

    async def run() -> None:
        async with Stack(network=network) as stack:
            cached: list[int] = []
            for principal in (PRINCIPAL, stranger, PRINCIPAL, stranger):
                async with closing(stack.gateway.generate(ASK, principal)) as chunks:
                    cached.append((await collect(chunks, 1)).choices[0].usage.cached_tokens)
            assert cached == [0, 0, 96, 96]
            computed = stack.workers["prefill-0"].stats
            assert computed.prompt_tokens_computed == 2 * len(PROMPT) + 2 * (len(PROMPT) - 96)

    asyncio.run(run())


async def ask_and_kill(stack: Stack, after: int) -> Answer:
    """Kill the decoding worker, whose engine is held before it computes more than ``after`` tokens."""
    for worker in stack.workers.values():
        worker.gate.hold(lambda parts: any(len(part.context) >= len(PROMPT) + after for part in parts))
    got: list[GenerateChunk] = []
    async with asyncio.timeout(30), closing(stack.gateway.generate(ASK, PRINCIPAL)) as chunks:
        async for chunk in chunks:
            got.append(chunk)
            if chunk.placement is not None and chunk.migrations == 0:
                await stack.kill(chunk.placement.decode_worker)
                await stack.heartbeat()
                for worker in stack.workers.values():
                    worker.gate.release()
    return await collect(_replayed(got), 1)


@both_networks
@pytest.mark.parametrize("after", [1, 9])
def test_a_stream_goes_on_elsewhere_when_its_worker_dies(network: NetworkFactory, after: int) -> None:
    async def run() -> None:
        wanted = await local_answer(ASK)
        async with Stack(decode=2, network=network) as stack:
            answer = await ask_and_kill(stack, after)
            same(answer, wanted)
            assert answer.choices[0].usage == wanted.choices[0].usage
            assert answer.choices[0].migrations == 1
            await stack.assert_idle()

    asyncio.run(run())


@both_networks
def test_the_prefill_worker_takes_the_streams_of_the_only_decode_worker(network: NetworkFactory) -> None:
    async def run() -> None:
        wanted = await local_answer(ASK)
        async with Stack(network=network) as stack:
            answer = await ask_and_kill(stack, 3)
            same(answer, wanted)
            assert answer.choices[0].placement.decode_worker == "prefill-0"
            await stack.assert_idle()

    asyncio.run(run())


@both_networks
def test_a_resume_continues_where_a_dead_gateway_left_off(network: NetworkFactory) -> None:
    async def run() -> None:
        wanted = await local_answer(replace(ASK, request_id="r", seed=None))
        async with Stack(network=network) as stack:
            for held in (1, 12, 23, 24):
                ids = wanted.choices[0].token_ids[:held]
                rest = await ask(stack, replace(ASK, request_id="r", seed=None, resume=(ids,)))
                assert ids + rest.choices[0].token_ids == wanted.choices[0].token_ids
                assert rest.choices[0].finish is FinishReason.LENGTH
                assert rest.choices[0].usage.completion_tokens == 24
            await stack.assert_idle()

    asyncio.run(run())


@both_networks
def test_a_call_that_takes_over_frees_what_the_older_one_held(network: NetworkFactory) -> None:
    async def run() -> None:
        request = replace(ASK, request_id="r")
        wanted = await local_answer(request)
        async with Stack(network=network) as stack:
            gate = stack.workers["decode-0"].gate
            gate.hold(lambda parts: any(len(part.context) > len(PROMPT) + 5 for part in parts))
            older = asyncio.create_task(ask(stack, request))
            await gate.reached()
            newer = asyncio.create_task(ask(stack, request))
            with pytest.raises(Cancelled):
                await older
            gate.release()
            same(await newer, wanted)
            await stack.assert_idle()

    asyncio.run(run())


@both_networks
def test_abandoning_several_choices_frees_everything(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(decode=2, network=network) as stack:
            async with closing(stack.gateway.generate(replace(ASK, n=4), PRINCIPAL)) as chunks:
                async for chunk in chunks:
                    if chunk.index == 2:
                        break
            await stack.assert_idle()
            assert stack.gateway.running == 0

    asyncio.run(run())


async def _replayed(chunks: list[GenerateChunk]):
    for chunk in chunks:
        yield chunk
