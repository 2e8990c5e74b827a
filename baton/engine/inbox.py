"""The commands that wait for an engine, of which those for a device may be taken while a step is computed.

Such a command only begins a copy, and does not change what is scheduled. So it may overtake commands that do; those
keep their order, and come between two steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from baton.engine.channel import SyncChannel
from baton.engine.messages import Command, DeviceCommand


class Inbox:
    def __init__(self, channel: SyncChannel) -> None:
        self._channel = channel
        self._later: deque[Command] = deque()

    def is_readable(self, timeout: float | None) -> bool:
        """See ``SyncChannel.is_readable``."""
        return bool(self._later) or self._channel.is_readable(timeout)

    def receive(self) -> Command:
        return self._later.popleft() if self._later else self._channel.receive()

    def urgent(self) -> Iterator[Command]:
        """What has come in and may be taken now."""
        while self._channel.is_readable(0.0):
            command = self._channel.receive()
            if isinstance(command, DeviceCommand):
                yield command
            else:
                self._later.append(command)
