"""A lost peer is left alone for a while, then tried again."""

from __future__ import annotations

import logging

import pytest

from baton.core.clock import ManualClock
from services.kvtransfer.circuit import Circuit


def test_tripped_peer_rests_and_comes_back() -> None:
    clock = ManualClock()
    circuit = Circuit(clock, rest_seconds=2.0)
    circuit.trip(("a", 1), "gone")
    assert circuit.is_open(("a", 1))
    assert not circuit.is_open(("a", 2))  # restarted: another epoch
    clock.advance(2.0)
    assert not circuit.is_open(("a", 1))


def test_peer_down_is_logged_once_per_rest(caplog: pytest.LogCaptureFixture) -> None:
    circuit = Circuit(ManualClock(), rest_seconds=2.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            circuit.trip("a", "gone")
    assert [record.getMessage() for record in caplog.records] == ["peer down"]


def test_memory_of_rested_peers_is_returned() -> None:
    clock = ManualClock()
    circuit = Circuit(clock, rest_seconds=2.0)
    for peer in range(100):
        circuit.trip(peer, "gone")
        clock.advance(1.0)
    assert len(circuit._until) <= 3
