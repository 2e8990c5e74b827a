"""Addresses of gateways, as callers write them."""

from __future__ import annotations

import re

from baton.core.errors import InvalidRequest

_HOST_PORT = re.compile(r"(?:\[[^\s\[\]/]+\]|[^\s:/\[\]]+):(\d{1,5})")  # an IPv6 host stands in brackets


def check_address(field: str, address: str) -> None:
    """InvalidRequest unless ``address`` is ``host:port``. gRPC takes more, and makes of it what nobody meant: port 443
    where there is none, 34463 of 99999, and the name ``http`` of a URL.
    """
    found = _HOST_PORT.fullmatch(address)
    if found is None or not 0 < int(found[1]) < 65536:
        raise InvalidRequest.out_of_range(field, repr(address[:100]), "must be host:port, such as 127.0.0.1:8600")
