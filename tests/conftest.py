"""Fixtures of all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from baton.core.errors import PeerUnavailable
from tests.networks import DirectNetwork, NetworkFactory, WireNetwork

# The same cases in every run, so that a change is judged by what it changes: `--hypothesis-profile=new_cases` looks
# for others.
settings.register_profile("same_cases", derandomize=True)
settings.register_profile("new_cases", derandomize=False)
settings.load_profile("same_cases")

# Read when torch loads its OpenMP library: idle threads that spin make everything else on the machine crawl.
os.environ.setdefault("GOMP_SPINCOUNT", "0")


@pytest.fixture(params=[DirectNetwork, WireNetwork], ids=["direct", "grpc"])
def network(request: pytest.FixtureRequest) -> NetworkFactory:
    """Tests that take it run twice: with the parts joined directly, and over gRPC on loopback."""
    return request.param


@pytest.fixture(scope="session")
def smollm2_directory() -> Path:
    """The default model, converted: the same directory that `baton up` uses, fetched on first use."""
    return _fetched("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def qwen_coder_directory() -> Path:
    """The optional second model: tests run where somebody has fetched it."""
    from baton.cli.models import CACHE, is_complete  # late, as below

    directory = CACHE / "qwen2.5-coder-0.5b-instruct"
    if not is_complete(directory):
        pytest.skip("qwen2.5-coder-0.5b-instruct is absent: baton model fetch qwen2.5-coder-0.5b-instruct")
    return directory


def _fetched(name: str) -> Path:
    from baton.cli.models import fetched  # late: most tests need none of what it imports

    try:
        return fetched(name)
    except PeerUnavailable as error:
        pytest.skip(error.message)
