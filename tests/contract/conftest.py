"""Runs a test's body in a world of each kind of quota."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from baton.state.embedded import embedded_server
from tests.contract.quota_worlds import Body, fake_world, memory_world, served_world


@pytest.fixture(scope="session")
def quota_server() -> Iterator[str]:
    with embedded_server("secret") as (url, _):
        yield url


@pytest.fixture(params=["memory", "fakeredis", "valkey"])
def in_each_world(request: pytest.FixtureRequest) -> Callable[[Body], None]:
    def run(body: Body) -> None:
        async def main() -> None:
            if request.param == "memory":
                world = memory_world()
            elif request.param == "fakeredis":
                world = fake_world()
            else:
                world = served_world(request.getfixturevalue("quota_server"), "secret")
            async with world as built:
                await body(built)

        asyncio.run(main())

    return run


@pytest.fixture(params=["memory", "fakeredis"])
def in_timed_worlds(request: pytest.FixtureRequest) -> Callable[[Body], None]:
    """Those whose clock can be moved."""

    def run(body: Body) -> None:
        async def main() -> None:
            async with memory_world() if request.param == "memory" else fake_world() as world:
                await body(world)

        asyncio.run(main())

    return run
