"""A hung engine is noticed; a slow or idle one is left alone."""

from __future__ import annotations

import pytest

from baton.core.errors import PeerUnavailable
from services.worker.watchdog import EngineWatchdog


def test_work_without_a_step_is_a_hang() -> None:
    watchdog = EngineWatchdog(10.0, now=0.0)
    watchdog.look(steps=5, computing=2, now=1.0)
    watchdog.look(steps=5, computing=2, now=11.0)
    with pytest.raises(PeerUnavailable, match=r"the engine hangs: 2 requests and no step for 10\.5 s"):
        watchdog.look(steps=5, computing=2, now=11.5)


def test_steps_however_slow_are_life() -> None:
    watchdog = EngineWatchdog(10.0, now=0.0)
    for step in range(100):
        watchdog.look(steps=step, computing=1, now=step * 9.0)


def test_idle_engine_does_not_hang() -> None:
    watchdog = EngineWatchdog(10.0, now=0.0)
    watchdog.look(steps=5, computing=0, now=100.0)
    watchdog.look(steps=5, computing=0, now=1000.0)
    watchdog.look(steps=5, computing=1, now=1005.0)  # its first step may still take as long as any
    with pytest.raises(PeerUnavailable):
        watchdog.look(steps=5, computing=1, now=1011.0)
