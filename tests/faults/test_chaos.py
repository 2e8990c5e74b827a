"""A short seed of chaos, and that a seed means the same every time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.chaos import chaos
from tests.faults.chaos_plan import OTHERS, WORKERS, Kind, plan_round

SEED, ROUNDS = 552, 4  # few rounds that hold faults of every kind, on every process


@pytest.mark.timeout(900)
def test_whatever_breaks_under_load_no_token_is_wrong_no_block_lost_and_no_request_hangs(tmp_path: Path) -> None:
    async def run() -> None:
        async with chaos(tmp_path) as played:
            for number in range(ROUNDS):
                await played.play(plan_round(SEED, number))
            assert played.outcomes["whole"] > played.outcomes.total() / 2
            assert set(played.faults) == set(Kind)

    asyncio.run(run())


def test_seed_and_round_decide_requests_and_faults() -> None:
    assert plan_round(3, 7) == plan_round(3, 7) != plan_round(3, 8) != plan_round(4, 8)


def test_short_run_breaks_things_in_every_way() -> None:
    kinds = {fault.kind for number in range(ROUNDS) for fault in plan_round(SEED, number).faults}
    targets = {fault.target for number in range(ROUNDS) for fault in plan_round(SEED, number).faults}
    assert kinds == set(Kind)
    assert targets == {*WORKERS, *OTHERS}
