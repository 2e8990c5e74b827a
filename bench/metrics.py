"""What is said of requests: TTFT, TPOT, ITL, goodput, percentiles. One definition for every benchmark.

TTFT: request sent to the first chunk with a token. TPOT: (latency - TTFT) / (output tokens - 1). ITL: gaps between the
chunks of a stream, pooled over all requests. Goodput: requests a second that met every objective.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Timeline:
    """One request as its caller saw it: when it was sent, and when how many tokens came. Seconds on one clock."""

    sent: float
    times: list[float] = field(default_factory=list[float])  # of chunks with tokens
    counts: list[int] = field(default_factory=list[int])  # tokens in each of them

    def add(self, now: float, tokens: int) -> None:
        if tokens:
            self.times.append(now)
            self.counts.append(tokens)

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.sent if self.times else None

    @property
    def tpot(self) -> float | None:
        """None for an answer of fewer than two tokens."""
        tokens = self.tokens
        return (self.times[-1] - self.times[0]) / (tokens - 1) if tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]


@dataclass(slots=True)
class Record:
    """One request of an open-loop run. ``due`` is when it should have been sent; ``error``: its reason if it failed."""

    due: float
    timeline: Timeline
    ended: float | None = None  # None: still running when the run was over
    error: str = ""
    cached_tokens: int = 0
    migrations: int = 0

    @property
    def succeeded(self) -> bool:
        return self.ended is not None and not self.error


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must meet to count as good, in milliseconds; None: no objective."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def met(self, record: Record) -> bool:
        line = record.timeline
        return record.succeeded and _within(line.ttft, self.ttft_ms) and _within(line.tpot, self.tpot_ms)


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run that is judged: requests that were due in [start, end), seconds from its beginning."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def holds(self, moment: float | None) -> bool:
        return moment is not None and self.start <= moment < self.end


def _within(seconds: float | None, limit_ms: float | None) -> bool:
    return seconds is None or limit_ms is None or 1000 * seconds <= limit_ms


def judge(records: Sequence[Record], window: Window, objectives: Objectives) -> dict[str, object]:
    """The figures of one open-loop run.

    Offered, good and failed are of the requests due inside the window, whenever they ended; ``completed_per_second``
    and ``output_tokens_per_second`` count what came to its end (or came at all) inside it, whoever was due when, so
    that a growing backlog shows.
    """
    counted = [record for record in records if window.holds(record.due)]
    lines = [record.timeline for record in counted if record.succeeded]
    tokens = sum(
        count
        for record in records
        for moment, count in zip(record.timeline.times, record.timeline.counts, strict=True)
        if window.holds(moment)
    )
    ends = sum(record.succeeded and window.holds(record.ended) for record in records)
    return {
        "requests": len(counted),
        "offered_per_second": round(len(counted) / window.seconds, 4),
        "completed_per_second": round(ends / window.seconds, 4),
        "goodput_per_second": round(sum(map(objectives.met, counted)) / window.seconds, 4),
        "output_tokens_per_second": round(tokens / window.seconds, 2),
        "errors": dict(Counter(record.error for record in counted if record.error)),
        "unfinished": sum(record.ended is None for record in counted),
        "migrations": sum(record.migrations for record in counted),
        "cached_tokens": sum(record.cached_tokens for record in counted),
        "ttft_ms": percentiles([1000 * line.ttft for line in lines if line.ttft is not None]),
        "tpot_ms": percentiles([1000 * line.tpot for line in lines if line.tpot is not None]),
        "itl_ms": percentiles([1000 * gap for line in lines for gap in line.gaps]),
        "sent_late_ms": percentiles([1000 * (record.timeline.sent - record.due) for record in counted]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p99 and maximum; None without a value."""
    if not values:
        return None
    ordered = sorted(values)
    found = {"mean": statistics.fmean(ordered)}
    found |= {f"p{percent}": percentile(ordered, percent) for percent in (50, 90, 99)}
    found["max"] = ordered[-1]
    return {name: round(value, 3) for name, value in found.items()}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks. ``ordered`` ascends and is not empty."""
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Of the repeats of one measurement."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }
