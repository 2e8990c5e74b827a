from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.metrics import Objectives, Record, Timeline, Window, judge, percentile, percentiles

WINDOW = Window(10.0, 20.0)
NO_OBJECTIVES = Objectives()


def answered(due: float, first: float, gap: float, tokens: int, *, error: str = "") -> Record:
    """Sent when due; one token a chunk, ``gap`` seconds apart, the first after ``first`` seconds."""
    times = [due + first + gap * i for i in range(tokens)]
    return Record(due, Timeline(due, times, [1] * tokens), ended=times[-1] if times else due, error=error)


def test_ttft_tpot_and_gaps_follow_their_definitions() -> None:
    line = Timeline(5.0)
    line.add(5.2, 0)  # a chunk without a token is not the first token
    for now, tokens in ((6.0, 1), (6.5, 2), (7.5, 1)):
        line.add(now, tokens)
    assert (line.ttft, line.tpot, line.gaps) == (1.0, 0.5, [0.5, 1.0])  # 1.5 s for the three tokens after the first


def test_an_answer_of_one_token_has_no_tpot_and_fails_no_objective_on_it() -> None:
    record = answered(12.0, 0.1, 0.0, 1)
    assert record.timeline.tpot is None
    assert Objectives(ttft_ms=200, tpot_ms=1).met(record)


def test_goodput_counts_the_requests_that_meet_every_objective() -> None:
    records = [
        answered(11.0, 0.1, 0.01, 5),
        answered(12.0, 0.6, 0.01, 5),  # first token late
        answered(13.0, 0.1, 0.03, 5),  # tokens slow
        answered(14.0, 0.1, 0.01, 5, error="OVERLOADED"),
    ]
    found = judge(records, WINDOW, Objectives(ttft_ms=500, tpot_ms=20))
    assert found["goodput_per_second"] == 0.1
    assert judge(records, WINDOW, Objectives(ttft_ms=500))["goodput_per_second"] == 0.2
    assert judge(records, WINDOW, NO_OBJECTIVES)["goodput_per_second"] == 0.3
    assert found["errors"] == {"OVERLOADED": 1}


def test_the_warm_up_is_not_judged() -> None:
    warm_up, judged, after = answered(9.9, 9.0, 0.0, 1), answered(10.0, 1.0, 0.0, 1), answered(20.0, 5.0, 0.0, 1)
    found = judge([warm_up, judged, after], WINDOW, NO_OBJECTIVES)
    assert (found["requests"], found["offered_per_second"]) == (1, 0.1)
    assert found["ttft_ms"] == {"mean": 1000.0, "p50": 1000.0, "p90": 1000.0, "p99": 1000.0, "max": 1000.0}


def test_a_growing_backlog_shows_in_what_is_completed() -> None:
    """All come through in the end, but fewer than were offered come through meanwhile."""
    records = [answered(10.0 + i, 6.0, 1.0, 2) for i in range(10)]
    found = judge(records, WINDOW, NO_OBJECTIVES)
    assert (found["offered_per_second"], found["completed_per_second"]) == (1.0, 0.3)
    assert found["output_tokens_per_second"] == 0.7


def test_what_never_ended_is_counted_and_not_good() -> None:
    record = Record(12.0, Timeline(12.0))
    found = judge([record], WINDOW, NO_OBJECTIVES)
    assert (found["unfinished"], found["goodput_per_second"], found["ttft_ms"]) == (1, 0.0, None)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_no_value_has_no_percentiles() -> None:
    assert percentiles([]) is None
