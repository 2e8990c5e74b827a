"""Notices an engine that hangs: it has work, and no step ends. Told the time, it never asks."""

from __future__ import annotations

from baton.core.errors import PeerUnavailable


class EngineWatchdog:
    """A hung engine answers nothing and closes nothing; only its worker's end lets other workers take over."""

    def __init__(self, stall_seconds: float, now: float) -> None:
        self._stall = stall_seconds
        self._steps = -1
        self._moved_at = now

    def look(self, steps: int, computing: int, now: float) -> None:
        """``steps`` so far and requests being computed; PeerUnavailable when nothing moved for too long."""
        if steps != self._steps or computing == 0:
            self._steps = steps
            self._moved_at = now
        elif now - self._moved_at > self._stall:
            stalled = now - self._moved_at
            raise PeerUnavailable(f"the engine hangs: {computing} requests and no step for {stalled:.1f} s")
