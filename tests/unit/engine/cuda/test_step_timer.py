"""Step times are read from events, without waiting for the device."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from baton.core.clock import ManualClock
from baton.engine.cuda.step_timer import StepTimer
from baton.engine.runner import RunnerTimes


class DeviceEvent:
    """Passes when the device's own clock, in milliseconds, says so at the record."""

    now: ClassVar[float] = 0.0

    def __init__(self, *, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at = -1.0

    def record(self) -> None:
        self.at = DeviceEvent.now

    def elapsed_time(self, later: DeviceEvent) -> float:
        assert 0.0 <= self.at <= later.at
        return later.at - self.at


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> StepTimer:
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    return StepTimer(ManualClock(), steps_ahead=1)


def run(timer: StepTimer, start: float, end: float) -> None:
    DeviceEvent.now = start
    timer.start()
    DeviceEvent.now = end
    timer.end()


def land(timer: StepTimer) -> RunnerTimes:
    with timer.waiting():
        pass
    return timer.times


def test_a_step_is_timed_from_its_start_to_its_end_and_so_is_the_gap_before_it(timer: StepTimer) -> None:
    """Over more steps than there are events, each launched while the one before is in flight."""
    run(timer, 1000.0, 5000.0)
    for index in range(1, 20):
        run(timer, 1000.0 + 5000.0 * index, 5000.0 + 5000.0 * index)
        assert land(timer).device == pytest.approx(4.0 * index)
        assert timer.times.device_idle == pytest.approx(1.0 * (index - 1))


def test_the_device_does_not_idle_while_there_is_nothing_to_do(timer: StepTimer) -> None:
    run(timer, 10.0, 20.0)
    land(timer)
    run(timer, 9000.0, 9010.0)
    assert land(timer) == pytest.approx(RunnerTimes(waited=0.0, device=0.02, device_idle=0.0))


def test_waiting_is_what_the_clock_says_while_the_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    clock = ManualClock()
    timer = StepTimer(clock, steps_ahead=1)
    run(timer, 0.0, 1.0)
    with timer.waiting():
        clock.advance(0.5)
    assert timer.times.waited == pytest.approx(0.5)
