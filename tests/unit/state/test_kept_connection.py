"""The connection that is kept for scripts: an answer reaches who asked for it, or nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import cast

import pytest
import uvloop
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError

from baton.state.config import StateConfig
from baton.state.redis_client import KeptConnection, connect

SECONDS = 10.0
PASSWORD = "open sesame"


class EchoServer:
    """Answers ECHO with its argument, "late" only when it is told to; ``passwords`` are those it was given."""

    def __init__(self) -> None:
        self.connections: list[asyncio.StreamWriter] = []
        self.passwords: list[bytes] = []
        self.password = PASSWORD.encode()
        self.asked_late = asyncio.Event()
        self.answer_late = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                writer.write(await self._answer(await self._command(reader)))
        writer.close()

    async def _command(self, reader: asyncio.StreamReader) -> list[bytes]:
        count = int((await reader.readuntil(b"\r\n"))[1:])
        words: list[bytes] = []
        for _ in range(count):
            length = int((await reader.readuntil(b"\r\n"))[1:])
            words.append((await reader.readexactly(length + 2))[:-2])
        return words

    async def _answer(self, words: list[bytes]) -> bytes:
        if words[0] in {b"AUTH", b"HELLO"} and self.password not in words:
            return b"-WRONGPASS invalid\r\n"
        if words[0] in {b"AUTH", b"HELLO"}:
            self.passwords.append(self.password)
            return b"%1\r\n$5\r\nproto\r\n:3\r\n" if words[0] == b"HELLO" else b"+OK\r\n"
        if words[0] != b"ECHO":
            return b"+OK\r\n"
        if words[1] == b"late":
            self.asked_late.set()
            await self.answer_late.wait()
        return b"$%d\r\n%b\r\n" % (len(words[1]), words[1])


@asynccontextmanager
async def kept() -> AsyncIterator[tuple[KeptConnection, EchoServer, Redis]]:
    server = EchoServer()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening, asyncio.timeout(SECONDS):
        port = listening.sockets[0].getsockname()[1]
        async with connect(StateConfig(f"redis://127.0.0.1:{port}/0", PASSWORD)) as client:
            yield KeptConnection(client), server, client


async def echo(kept: KeptConnection, *words: bytes) -> list[bytes]:
    async with kept as connection:
        commands = [b"*2\r\n$4\r\nECHO\r\n$%d\r\n%b\r\n" % (len(word), word) for word in words]
        await connection.send_packed_command(commands, check_health=False)
        return [cast(bytes, await connection.read_response()) for _ in words]


Body = Callable[[KeptConnection, EchoServer, Redis], Awaitable[None]]
Run = Callable[[Body], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    async def main(body: Body) -> None:
        async with kept() as world:
            await body(*world)

    def in_loop(body: Body) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main(body))

    return in_loop


def test_exchanges_share_a_connection(run: Run) -> None:
    async def body(kept: KeptConnection, server: EchoServer, _: Redis) -> None:
        assert [await echo(kept, b"a"), await echo(kept, b"b", b"c")] == [[b"a"], [b"b", b"c"]]
        assert len(server.connections) == 1

    run(body)


def test_the_answer_of_an_exchange_that_was_cancelled_is_nobodys(run: Run) -> None:
    async def body(kept: KeptConnection, server: EchoServer, _: Redis) -> None:
        leaving = asyncio.create_task(echo(kept, b"early", b"late"))
        await server.asked_late.wait()
        leaving.cancel()
        await asyncio.wait({leaving})
        assert leaving.cancelled()
        server.answer_late.set()
        assert await echo(kept, b"mine") == [b"mine"]
        assert len(server.connections) == 2

    run(body)


def test_an_exchange_that_fails_ends_the_connection(run: Run) -> None:
    async def body(kept: KeptConnection, server: EchoServer, _: Redis) -> None:
        async def fails_before_its_answer() -> None:
            async with kept as connection:
                await connection.send_packed_command(b"*2\r\n$4\r\nECHO\r\n$5\r\nother\r\n", check_health=False)
                raise LookupError

        with pytest.raises(LookupError):
            await fails_before_its_answer()
        assert await echo(kept, b"mine") == [b"mine"]

    run(body)


def test_what_ends_is_given_back_to_the_pool(run: Run) -> None:
    async def body(kept: KeptConnection, server: EchoServer, client: Redis) -> None:
        client.connection_pool.max_connections = 1
        for _ in range(3):
            with suppress(LookupError):
                async with kept:
                    raise LookupError
        assert await echo(kept, b"mine") == [b"mine"]

    run(body)


def test_what_nobody_asked_for_is_nobodys_answer(run: Run) -> None:
    async def body(kept: KeptConnection, server: EchoServer, client: Redis) -> None:
        await echo(kept, b"a")
        server.connections[0].write(b"$5\r\nstale\r\n")
        async with kept as connection:
            pass
        while not await connection.can_read():
            await asyncio.sleep(0)
        assert await echo(kept, b"mine") == [b"mine"]
        assert len(server.connections) == 2

    run(body)


def test_a_connection_that_the_server_closed_is_made_anew(run: Run) -> None:
    async def body(kept: KeptConnection, server: EchoServer, client: Redis) -> None:
        await echo(kept, b"a")
        async with kept as connection:
            pass
        server.connections[0].close()
        while not await connection.can_read():  # which is what it says of an end, too
            await asyncio.sleep(0)
        assert await echo(kept, b"b") == [b"b"]
        assert server.passwords == [PASSWORD.encode()] * 2

    run(body)


def test_a_password_that_is_no_longer_taken_fails_until_it_is_again(run: Run) -> None:
    async def body(kept: KeptConnection, server: EchoServer, client: Redis) -> None:
        server.password = b"another"
        for _ in range(2):
            with pytest.raises(AuthenticationError):
                await echo(kept, b"a")
        server.password = PASSWORD.encode()
        assert await echo(kept, b"b") == [b"b"]

    run(body)


def test_it_is_closed_with_the_client(run: Run) -> None:
    async def body(kept: KeptConnection, server: EchoServer, client: Redis) -> None:
        await echo(kept, b"a")
        await client.aclose()
        await server.connections[0].wait_closed()

    run(body)
