from __future__ import annotations

import errno
import os
import socket

import pytest

from baton.state import embedded


def test_nobody_else_is_given_the_servers_port_before_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    told = embedded._configuration  # pyright: ignore[reportPrivateUsage]
    refused: list[int | None] = []

    def configuration(port: int, password: str) -> str:
        """Called before the server knows its port."""
        with socket.socket() as stranger, pytest.raises(OSError) as error:
            stranger.bind(("127.0.0.1", port))
        refused.append(error.value.errno)
        return told(port, password)

    monkeypatch.setattr(embedded, "_configuration", configuration)
    with embedded.embedded_server("hush") as (url, _), socket.create_connection(_place(url), timeout=30) as client:
        client.sendall(b"AUTH hush\r\nPING\r\n")
        answer = client.makefile("rb")
        assert [answer.readline(), answer.readline()] == [b"+OK\r\n", b"+PONG\r\n"]
    assert refused == [errno.EADDRINUSE]


def _place(url: str) -> tuple[str, int]:
    return "127.0.0.1", int(url.rpartition(":")[2].partition("/")[0])


def test_an_interrupt_at_the_terminal_does_not_reach_the_server() -> None:
    with embedded.embedded_server("hush") as (_, pid):
        assert os.getpgid(pid) != os.getpgid(0)
