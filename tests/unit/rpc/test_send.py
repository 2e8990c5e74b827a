from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from baton.core.errors import Cancelled
from baton.rpc.interceptors import send


class GoneCaller:
    """A call whose caller has left: gRPC refuses to send before it reports the cancellation."""

    async def write(self, message: object) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')


def test_a_caller_that_left_cancels_the_call_and_is_no_bug() -> None:
    with pytest.raises(Cancelled):
        asyncio.run(send(b"chunk", GoneCaller()))
