from __future__ import annotations

import pytest

from baton.core.errors import PeerUnavailable
from baton.rpc.link import EnginePulse, LinkPolicy, PeerHealth

POLICY = LinkPolicy(heartbeat=0.25, silence=1.0, stall=10.0)


def health() -> PeerHealth:
    return PeerHealth("decode-0", POLICY, now=0.0)


def test_a_peer_that_beats_is_alive_for_ever() -> None:
    peer = health()
    for tick in range(1, 400):
        now = tick * 0.25
        peer.heard(now)
        peer.pulse(EnginePulse(step=3, unfinished=0), now)
        peer.tick(now)


def test_silence_is_down_after_its_bound_and_not_before() -> None:
    peer = health()
    for tick in range(1, 5):
        peer.tick(tick * 0.25)
    with pytest.raises(PeerUnavailable, match="decode-0 is silent"):
        peer.tick(1.25)


def test_our_own_standstill_is_not_the_peers_silence() -> None:
    peer = health()
    peer.tick(0.25)
    peer.tick(60.0)  # this process stood still; the peer's heartbeats wait in the socket
    peer.heard(60.0)
    peer.tick(60.25)


def test_silence_after_our_own_standstill_is_still_noticed() -> None:
    peer = health()
    peer.tick(60.0)
    peer.tick(60.25)
    peer.tick(60.5)
    with pytest.raises(PeerUnavailable):
        peer.tick(60.75)


def test_work_without_steps_is_a_hang_after_its_bound() -> None:
    peer = health()
    peer.pulse(EnginePulse(5, 1), 0.25)
    peer.pulse(EnginePulse(5, 1), 10.0)
    with pytest.raises(PeerUnavailable, match="no engine step"):
        peer.pulse(EnginePulse(5, 1), 10.5)


def test_a_step_or_a_chunk_is_progress() -> None:
    peer = health()
    peer.pulse(EnginePulse(5, 1), 0.0)
    peer.pulse(EnginePulse(6, 1), 9.0)
    peer.pulse(EnginePulse(6, 1), 18.0)
    peer.progressed(18.5)
    peer.pulse(EnginePulse(6, 1), 28.0)


def test_an_idle_engine_needs_no_steps_and_new_work_starts_the_clock() -> None:
    peer = health()
    peer.pulse(EnginePulse(5, 0), 0.0)
    peer.pulse(EnginePulse(5, 0), 100.0)
    peer.pulse(EnginePulse(5, 2), 100.25)
    peer.pulse(EnginePulse(5, 2), 110.0)
    with pytest.raises(PeerUnavailable):
        peer.pulse(EnginePulse(5, 2), 110.5)
