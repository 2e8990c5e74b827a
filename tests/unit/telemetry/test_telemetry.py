from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest

from baton.core.errors import ConfigError
from baton.core.telemetry import log_context
from baton.telemetry.http import Endpoints, serve_http
from baton.telemetry.logs import JsonFormatter
from baton.telemetry.metrics import PrometheusMeter


async def get(address: str, request: bytes) -> str:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = (await reader.read()).decode()
    writer.close()
    return answer


def test_serves_metrics_health_and_readiness() -> None:
    async def main() -> None:
        meter = PrometheusMeter()
        meter.counter("requests_total", "Requests.", ("reason",)).add(reason="ok")
        why: list[str | None] = ["model is loading"]
        async with serve_http("127.0.0.1", 0, Endpoints(meter.exposition, lambda: why[0])) as address:
            assert 'baton_requests_total{reason="ok"} 1.0' in await get(address, b"GET /metrics HTTP/1.1\r\n\r\n")
            assert "200 OK" in await get(address, b"GET /healthz HTTP/1.1\r\n\r\n")
            loading = await get(address, b"GET /readyz HTTP/1.1\r\n\r\n")
            assert "503" in loading and "model is loading" in loading
            why[0] = None
            assert "200 OK" in await get(address, b"GET /readyz?x=1 HTTP/1.1\r\n\r\n")
            assert "404" in await get(address, b"GET /other HTTP/1.1\r\n\r\n")
            assert "405" in await get(address, b"POST /metrics HTTP/1.1\r\n\r\n")
            assert await get(address, b"GET /" + b"x" * 100_000 + b"\r\n\r\n") == ""
            assert "200 OK" in await get(address, b"GET /healthz HTTP/1.1\r\n\r\n")
            port = int(address.split(":")[1])
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
                async with serve_http("127.0.0.1", port, Endpoints(meter.exposition, lambda: None)):
                    pass

    asyncio.run(main())


def test_a_ready_process_says_what_it_does_without() -> None:
    async def main() -> str:
        async with serve_http("127.0.0.1", 0, Endpoints(lambda: b"", lambda: None, lambda: "counters")) as address:
            return await get(address, b"GET /readyz HTTP/1.1\r\n\r\n")

    answer = asyncio.run(main())
    assert "200 OK" in answer and answer.endswith("ready\ndegraded: counters\n")


@pytest.mark.parametrize("garbage", [b"\r\n\r\n", b"GET\r\n\r\n", b"\xff\xfe\x00\r\n\r\n"])
def test_bytes_that_are_no_request_are_answered_and_not_logged(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serve_http("127.0.0.1", 0, Endpoints(lambda: b"", lambda: None)) as address:
            assert "400 Bad Request" in await get(address, garbage)

    asyncio.run(main())
    assert not caplog.records


def test_log_lines_are_json_and_carry_the_request() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("gateway"))
    log = logging.Logger("test")
    log.addHandler(handler)
    with log_context(request_id="req-1", tenant="acme"):
        log.warning("worker is down", extra={"worker": "decode-0"})
    log.error("outside")
    first, second = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert first["message"] == "worker is down" and first["request_id"] == "req-1" and first["worker"] == "decode-0"
    assert first["service"] == "gateway" and first["level"] == "warning" and "request_id" not in second
