"""A worker's engine in numbers, for Prometheus."""

from __future__ import annotations

from baton.core.telemetry import Meter
from baton.core.types import EngineStats, TierLoad

COUNTERS = {
    "prompt_tokens_computed": "Prompt tokens computed by this engine",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache",
    "tokens_generated": "Tokens drawn",
    "preemptions": "Requests that gave up their blocks and were recomputed",
    "steps": "Engine steps",
    "host_seconds": "The engine loop's own work, all but waiting for commands and for the device",
    "device_seconds": "Steps on the device, from the start of each to its end; 0 where the host computes",
    "device_idle_seconds": "Between two steps on the device while there was work; 0 where the host computes",
    "energy_joules": "What the GPU has used, idle or not; 0 where nothing measures it",
    "draft_tokens_proposed": "Drafts that were checked, when speculation is on",
    "draft_tokens_accepted": "Drafts that were right: tokens drawn without a step of their own",
}


class EngineSeries:
    """Turns snapshots into gauges and counters. Free, held and cached blocks sum to the pool."""

    def __init__(self, meter: Meter) -> None:
        self._blocks = meter.gauge("kv_blocks", "KV blocks by state", ("state",))
        self._kept = meter.gauge("kv_blocks_kept", "Cached KV blocks that are evicted after all others")
        self._requests = meter.gauge("engine_requests", "Requests in the engine by state", ("state",))
        self._tier_requests = meter.gauge("tier_requests", "Requests by tenants' tier and state", ("tier", "state"))
        self._tier_blocks = meter.gauge("tier_kv_blocks", "KV blocks held by the tenants of a tier", ("tier",))
        self._tier_tenants = meter.gauge("tier_tenants", "Tenants of a tier with requests in the engine", ("tier",))
        backlog = "Prompt tokens of a tier that were admitted and are not computed yet"
        self._tier_backlog = meter.gauge("tier_backlog_tokens", backlog, ("tier",))
        self._tier_preemptions = meter.counter(
            "tier_preemptions", "Requests of a tier that gave up their blocks and were recomputed", ("tier",)
        )
        self._counters = {name: meter.counter(f"engine_{name}", text) for name, text in COUNTERS.items()}
        self._last = EngineStats()

    def update(self, stats: EngineStats) -> None:
        """Called with every heartbeat."""
        for state, blocks in (
            ("free", stats.free_blocks),
            ("held", stats.held_blocks),
            ("cached", stats.cached_blocks),
        ):
            self._blocks.set(blocks, state=state)
        self._kept.set(stats.kept_blocks)
        self._requests.set(stats.waiting, state="waiting")
        self._requests.set(stats.running, state="running")
        self._update_tiers(stats.tiers)
        for name, counter in self._counters.items():
            counter.add(getattr(stats, name) - getattr(self._last, name))
        self._last = stats

    def _update_tiers(self, loads: tuple[TierLoad, ...]) -> None:
        before = {load.tier: load.preemptions for load in self._last.tiers}
        for load in loads:
            self._tier_requests.set(load.waiting, tier=load.tier, state="waiting")
            self._tier_requests.set(load.running, tier=load.tier, state="running")
            self._tier_blocks.set(load.blocks, tier=load.tier)
            self._tier_tenants.set(load.tenants, tier=load.tier)
            self._tier_backlog.set(load.backlog_tokens, tier=load.tier)
            self._tier_preemptions.add(load.preemptions - before.get(load.tier, 0), tier=load.tier)
