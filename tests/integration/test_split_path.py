"""Prefill on one worker and decode on another give what one engine gives, field by field, from every starting point."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.core.types import Placement, PrefillMode, StopRules
from tests.networks import NetworkFactory
from tests.stack import Answer, Stack, tokens
from tests.stack_modes import steps_ahead

__all__ = ["steps_ahead"]  # a fixture of every test here


def test_split_equals_local_field_by_field(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            request = tokens(100, logprobs=3, prompt_logprobs=2, max_tokens=20)
            split = await stack.generate(request)
            alone = await stack.alone(request)
            assert split.content == alone.content
            assert split.usage == alone.usage
            assert len(split.prompt_logprobs) == 100
            assert split.prompt_logprobs[0] is None
            assert len(split.logprobs) == 20
            assert split.placement == Placement("decode-0", "prefill-0", PrefillMode.REMOTE, 100 * 16)
            assert alone.placement == Placement("decode-0", "decode-0", PrefillMode.LOCAL, 0)
            assert stack.workers["decode-0"].stats.prompt_tokens_computed == 0
            assert stack.workers["prefill-0"].stats.prompt_tokens_computed == 100
            await stack.assert_idle()

    asyncio.run(run())


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128])
def test_split_equals_local_at_block_and_chunk_boundaries(network: NetworkFactory, length: int) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            request = tokens(length, seed=length, logprobs=0)
            split = await stack.generate(request)
            assert split.content == (await stack.alone(request)).content
            assert split.placement is not None
            assert split.placement.kv_bytes == length * 16
            await stack.assert_idle()

    asyncio.run(run())


def test_blocks_that_decode_holds_already_are_not_shipped(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            first = await stack.generate(tokens(80, request_id="a"))
            again = await stack.generate(tokens(80, request_id="b"))
            assert again.content == first.content
            assert (first.placement, again.placement) != (None, None)
            assert first.placement and first.placement.kv_bytes == 5 * 256
            assert again.placement and again.placement.kv_bytes == 1 * 256  # the last token is always computed
            assert again.usage and again.usage.cached_tokens == 64
            await stack.assert_idle()

    asyncio.run(run())


def test_cached_tokens_is_what_prefill_found_not_what_decode_found(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, prefill=2) as stack:
            request = tokens(80, request_id="a")
            first = stack.candidate("prefill-0")
            other = stack.candidate("prefill-1")
            await stack.generate(request, prefill=(first,))
            again = await stack.generate(replace(request, request_id="b"), prefill=(other,))
            assert again.placement and again.placement.kv_bytes == 256  # decode held the rest
            assert again.usage and again.usage.cached_tokens == 0  # and yet prefill-1 computed every token
            await stack.assert_idle()

    asyncio.run(run())


def test_short_uncached_rest_is_computed_by_decode(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            warm = await stack.generate(tokens(100, request_id="a"))
            again = await stack.generate(tokens(100, request_id="b"), local_prefill_max_tokens=4)
            assert again.content == warm.content
            assert again.placement == Placement("decode-0", "decode-0", PrefillMode.LOCAL, 0)
            assert stack.workers["decode-0"].stats.prompt_tokens_computed == 4
            at_limit = await stack.generate(tokens(5, request_id="c", first=90), local_prefill_max_tokens=4)
            assert at_limit.placement and at_limit.placement.prefill_mode is PrefillMode.REMOTE

    asyncio.run(run())


def test_one_token_is_one_token_and_decode_does_nothing(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            answer = await stack.generate(tokens(40, max_tokens=1))
            assert len(answer.token_ids) == 1
            assert answer.usage and answer.usage.completion_tokens == 1
            assert stack.workers["decode-0"].stats.steps == 0
            await stack.assert_idle()

    asyncio.run(run())


def test_stop_token_drawn_first_ends_at_prefill(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            probe = await stack.generate(tokens(40))
            stop = StopRules(max_tokens=12, stop_token_ids=(probe.token_ids[0],))
            answer = await stack.generate(tokens(40, request_id="s", stop=stop))
            assert answer.token_ids == probe.token_ids[:1]
            assert answer.finish == "stop"
            await stack.assert_idle()

    asyncio.run(run())


def test_resumed_request_continues_through_the_split_path(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            whole = await stack.alone(tokens(50, seed=9, max_tokens=20, logprobs=1))
            for cut in (1, 7, 14, 19):
                request = tokens(50, seed=9, max_tokens=20, logprobs=1, request_id=f"cut{cut}")
                rest = await stack.generate(replace(request, generated=whole.token_ids[:cut]))
                assert rest.token_ids == whole.token_ids[cut:]
                assert rest.logprobs == whole.logprobs[cut:]
                assert rest.usage and rest.usage.completion_tokens == 20
            await stack.assert_idle()

    asyncio.run(run())


def test_many_requests_at_once_are_exact_and_leave_nothing(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network, prefill=2, decode=2) as stack:
            requests = [tokens(5 + 9 * n % 90, request_id=f"r{n}", first=n, seed=n % 3) for n in range(40)]
            answers: list[Answer] = await asyncio.gather(*(stack.generate(request) for request in requests))
            alone = Stack(prefill=0)
            async with alone:
                for request, answer in zip(requests, answers, strict=True):
                    assert answer.content == (await alone.generate(request)).content
            await stack.assert_idle()

    asyncio.run(run())
