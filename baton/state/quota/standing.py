"""What a script's answer says that counters stand at. Few of them are looked into, so each is read when one is."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property
from typing import overload

from baton.core.types import QuotaBalance
from baton.state.quota.buckets import FLOW, WINDOW, Bucket, Cost, Counters, FlowCounters, WindowCounters
from baton.state.quota.drawing import Drawing
from baton.state.quota.verdict import balances_in_row
from baton.state.quota.windows import Windows

_COUNTERS_AT = 5  # where they begin in an answer: after status, now, and the cost
_NOTHING = struct.pack("<2d", 0, 0)


class Standing:
    """``reply``: the answer to a claim that draws on ``drawing``, with counters; ``now`` in Unix microseconds."""

    def __init__(self, drawing: Drawing, windows: Windows, now: int, reply: bytes) -> None:
        self.drawing = drawing
        self.windows = windows
        self.now = now
        self._reply = reply

    @property
    def cost(self) -> Cost:
        """What the claim comes to."""
        return Cost(*_numbers(self._reply)[2:_COUNTERS_AT])

    @property
    def row(self) -> tuple[float, ...]:
        """The counters of all buckets as the scripts have them (``in_row``), whole numbers."""
        return struct.unpack_from(f"<{len(self._reply) // 8 - _COUNTERS_AT}d", self._reply, 8 * _COUNTERS_AT)

    @cached_property
    def counters(self) -> list[Counters]:
        """The same, bucket by bucket."""
        numbers, found, at = _numbers(self._reply), list[Counters](), _COUNTERS_AT
        for bucket in self.drawing.buckets:
            flow = FlowCounters(numbers[at], numbers[at + 1])
            at += FLOW
            end = at + WINDOW * len(bucket.kinds)
            windows = tuple([_window_counters(numbers, window) for window in range(at, end, WINDOW)])
            found.append(Counters(windows, flow))
            at = end
        return found


class StandingBalances(Sequence[QuotaBalance]):
    """The balances of a standing, made for the first who reads them."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing

    @cached_property
    def _all(self) -> tuple[QuotaBalance, ...]:
        standing = self._standing
        return balances_in_row(standing.drawing.buckets, standing.windows, standing.row, standing.now)

    @overload
    def __getitem__(self, index: int) -> QuotaBalance: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[QuotaBalance, ...]: ...
    def __getitem__(self, index: int | slice) -> QuotaBalance | tuple[QuotaBalance, ...]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all == tuple(other)  # pyright: ignore[reportUnknownArgumentType]

    def __hash__(self) -> int:
        return hash(self._all)

    def __repr__(self) -> str:
        return repr(self._all)


def _numbers(text: bytes) -> list[int]:
    return list(map(int, struct.unpack(f"<{len(text) // 8}d", text)))


def stored_counters(value: bytes | None, bucket: Bucket, windows: Windows) -> Counters:
    """From a key, whose windows may have any order, and some of which may be over."""
    numbers = _numbers(value or _NOTHING)
    places = {numbers[at]: at for at in range(FLOW, len(numbers), WINDOW)}
    current = [places.get(windows.ids[bucket.place(kind)]) for kind in bucket.kinds]
    counted = (WindowCounters() if at is None else _window_counters(numbers, at) for at in current)
    return Counters(tuple(counted), FlowCounters(numbers[0], numbers[1]))


def _window_counters(numbers: Sequence[int], at: int) -> WindowCounters:
    """Of a window that begins there, with its id."""
    return WindowCounters._make(numbers[at + 1 : at + 7])
