"""A port that is known before anything listens on it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from baton.core.errors import ConfigError


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Hold ``port`` (0: any free one) of ``host`` while the block lasts, so that only this process can listen on it.

    A worker's address is part of its tickets and its registry record, so the parts that a server is made of need it
    before the server exists. The port is bound and never listened on; with SO_REUSEADDR, which gRPC sets too, this
    process may bind it once more and listen, while the kernel gives it to nobody who asks for any free port.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        held = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    with held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(place)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        yield int(held.getsockname()[1])
