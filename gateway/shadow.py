"""What limits in shadow would refuse, for whoever tries one out: counted by whose limit it is, and logged."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from baton.core.telemetry import Meter
from baton.core.types import QuotaRefusal

log = logging.getLogger(__name__)

SUBJECTS = 100  # told by name in the metrics; a series each, so their number has to be bounded
OTHER = "other"  # stands for all further ones, which the log lines name


class ShadowReport:
    def __init__(self, meter: Meter) -> None:
        labels = ("level", "subject", "metric")
        self._counter = meter.counter("quota_shadow_refusals", "What limits in shadow would refuse", labels)
        self._subjects: set[tuple[str, str]] = set()

    def note(self, refusals: Iterable[QuotaRefusal]) -> None:
        """Of one request that was admitted all the same."""
        for refusal in refusals:
            self._counter.add(level=refusal.level, subject=self._told(refusal), metric=refusal.metric)
            log.info("a shadowed quota would refuse", extra={"quota": str(refusal)})

    def _told(self, refusal: QuotaRefusal) -> str:
        if len(self._subjects) < SUBJECTS:
            self._subjects.add((refusal.level, refusal.subject))
        return refusal.subject if (refusal.level, refusal.subject) in self._subjects else OTHER
