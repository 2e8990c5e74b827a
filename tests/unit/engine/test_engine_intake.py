"""The engine's loop takes commands in between steps, and lets no step wait for all of them."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from baton.core.clock import ManualClock
from baton.engine.channel import ChannelClosed
from baton.engine.config import EngineConfig
from baton.engine.drafter import NoDrafts
from baton.engine.fake import FakeRunner, fake_card
from baton.engine.messages import Reserve, StepReport, Streamed
from baton.engine.process import IDLE_INTAKE_SECONDS, serve
from baton.engine.runner import Part
from baton.engine.sharedpool import Descriptors
from tests.unit.engine.core_driver import prompt, request

REQUESTS = 100
CONFIG = EngineConfig(max_running=REQUESTS, max_waiting=REQUESTS)
COMMAND_SECONDS = IDLE_INTAKE_SECONDS / 4


class SlowChannel:
    """All commands are there from the start; each takes time to receive. Hangs up when all answers have gone out."""

    def __init__(self, commands: Sequence[Reserve], clock: ManualClock) -> None:
        self.waiting = deque(commands)
        self.finished = 0
        self._clock = clock

    def is_readable(self, timeout: float | None) -> bool:
        return bool(self.waiting) or self.finished == REQUESTS

    def receive(self) -> Any:
        if not self.waiting:
            raise ChannelClosed("done")
        self._clock.advance(COMMAND_SECONDS)
        return self.waiting.popleft()

    def send(self, message: object) -> None:
        if isinstance(message, StepReport):
            ends = [event for event in message.events if isinstance(event, Streamed) and event.chunk.finish]
            self.finished += len(ends)


class WatchedRunner(FakeRunner):
    """Notes how many commands were still waiting when each step was launched."""

    channel: SlowChannel

    def __init__(self, blocks: int) -> None:
        super().__init__(fake_card(), blocks)
        self.left: list[int] = []

    def launch(self, parts: Sequence[Part]) -> None:
        self.left.append(len(self.channel.waiting))
        super().launch(parts)


def test_an_idle_engine_starts_to_compute_before_it_has_seen_all_that_came_at_once() -> None:
    clock, runner = ManualClock(), WatchedRunner(2 * REQUESTS)
    commands = [Reserve(key, request(prompt(20, key), max_tokens=4), 20) for key in range(REQUESTS)]
    channel = runner.channel = SlowChannel(commands, clock)
    near, far = socket.socketpair()
    with near, far, pytest.raises(ChannelClosed):
        serve(runner, NoDrafts(), CONFIG, channel, clock, Descriptors(near))  # type: ignore[arg-type]
    assert REQUESTS / 2 < runner.left[0] < REQUESTS
    assert channel.finished == REQUESTS, "and all are answered in the end"
