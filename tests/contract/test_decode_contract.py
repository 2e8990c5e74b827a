"""What a gateway may rely on from DecodeApi, whether the worker is an object or a process at the end of a link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from baton.core.errors import BatonError
from baton.core.types import (
    Attempt,
    CacheClass,
    CachePolicy,
    Candidate,
    DecodeRequest,
    FinishReason,
    Placement,
    PrefillMode,
    Sampling,
    StopRules,
    Tier,
    TokenChunk,
    TokenLogprob,
    Usage,
)
from tests.contract.decode_streams import REQUEST, collected, collected_ids, counting, endless, request, silent
from tests.contract.test_wire_errors import ALL_ERRORS, same_error
from tests.contract.wire_doubles import TOKENS, WAYS, ScriptedDecode, decode, soon, until


@pytest.mark.parametrize("way", WAYS)
def test_every_field_of_request_and_answer_arrives(way: str) -> None:
    asked = DecodeRequest(
        replace(
            TOKENS,
            attempt=Attempt(2, 1),
            generated=(4, 5),
            sampling=Sampling(temperature=0.7, top_k=3, logit_bias=((1, -2.5),), seed=2**62),
            stop=StopRules(9, 2, (7,), ignore_eos=True),
            logprobs=2,
            prompt_logprobs=0,
            priority=-3,
            tenant="acme",
            tier=Tier.GOLD,
            salt=b"\x00\xff",
            speculation=False,
            max_chunk_tokens=96,
            cache=CachePolicy(CacheClass.KEEP, 64),
        ),
        prefill=(Candidate("prefill-0", "127.0.0.1:9", 2**64 - 1),),
        local_prefill_max_tokens=128,
        prefill_wait=0.0,
    )
    chunks = [
        TokenChunk(
            token_ids=(6, 7),
            logprobs=(TokenLogprob(6, -0.5, ((6, -0.5), (1, -1.25))),),
            prompt_logprobs=(None, TokenLogprob(2, -3.5)),
            usage=Usage(3, 2, 1),
            placement=Placement("decode-0", "prefill-0", PrefillMode.REMOTE, 4096),
        ),
        TokenChunk(token_ids=(8,)),
        TokenChunk(finish=FinishReason.STOP, usage=Usage(3, 2, 3)),
    ]

    async def answer(_: DecodeRequest) -> AsyncIterator[TokenChunk]:
        for chunk in chunks:
            yield chunk

    async def run() -> None:
        domain = ScriptedDecode(answer)
        async with decode(way, domain) as worker:
            got = await soon(collected(worker.generate(asked)))
        first, last = got[0], got[-1]
        assert replace(first, token_ids=(6, 7)) == chunks[0]
        assert [token_id for chunk in got for token_id in chunk.token_ids] == [6, 7, 8]
        assert last == chunks[-1]
        assert domain.seen == [asked]

    asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
def test_many_requests_at_once_are_not_mixed_up(way: str) -> None:
    async def run() -> None:
        async with decode(way, ScriptedDecode(counting)) as worker:
            sizes = [1 + 7 * index % 40 for index in range(64)]
            streams = [collected_ids(worker.generate(request(f"req-{n}", size))) for n, size in enumerate(sizes)]
            answers = await soon(asyncio.gather(*streams))
        for size, answer in zip(sizes, answers, strict=True):
            assert answer == list(range(size))

    asyncio.run(run())


# Workers know no quotas: the limits that a refusal is about travel from the gateway alone, by status details.
OF_WORKERS = [error for error in ALL_ERRORS if not getattr(error, "refusals", ())]


@pytest.mark.parametrize("error", OF_WORKERS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("way", WAYS)
def test_a_typed_error_arrives_intact_after_the_chunks_before_it(way: str, error: BatonError) -> None:
    async def failing(_: DecodeRequest) -> AsyncIterator[TokenChunk]:
        yield TokenChunk(token_ids=(1,))
        raise error

    async def run() -> None:
        got: list[TokenChunk] = []
        async with decode(way, ScriptedDecode(failing)) as worker:
            with pytest.raises(BatonError) as raised:
                async for chunk in worker.generate(REQUEST):
                    got.append(chunk)
        same_error(raised.value, error)
        assert got == [TokenChunk(token_ids=(1,))]

    asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
def test_closing_the_stream_frees_the_request(way: str) -> None:
    async def run() -> None:
        domain = ScriptedDecode(endless)
        async with decode(way, domain) as worker:
            async with aclosing(worker.generate(REQUEST)) as stream:  # type: ignore[type-var]
                await soon(anext(stream))
                assert domain.running == {"req-1"}
            await until(lambda: not domain.running)
            assert domain.cancelled == ["req-1"]

    asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
def test_cancelling_frees_a_request_that_was_never_answered(way: str) -> None:
    async def run() -> None:
        domain = ScriptedDecode(silent)
        async with decode(way, domain) as worker:
            task = asyncio.create_task(collected(worker.generate(REQUEST)))
            await until(lambda: bool(domain.running))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: not domain.running)

    asyncio.run(run())
