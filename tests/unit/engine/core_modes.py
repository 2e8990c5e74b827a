"""Both ways in which a core may drive its runner, and what a request is answered alone: shared by the core's tests."""

from __future__ import annotations

import pytest

from baton.core.types import Sampling, TokenRequest
from tests.unit.engine.core_driver import Driver

SAMPLED = Sampling(temperature=0.7, seed=11, repetition_penalty=1.1)


@pytest.fixture(params=[0, 1], ids=["in step", "one step ahead"], autouse=True)
def steps_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every promise here holds whether or not a step is launched before the one before it is collected."""
    monkeypatch.setattr(Driver, "steps_ahead", request.param)
    return request.param


def alone(wanted: TokenRequest) -> list[int]:
    """The tokens of a request that has an engine to itself."""
    return Driver(512).answer(wanted).tokens
