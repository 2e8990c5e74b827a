"""Prefill and decode workers whose blocks differ in size, or in the shards that share the heads, over the real wire:
the answer is that of one engine, token for token."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest

from baton.core.errors import BatonError, CorruptTransfer, TransportUnavailable
from baton.core.streams import closing
from baton.core.types import DecodeRequest, KvChunk, PrefillMode, StopRules, TokenRequest
from baton.engine.config import EngineConfig
from baton.engine.runner import Runner
from services.kvtransfer.config import KvTransferConfig
from tests.answers import Answer, tokens
from tests.gates import GENEROUS_SECONDS, StepGate
from tests.networks import NetworkFactory, StackWorker, WireNetwork
from tests.real_engines import SAMPLINGS, VOCABULARY, alone, gated, prompt, real_config, request, varied
from tests.shard_pools import ShardedConfig, sharded
from tests.stack import ENGINE, Stack

SIZES = ((16, 32), (32, 16), (8, 64), (64, 8))
MESSAGES = KvTransferConfig(max_message_bytes=100_000, max_mapped_bytes=400_000, acknowledge_seconds=GENEROUS_SECONDS)
TOKENS = 70  # of a prompt that ends inside a block of every size here

by_sizes = pytest.mark.parametrize(("prefill", "decode"), SIZES)
by_transport = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.fixture
def over(transport: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Stack, "transports", (transport,))
    return transport


def sized(block_size: int) -> EngineConfig:
    """With a pool of about the same bytes whatever the size, which no number of other blocks fills."""
    return replace(ENGINE, block_size=block_size, kv_blocks=4096 // block_size + 1)


def mixed(prefill: EngineConfig, decode: EngineConfig, runner: Callable[[EngineConfig, StepGate], Runner]) -> Stack:
    """A real engine on either side."""
    return Stack(1, 1, prefill, MESSAGES, decode_engine=decode, runner=runner, network=WireNetwork)


async def remember(worker: StackWorker, past: TokenRequest, length: int) -> None:
    """Let a worker compute a request by itself that has ``length`` tokens in common with ``past``."""
    other = ((token + 1) % VOCABULARY for token in past.prompt[length:])
    shorter = replace(past, prompt=(*past.prompt[:length], *other, 1), stop=StopRules(max_tokens=1))
    async with closing(worker.parts.decode.generate(DecodeRequest(shorter))) as chunks:
        assert [chunk async for chunk in chunks]


def remote(found: Answer) -> bool:
    return found.placement is not None and found.placement.prefill_mode is PrefillMode.REMOTE


# --- block sizes ------------------------------------------------------------------------------------------------------


@by_transport
@by_sizes
def test_random_prompts_and_random_prefix_hits_are_handed_over_exactly(over: str, prefill: int, decode: int) -> None:
    """The fake engine decodes from the right bytes only, and nothing but what is missing, to the block, is sent."""
    draw = random.Random(prefill)

    async def run() -> None:
        stack = Stack(engine=sized(prefill), decode_engine=sized(decode), network=WireNetwork)
        async with stack:
            receiver = stack.workers["decode-0"]
            lengths = [*range(1, 8), 63, 64, 65, 127, 128, 129, *(draw.randrange(1, 400) for _ in range(12))]
            for number, length in enumerate(lengths):
                wanted = tokens(
                    length, request_id=f"r{number}", salt=b"%d" % number, logprobs=1, seed=draw.randrange(9)
                )
                here, there = draw.randint(0, length), draw.randint(0, length)
                await remember(receiver, wanted, here)
                await remember(stack.workers["prefill-0"], wanted, there)
                computed = receiver.stats.prompt_tokens_computed
                found = await stack.generate(wanted)
                assert found.content == (await stack.alone(wanted)).content, (length, here, there)
                assert remote(found)
                assert receiver.stats.prompt_tokens_computed == computed
                held = min(here, length - 1) // decode * decode
                begin = held // prefill * prefill  # a block of the sender that the receiver has a part of comes whole
                assert found.placement and found.placement.kv_bytes == (length - begin) * 16
                assert found.usage and found.usage.cached_tokens == min(there, length - 1) // prefill * prefill
            offered = receiver.offers.offers
            assert {chunk.format is not None for chunk in offered} == {True}
            assert {chunk.source is not None for chunk in offered} == {over == "shm"}
            await stack.assert_idle()

    asyncio.run(run())


@by_transport
@by_sizes
def test_a_real_model_answers_the_same_with_a_prefix_hit_of_any_length(over: str, prefill: int, decode: int) -> None:
    name, wanted = "mistral-window", request(prompt(TOKENS, salt=5), 6, sampling=SAMPLINGS[4], logprobs=1)
    hits = [0, 7, 8, 16, 31, 32, 63, 64, TOKENS]

    async def run() -> None:
        config = real_config(name, max_step_tokens=24, block_size=prefill)
        receiving = replace(config, block_size=decode)
        async with mixed(config, receiving, runner=gated) as stack:
            for here, there in {*zip(hits, hits, strict=True), *zip(hits, reversed(hits), strict=True)}:
                each = replace(wanted, salt=f"{here}/{there}".encode())
                await remember(stack.workers["decode-0"], each, here)
                await remember(stack.workers["prefill-0"], each, there)
                found = await stack.generate(each)
                assert found.content == alone(name, wanted).content, (here, there)
                assert remote(found)
            await stack.assert_idle()

    asyncio.run(run())


@by_transport
def test_one_flipped_bit_is_found_before_anything_is_converted(over: str) -> None:
    wanted = tokens(200, seed=3, logprobs=1)

    async def run() -> None:
        stack = Stack(2, engine=sized(16), decode_engine=sized(32), network=WireNetwork)
        async with stack:
            decode, refused = stack.workers["decode-0"], list[BatonError]()

            async def falsified_at_first(chunk: KvChunk) -> KvChunk:
                if chunk.ticket.attempt.retry > 1:
                    return chunk
                try:
                    await decode.parts.receiver.offer(falsified(chunk, random.Random(7)))
                except BatonError as error:
                    refused.append(error)
                    raise
                raise AssertionError("a falsified block was taken")

            decode.offers.on_offer = falsified_at_first
            found = await stack.generate(wanted)
            assert found.content == (await stack.alone(wanted)).content
            assert remote(found)
            assert {type(error) for error in refused} == {CorruptTransfer}
            assert all("as read" in str(error) or "as received" in str(error) for error in refused)
            await stack.assert_idle()

    asyncio.run(run())


def falsified(chunk: KvChunk, draw: random.Random) -> KvChunk:
    """With one bit of the bytes flipped; of those that are not in the chunk, of a checksum."""
    flipped = bytearray(chunk.payload or chunk.checksums[0])
    at = draw.randrange(8 * len(flipped))
    flipped[at // 8] ^= 1 << at % 8
    if chunk.payload:
        return replace(chunk, payload=bytes(flipped))
    return replace(chunk, checksums=(bytes(flipped), *chunk.checksums[1:]))


def test_a_broken_transport_gives_way_to_the_next_that_converts(network: NetworkFactory) -> None:
    wanted = tokens(200, seed=5, logprobs=2)

    async def run() -> None:
        stack = Stack(engine=sized(16), decode_engine=sized(64), network=network)
        async with stack:
            offers = stack.workers["decode-0"].offers

            def refuse(chunk: KvChunk) -> KvChunk:
                if chunk.source is not None:
                    raise TransportUnavailable("shared memory is broken")
                return chunk

            offers.on_offer = refuse
            found = await stack.generate(wanted)
            assert found.content == (await stack.alone(wanted)).content
            assert remote(found)
            assert {chunk.source is None for chunk in offers.offers} == {True, False}
            await stack.assert_idle()

    asyncio.run(run())


@pytest.mark.parametrize("others", [("shm", "tcp"), ("tcp",), ()])
def test_blocks_on_gpus_are_converted_as_bytes_or_refused_by_name(
    others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither ``cuda-ipc`` nor ``nccl`` converts; nothing is tried that could not work."""
    monkeypatch.setattr(Stack, "fake_pool", "device")
    monkeypatch.setattr(Stack, "transports", ("cuda-ipc", "nccl", *others))
    wanted = tokens(200, seed=5, logprobs=2)

    async def run() -> None:
        stack = Stack(engine=sized(16), decode_engine=sized(32), network=WireNetwork)
        async with stack:
            found = await stack.generate(wanted)
            assert found.content == (await stack.alone(wanted)).content
            assert remote(found) is bool(others)
            assert {chunk.source for chunk in stack.workers["decode-0"].offers.offers} == ({None} if others else set())
            await stack.assert_idle()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert [record.message for record in caplog.records] == ([] if others else ["prefill attempt failed"])
    if not others:
        refused = getattr(caplog.records[0], "error", "")
        assert "format.block_size: " in refused and "only shm, tcp convert; in common are cuda-ipc, nccl" in refused


