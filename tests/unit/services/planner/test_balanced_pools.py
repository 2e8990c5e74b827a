"""The pools help each other out: how long a prompt may wait, and who gives short answers when decode is full."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.errors import ConfigError
from baton.core.types import EngineStats, KvFormat, ModelCard, Plan, PlanQuery, ProcessRecord, Role, WorkerState
from services.planner.config import PlannerConfig
from services.planner.fleet import Fleet
from services.planner.policy import plan

CARD = ModelCard("m", "llama", 8192, 512, "h", KvFormat("fake", 16, 1, 1, 8))
SHORT = PlanQuery("r", "m", "acme", prompt_tokens=200, max_tokens=50)
LONG = replace(SHORT, max_tokens=500)
CONFIG = PlannerConfig(tpot_limit_ms=20.0)


def worker(worker_id: str, role: Role, **stats: float) -> ProcessRecord:
    known = EngineStats(total_blocks=1000, free_blocks=1000, prompt_tokens_per_second=40_000.0)
    known = replace(known, **stats)  # type: ignore[arg-type]
    return ProcessRecord(worker_id, role, f"{worker_id}:1", 5, 1, state=WorkerState.READY, card=CARD, stats=known)


def decided(query: PlanQuery, *workers: ProcessRecord, config: PlannerConfig = CONFIG) -> Plan:
    return plan(query, Fleet(workers, frozenset({"m"}), {}), config, lambda: 0.0)


def ids(found: Plan) -> tuple[list[str], list[str]]:
    return [c.worker_id for c in found.decode], [c.worker_id for c in found.prefill]


IDLE_PREFILL = worker("p", Role.PREFILL)
FULL_DECODE = worker("d", Role.DECODE, waiting=3)
SLOW_DECODE = worker("d", Role.DECODE, running=8, decode_step_seconds=0.030)


def test_a_plan_says_how_long_a_prompt_may_wait() -> None:
    found = decided(LONG, worker("d", Role.DECODE), IDLE_PREFILL, config=replace(CONFIG, prefill_wait_ms=150.0))
    assert found.prefill_wait == 0.15


@pytest.mark.parametrize("config", [replace(CONFIG, balance=False), replace(CONFIG, local_prefill_max_tokens=0)])
def test_without_the_balance_a_prompt_waits_as_long_as_it_takes(config: PlannerConfig) -> None:
    found = decided(SHORT, FULL_DECODE, IDLE_PREFILL, config=config)
    assert found.prefill_wait is None
    assert ids(found) == (["d"], ["p"])


@pytest.mark.parametrize("decode", [FULL_DECODE, SLOW_DECODE])
def test_prefill_workers_give_short_answers_while_decode_has_too_much_to_do(decode: ProcessRecord) -> None:
    found = decided(SHORT, decode, IDLE_PREFILL)
    assert ids(found) == (["p"], [])
    assert found.reasons[-1] == "decode_pool_busy"
    assert found.prefill_wait is None


def test_long_answers_stay_with_decode_workers() -> None:
    assert ids(decided(LONG, FULL_DECODE, IDLE_PREFILL)) == (["d"], ["p"])


def test_one_decode_worker_with_time_is_enough_for_short_answers() -> None:
    free = worker("d2", Role.DECODE)
    assert "p" not in ids(decided(SHORT, FULL_DECODE, free, IDLE_PREFILL))[0]


@pytest.mark.parametrize(
    "busy", [{"backlog_tokens": 20_000}, {"waiting": 1}, {"running": 8, "decode_step_seconds": 0.030}]
)
def test_a_busy_prefill_worker_gives_no_short_answers(busy: dict[str, float]) -> None:
    assert ids(decided(SHORT, FULL_DECODE, worker("p", Role.PREFILL, **busy))) == (["d"], ["p"])


def test_a_decode_worker_at_rest_has_time_however_slow_its_last_steps_were() -> None:
    rested = worker("d", Role.DECODE, running=0, decode_step_seconds=0.030)
    assert ids(decided(SHORT, rested, IDLE_PREFILL)) == (["d"], ["p"])


def test_without_a_limit_slow_steps_are_nothing_to_flee_from() -> None:
    assert ids(decided(SHORT, SLOW_DECODE, IDLE_PREFILL, config=PlannerConfig())) == (["d"], ["p"])


@pytest.mark.parametrize(
    ("key", "value"), [("prefill_wait_ms", -1.0), ("prefill_wait_ms", float("inf")), ("tpot_limit_ms", -0.1)]
)
def test_impossible_settings_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"planner\.{key} must be"):
        replace(CONFIG, **{key: value})
