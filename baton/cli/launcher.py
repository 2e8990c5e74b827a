"""Starts every service as its own process on loopback, waits until the path is warm, takes everything down with itself.

Nothing is restarted: a process that ends is reported in one line and the others carry on.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.cli.children import REDIS_ID, Child, StackPlan, reason_of_end, started
from baton.cli.local_tenant import make_local_tenant
from baton.cli.placement import checked_gpus, known_gpus, visible_gpus
from baton.cli.state_dir import LaunchedProcess, StackRecord, StateDir, is_alive
from baton.cli.state_server import StateServer, state_server
from baton.cli.terminal import say
from baton.cli.warm import warm_path
from baton.core.api import RegistryApi
from baton.core.config import Section, Settings, mask_password
from baton.core.errors import ConfigError, PeerUnavailable, StateUnavailable
from baton.core.types import AdminRole, ProcessRecord, Role, WorkerState
from baton.rpc.channels import ClientTls
from baton.state.audited_records import RedisRecords
from baton.state.redis_client import connect
from baton.state.registry import RedisRegistry
from gateway.config import GatewayConfig
from gateway.keys import dump_keys, new_key, new_server_secret
from services.decode.config import DecodeConfig
from services.planner.config import PlannerConfig
from services.prefill.config import PrefillConfig
from services.process.config import WorkerConfig

__all__ = ["Child", "Stack", "StackPlan", "launched"]

POLL_SECONDS = 0.05
TOKEN_SECTIONS = ("GATEWAY", "PLANNER", "PREFILL", "DECODE", "KVTRANSFER")


@dataclass
class Stack:
    """A started stack. ``record`` is what other commands read."""

    plan: StackPlan
    record: StackRecord
    registry: RegistryApi
    children: list[Child] = field(default_factory=list[Child])
    redis_pid: int | None = None
    _reported: set[str] = field(default_factory=set[str])

    def report_ended(self) -> list[Child]:
        """Print one line for each process that ended since the last call, and return those of services."""
        ended = [c for c in self.children if c.id not in self._reported and c.process.poll() is not None]
        for child in ended:
            say(f"{child.id} ended with status {child.process.returncode}; not restarted; see {child.log}")
        if self.redis_ended and REDIS_ID not in self._reported:
            self._reported.add(REDIS_ID)
            say(f"{REDIS_ID} ended; not restarted; requests go on, changes of the fleet are seen by nobody")
        self._reported.update(child.id for child in ended)
        return ended

    @property
    def redis_ended(self) -> bool:
        return self.redis_pid is not None and not is_alive(self.redis_pid)

    @property
    def all_ended(self) -> bool:
        return all(child.id in self._reported for child in self.children)

    async def processes(self) -> Sequence[ProcessRecord]:
        """The registered ones of this stack; none while Redis does not answer."""
        pids = {child.process.pid for child in self.children}
        try:
            return [record for record in await self.registry.processes() if record.pid in pids]
        except StateUnavailable:
            return ()


@asynccontextmanager
async def launched(plan: StackPlan, state_dir: StateDir) -> AsyncIterator[Stack]:
    """Start everything; yields when the whole path is warm. Whatever happens, nothing is left running."""
    settings = Settings.read(file=plan.config, environ=os.environ, flags=plan.flags)
    placed = _gpus(plan, settings, os.environ)
    state_dir.prepare()
    async with AsyncExitStack() as stack:
        stack.enter_context(state_dir.owned())
        key, api_key = new_key("local", "local")
        api_key = replace(api_key, role=AdminRole.PLATFORM_ADMIN)
        keys_file = state_dir.write_private("keys.json", dump_keys(new_server_secret(), [api_key]))
        server = stack.enter_context(state_server(settings, state_dir))
        client = await stack.enter_async_context(connect(server.config))
        registry = RedisRegistry(client, server.config)
        await _check_state(registry, server)
        await make_local_tenant(RedisRecords(client, server.config))
        children = stack.enter_context(
            started(plan, state_dir, server.settings, keys_file, _tokens() | dict(server.secrets), placed)
        )
        record = _record(plan, key, settings, server, children)
        state_dir.write(record)
        running = Stack(plan, record, registry, children, server.process.pid if server.process else None)
        await _make_ready(running, settings)
        state_dir.write(running.record)
        yield running


def _gpus(plan: StackPlan, settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """What each worker sees of GPUs, by its id; nothing on CPUs."""
    if plan.device != "cuda":
        return {}
    known = known_gpus(environ)
    sections = {
        Role.PREFILL: Section[WorkerConfig]("prefill", PrefillConfig),
        Role.DECODE: Section[WorkerConfig]("decode", DecodeConfig),
    }
    of_role = {
        role: checked_gpus(f"{section.name}.gpus", settings.fill(section).gpus, known)
        for role, section in sections.items()
    }
    workers = [(role, process_id) for role, process_id in plan.services() if role in of_role]
    return visible_gpus(workers, checked_gpus("--gpus", plan.gpus, known) or [gpu.name for gpu in known], of_role)


async def _check_state(registry: RegistryApi, server: StateServer) -> None:
    try:
        await registry.processes()
    except StateUnavailable as error:
        raise StateUnavailable(f"state.url {mask_password(server.config.url)}: {error.message}") from error


def _tokens() -> dict[str, str]:
    """Secrets travel in the environment, which other users cannot read, never on a command line."""
    token = secrets.token_hex(16)
    return {f"BATON_{section}__SERVICE_TOKEN": token for section in TOKEN_SECTIONS}


def _record(
    plan: StackPlan, key: str, settings: Settings, server: StateServer, children: Sequence[Child]
) -> StackRecord:
    processes = [server.process] if server.process else []
    processes += [LaunchedProcess(c.role.value, c.id, c.process.pid, str(c.log)) for c in children]
    return StackRecord(
        supervisor_pid=os.getpid(),
        gateway="",
        key=key,
        model=plan.model.name,
        state_url=server.config.url,
        state_password=server.config.password,
        state_namespace=server.config.namespace,
        processes=tuple(processes),
        gateway_ca=settings.fill(Section("gateway", GatewayConfig)).door_certificate,
    )


async def _make_ready(stack: Stack, settings: Settings) -> None:
    """Wait for all processes and warm the path; the record then holds every address."""
    await _until_ready(stack)
    found = {record.id: record for record in await stack.processes()}
    gateway = next((r.address for r in found.values() if r.role is Role.GATEWAY), "")
    known = tuple(_with_address(process, found.get(process.id)) for process in stack.record.processes)
    ready = replace(stack.record, gateway=gateway, processes=known, ready=True)
    tls = ClientTls(Path(ready.gateway_ca)) if ready.gateway_ca else None
    await warm_path(gateway, ready.key, ready.model, remote_tokens=_remote_tokens(stack.plan, settings), tls=tls)
    stack.record = ready


def _with_address(process: LaunchedProcess, found: ProcessRecord | None) -> LaunchedProcess:
    if found is None:
        return process
    return replace(process, address=found.address, http_address=found.http_address, epoch=found.epoch)


async def _until_ready(stack: Stack) -> None:
    """Wait for every process to register as ready, telling when each does; a process that ends ends the start."""
    waiting = {child.id for child in stack.children}
    deadline = asyncio.get_running_loop().time() + stack.plan.start_timeout
    while waiting:
        ended = [child for child in stack.children if child.process.poll() is not None]
        if ended:
            raise ConfigError(f"{ended[0].id} could not start: {reason_of_end(ended[0].log)}")
        if stack.redis_ended:
            raise PeerUnavailable(f"{REDIS_ID} ended while the services started")
        if asyncio.get_running_loop().time() > deadline:
            raise PeerUnavailable(f"not ready after {stack.plan.start_timeout:.0f} s: {', '.join(sorted(waiting))}")
        for record in await stack.processes():
            if record.id in waiting and record.state is WorkerState.READY:
                waiting.discard(record.id)
                say(f"{record.id} ready at {record.address}")
        await asyncio.sleep(POLL_SECONDS)


def _remote_tokens(plan: StackPlan, settings: Settings) -> int:
    """A prompt length that the planner sends to a prefill worker; 0 when there is none to send to."""
    if not (plan.prefill and plan.decode):
        return 0
    return settings.fill(Section("planner", PlannerConfig)).local_prefill_max_tokens + 2