# --- shards -----------------------------------------------------------------------------------------------------------

FOUR_HEADS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose KV heads up to four shards can share."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(FOUR_HEADS))
    return f"random:{path}"


@by_transport
@pytest.mark.parametrize(("prefill", "decode"), list(product([1, 2, 4], repeat=2)))
def test_shards_of_any_number_on_either_side_decode_what_one_pool_does(
    over: str, prefill: int, decode: int, four_heads: str
) -> None:
    """Block sizes equal and not, prefix hits on both sides, greedy and sampled."""
    wanted = [varied(index, 12, prompt=prompt(TOKENS + index, index), logprobs=1) for index in range(4)]

    async def run() -> None:
        for here, there in ((16, 16), (8, 32), (32, 8)):
            single = real_config("tiny", model=four_heads, max_step_tokens=48)
            config, receiving = (
                ShardedConfig(**asdict(replace(single, block_size=size)), shards=shards)
                for size, shards in ((here, prefill), (there, decode))
            )
            async with mixed(config, receiving, runner=sharded) as stack:
                layouts = {worker.engine.card.format.shards for worker in stack.workers.values()}
                assert layouts == {prefill, decode}
                for hit in (0, 33):
                    for each in wanted:
                        salted = replace(each, salt=b"%d" % hit)
                        if hit:
                            await remember(stack.workers["decode-0"], salted, hit)
                            await remember(stack.workers["prefill-0"], salted, hit + 20)
                        found = await stack.generate(salted)
                        assert found.content == alone("tiny", each, model=four_heads).content, (hit, each.request_id)
                        assert remote(found)
                converts = {chunk.format is not None for chunk in stack.workers["decode-0"].offers.offers}
                assert converts == {(here, prefill) != (there, decode)}
                await stack.assert_idle()

    asyncio.run(run())
