"""What every ``EngineApi`` promises, whatever computes inside: subclass ``EngineContract`` and say how to open one.

What the plan may direct is in ``directive_contract.py``, what fronts may do with a shared pool in
``filling_contract.py``.

The suite compares an engine only with itself, so it fits the fake and real models alike. It needs a model with at
least 384 token ids, whose float32 results do not depend on the batch.
"""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack, aclosing, suppress
from typing import ClassVar

import pytest

from baton.core.errors import Expired, InvalidRequest, Overloaded, TransferRejected
from baton.core.types import FinishReason, Sampling, StopRules, Tier, TokenChunk
from baton.engine.client import EngineClient
from tests.contract.engine_driving import (
    answer,
    assert_idle,
    drain,
    prompt,
    request,
    ship,
    task,
    tokens_of,
    until,
)
from tests.contract.filling_contract import FillingContract

SAMPLED = Sampling(temperature=0.8, top_k=40, seed=7, repetition_penalty=1.2, frequency_penalty=0.1)


class EngineContract(FillingContract):
    chunk_sizes: ClassVar[tuple[int, ...]] = (1, 3, 4, 5, 20, 21)

    # --- the same tokens, whatever happens around them ----------------------------------------------------------------

    def test_a_request_that_starts_by_itself_answers_like_one_that_is_told_to(self) -> None:
        wanted = request(prompt(3 * self.block_size + 1))

        async def scenario(engine: EngineClient) -> None:
            expected = tokens_of(await answer(engine, wanted))
            for compute_up_to in (len(wanted.prompt), 1, 0):  # the last two find all blocks but the last token cached
                async with engine.reserve(wanted, compute_up_to) as reservation:
                    assert tokens_of(await drain(reservation)) == expected

        self.run(scenario)

    def test_a_request_that_starts_by_itself_ends_with_its_reservation(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            async with engine.reserve(request(prompt(5), 200), 5):
                await until(lambda: engine.stats.tokens_generated > 0)

        self.run(scenario)

    def test_the_first_chunk_has_the_usage_and_the_last_one_the_end(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            chunks = await answer(engine, request(prompt(9), 5))
            assert len(tokens_of(chunks)) == 5
            assert chunks[0].usage is not None
            assert chunks[0].usage.prompt_tokens == 9
            assert [c.finish for c in chunks] == [None] * 4 + [FinishReason.LENGTH]
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 5

        self.run(scenario)

    def test_every_prefix_hit_length_gives_the_same_tokens(self) -> None:
        length = 4 * self.block_size + 1

        async def scenario(engine: EngineClient) -> None:
            wanted = request(prompt(length), sampling=SAMPLED, logprobs=1)
            expected = await answer(engine, wanted)
            for hit in range(1, length + 1):
                salt = str(hit).encode()
                await answer(engine, request(wanted.prompt[:hit], 1, salt=salt))
                async with engine.reserve(dataclasses.replace(wanted, salt=salt)) as reservation:
                    chunks = await drain(reservation)
                cached = min(hit, length - 1) // self.block_size * self.block_size
                assert reservation.cached_tokens == cached
                assert chunks[0].usage is not None
                assert chunks[0].usage.cached_tokens == cached
                assert tokens_of(chunks) == tokens_of(expected)
                assert [c.logprobs for c in chunks] == [c.logprobs for c in expected]

        self.run(scenario)

    def test_every_chunk_size_gives_the_same_chunks(self) -> None:
        async def main() -> None:
            wanted = request(prompt(21), sampling=SAMPLED, logprobs=2, prompt_logprobs=1)
            results: list[list[TokenChunk]] = []
            for size in self.chunk_sizes:
                async with self.open(self.config(max_step_tokens=size)) as engine:
                    results.append(await answer(engine, wanted))
                    await assert_idle(engine)
            assert all(result == results[0] for result in results)

        asyncio.run(main())

    def test_a_crowd_that_is_preempted_gives_the_tokens_of_each_alone(self) -> None:
        wanted = [
            request(
                prompt(3 + 2 * i, i % 3),
                4 * self.block_size,
                priority=i % 2,
                tenant="ab"[i % 2],
                tier=list(Tier)[i % 3],
                sampling=SAMPLED if i % 3 else Sampling(),
                logprobs=1,
            )
            for i in range(8)
        ]

        async def scenario(engine: EngineClient) -> None:
            together = await asyncio.gather(*(answer(engine, one) for one in wanted))
            assert engine.stats.preemptions > 0
            for one, chunks in zip(wanted, together, strict=True):
                alone = await answer(engine, one)
                assert tokens_of(chunks) == tokens_of(alone)
                assert [c.logprobs for c in chunks] == [c.logprobs for c in alone]

        self.run(scenario, kv_blocks=16, growth_window=0, max_step_tokens=32)

    def test_resuming_at_any_token_continues_the_same_answer(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            wanted = request(prompt(7), sampling=SAMPLED, stop=StopRules(max_tokens=9, min_tokens=6), logprobs=2)
            whole = await answer(engine, wanted)
            tokens = tokens_of(whole)
            for cut in range(1, len(tokens)):
                rest = await answer(engine, dataclasses.replace(wanted, generated=tuple(tokens[:cut])))
                assert tokens_of(rest) == tokens[cut:]
                assert [c.logprobs for c in rest] == [c.logprobs for c in whole[cut:]]
                assert rest[-1].finish == whole[-1].finish
                assert rest[-1].usage is not None
                assert rest[-1].usage.completion_tokens == len(tokens)

        self.run(scenario)

    # --- where an answer ends -----------------------------------------------------------------------------------------

    def test_stop_ids_min_tokens_and_max_tokens_hold_exactly(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            free = tokens_of(await answer(engine, request(prompt(9), 10)))
            stop = free[0]

            def rules(max_tokens: int, min_tokens: int = 0) -> StopRules:
                return StopRules(max_tokens, min_tokens, stop_token_ids=(stop,), ignore_eos=True)

            stopped = await answer(engine, request(prompt(9), stop=rules(10)))
            assert tokens_of(stopped) == [stop]
            assert stopped[-1].finish is FinishReason.STOP
            later = tokens_of(await answer(engine, request(prompt(9), stop=rules(10, 4))))
            assert len(later) >= 4
            assert stop not in later[:4]
            single = await answer(engine, request(prompt(9), 1))
            assert (tokens_of(single), single[-1].finish) == (free[:1], FinishReason.LENGTH)

        self.run(scenario)

    def test_a_prefill_that_is_the_whole_answer_says_so(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            async with engine.prefill(request(prompt(9), 1)) as run:
                first = await run.first_token()
            assert first.finish is FinishReason.LENGTH
            rules = StopRules(max_tokens=9, stop_token_ids=(first.token_id,))
            async with engine.prefill(request(prompt(9), stop=rules)) as run:
                assert (await run.first_token()).finish is FinishReason.STOP

        self.run(scenario)

    # --- hand-over ----------------------------------------------------------------------------------------------------

    def test_a_handed_over_request_answers_like_one_engine_field_by_field(self) -> None:
        async def main() -> None:
            async with self.open(self.config(max_step_tokens=7)) as source, self.open(self.config()) as target:
                for length in (1, self.block_size, 3 * self.block_size + 1):
                    await self._compare_hand_over(source, target, length)
                await assert_idle(source)
                await assert_idle(target)

        asyncio.run(main())

    async def _compare_hand_over(self, source: EngineClient, target: EngineClient, length: int) -> None:
        wanted = request(prompt(length, length), sampling=SAMPLED, logprobs=2, prompt_logprobs=1)
        whole = await answer(source, wanted)
        computed = target.stats.prompt_tokens_computed
        async with target.reserve(wanted) as reservation:
            async with source.prefill(wanted) as run:
                first = await ship(run, reservation, self.block_size)
            rest = await drain(reservation, first)
        assert [first.token_id, *tokens_of(rest)] == tokens_of(whole)
        assert (first.logprob,) == whole[0].logprobs
        assert first.prompt_logprobs == whole[0].prompt_logprobs
        assert first.usage == whole[0].usage
        assert [c.logprobs for c in rest] == [c.logprobs for c in whole[1:]]
        assert rest[-1].usage == whole[-1].usage
        assert target.stats.prompt_tokens_computed == computed

    def test_what_was_handed_over_is_a_prefix_hit_for_the_next(self) -> None:
        async def main() -> None:
            async with self.open(self.config()) as source, self.open(self.config()) as target:
                wanted = request(prompt(2 * self.block_size + 2))
                async with target.reserve(wanted) as reservation, source.prefill(wanted) as run:
                    first = await ship(run, reservation, self.block_size)
                    rest = await drain(reservation, first)
                async with target.reserve(wanted) as reservation:
                    assert reservation.cached_tokens == 2 * self.block_size
                    async with source.prefill(wanted) as run:
                        again = await ship(run, reservation, self.block_size)
                    assert again.token_id == first.token_id
                    assert tokens_of(await drain(reservation, again)) == tokens_of(rest)

        asyncio.run(main())

    def test_written_blocks_read_back_and_others_are_refused(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            size = engine.card.format.block_bytes
            payload = bytes(i % 251 for i in range(2 * size))
            async with engine.reserve(request(prompt(3 * self.block_size), 2)) as reservation:
                await reservation.write_blocks(1, payload)
                assert bytes(await reservation.read_blocks(1, 2)) == payload
                assert bytes(await reservation.read_blocks(2, 1)) == payload[size:]
                for first, bad in ((2, payload), (3, payload[:size]), (0, payload[:-1]), (0, b"")):
                    with pytest.raises(TransferRejected):
                        await reservation.write_blocks(first, bad)
                await drain(reservation)
                with pytest.raises(TransferRejected):
                    await reservation.write_blocks(1, payload)

        self.run(scenario)

    # --- leaving ------------------------------------------------------------------------------------------------------

    def test_cancelling_at_each_stage_frees_everything(self) -> None:
        long = 20 * self.block_size

        async def scenario(engine: EngineClient) -> None:
            async with engine.reserve(request(prompt(long), long)):
                assert engine.stats.held_blocks > 0
                async with task(answer(engine, request(prompt(long, 1), long))):  # queued
                    await until(lambda: engine.stats.waiting == 1)
                async with task(engine.prefill(request(prompt(long, 1), long)).__aenter__()):
                    await until(lambda: engine.stats.waiting == 1)
                await until(lambda: engine.stats.waiting == 0)
            await assert_idle(engine)
            steps = engine.stats.steps
            async with task(answer(engine, request(prompt(long, 2), long))):  # mid-prefill, one token a step
                await until(lambda: engine.stats.steps > steps + 2)
            await assert_idle(engine)
            async with engine.prefill(request(prompt(long, 3), 1)) as run, aclosing(run.filled()) as filled:  # type: ignore[type-var]
                await anext(filled)
            await assert_idle(engine)
            async with (
                engine.reserve(request(prompt(2), long)) as reservation,
                aclosing(reservation.decode(None)) as chunks,
            ):
                await anext(chunks)
            await assert_idle(engine)
            async with (
                engine.reserve(request(prompt(long, 4), 2)) as reservation,
                task(reservation.write_blocks(0, bytes(engine.card.format.block_bytes))),
            ):
                await asyncio.sleep(0)

        self.run(scenario, kv_blocks=60, growth_window=0, max_step_tokens=1, max_running=8)

    # --- refusing -----------------------------------------------------------------------------------------------------

    def test_a_full_queue_refuses_at_once(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            wanted = request(prompt(8 * self.block_size), 8 * self.block_size)
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(engine.reserve(wanted))
                for waiting in (1, 2):
                    await stack.enter_async_context(task(answer(engine, wanted)))
                    await until(lambda waiting=waiting: engine.stats.waiting == waiting)
                for opened in (engine.reserve(wanted), engine.prefill(wanted)):
                    with pytest.raises(Overloaded) as refused:
                        await opened.__aenter__()
                    assert refused.value.retry_after > 0

        self.run(scenario, kv_blocks=16, max_waiting=2)

    def test_a_request_that_can_never_fit_is_refused_by_name(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            with pytest.raises(InvalidRequest, match="KV pool") as refused:
                await answer(engine, request(prompt(15 * self.block_size), self.block_size + 1))
            assert refused.value.field == "prompt"
            with pytest.raises(InvalidRequest, match="max_tokens"):
                await answer(engine, request(prompt(6), stop=StopRules(max_tokens=0)))
            with pytest.raises(InvalidRequest, match="prompt"):
                await answer(engine, request((3, engine.card.vocab_size)))
            assert len(tokens_of(await answer(engine, request(prompt(6))))) == 6

        self.run(scenario, kv_blocks=16)

    def test_a_request_that_waits_past_its_deadline_is_told_so(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            wanted = request(prompt(8 * self.block_size), 8 * self.block_size, timeout=0.05)
            async with engine.reserve(dataclasses.replace(wanted, timeout=None)):
                with pytest.raises(Expired):
                    await answer(engine, wanted)

        self.run(scenario, kv_blocks=16)

    # --- what it says about itself ------------------------------------------------------------------------------------

    def test_block_changes_follow_each_other_and_add_up_to_the_cache(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            sequence, mirror = engine.cached_blocks()
            held = set(mirror)
            async with aclosing(engine.block_changes()) as changes:  # type: ignore[type-var]
                reading = asyncio.ensure_future(anext(changes))
                await asyncio.sleep(0)
                for salt in range(6):
                    await answer(engine, request(prompt(20, salt), 4))
                await assert_idle(engine)
                last, expected = engine.cached_blocks()
                while sequence < last:
                    change = await reading
                    assert change.sequence == sequence + 1
                    sequence = change.sequence
                    held = (held - set(change.removed)) | set(change.added)
                    reading = asyncio.ensure_future(anext(changes))
                reading.cancel()
                with suppress(asyncio.CancelledError):
                    await reading
            assert held == expected
            assert 0 < len(held) <= 16

        self.run(scenario, kv_blocks=16)
