"""What the gateway counts and logs of its requests.

Model labels are names that the fleet serves, else ``other``, so that callers cannot grow the number of series.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from baton.core.clock import Clock
from baton.core.errors import BatonError
from baton.core.telemetry import Meter, log_context
from baton.core.types import GenerateChunk, Placement, Usage

log = logging.getLogger(__name__)
OTHER_MODEL = "other"
TOLD_AT_ONCE = 32  # gaps between chunks


class RequestRecord:
    """One request as it goes. ``outcome`` is an error's reason, or OK."""

    def __init__(self, clock: Clock, model: str) -> None:
        self._clock = clock
        self._started = clock.now()
        self._latest: dict[int, float] = {}
        self._gaps: list[float] = []
        self._tokens = 0
        self.model = model
        self.outcome = "OK"
        self.first_token_seconds: float | None = None
        self.usage = Usage()  # of choice 0
        self.output_tokens = 0
        self.placement = Placement()  # the latest of any choice
        self.migrations = 0
        self.limit = ""  # of the plan, that ended an answer

    @property
    def seconds(self) -> float:
        return self._clock.now() - self._started

    def note(self, chunk: GenerateChunk) -> None:
        self.migrations = max(self.migrations, chunk.migrations)
        self.placement = chunk.placement or self.placement
        self.limit = chunk.limit or self.limit
        if chunk.usage is not None and chunk.index == 0:
            self.usage = chunk.usage
        if not chunk.token_ids:
            return
        now = self._clock.now()
        self.output_tokens += len(chunk.token_ids)
        self._tokens += len(chunk.token_ids)
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self._started
        if (before := self._latest.get(chunk.index)) is not None:
            self._gaps.append(now - before)
        self._latest[chunk.index] = now

    @property
    def untold(self) -> int:
        """How many gaps ``take_news`` would return."""
        return len(self._gaps)

    def take_news(self) -> tuple[int, list[float]]:
        """Output tokens, and seconds between chunks of one choice, since the last call."""
        tokens, gaps = self._tokens, self._gaps
        self._tokens, self._gaps = 0, []
        return tokens, gaps

    def figures(self) -> dict[str, object]:
        """For the log line."""
        ttft = self.first_token_seconds
        return {
            "outcome": self.outcome,
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "output_tokens": self.output_tokens,
            "prefill_worker": self.placement.prefill_worker,
            "decode_worker": self.placement.decode_worker,
            "migrations": self.migrations,
            "limit": self.limit,
            "ttft_ms": None if ttft is None else round(ttft * 1000, 3),
            "duration_ms": round(self.seconds * 1000, 3),
        }


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

        ``subject`` tells in log lines whose request it is. The block may correct the record's ``model``.
        """
        record = RequestRecord(self._clock, model)
        self._running += 1
        self._in_flight.set(self._running)
        try:
            with log_context(**subject):
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

    def note(self, record: RequestRecord, chunk: GenerateChunk) -> None:
        """Take in a chunk. Long answers show in the series while they run, not only at their end."""
        record.note(chunk)
        if record.untold >= TOLD_AT_ONCE:
            self._tell(record, self.label(record.model))

    def _tell(self, record: RequestRecord, model: str) -> None:
        tokens, gaps = record.take_news()
        self._output.add(tokens, model=model)
        for gap in gaps:
            self._itl.observe(gap, model=model)

    def _settle(self, record: RequestRecord, model: str) -> None:
        self._requests.add(model=model, outcome=record.outcome)
        self._duration.observe(record.seconds, model=model)
        if record.first_token_seconds is not None:
            self._ttft.observe(record.first_token_seconds, model=model)
            self._prompt.add(record.usage.prompt_tokens, model=model)
            self._cached.add(record.usage.cached_tokens, model=model)
            self._tell(record, model)
