"""What requests are charged for energy: each token by what its worker was measured to use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.types import (
    EngineStats,
    GenerateChunk,
    GenerateRequest,
    Placement,
    ProcessRecord,
    QuotaClaim,
    Usage,
)
from gateway.energy import FEWEST_TOKENS, EnergyRates
from gateway.quota_claims import Delivery
from tests.unit.gateway.doubles import record
from tests.unit.gateway.quota_doubles import claim

PREFILL, DECODE = record("p"), record("d")


def counted(worker: ProcessRecord, joules: float, tokens: int) -> ProcessRecord:
    stats = EngineStats(energy_joules=joules, prompt_tokens_computed=tokens // 2, tokens_generated=tokens - tokens // 2)
    return replace(worker, stats=stats)


def measured(prefill: float = 0.01, decode: float = 0.5) -> EnergyRates:
    """Joules a token of both workers."""
    rates = EnergyRates()
    rates.update([counted(PREFILL, 100, 50), counted(DECODE, 100, 50)])
    rates.update([counted(PREFILL, 100 + 1000 * prefill, 1050), counted(DECODE, 100 + 1000 * decode, 1050)])
    return rates


def order(tokens: tuple[int, int]) -> QuotaClaim:
    return claim("r", tokens=tokens)


def test_a_workers_rate_is_what_it_used_between_two_looks() -> None:
    rates = measured()
    assert (rates.millijoules("p", 10), rates.millijoules("d", 10)) == (pytest.approx(100), pytest.approx(5000))
    assert rates.millijoules("nobody", 10) == 0


def test_what_an_idle_worker_uses_is_charged_to_nobody() -> None:
    rates = measured()
    rates.update([counted(DECODE, 10_000, 1050)])
    rates.update([counted(DECODE, 10_000 + FEWEST_TOKENS, 1050 + FEWEST_TOKENS)])
    assert rates.millijoules("d", 1) == pytest.approx(1000)


def test_a_few_tokens_are_no_measurement_yet_and_are_not_lost() -> None:
    rates = measured()
    rates.update([counted(DECODE, 601, 1051)])
    assert rates.millijoules("d", 1) == pytest.approx(500)
    rates.update([counted(DECODE, 600 + 200, 1150)])
    assert rates.millijoules("d", 1) == pytest.approx(2000)


def test_a_restarted_worker_is_measured_anew() -> None:
    rates = measured()
    rates.update([replace(counted(DECODE, 0, 0), epoch=DECODE.epoch + 1)])
    assert rates.millijoules("d", 1) == 0


def test_a_request_is_charged_its_computed_prompt_and_its_tokens_where_they_were_computed() -> None:
    delivery = Delivery(GenerateRequest(), order((100, 50)), measured())
    first = GenerateChunk("r", token_ids=(1,), usage=Usage(100, 40, 1), placement=Placement("d", "p"))
    assert delivery.add(first).energy_millijoules == 60 * 10 + 500
    assert delivery.add(GenerateChunk("r", token_ids=(2, 3))).energy_millijoules == 60 * 10 + 3 * 500


def test_tokens_after_a_migration_cost_what_the_next_worker_uses_and_the_prompt_counts_once() -> None:
    delivery = Delivery(GenerateRequest(), order((100, 50)), measured())
    delivery.add(GenerateChunk("r", token_ids=(1,), usage=Usage(100, 0, 1), placement=Placement("d", "p")))
    moved = delivery.add(GenerateChunk("r", token_ids=(2,), placement=Placement("p", "p")))
    assert moved.energy_millijoules == 100 * 10 + 500 + 10


def test_what_a_client_brings_back_is_charged_like_what_follows() -> None:
    delivery = Delivery(GenerateRequest(resume=((1, 2),)), order((100, 50)), measured())
    first = GenerateChunk("r", token_ids=(3,), usage=Usage(100, 0, 3), placement=Placement("d", "p"))
    assert delivery.add(first).energy_millijoules == 100 * 10 + 3 * 500
