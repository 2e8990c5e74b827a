"""An engine's snapshots as series: gauges show the newest one, counters what has been added since the one before."""

from __future__ import annotations

from baton.core.types import EngineStats, Tier, TierLoad
from baton.telemetry.metrics import PrometheusMeter
from services.worker.load import EngineSeries


def test_each_tiers_requests_tenants_blocks_and_preemptions_are_told() -> None:
    meter = PrometheusMeter()
    series = EngineSeries(meter)
    gold = TierLoad(Tier.GOLD, tenants=2, waiting=1, running=3, blocks=40, preemptions=0, backlog_tokens=700)
    series.update(EngineStats(tiers=(gold, TierLoad(Tier.BRONZE, 1, 9, 1, 8, preemptions=5))))
    series.update(EngineStats(tiers=(gold, TierLoad(Tier.BRONZE, 1, 7, 0, 0, preemptions=6))))
    lines = meter.exposition().decode().splitlines()
    for line in (
        'baton_tier_requests{state="waiting",tier="gold"} 1.0',
        'baton_tier_requests{state="running",tier="gold"} 3.0',
        'baton_tier_requests{state="waiting",tier="bronze"} 7.0',
        'baton_tier_tenants{tier="gold"} 2.0',
        'baton_tier_kv_blocks{tier="gold"} 40.0',
        'baton_tier_kv_blocks{tier="bronze"} 0.0',
        'baton_tier_backlog_tokens{tier="gold"} 700.0',
        'baton_tier_backlog_tokens{tier="bronze"} 0.0',
        'baton_tier_preemptions_total{tier="gold"} 0.0',
        'baton_tier_preemptions_total{tier="bronze"} 6.0',
    ):
        assert line in lines
