from __future__ import annotations

import errno
import os
import socket
import subprocess

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


def test_the_server_shares_its_starters_session_and_so_the_processor_time_of_its_clients() -> None:
    with embedded.embedded_server("hush") as (_, pid):
        assert os.getsid(pid) == os.getsid(0)


def test_the_server_goes_before_its_starter_where_that_is_permitted() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    preferred = max(own - embedded.LESS_NICE_BY, -20)
    with embedded.embedded_server("hush") as (_, pid):
        assert os.getpriority(os.PRIO_PROCESS, pid) == (preferred if _is_permitted(preferred) else own)


def _is_permitted(niceness: int) -> bool:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            os.setpriority(os.PRIO_PROCESS, other.pid, niceness)
        except PermissionError:
            return False
        finally:
            other.kill()
    return True


def test_the_server_starts_where_nobody_may_go_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(_which: int, who: int, _niceness: int) -> None:
        asked.append(who)
        raise PermissionError(errno.EACCES, "not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    with (
        embedded.embedded_server("hush") as (url, pid),
        socket.create_connection(_place(url), timeout=30),
    ):
        assert asked == [pid]
