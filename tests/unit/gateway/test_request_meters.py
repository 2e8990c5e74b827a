from __future__ import annotations

import asyncio
import logging

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import Overloaded
from baton.core.types import FinishReason, GenerateChunk, Usage
from baton.telemetry.metrics import PrometheusMeter
from gateway.meters import RequestMeters


def meters() -> tuple[RequestMeters, PrometheusMeter, ManualClock]:
    meter, clock = PrometheusMeter(), ManualClock()
    return RequestMeters(meter, clock, lambda model: model == "toy"), meter, clock


def value(meter: PrometheusMeter, series: str) -> float:
    lines = [line for line in meter.exposition().decode().splitlines() if line.startswith(f"baton_{series} ")]
    [line] = lines
    return float(line.rpartition(" ")[2])


def test_a_request_is_counted_with_its_tokens_and_times() -> None:
    instruments, meter, clock = meters()
    with instruments.request("toy", {}) as record:
        assert value(meter, "requests_in_flight") == 1
        clock.advance(0.3)
        instruments.note(record, GenerateChunk("r", token_ids=(1,), usage=Usage(10, 4, 1)))
        clock.advance(0.1)
        instruments.note(record, GenerateChunk("r", token_ids=(2, 3)))
        instruments.note(record, GenerateChunk("r", finish=FinishReason.STOP, usage=Usage(10, 4, 3)))
    assert value(meter, "requests_in_flight") == 0
    assert value(meter, 'requests_total{model="toy",outcome="OK"}') == 1
    assert value(meter, 'prompt_tokens_total{model="toy"}') == 10
    assert value(meter, 'prompt_tokens_cached_total{model="toy"}') == 4
    assert value(meter, 'output_tokens_total{model="toy"}') == 3
    assert value(meter, 'time_to_first_token_seconds_sum{model="toy"}') == pytest.approx(0.3)
    assert value(meter, 'inter_token_latency_seconds_sum{model="toy"}') == pytest.approx(0.1)
    assert value(meter, 'inter_token_latency_seconds_count{model="toy"}') == 1
    assert value(meter, 'request_duration_seconds_sum{model="toy"}') == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(Overloaded("full"), "OVERLOADED"), (asyncio.CancelledError(), "CANCELLED"), (KeyError("bug"), "INTERNAL")],
)
def test_a_failed_request_is_counted_under_its_cause_and_its_tokens_are_kept(
    error: BaseException, outcome: str
) -> None:
    instruments, meter, _ = meters()
    with pytest.raises(type(error)), instruments.request("toy", {}) as record:
        instruments.note(record, GenerateChunk("r", token_ids=(1, 2)))
        raise error
    assert value(meter, f'requests_total{{model="toy",outcome="{outcome}"}}') == 1
    assert value(meter, 'output_tokens_total{model="toy"}') == 2
    assert value(meter, "requests_in_flight") == 0


def test_a_long_answer_shows_before_its_end() -> None:
    instruments, meter, clock = meters()
    with instruments.request("toy", {}) as record:
        for _ in range(100):
            clock.advance(0.1)
            instruments.note(record, GenerateChunk("r", token_ids=(1,)))
        assert value(meter, 'output_tokens_total{model="toy"}') >= 50
        assert value(meter, 'inter_token_latency_seconds_count{model="toy"}') >= 50
    assert value(meter, 'output_tokens_total{model="toy"}') == 100
    assert value(meter, 'inter_token_latency_seconds_count{model="toy"}') == 99


def test_unknown_model_names_share_one_series() -> None:
    instruments, meter, _ = meters()
    for name in ("a", "b", "x" * 100, ""):
        with instruments.request(name, {}):
            pass
    assert value(meter, 'requests_total{model="other",outcome="OK"}') == 4
    assert meter.exposition().decode().count("baton_requests_total{") == 1


def test_one_log_line_tells_how_a_request_went(caplog: pytest.LogCaptureFixture) -> None:
    instruments, _, clock = meters()
    with caplog.at_level(logging.INFO, "gateway.meters"), instruments.request("toy", {"request_id": "r"}) as record:
        clock.advance(0.25)
        instruments.note(record, GenerateChunk("r", token_ids=(1,), usage=Usage(10, 4, 1), migrations=1))
    [line] = caplog.records
    told = {name: getattr(line, name) for name in ("request_id", "outcome", "output_tokens", "migrations", "ttft_ms")}
    assert told == {"request_id": "r", "outcome": "OK", "output_tokens": 1, "migrations": 1, "ttft_ms": 250.0}
