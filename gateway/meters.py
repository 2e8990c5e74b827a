"""What the gateway counts and logs of its requests.

Model labels are names that the fleet serves, else ``other``, so that callers cannot grow the number of series.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from baton.core.clock import Clock
from baton.core.errors import BatonError
from baton.core.telemetry import Meter
from baton.core.types import GenerateChunk

log = logging.getLogger(__name__)
OTHER_MODEL = "other"


class RequestRecord:
    """One request as it goes; read when it ends."""

    def __init__(self, clock: Clock, model: str) -> None:
        self._clock = clock
        self.model = model
        self.started = clock.now()
        self.first_token_seconds: float | None = None
        self.gaps: list[float] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.migrations = 0
        self.outcome = "OK"
        self._latest: dict[int, float] = {}

    def note(self, chunk: GenerateChunk) -> None:
        self.migrations = max(self.migrations, chunk.migrations)
        if chunk.usage is not None and chunk.index == 0:
            self.prompt_tokens, self.cached_tokens = chunk.usage.prompt_tokens, chunk.usage.cached_tokens
        if not chunk.token_ids:
            return
        now = self._clock.now()
        self.output_tokens += len(chunk.token_ids)
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self.started
        if (before := self._latest.get(chunk.index)) is not None:
            self.gaps.append(now - before)
        self._latest[chunk.index] = now

    def figures(self) -> dict[str, object]:
        """For the log line."""
        ttft = self.first_token_seconds
        return {
            "outcome": self.outcome,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "migrations": self.migrations,
            "ttft_ms": None if ttft is None else round(ttft * 1000, 3),
            "duration_ms": round(self.seconds * 1000, 3),
        }

    @property
    def seconds(self) -> float:
        return self._clock.now() - self.started


class RequestMeters:
    """The instruments of requests. ``known`` says which model names may label a series."""

    def __init__(self, meter: Meter, clock: Clock, known: Callable[[str], bool]) -> None:
        self._clock = clock
        self._known = known
        by_model = ("model",)
        self._requests = meter.counter("requests", "Requests ended, by outcome", ("model", "outcome"))
        self._duration = meter.histogram("request_duration_seconds", "Arrival to last chunk", by_model)
        self._ttft = meter.histogram("time_to_first_token_seconds", "Arrival to first token", by_model)
        self._itl = meter.histogram("inter_token_latency_seconds", "Gaps between a choice's chunks", by_model)
        self._prompt = meter.counter("prompt_tokens", "Prompt tokens of answered requests", by_model)
        self._cached = meter.counter("prompt_tokens_cached", "Of these, found in a prefix cache", by_model)
        self._output = meter.counter("output_tokens", "Output tokens delivered", by_model)
        self._in_flight = meter.gauge("requests_in_flight", "Requests in progress")
        self._running = 0

    def label(self, model: str) -> str:
        return model if self._known(model) else OTHER_MODEL

    @contextmanager
    def request(self, model: str, subject: Mapping[str, str]) -> Iterator[RequestRecord]:
        """One request for as long as the block lasts; an error that leaves it counts under its reason.

        ``subject`` tells in the log line whose request it was. The block may correct the record's ``model``.
        """
        record = RequestRecord(self._clock, model)
        self._running += 1
        self._in_flight.set(self._running)
        try:
            yield record
        except BatonError as error:
            record.outcome = error.reason
            raise
        except BaseException as error:
            record.outcome = "INTERNAL" if isinstance(error, Exception) else "CANCELLED"
            raise
        finally:
            self._running -= 1
            self._in_flight.set(self._running)
            label = self.label(record.model)
            self._settle(record, label)
            log.info("request ended", extra={**subject, "model": label, **record.figures()})

    def _settle(self, record: RequestRecord, model: str) -> None:
        self._requests.add(model=model, outcome=record.outcome)
        self._duration.observe(record.seconds, model=model)
        if record.first_token_seconds is not None:
            self._ttft.observe(record.first_token_seconds, model=model)
            self._prompt.add(record.prompt_tokens, model=model)
            self._cached.add(record.cached_tokens, model=model)
            self._output.add(record.output_tokens, model=model)
        for gap in record.gaps:
            self._itl.observe(gap, model=model)
