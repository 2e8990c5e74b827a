"""Which streams a worker's end has hit, and for how long they stood still."""

from __future__ import annotations

import pytest

from baton.core.types import Role
from bench.failover import Stream

MOMENT = 10.0


def stream(asked: float, *chunks: tuple[float, str], migrations: int = 0) -> Stream:
    times, workers = [time for time, _ in chunks], [worker for _, worker in chunks]
    return Stream(asked, times, workers, tokens=len(chunks), migrations=migrations)


@pytest.mark.parametrize(
    ("found", "standstill"),
    [
        (stream(8, (9, "decode-0"), (12, "decode-1"), migrations=1), 2.0),
        (stream(8, (9, "decode-1"), (12, "decode-1")), None),  # another worker's
        (stream(9, (13, "decode-1"), migrations=1), 3.0),  # it waited for its first token
        (stream(11, (13, "decode-1"), migrations=1), 2.0),  # it was sent there afterwards: from its own start
        (stream(11, (13, "decode-1")), None),
        (stream(8, (9, "decode-0")), None),  # it ended before, or was lost: counted apart
    ],
)
def test_streams_of_the_decode_worker_stand_still_until_their_next_token(
    found: Stream, standstill: float | None
) -> None:
    assert found.gap_after(MOMENT, "decode-0", Role.DECODE) == standstill


@pytest.mark.parametrize(
    ("found", "standstill"),
    [
        (stream(9, (13, "decode-1")), 3.0),
        (stream(8, (9, "decode-0"), (12, "decode-0")), None),  # its prompt was computed before
        (stream(11, (13, "decode-1")), None),
    ],
)
def test_of_a_prefill_worker_those_are_hit_that_wait_for_their_first_token(
    found: Stream, standstill: float | None
) -> None:
    assert found.gap_after(MOMENT, "prefill-0", Role.PREFILL) == standstill
