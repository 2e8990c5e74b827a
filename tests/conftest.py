"""Fixtures of all tests."""

from __future__ import annotations

import pytest

from tests.networks import DirectNetwork, NetworkFactory, WireNetwork


@pytest.fixture(params=[DirectNetwork, WireNetwork], ids=["direct", "grpc"])
def network(request: pytest.FixtureRequest) -> NetworkFactory:
    """Tests that take it run twice: with the parts joined directly, and over gRPC on loopback."""
    return request.param
