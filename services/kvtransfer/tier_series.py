"""The cache tier in numbers, for Prometheus."""

from __future__ import annotations

from baton.core.telemetry import Meter
from baton.core.types import TierStats

COUNTERS = {
    "hits": "Blocks that workers looked for and found",
    "misses": "Blocks that workers looked for in vain",
    "corrupt": "Blocks dropped because they did not match their checksum",
    "disk_errors": "Failed reads and writes of the disk",
}


class TierSeries:
    """Turns snapshots into gauges and counters."""

    def __init__(self, meter: Meter) -> None:
        self._blocks = meter.gauge("tier_blocks", "Blocks in the cache tier", ("level",))
        self._bytes = meter.gauge("tier_bytes", "Bytes in the cache tier", ("level",))
        self._pinned = meter.gauge("tier_pinned_blocks", "Blocks that are never evicted")
        self._counters = {name: meter.counter(f"tier_{name}", text) for name, text in COUNTERS.items()}
        self._last = TierStats()

    def update(self, stats: TierStats) -> None:
        self._blocks.set(stats.memory_blocks, level="memory")
        self._blocks.set(stats.disk_blocks, level="disk")
        self._bytes.set(stats.memory_bytes, level="memory")
        self._bytes.set(stats.disk_bytes, level="disk")
        self._pinned.set(stats.pinned_blocks)
        for name, counter in self._counters.items():
            counter.add(getattr(stats, name) - getattr(self._last, name))
        self._last = stats
