"""The random load on real engines over tiny models; and that it tells when an engine is wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from baton.core.clock import SystemClock
from baton.engine.client import threaded_engine
from baton.engine.config import EngineConfig
from baton.engine.load import build_runner
from baton.engine.runner import Runner, StepResult
from bench.random_load import LoadPlan, Requests, load, load_config
from tests.goldens import DATA
from tests.real_engines import AheadRunner

CLIENTS = 24


def plan(name: str, requests: int, seed: int) -> LoadPlan:
    config = load_config(str(DATA / "tiny" / name), "cpu", ["engine.dtype=float32", "engine.kv_blocks=128"], CLIENTS)
    return LoadPlan(config, Requests(requests), CLIENTS, pause=0.01, replays=15, seed=seed)


def result_of(runner: Runner, wanted: LoadPlan) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        async with threaded_engine(runner, wanted.config) as engine:
            return await load(engine, wanted, SystemClock())

    return asyncio.run(main())


@pytest.mark.parametrize(("name", "steps_ahead"), [("llama-gqa-tied", 0), ("mistral-window", 0), ("llama-gqa-tied", 1)])
def test_a_random_load_leaves_nothing_held_and_is_answered_as_lone_requests_are(name: str, steps_ahead: int) -> None:
    wanted = plan(name, 70, seed=7)
    runner = build_runner(wanted.config)
    result = result_of(AheadRunner(runner) if steps_ahead else runner, wanted)
    assert result["faults"] == []
    assert result["engine"]["preemptions"] > 0
    assert result["replays"]["equal_answers"] == result["replays"]["answers"] == 15
    assert {"resumed", "left decoding", "left queued", "finished: length"} <= set(result["requests"])


def test_an_engine_that_draws_wrong_tokens_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then another token than the model would draw."""
    wanted = plan("llama-gqa-tied", 60, seed=7)
    runner = build_runner(wanted.config)
    right, steps = runner.collect, count(1)

    def wrong() -> StepResult:
        result = right()
        if next(steps) % 5:
            return result
        return replace(result, token_ids=[None if token is None else (token + 1) % 384 for token in result.token_ids])

    monkeypatch.setattr(runner, "collect", wrong)
    assert any("alone it is answered otherwise" in fault for fault in result_of(runner, wanted)["faults"])


def test_the_settings_are_scarce_unless_they_are_given() -> None:
    assert load_config("fake", "cpu", [], 64).kv_blocks < EngineConfig().max_step_tokens * 64
    given = load_config("fake", "cpu", ["engine.kv_blocks=77", "engine.growth_window=5"], 64)
    assert (given.kv_blocks, given.growth_window) == (77, 5)
