"""The ways in which what a ``Stack`` promises has to hold: fixtures for the test modules that import them."""

from __future__ import annotations

import pytest

from tests.stack import Stack


@pytest.fixture(params=[0, 1], ids=["in step", "one step ahead"], autouse=True)
def steps_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its engines launch a step before the one before it is collected."""
    monkeypatch.setattr(Stack, "steps_ahead", request.param)


@pytest.fixture(params=["shm", "tcp"], autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By which blocks are handed over."""
    monkeypatch.setattr(Stack, "transports", ("shm", "tcp") if request.param == "shm" else ("tcp",))
    return request.param
