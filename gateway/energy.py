"""What a token costs in energy on each worker, as measured of late. Pure: fed with the workers' counters.

A worker counts joules and tokens, computed prompt tokens and drawn ones alike; what it uses while it computes none is
charged to nobody. Workers that measure nothing cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.core.types import ProcessRecord

FEWEST_TOKENS = 64  # that make a measurement


@dataclass(frozen=True, slots=True)
class _Mark:
    """The worker's counters where the present measurement began, and the rate of the one before."""

    epoch: int
    joules: float
    tokens: int
    millijoules_a_token: float = 0.0


class EnergyRates:
    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}

    def update(self, records: Sequence[ProcessRecord]) -> None:
        """The fleet as it is now; workers that left are forgotten."""
        self._marks = {record.id: self._marked(record) for record in records if record.card is not None}

    def millijoules(self, worker_id: str, tokens: int) -> float:
        """Of so many tokens; 0 for a worker that nothing is known of."""
        mark = self._marks.get(worker_id)
        return 0.0 if mark is None else mark.millijoules_a_token * tokens

    def _marked(self, record: ProcessRecord) -> _Mark:
        stats = record.stats
        now = _Mark(record.epoch, stats.energy_joules, stats.prompt_tokens_computed + stats.tokens_generated)
        mark = self._marks.get(record.id)
        if mark is None or mark.epoch != now.epoch:
            return now
        now = replace(now, millijoules_a_token=mark.millijoules_a_token)
        tokens = now.tokens - mark.tokens
        if tokens == 0:
            return now  # idle
        if tokens < FEWEST_TOKENS:
            return mark
        return replace(now, millijoules_a_token=1000 * (now.joules - mark.joules) / tokens)
