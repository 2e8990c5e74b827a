"""What both ends of a gateway-to-decode link share: its policy, and the judgement whether the other end still lives."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

from baton.core.errors import PeerUnavailable

PROTOCOL_VERSION: Final = 1
OLDEST_PROTOCOL_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class LinkPolicy:
    """Bounds of a link, in seconds. Both ends of a fleet should use the same."""

    heartbeat: float = 0.25
    silence: float = 2.0  # nothing heard, not even the welcome: the worker is stopped, or gone without a goodbye
    gateway_silence: float = 5.0  # the same for the worker's view: to be wrong would cost every stream of the gateway
    stall: float = 10.0  # work in the engine but no step: a hung device. Above the longest step (a chunk of a prompt)
    idle_reader: float = 30.0  # chunks wait and nobody takes any: the consumer is cancelled
    first_backoff: float = 0.05  # after a failed attempt to connect, doubled by each further one
    last_backoff: float = 2.0


DEFAULT_LINK_POLICY: Final = LinkPolicy()


@dataclass(frozen=True, slots=True)
class EnginePulse:
    """``step`` grows with every engine step; with ``unfinished`` above 0 it must, or the engine hangs.

    Count as unfinished only what the engine itself works on: a request that waits for a remote prefill makes no steps.
    """

    step: int
    unfinished: int


class PeerHealth:
    """Decides from what was heard and when whether the peer is down. Told the time, it never asks.

    Silence is measured in time *and* in our own ticks: when this process was the one that stood still, a single tick
    follows, and the peer's messages that wait in the socket are read before the next.
    """

    def __init__(self, peer: str, policy: LinkPolicy, now: float) -> None:
        self._peer = peer
        self._policy = policy
        self._heard_at = now
        self._ticks_since_heard = 0
        self._ticks_of_silence = max(1, int(policy.silence / policy.heartbeat))
        self._pulse = EnginePulse(step=-1, unfinished=0)
        self._progress_at = now

    def heard(self, now: float) -> None:
        """Any message came."""
        self._heard_at = now
        self._ticks_since_heard = 0

    def progressed(self, now: float) -> None:
        """The engine did something: a chunk came."""
        self._progress_at = now

    def pulse(self, pulse: EnginePulse, now: float) -> None:
        """A heartbeat came. PeerUnavailable when it has had work for too long without a step."""
        if pulse.step != self._pulse.step or pulse.unfinished == 0 or self._pulse.unfinished == 0:
            self._progress_at = now
        self._pulse = pulse
        stalled = now - self._progress_at
        if stalled > self._policy.stall:
            raise PeerUnavailable(
                f"{self._peer} hangs: {pulse.unfinished} requests and no engine step for {stalled:.1f} s"
            )

    def tick(self, now: float) -> None:
        """Called every heartbeat interval. PeerUnavailable when the peer has been silent for too long."""
        self._ticks_since_heard += 1
        silent = now - self._heard_at
        if silent > self._policy.silence and self._ticks_since_heard >= self._ticks_of_silence:
            raise PeerUnavailable(f"{self._peer} is silent for {silent:.1f} s")


async def first_of(*work: Coroutine[Any, Any, object]) -> None:
    """Run all until one ends; cancel the others and wait for them. Raises what the ended one raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
