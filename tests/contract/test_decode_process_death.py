"""A worker that is killed or stopped is told to all its requests; the link needs no help from the registry."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import PeerUnavailable
from baton.core.types import DecodeRequest
from baton.rpc.link import LinkPolicy
from tests.contract.wire_doubles import TOKENS, link_to, soon

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def worker_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    command = (sys.executable, "-m", "tests.contract.decode_process")
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield process, (await soon(process.stdout.readline())).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await soon(process.wait())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_all_requests_learn_that_their_worker_is_gone(how: signal.Signals) -> None:
    async def run() -> None:
        async with worker_process() as (process, address), link_to(address, LinkPolicy()) as link:
            requests = [DecodeRequest(replace(TOKENS, request_id=f"req-{n}")) for n in range(4)]
            streams = [aiter(link.generate(request)) for request in requests]
            for stream in streams:
                assert (await soon(anext(stream))).token_ids == (1,)
            process.send_signal(how)
            for stream in streams:
                with pytest.raises(PeerUnavailable):
                    await soon(anext(stream))

    asyncio.run(run())
