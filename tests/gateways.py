"""Further gateways beside that of a running stack, and what a gateway says of itself in its metrics."""

from __future__ import annotations

import asyncio
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.cli.launcher import Child
from baton.core.types import Role, WorkerState
from tests.launched import GENEROUS_SECONDS, RunningStack

SECOND = "gateway-9"


@dataclass(frozen=True)
class GatewayProcess:
    id: str
    process: subprocess.Popen[bytes]
    address: str
    http_address: str

    async def metric(self, name: str) -> float:
        """The sum of the series of ``name``; 0 of none."""
        lines = (await asyncio.to_thread(_exposition, self.http_address)).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def gateway_of(running: RunningStack) -> Child:
    return next(child for child in running.stack.children if child.role is Role.GATEWAY)


@asynccontextmanager
async def second_gateway(running: RunningStack) -> AsyncIterator[str]:
    """The address of another gateway process with the first one's settings; it ends in order with the block."""
    async with further_gateways(running, SECOND) as (gateway,):
        yield gateway.address
    assert gateway.process.returncode == 0


@asynccontextmanager
async def further_gateways(
    running: RunningStack, *names: str, settings: Sequence[str] = ()
) -> AsyncIterator[list[GatewayProcess]]:
    """More gateway processes with the first one's settings and some of their own, which go before those. What the block
    did not end is ended with it."""
    processes = {name: _started(gateway_of(running), name, settings) for name in names}
    try:
        yield [await _ready(running, name, process) for name, process in processes.items()]
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            await asyncio.to_thread(process.wait, GENEROUS_SECONDS)


async def first_gateway(running: RunningStack) -> GatewayProcess:
    child = gateway_of(running)
    return await _ready(running, child.id, child.process)


async def eventually(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(GENEROUS_SECONDS):
            while not await holds():
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise AssertionError(f"never came true: {what}") from error


def _started(first: Child, name: str, settings: Sequence[str]) -> subprocess.Popen[bytes]:
    variables = Path(f"/proc/{first.process.pid}/environ").read_bytes().split(b"\0")
    environment = dict(entry.decode().split("=", 1) for entry in variables if b"=" in entry)
    command = [str(part) for part in first.process.args]  # type: ignore[union-attr]
    command[command.index("--id") + 1] = name
    command += [part for setting in settings for part in ("--set", setting)]
    with first.log.with_name(f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


async def _ready(running: RunningStack, name: str, process: subprocess.Popen[bytes]) -> GatewayProcess:
    async with asyncio.timeout(GENEROUS_SECONDS):
        while True:
            assert process.poll() is None, f"{name} ended with {process.returncode}"
            for record in await running.stack.registry.processes():
                if (record.id, record.pid) == (name, process.pid) and record.state is WorkerState.READY:
                    return GatewayProcess(name, process, record.address, record.http_address)
            await asyncio.sleep(0.05)


def _exposition(http_address: str) -> str:
    with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=GENEROUS_SECONDS) as answer:
        return answer.read().decode()
