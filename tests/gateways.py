"""A second gateway beside that of a running stack."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from baton.cli.launcher import Child
from baton.core.types import Role, WorkerState
from tests.launched import GENEROUS_SECONDS, RunningStack

SECOND = "gateway-9"


def gateway_of(running: RunningStack) -> Child:
    return next(child for child in running.stack.children if child.role is Role.GATEWAY)


@asynccontextmanager
async def second_gateway(running: RunningStack) -> AsyncIterator[str]:
    """The address of another gateway process with the first one's settings; it ends in order with the block."""
    process = _started(gateway_of(running))
    try:
        yield await _address(running, process)
    finally:
        process.terminate()
        status = await asyncio.to_thread(process.wait, GENEROUS_SECONDS)
    assert status == 0


def _started(first: Child) -> subprocess.Popen[bytes]:
    variables = Path(f"/proc/{first.process.pid}/environ").read_bytes().split(b"\0")
    environment = dict(entry.decode().split("=", 1) for entry in variables if b"=" in entry)
    command = [str(part) for part in first.process.args]  # type: ignore[union-attr]
    command[command.index("--id") + 1] = SECOND
    with first.log.with_name(f"{SECOND}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


async def _address(running: RunningStack, process: subprocess.Popen[bytes]) -> str:
    async with asyncio.timeout(GENEROUS_SECONDS):
        while True:
            assert process.poll() is None, f"{SECOND} ended with {process.returncode}"
            for record in await running.stack.registry.processes():
                if record.id == SECOND and record.state is WorkerState.READY:
                    return record.address
            await asyncio.sleep(0.05)
