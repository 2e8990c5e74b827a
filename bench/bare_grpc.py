"""A bare grpc.aio loop that moves bytes and does nothing else: what a hand-over by TCP is measured against."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

METHOD = "/bench.Bare/Take"
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


async def _take(request: bytes, context: Any) -> bytes:
    return b""


@asynccontextmanager
async def bare_server() -> AsyncIterator[str]:
    """Takes messages while the block runs; its address."""
    server = grpc.aio.server(options=UNLIMITED)
    handler = grpc.unary_unary_rpc_method_handler(_take)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bare", {"Take": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class BareLoop:
    """The client's end, with ``in_flight`` messages at once."""

    def __init__(self, channel: grpc.aio.Channel, in_flight: int) -> None:
        untyped: Any = channel  # bytes as they are
        self._take = untyped.unary_unary(METHOD)
        self._in_flight = in_flight

    async def move(self, size: int, message: bytes) -> None:
        """``size`` bytes in messages no larger than ``message``, whose bytes they repeat."""
        slots = asyncio.Semaphore(self._in_flight)

        async def one(length: int) -> None:
            async with slots:
                await self._take(message[:length] if length < len(message) else message)

        async with asyncio.TaskGroup() as group:
            for start in range(0, size, len(message)):
                group.create_task(one(min(len(message), size - start)))


@asynccontextmanager
async def bare_loop(address: str, in_flight: int) -> AsyncIterator[BareLoop]:
    async with grpc.aio.insecure_channel(address, options=UNLIMITED) as channel:
        yield BareLoop(channel, in_flight)
