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


KINDS = (WindowKind.MINUTE, WindowKind.DAY, WindowKind.MONTH)
KNOWN_ZONES = 1000  # pairs of them


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

    @property
    def id(self) -> int:
        """What the scripts know it by."""
        return self.start // MICROSECONDS * 4 + KINDS.index(self.kind)


@dataclass(frozen=True, slots=True)
class Windows:
    """All that a claim may count in at one moment: the minute, the organisation's day and month, the tenant's.

    They hold from ``start`` to ``end``, Unix microseconds. ``ids``: what the scripts know each by.
    """

    each: tuple[Window, ...]
    start: int
    end: int
    ids: tuple[int, ...]

    @classmethod
    def of(cls, *each: Window) -> Windows:
        start, end = max(window.start for window in each), min(window.end for window in each)
        return cls(each, start, end, tuple(window.id for window in each))

    @property
    def seconds(self) -> tuple[int, int]:
        """From when until when they hold."""
        return self.start // MICROSECONDS, self.end // MICROSECONDS


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
    """The current windows of each pair of zones, computed again only when one has ended."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str], Windows] = {}

    def windows(self, organisation_zone: str, tenant_zone: str, moment: int) -> Windows:
        """Those that hold ``moment`` (Unix microseconds)."""
        zones = (organisation_zone, tenant_zone)
        known = self._latest.get(zones)
        if known is None or not known.start <= moment < known.end:
            if len(self._latest) >= KNOWN_ZONES:
                self._latest.clear()
            days = (day_window(moment, zone) for zone in zones)
            months = (month_window(moment, zone) for zone in zones)
            organisation, tenant = zip(days, months, strict=True)
            known = self._latest[zones] = Windows.of(minute_window(moment), *organisation, *tenant)
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
