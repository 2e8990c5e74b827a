"""A port is ours before we listen on it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from baton.core.errors import ConfigError
from baton.core.reserved_port import reserved_port
from baton.core.telemetry import SilentMeter
from baton.rpc.serving import serve
from services.planner.config import PlannerConfig


def test_only_its_holder_can_listen_on_a_reserved_port() -> None:
    async def run() -> None:
        with reserved_port("127.0.0.1", 0) as port:
            with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
                other.bind(("127.0.0.1", port))
            async with serve([], f"127.0.0.1:{port}", SilentMeter()) as server:
                assert server.port == port

    asyncio.run(run())


def test_port_in_use_is_a_config_error_that_names_the_address() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"),
            reserved_port("127.0.0.1", port),
        ):
            pass


def test_two_processes_cannot_both_serve_a_port() -> None:
    async def run() -> None:
        async with serve([], "127.0.0.1:0", SilentMeter()) as server:
            with pytest.raises(ConfigError), reserved_port("127.0.0.1", server.port):
                pass

    asyncio.run(run())


def test_wrong_settings_name_section_key_and_value() -> None:
    with pytest.raises(ConfigError, match=r"planner\.heartbeat_seconds must be positive, got 0"):
        PlannerConfig(heartbeat_seconds=0)
    with pytest.raises(ConfigError, match=r"planner\.http_port must be between 0 and 65535, got 70000"):
        PlannerConfig(http_port=70000)
    with pytest.raises(ConfigError, match=r"planner\.tls_ca goes with .* all or none, got ''"):
        PlannerConfig(tls_certificate="cert.pem", tls_key="key.pem")
    assert "shared" not in repr(PlannerConfig(service_token="shared"))
