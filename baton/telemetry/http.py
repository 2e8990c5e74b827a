"""The small HTTP port of every service: /metrics, /healthz, /readyz. GET only, plain asyncio, no framework.

/healthz says that this process's event loop turns; it never depends on a peer. /readyz says that it takes work, and in
a second line, ``degraded: ...``, what it has to do without meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from baton.core.errors import ConfigError

READ_TIMEOUT_SECONDS = 5.0
MAX_REQUEST_LINE = 4096


@dataclass(frozen=True, slots=True)
class Endpoints:
    """``ready`` returns None when ready, else the reason why not; ``degraded`` what a ready process does without."""

    exposition: Callable[[], bytes]
    ready: Callable[[], str | None]
    degraded: Callable[[], str | None] = lambda: None


@asynccontextmanager
async def serve_http(host: str, port: int, endpoints: Endpoints) -> AsyncIterator[str]:
    """Listen (port 0: any free one) and yield the address as ``host:port``."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            await _answer(reader, writer, endpoints)
        writer.close()

    try:
        server = await asyncio.start_server(handle, host, port, limit=MAX_REQUEST_LINE)
    except OSError as error:
        raise ConfigError(f"http address {host}:{port}: cannot listen: {error.strerror}") from error
    async with server:
        bound_port: int = server.sockets[0].getsockname()[1]
        yield f"{host}:{bound_port}"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, endpoints: Endpoints) -> None:
    async with asyncio.timeout(READ_TIMEOUT_SECONDS):
        request_line = (await reader.readline()).decode("latin-1").split()
        while (await reader.readline()).strip():
            pass
    method, target = request_line[:2] if len(request_line) >= 2 else ("", "")
    status, body = _respond(method, target.partition("?")[0], endpoints)
    kind = "text/plain; version=0.0.4; charset=utf-8"
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + (b"" if method == "HEAD" else body))
    await writer.drain()


def _respond(method: str, path: str, endpoints: Endpoints) -> tuple[str, bytes]:
    if not method:
        return "400 Bad Request", b"no request line\n"
    if method not in ("GET", "HEAD"):
        return "405 Method Not Allowed", b"GET only\n"
    if path == "/metrics":
        return "200 OK", endpoints.exposition()
    if path == "/healthz":
        return "200 OK", b"ok\n"
    if path == "/readyz":
        reason = endpoints.ready()
        if reason is not None:
            return "503 Service Unavailable", f"{reason}\n".encode()
        lacking = endpoints.degraded()
        return "200 OK", b"ready\n" if lacking is None else f"ready\ndegraded: {lacking}\n".encode()
    return "404 Not Found", b"try /metrics, /healthz or /readyz\n"
