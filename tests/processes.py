"""Service processes on loopback, started one by one: see Fleet."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton.core.errors import StateUnavailable
from baton.core.types import Candidate, ProcessRecord, Role, WorkerState
from baton.rpc.channels import ChannelPool, ClientSecurity
from baton.state.config import StateConfig
from baton.state.embedded import embedded_server
from baton.state.redis_client import connect
from baton.state.registry import RedisRegistry

TOKEN = "a-token-for-tests"
PASSWORD = "a-password-for-tests"
GENEROUS_SECONDS = 60.0
SERVICES = ("PLANNER", "PREFILL", "DECODE", "KVTRANSFER", "GATEWAY")


@dataclass
class Fleet:
    """Started processes by id. ``stop`` and ``kill`` are for tests; whatever is left is killed at the end."""

    url: str
    redis_pid: int
    registry: RedisRegistry
    channels: ChannelPool
    logs: Path
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, "subprocess.Popen[bytes]"])

    @property
    def security(self) -> ClientSecurity:
        return ClientSecurity(TOKEN)

    def start(self, role: Role, process_id: str, *settings: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"BATON_STATE__PASSWORD": PASSWORD}
        environment |= {f"BATON_{service}__SERVICE_TOKEN": TOKEN for service in SERVICES}
        package = "gateway" if role is Role.GATEWAY else f"services.{role.value}"
        command = [sys.executable, "-m", package, "--id", process_id, "--parent-pid", str(os.getpid())]
        defaults = (f"state.url={self.url}", "engine.model=fake", "engine.kv_blocks=2000")
        command += [part for setting in (*defaults, *settings) for part in ("--set", setting)]
        with self.log(process_id).open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.started[process_id] = process
        return process

    def log(self, process_id: str) -> Path:
        return self.logs / f"{process_id}.log"

    async def records(self) -> dict[str, ProcessRecord]:
        try:
            return {record.id: record for record in await self.registry.processes()}
        except StateUnavailable:
            return {}

    async def ready(self, *process_ids: str) -> dict[str, ProcessRecord]:
        """The records, once all of these processes are READY."""
        found: dict[str, ProcessRecord] = {}

        async def all_ready() -> bool:
            found.update(await self.records())
            for process_id in process_ids:
                status = self.started[process_id].poll()
                assert status is None, f"{process_id} ended with {status}: {self.log(process_id).read_text()}"
            return all(key in found and self._is_ready(found[key]) for key in process_ids)

        await self.until(all_ready, f"ready: {process_ids}")
        return found

    def _is_ready(self, record: ProcessRecord) -> bool:
        """And not the record that a killed process of the same id has left behind."""
        return record.state is WorkerState.READY and record.pid == self.started[record.id].pid

    async def until(self, holds: Callable[[], object], what: str) -> None:
        """Poll (``holds`` may be a coroutine function) until true."""
        async with asyncio.timeout(GENEROUS_SECONDS):
            while True:
                answer = holds()
                if await answer if asyncio.iscoroutine(answer) else answer:
                    return
                await asyncio.sleep(0.02)

    async def ended(self, process_id: str) -> int:
        """The exit status, once the process has ended by itself."""
        process = self.started[process_id]
        await self.until(lambda: process.poll() is not None, f"{process_id} ends")
        assert process.returncode is not None
        return process.returncode

    def signal(self, process_id: str, number: signal.Signals) -> None:
        self.started[process_id].send_signal(number)


def candidate(record: ProcessRecord) -> Candidate:
    return Candidate(record.id, record.address, record.epoch)


def children(pid: int) -> list[int]:
    """Process ids of the direct children."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text().split()]


def is_alive(pid: int) -> bool:
    """False once the process has ended, whether or not somebody has asked for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@asynccontextmanager
async def fleet(logs: Path, processes: Sequence[tuple[Role, str]], *settings: str) -> AsyncIterator[Fleet]:
    """Start Redis and ``processes``; yields when all are READY."""
    async with AsyncExitStack() as stack:
        url, redis_pid = stack.enter_context(embedded_server(PASSWORD))
        config = StateConfig(url=url, password=PASSWORD, timeout_ms=1000)
        client = await stack.enter_async_context(connect(config))
        channels = await stack.enter_async_context(ChannelPool(ClientSecurity(TOKEN)))
        found = Fleet(url, redis_pid, RedisRegistry(client, config), channels, logs)
        try:
            for role, process_id in processes:
                found.start(role, process_id, *settings)
            await found.ready(*found.started)
            yield found
        finally:
            for process in found.started.values():
                process.kill()
                process.wait()
