"""The simulated balance meets the objectives that are asked of one prefill and one decode worker on two H200s."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.runner import Part
from bench.balance import LOOSE, STRICT, Case, simulate, step_seconds
from services.planner.config import PlannerConfig

SECONDS = 20.0
FIXED = PlannerConfig(balance=False)


def part(start: int, end: int) -> Part:
    return Part(0, (), start, end, ())


@pytest.mark.parametrize(("batch", "measured_ms"), [(1, 3.95), (64, 7.07), (128, 10.3), (256, 16.2)])
def test_a_simulated_decode_step_takes_what_it_took_on_a_gpu(batch: int, measured_ms: float) -> None:
    assert 1000 * step_seconds([part(1088, 1089)] * batch) == pytest.approx(measured_ms, rel=0.05)


@pytest.mark.parametrize(("tokens", "measured_ms"), [(2048, 45.0), (8192, 215.0)])
def test_a_simulated_prompt_takes_what_it_took_on_a_gpu(tokens: int, measured_ms: float) -> None:
    assert 1000 * step_seconds([part(0, tokens)]) == pytest.approx(measured_ms, rel=0.05)


def found(rate: float, prompt: int, output: int, planner: PlannerConfig | None = None) -> tuple[Any, Any]:
    case = Case(rate, prompt, output, SECONDS, warm_up=5.0, planner=planner or PlannerConfig())
    return simulate(case, LOOSE), simulate(case, STRICT)


def test_the_balance_holds_the_loose_objectives_where_prefill_alone_is_not_enough() -> None:
    loose, _ = found(22.0, 2048, 256)
    fixed, _ = found(22.0, 2048, 256, FIXED)
    assert loose["met_share"] >= 0.97
    assert loose["local_share"] > 0.02
    assert fixed["met_share"] < loose["met_share"]
    assert fixed["local_share"] == 0


def test_the_balance_leaves_decode_alone_where_prefill_is_enough() -> None:
    _, strict = found(12.0, 2048, 256)
    assert strict["met_share"] >= 0.95
    assert strict["tpot_ms"]["p99"] <= 7.0
    assert strict["local_share"] < 0.02


def test_long_prompts_do_not_queue_behind_each_other() -> None:
    loose, _ = found(3.0, 8192, 128)
    assert loose["ttft_ms"]["p50"] <= 330.0
    assert loose["ttft_ms"]["p99"] < found(3.0, 8192, 128, FIXED)[0]["ttft_ms"]["p99"]


def test_two_runs_of_a_case_say_the_same() -> None:
    case = Case(12.0, 2048, 64, 3.0, warm_up=1.0)
    assert simulate(case, LOOSE) == simulate(case, LOOSE)
