"""What every engine does with a plan's directives in a request: limits on its chunks, and how its blocks are kept."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import ClassVar

import pytest

from baton.core.blockhash import child_hash, root_hash
from baton.core.errors import InvalidRequest
from baton.core.types import CacheClass, CachePolicy, Sampling, TokenRequest
from baton.engine.client import EngineClient
from baton.engine.config import EngineConfig
from tests.contract.engine_driving import answer, assert_idle, drain, prompt, request, ship, tokens_of

NONE = CachePolicy(CacheClass.NONE)
KEEP = CachePolicy(CacheClass.KEEP)
SAMPLED = Sampling(temperature=0.8, top_k=40, seed=7)


class EngineSuite:
    """How a suite opens the engine that it is about."""

    block_size: ClassVar[int] = 4

    def open(self, config: EngineConfig) -> AbstractAsyncContextManager[EngineClient]:
        raise NotImplementedError

    def config(self, **changes: object) -> EngineConfig:
        return dataclasses.replace(EngineConfig(block_size=self.block_size, kv_blocks=64), **changes)  # type: ignore[arg-type]

    def run(self, scenario: Callable[[EngineClient], Awaitable[None]], **changes: object) -> None:
        """One engine for one scenario; afterwards it is idle."""

        async def main() -> None:
            async with self.open(self.config(**changes)) as engine:
                await scenario(engine)
                await assert_idle(engine)

        asyncio.run(main())


class DirectiveContract(EngineSuite):
    def blocks(self, count: int, salt: int = 0, cache: CachePolicy | None = None) -> TokenRequest:
        """A prompt of ``count`` full blocks and a token, whose answer is one token: so many blocks have a name then."""
        return request(prompt(count * self.block_size + 1, salt), 1, cache=cache or CachePolicy())

    def found(self, engine: EngineClient, wanted: TokenRequest) -> int:
        """Leading blocks of the prompt that are in the prefix cache. Their names have nothing to do with classes."""
        card, size = engine.card, self.block_size
        name = root_hash(salt=wanted.salt, weights_hash=card.weights_hash, kv_format=str(card.format))
        _, cached = engine.cached_blocks()
        for count in range(len(wanted.prompt) // size):
            name = child_hash(name, wanted.prompt[count * size : (count + 1) * size])
            if name not in cached:
                return count
        return len(wanted.prompt) // size

    def test_a_prompt_in_any_chunks_that_the_plan_allows_gives_the_same_chunks(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            wanted = request(prompt(21), sampling=SAMPLED, logprobs=1, cache=NONE)
            expected = await answer(engine, wanted)
            for chunk in (1, 5, 20, 21, 1000):
                steps = engine.stats.steps
                assert await answer(engine, dataclasses.replace(wanted, max_chunk_tokens=chunk)) == expected
                assert engine.stats.steps - steps >= -(-21 // chunk) + len(tokens_of(expected)) - 1

        self.run(scenario)

    def test_directives_that_mean_nothing_are_refused_by_name(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            for field, bad, message in (
                ("max_chunk_tokens", request(prompt(6), max_chunk_tokens=0), "must be at least 1, got 0"),
                ("keep_tokens", request(prompt(6), cache=CachePolicy(keep_tokens=-1)), "must not be negative, got -1"),
            ):
                with pytest.raises(InvalidRequest, match=f"{field}: {message}") as refused:
                    await answer(engine, bad)
                assert refused.value.field == field

        self.run(scenario)

    def test_blocks_of_class_none_are_free_at_once_and_never_found(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            wanted = request(prompt(5 * self.block_size + 1), 2 * self.block_size, cache=NONE)
            for _ in range(2):
                async with engine.reserve(wanted) as reservation:
                    assert reservation.cached_tokens == 0
                    await drain(reservation)
                await assert_idle(engine)
                assert (engine.stats.free_blocks, engine.cached_blocks()[1]) == (64, frozenset())

        self.run(scenario)

    def test_a_request_of_class_none_hits_what_others_left_and_leaves_it(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            wanted = self.blocks(5)
            expected = tokens_of(await answer(engine, wanted))
            for _ in range(2):
                assert self.found(engine, wanted) == 5
                assert tokens_of(await answer(engine, dataclasses.replace(wanted, cache=NONE))) == expected
            await assert_idle(engine)
            assert engine.stats.cached_blocks == 5

        self.run(scenario)

    def test_of_a_span_that_is_to_be_kept_only_its_full_blocks_are_found(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            for tokens, found in ((3 * self.block_size - 1, 2), (3 * self.block_size, 3), (1000, 5)):
                salt = bytes([found])
                span = dataclasses.replace(self.blocks(5), salt=salt, cache=CachePolicy(CacheClass.NONE, tokens))
                await answer(engine, span)
                assert self.found(engine, span) == found

        self.run(scenario)

    def test_kept_blocks_outlive_normal_ones(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            span = CachePolicy(keep_tokens=2 * self.block_size)
            kept, spanned, normal = self.blocks(3, 1, KEEP), self.blocks(4, 2, span), self.blocks(3, 3)
            for wanted in (kept, spanned, normal):
                await answer(engine, wanted)
            for salt in range(10, 20):
                await answer(engine, self.blocks(8, salt))
            assert [self.found(engine, wanted) for wanted in (kept, spanned, normal)] == [3, 2, 0]
            await assert_idle(engine)
            assert engine.stats.kept_blocks == 5

        self.run(scenario, kv_blocks=24, cache_keep_share=0.25)

    def test_a_normal_prompt_is_kept_from_the_request_on_that_asks_for_it(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            wanted = self.blocks(3)
            await answer(engine, wanted)
            await answer(engine, dataclasses.replace(wanted, cache=KEEP))
            await answer(engine, wanted)
            for salt in range(10, 20):
                await answer(engine, self.blocks(8, salt))
            assert self.found(engine, wanted) == 3

        self.run(scenario, kv_blocks=24, cache_keep_share=0.25)

    def test_who_keeps_much_pushes_out_what_was_kept_before_and_no_more_than_the_share(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            normal = self.blocks(4, 1)
            await answer(engine, normal)
            for salt in range(10, 14):
                await answer(engine, self.blocks(4, salt, KEEP))
            await assert_idle(engine)
            assert (engine.stats.kept_blocks, engine.stats.cached_blocks) == (6, 20)
            await answer(engine, self.blocks(8, 2))
            found = [self.found(engine, self.blocks(4, salt)) for salt in (1, 10, 11, 12, 13)]
            assert found == [0, 3, 4, 4, 4]  # of 24 blocks 9 were needed, 4 were free

        self.run(scenario, kv_blocks=24, cache_keep_share=0.25)

    def test_both_ends_of_a_hand_over_keep_blocks_as_the_request_says(self) -> None:
        async def main() -> None:
            async with self.open(self.config()) as source, self.open(self.config()) as target:
                for cache, found in ((NONE, 0), (CachePolicy(CacheClass.NONE, self.block_size), 1), (CachePolicy(), 3)):
                    wanted = request(prompt(3 * self.block_size + 1), cache=cache)
                    async with target.reserve(wanted) as reservation, source.prefill(wanted) as run:
                        first = await ship(run, reservation, self.block_size)
                        await drain(reservation, first)
                    assert self.found(source, wanted) == self.found(target, wanted) == found
                for engine in (source, target):
                    await assert_idle(engine)

        asyncio.run(main())
