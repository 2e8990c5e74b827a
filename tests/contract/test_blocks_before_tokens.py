"""Blocks are handed over while the token that follows them is still being computed, whatever computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.core.api import PrefillRun
from baton.engine.client import EngineClient, threaded_engine
from baton.engine.config import EngineConfig
from baton.engine.load import build_runner
from baton.engine.process import fake_runner
from baton.engine.runner import Runner
from tests.contract.engine_driving import all_filled, assert_idle, prompt, request
from tests.goldens import DATA
from tests.held_runner import HeldRunner
from tests.real_engines import AheadRunner

BLOCK_SIZE = 4
LENGTH = 5 * BLOCK_SIZE + 2

FAKE = EngineConfig(model="fake", kv_blocks=64, block_size=BLOCK_SIZE, max_step_tokens=8)
REAL = EngineConfig(
    model=str(DATA / "tiny" / "llama-gqa-tied"),
    dtype="float32",
    threads=1,
    kv_blocks=64,
    block_size=BLOCK_SIZE,
    max_step_tokens=8,
)
RUNNERS: dict[str, Callable[[], Runner]] = {
    "fake": lambda: fake_runner(FAKE),
    "native": lambda: build_runner(REAL),
    "native, a step ahead": lambda: AheadRunner(build_runner(REAL)),
}


def bytes_of(engine: EngineClient, run: PrefillRun) -> list[bytes]:
    """Of each block of the prompt, as they stand in the pool at this moment."""
    assert engine.pool is not None
    size, ids = engine.card.format.block_bytes, run.block_ids(0, -(-LENGTH // BLOCK_SIZE))
    return [bytes(engine.pool.view[number * size : (number + 1) * size]) for number in ids]


@pytest.mark.parametrize("kind", RUNNERS)
def test_all_blocks_can_be_read_while_the_first_token_is_being_computed(kind: str) -> None:
    async def scenario() -> None:
        runner = HeldRunner(RUNNERS[kind]())
        async with threaded_engine(runner, FAKE if kind == "fake" else REAL) as engine:
            async with engine.prefill(request(prompt(LENGTH))) as run:
                assert [blocks.tokens for blocks in await all_filled(run)] == [8, 16, LENGTH]
                early = bytes_of(engine, run)
                first = asyncio.ensure_future(run.first_token())
                await asyncio.sleep(0)
                assert not first.done(), "the step is held"
                runner.release()
                await first
                assert early == bytes_of(engine, run)
                assert any(early[-1])
            await assert_idle(engine)

    asyncio.run(scenario())
