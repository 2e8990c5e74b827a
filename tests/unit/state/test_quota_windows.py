"""Windows of every time zone follow each other without gap, whatever clocks do."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.state.quota.windows import MICROSECONDS, Calendar, day_window, minute_window, month_window

ZONES = st.sampled_from(sorted(available_timezones()))
MOMENTS = st.integers(946_684_800 * MICROSECONDS, 2_145_916_800 * MICROSECONDS)  # 2000 to 2037
HOUR = 3600 * MICROSECONDS


def moment(local: str, zone: str) -> int:
    return round(datetime.fromisoformat(local).replace(tzinfo=ZoneInfo(zone)).timestamp()) * MICROSECONDS


@given(ZONES, MOMENTS)
def test_a_day_holds_its_moments_and_ends_where_the_next_begins(zone: str, now: int) -> None:
    for window_of in (day_window, month_window):
        window = window_of(now, zone)
        assert window.holds(now)
        assert window_of(window.start, zone) == window == window_of(window.end - 1, zone)
        assert window_of(window.end, zone).start == window.end


@given(MOMENTS)
def test_a_minute_is_that_of_the_clock(now: int) -> None:
    window = minute_window(now)
    assert window.holds(now)
    assert (window.end - window.start, window.start % (60 * MICROSECONDS)) == (60 * MICROSECONDS, 0)


@pytest.mark.parametrize(
    ("zone", "local", "hours"),
    [
        ("Europe/Berlin", "2026-03-29T12:00", 23),
        ("Europe/Berlin", "2026-10-25T12:00", 25),
        ("Europe/Berlin", "2026-07-01T12:00", 24),
        ("America/Sao_Paulo", "2018-11-04T12:00", 23),  # clocks skipped midnight itself
        ("Australia/Lord_Howe", "2026-04-05T12:00", 24.5),
    ],
)
def test_a_day_is_as_long_as_its_clocks_make_it(zone: str, local: str, hours: float) -> None:
    window = day_window(moment(local, zone), zone)
    assert (window.end - window.start) / HOUR == hours


def test_days_of_two_zones_are_different_windows() -> None:
    now = moment("2026-05-01T01:00", "Asia/Tokyo")
    assert day_window(now, "Asia/Tokyo").name != day_window(now, "UTC").name
    assert month_window(now, "Asia/Tokyo").start - month_window(now, "UTC").start == (30 * 24 - 9) * HOUR


@given(st.lists(st.tuples(ZONES, ZONES, MOMENTS), min_size=1, max_size=20))
def test_a_calendar_remembers_nothing_that_is_over(asked: list[tuple[str, str, int]]) -> None:
    calendar = Calendar()
    for above, zone, now in asked:
        windows = calendar.windows(above, zone, now)
        organisation, tenant = (
            (day_window(now, above), month_window(now, above)),
            (day_window(now, zone), month_window(now, zone)),
        )
        assert windows.each == (minute_window(now), *organisation, *tenant)
        assert windows.start <= now < windows.end
        assert (windows.start, windows.end) == (minute_window(now).start, minute_window(now).end)


def test_a_calendar_makes_windows_once_a_minute() -> None:
    calendar, now = Calendar(), moment("2026-03-04 10:20:30", "UTC")
    known = calendar.windows("UTC", "Asia/Tokyo", now)
    assert calendar.windows("UTC", "Asia/Tokyo", now + 29 * MICROSECONDS) is known
    assert calendar.windows("UTC", "Asia/Tokyo", now + 30 * MICROSECONDS) != known


def test_windows_of_one_start_have_ids_of_their_own() -> None:
    """At midnight of the first of a month, UTC."""
    now = moment("2026-03-01 00:00:00", "UTC")
    ids = {window.id for window in Calendar().windows("UTC", "UTC", now).each}
    assert len(ids) == 3
