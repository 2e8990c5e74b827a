"""The tax of relaying: which of the engine's steps count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import BatonError
from baton.core.types import EngineStats
from bench.relay_tax import Load, Looks

LOAD = Load(streams=4, prompt=10, output=100)


def taken(snapshots: Sequence[EngineStats]) -> list[float]:
    """What is found when the counters stand so, one snapshot a look; the last one stays."""
    left: Iterator[EngineStats] = iter(snapshots)
    last = snapshots[-1]

    async def stats() -> EngineStats:
        return next(left, last)

    async def main() -> list[float]:
        looks = Looks(stats, LOAD, ManualClock())
        await looks.note()
        await looks.take()
        return looks.step_ms

    return asyncio.run(main())


def at(steps: int, running: int, computed: int, device: float = 0.0) -> EngineStats:
    return EngineStats(
        steps=steps, running=running, prompt_tokens_computed=computed, device_seconds=device, device_idle_seconds=0.0
    )


def test_steps_count_only_while_all_streams_are_past_their_prompts() -> None:
    """100 tokens had been computed before the load."""
    found = taken(
        [
            at(5, 0, 100),
            at(6, 4, 120, 0.5),  # prompts are still being computed
            at(7, 4, 140, 0.6),
            at(8, 4, 140, 0.7),
            at(18, 4, 140, 0.9),
            at(38, 4, 140, 1.5),
            at(40, 3, 140, 9.0),  # the first stream has ended
        ]
    )
    assert found == pytest.approx([20.0, 30.0])


def test_without_a_device_wall_time_counts() -> None:
    found = taken([at(0, 0, 0), at(1, 4, 40), at(1, 4, 40), at(11, 4, 40), at(12, 0, 40)])
    assert found == pytest.approx([100.0])


def test_a_load_that_never_runs_at_once_is_an_error() -> None:
    with pytest.raises(BatonError, match="4 streams did not decode at once"):
        taken([at(0, 0, 0), at(1, 3, 40)])
