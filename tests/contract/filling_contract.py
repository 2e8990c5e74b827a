"""What every engine whose pool is shared memory lets its front do with it: fill the blocks of a held request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from baton.core.errors import TransferRejected, TransportUnavailable
from baton.core.types import Sampling
from baton.engine.client import EngineClient
from services.kvtransfer.checksum import block_checksums
from services.kvtransfer.layout import pack
from tests.contract.directive_contract import DirectiveContract
from tests.contract.engine_driving import answer, assert_idle, drain, prompt, request, tokens_of

SAMPLED = Sampling(temperature=0.8, seed=7)


class FillingContract(DirectiveContract):
    def test_a_request_whose_blocks_were_filled_by_its_front_answers_the_same(self) -> None:
        self._at_each_length(self._compare_filled)

    def _at_each_length(self, compare: Callable[[EngineClient, EngineClient, int], Awaitable[None]]) -> None:
        async def main() -> None:
            async with self.open(self.config(max_step_tokens=7)) as source, self.open(self.config()) as target:
                if source.pool is None:
                    pytest.skip("this engine's pool is not shared memory")
                for length in (1, self.block_size, 3 * self.block_size + 1):
                    await compare(source, target, length)
                await assert_idle(source)
                await assert_idle(target)

        asyncio.run(main())

    async def _compare_filled(self, source: EngineClient, target: EngineClient, length: int) -> None:
        wanted = request(prompt(length, length), sampling=SAMPLED, logprobs=2)
        expected = await answer(source, wanted)
        count, layout = -(-length // self.block_size), source.card.format
        filled = length - (count - 1) * self.block_size
        async with target.reserve(wanted) as reservation:
            async with source.prefill(wanted) as run:
                first = await run.first_token()
                payload = pack(bytes(await run.read_blocks(0, count)), layout, filled)
            assert reservation.fill_blocks(0, payload, filled) == block_checksums(payload, 0, count, layout.block_bytes)
            for bad in ((1, payload), (0, payload + payload), (0, payload[:-1]), (0, b""), (-1, payload)):
                with pytest.raises(TransferRejected):
                    reservation.fill_blocks(*bad, filled)
            rest = await drain(reservation, first)
            with pytest.raises(TransferRejected):
                reservation.fill_blocks(0, payload, filled)
        assert [first.token_id, *tokens_of(rest)] == tokens_of(expected)
        assert [c.logprobs for c in rest] == [c.logprobs for c in expected[1:]]

    def test_a_request_whose_blocks_were_copied_out_of_another_pool_answers_the_same(self) -> None:
        self._at_each_length(self._compare_copied)

    async def _compare_copied(self, source: EngineClient, target: EngineClient, length: int) -> None:
        assert source.pool is not None
        pool = source.pool.view
        wanted = request(prompt(length, length), sampling=SAMPLED, logprobs=2)
        expected = await answer(source, wanted)
        count, layout = -(-length // self.block_size), source.card.format
        filled = length - (count - 1) * self.block_size
        async with target.reserve(wanted) as reservation:
            async with source.prefill(wanted) as run:
                first = await run.first_token()
                ids = run.block_ids(0, count)
                travelling = pack(bytes(await run.read_blocks(0, count)), layout, filled)
                digests = reservation.copy_blocks(0, pool, ids, filled)
                assert digests == block_checksums(travelling, 0, count, layout.block_bytes)
                for bad in ((1, ids), (0, (*ids, ids[0])), (-1, ids), (0, ())):
                    with pytest.raises(TransferRejected):
                        reservation.copy_blocks(bad[0], pool, bad[1], filled)
                for other in (len(pool) // layout.block_bytes, -1):
                    with pytest.raises(TransportUnavailable):
                        reservation.copy_blocks(0, pool, (*ids[:-1], other), filled)
            rest = await drain(reservation, first)
            with pytest.raises(TransferRejected):
                reservation.copy_blocks(0, pool, ids, filled)
        assert [first.token_id, *tokens_of(rest)] == tokens_of(expected)
        assert [c.logprobs for c in rest] == [c.logprobs for c in expected[1:]]

    def test_blocks_found_in_the_cache_given_back_or_being_computed_are_not_filled(self) -> None:
        async def scenario(engine: EngineClient) -> None:
            if engine.pool is None:
                pytest.skip("this engine's pool is not shared memory")
            wanted, other = request(prompt(2 * self.block_size + 1)), bytes(engine.card.format.block_bytes)
            expected = tokens_of(await answer(engine, wanted))
            async with engine.reserve(wanted) as reservation:
                with pytest.raises(TransferRejected, match="only 2"):
                    reservation.fill_blocks(1, other, self.block_size)
            with pytest.raises(TransferRejected, match="holds no blocks"):
                reservation.fill_blocks(2, other[: engine.card.format.token_bytes], 1)
            async with engine.reserve(wanted, self.block_size) as started:
                with pytest.raises(TransferRejected, match="holds no blocks"):
                    started.fill_blocks(2, other[: engine.card.format.token_bytes], 1)
                assert tokens_of(await drain(started)) == expected

        self.run(scenario)

    def test_what_a_front_filled_is_a_prefix_to_compute_from_once_it_says_so(self) -> None:
        async def main() -> None:
            async with self.open(self.config()) as source, self.open(self.config()) as target:
                if target.pool is None:
                    pytest.skip("this engine's pool is not shared memory")
                wanted = request(prompt(2 * self.block_size + 2))
                expected = tokens_of(await answer(source, wanted))
                async with source.prefill(wanted) as run:
                    await run.first_token()
                    payload = bytes(await run.read_blocks(0, 2))
                async with target.reserve(wanted) as reservation:
                    reservation.fill_blocks(0, payload, self.block_size)
                    await reservation.imported(2)
                    with pytest.raises(TransferRejected, match="only 2"):
                        reservation.fill_blocks(0, payload, self.block_size)
                    assert tokens_of(await drain(reservation)) == expected
                assert target.stats.prompt_tokens_computed == 2

        asyncio.run(main())
