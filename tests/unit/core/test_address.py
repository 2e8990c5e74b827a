"""Which addresses callers may write."""

from __future__ import annotations

import pytest

from baton.core.address import check_address
from baton.core.errors import InvalidRequest


@pytest.mark.parametrize("address", ["127.0.0.1:8600", "gateway.example:1", "[::1]:65535", "a_b-c:80"])
def test_host_and_port_are_an_address(address: str) -> None:
    check_address("address", address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1",
        ":8600",
        "http://127.0.0.1:8600",
        "a:b",
        "a:0",
        "a:65536",
        "a:99999",
        "::1:8600",
        "a b:1",
        "a:1/x",
    ],
)
def test_what_grpc_would_make_something_else_of_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_address("address", address)
    assert caught.value.field == "address"
    assert "host:port" in caught.value.message
    assert repr(address) in caught.value.message
