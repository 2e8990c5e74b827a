"""When each step starts and ends on the device, from events in the stream that are read when the step has landed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from baton.core.clock import Clock
from baton.engine.runner import RunnerTimes

_MILLISECONDS = 1e-3


class StepTimer:
    """Sums up the steps' times. Steps start, end and land in the order of their launch; nothing here waits."""

    def __init__(self, clock: Clock, steps_ahead: int) -> None:
        self._clock = clock
        # When a step lands, those ahead of it have their events in use, and so has the one before it, whose end counts.
        self._pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(steps_ahead + 2)
        ]
        self._follows = [False] * len(self._pairs)
        self._launched = 0
        self._landed = 0
        self.times = RunnerTimes()

    def start(self) -> None:
        """The next operation on torch's current stream is the step's first."""
        self._pairs[self._launched % len(self._pairs)][0].record()

    def end(self) -> None:
        """Queued: all of the step that ``start`` began."""
        turn = self._launched % len(self._pairs)
        self._pairs[turn][1].record()
        self._follows[turn] = self._launched > self._landed  # else there was no work that could have been queued before
        self._launched += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits until the oldest step that has not landed has ended."""
        started = self._clock.now()
        yield
        self._land(self._clock.now() - started)

    def _land(self, waited: float) -> None:
        turn = self._landed % len(self._pairs)
        begun, ended = self._pairs[turn]
        device, idle = begun.elapsed_time(ended), 0.0
        if self._follows[turn]:
            idle = max(0.0, self._pairs[turn - 1][1].elapsed_time(begun))
        self._landed += 1
        before = self.times
        self.times = RunnerTimes(
            before.waited + waited,
            before.device + device * _MILLISECONDS,
            before.device_idle + idle * _MILLISECONDS,
        )
