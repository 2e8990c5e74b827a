"""A server, or what stands before it, resets a connection that nobody uses: the next call fails, and no more."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from redis.asyncio import Redis

from baton.core.errors import StateUnavailable
from baton.state.config import StateConfig
from baton.state.quota.scripts import Scripts
from baton.state.redis_client import Patience, connect, within

RESET_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER
SECONDS = 10.0


class Server:
    """Answers OK to whatever it is asked."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        while await reader.read(1 << 16):
            writer.write(b"+OK\r\n")
        writer.close()

    def reset(self) -> None:
        for writer in self._writers:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_ONCE)
            writer.transport.abort()
        self._writers.clear()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Redis, Server]]:
    server = Server()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with connect(StateConfig(f"redis://127.0.0.1:{port}/0")) as client:
            yield client, server


async def is_reset(client: Redis) -> None:
    """Returns when this end knows of it."""
    pool: Any = client.connection_pool
    (connection,) = {*pool._available_connections, *pool._in_use_connections}
    async with asyncio.timeout(SECONDS):
        while not connection._writer.transport.is_closing():
            await asyncio.sleep(0.001)


def command(client: Redis) -> Callable[[], Awaitable[object]]:
    return lambda: within(client.set("key", "value"), SECONDS, "set")  # pyright: ignore


def script(client: Redis) -> Callable[[], Awaitable[object]]:
    scripts = Scripts(client, Patience(SECONDS, SECONDS))
    return lambda: scripts.call("renew", ["open"])


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("calls", [command, script])
def test_a_connection_that_was_reset_costs_one_call(
    loop: Callable[[], asyncio.AbstractEventLoop], calls: Callable[[Redis], Callable[[], Awaitable[object]]]
) -> None:
    async def main() -> None:
        async with connected() as (client, server):
            call = calls(client)
            assert await call()
            server.reset()
            await is_reset(client)
            async with asyncio.timeout(SECONDS):
                with pytest.raises(StateUnavailable):
                    await call()
                assert await call()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
