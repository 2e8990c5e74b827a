"""Minutes of the clock, days and months of a time zone: the windows that limits count in.

A window is known by its start. It is part of the counter's key, so nothing has to be reset when a window ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from enum import StrEnum
from zoneinfo import ZoneInfo

MICROSECONDS = 1_000_000
MINUTE = 60 * MICROSECONDS


class WindowKind(StrEnum):
    MINUTE = "minute"
    DAY = "day"
    MONTH = "month"


@dataclass(frozen=True, slots=True)
class Window:
    """[start, end) in Unix microseconds."""

    kind: WindowKind
    start: int
    end: int

    def holds(self, moment: int) -> bool:
        return self.start <= moment < self.end

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.start // MICROSECONDS}"


def minute_window(moment: int) -> Window:
    start = moment - moment % MINUTE
    return Window(WindowKind.MINUTE, start, start + MINUTE)


def day_window(moment: int, zone: str) -> Window:
    """From local midnight to the next one: 23 or 25 hours when the clocks change."""
    place = _zone(zone)
    today = _local_date(moment, place)
    tomorrow = today + timedelta(days=1)
    return Window(WindowKind.DAY, _midnight(today, place), _midnight(tomorrow, place))


def month_window(moment: int, zone: str) -> Window:
    place = _zone(zone)
    first = _local_date(moment, place).replace(day=1)
    next_first = (first + timedelta(days=32)).replace(day=1)
    return Window(WindowKind.MONTH, _midnight(first, place), _midnight(next_first, place))


class Calendar:
    """The current windows of each zone, computed again only when one has ended."""

    def __init__(self) -> None:
        self._minute = minute_window(0)
        self._latest: dict[tuple[WindowKind, str], Window] = {}

    def window(self, kind: WindowKind, zone: str, moment: int) -> Window:
        """The window that holds ``moment`` (Unix microseconds). Minutes are the same in every zone."""
        if kind is WindowKind.MINUTE:
            if not self._minute.holds(moment):
                self._minute = minute_window(moment)
            return self._minute
        known = self._latest.get((kind, zone))
        if known is None or not known.holds(moment):
            known = day_window(moment, zone) if kind is WindowKind.DAY else month_window(moment, zone)
            self._latest[kind, zone] = known
        return known


def _zone(name: str) -> tzinfo:
    """UTC needs no time zone database."""
    return UTC if name == "UTC" else ZoneInfo(name)


def _local_date(moment: int, place: tzinfo) -> date:
    """Whole seconds: a float of microseconds would round up into the next day."""
    return datetime.fromtimestamp(moment // MICROSECONDS, place).date()


def _midnight(day: date, place: tzinfo) -> int:
    """Where clocks skip midnight, the moment at which they do."""
    return round(datetime(day.year, day.month, day.day, tzinfo=place).timestamp()) * MICROSECONDS
