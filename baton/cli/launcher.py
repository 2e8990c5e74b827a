"""Starts every service as its own process on loopback, waits until the path is warm, takes everything down with itself.

Nothing is restarted: a process that ends is reported in one line and the others carry on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.cli.models import ResolvedModel
from baton.cli.state_dir import LaunchedProcess, StackRecord, StateDir
from baton.cli.terminal import say
from baton.cli.warm import warm_path
from baton.core.api import RegistryApi
from baton.core.config import Section, Settings
from baton.core.errors import ConfigError, PeerUnavailable, StateUnavailable
from baton.core.types import ProcessRecord, Role, WorkerState
from baton.state.config import StateConfig
from baton.state.embedded import embedded_server
from baton.state.redis_client import connect
from baton.state.registry import RedisRegistry
from gateway.keys import dump_keys, new_key, new_server_secret
from services.planner.config import PlannerConfig

POLL_SECONDS = 0.05
STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What to start. ``flags`` are the user's SECTION.KEY=VALUE settings; they win over the launcher's defaults."""

    model: ResolvedModel
    prefill: int = 1
    decode: int = 1
    kvtransfer: int = 1
    device: str = "cpu"
    config: Path | None = None
    flags: tuple[str, ...] = ()
    start_timeout: float = 300.0

    def services(self) -> list[tuple[Role, str]]:
        """(role, process id) in the order of starting: workers first, for they load longest."""
        counts = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.KVTRANSFER: self.kvtransfer}
        counts |= {Role.PLANNER: 1, Role.GATEWAY: 1}
        return [(role, f"{role.value}-{index}") for role, count in counts.items() for index in range(count)]


@dataclass(frozen=True, slots=True)
class Child:
    role: Role
    id: str
    process: subprocess.Popen[bytes]
    log: Path


@dataclass
class Stack:
    """A started stack. ``record`` is what other commands read."""

    plan: StackPlan
    record: StackRecord
    registry: RegistryApi
    children: list[Child] = field(default_factory=list[Child])
    _reported: set[str] = field(default_factory=set[str])

    def report_ended(self) -> list[Child]:
        """Print one line for each child that ended since the last call, and return them."""
        ended = [c for c in self.children if c.id not in self._reported and c.process.poll() is not None]
        for child in ended:
            self._reported.add(child.id)
            say(f"{child.id} ended with status {child.process.returncode}; not restarted; see {child.log}")
        return ended

    @property
    def all_ended(self) -> bool:
        return len(self._reported) == len(self.children)


@asynccontextmanager
async def launched(plan: StackPlan, state_dir: StateDir) -> AsyncIterator[Stack]:
    """Start everything; yields when the whole path is warm. Whatever happens, nothing is left running."""
    state_dir.prepare()
    running = state_dir.find()
    if running is not None:
        raise ConfigError(f"state-dir {state_dir.path}: a stack runs here already (pid {running.supervisor_pid})")
    key, api_key = new_key("local", "local")
    keys_file = state_dir.write_private("keys.json", dump_keys(new_server_secret(), [api_key]))
    password = secrets.token_hex(16)
    with embedded_server(password) as (url, redis_pid):
        state = StateConfig(url=url, password=password, timeout_ms=1000)
        environment = _environment(password)
        with _children(plan, state_dir, url, keys_file, environment) as children:
            async with connect(state) as client:
                launched = [LaunchedProcess("redis", "redis-0", redis_pid)]
                launched += [LaunchedProcess(c.role.value, c.id, c.process.pid, str(c.log)) for c in children]
                record = StackRecord(os.getpid(), "", key, plan.model.name, url, password, tuple(launched))
                stack = Stack(plan, record, RedisRegistry(client, state), children)
                state_dir.write(record)
                try:
                    await _until_ready(stack)
                    stack.record = replace(record, gateway=await _gateway_address(stack))
                    await warm_path(stack.record.gateway, key, plan.model.name, remote_tokens=_remote_tokens(plan))
                    stack.record = replace(stack.record, ready=True)
                    state_dir.write(stack.record)
                    yield stack
                finally:
                    state_dir.clear()


def _environment(password: str) -> dict[str, str]:
    """Secrets travel in the environment, which other users cannot read, never on a command line."""
    token = secrets.token_hex(16)
    sections = ("GATEWAY", "PLANNER", "PREFILL", "DECODE", "KVTRANSFER")
    tokens = {f"BATON_{section}__SERVICE_TOKEN": token for section in sections}
    return os.environ | tokens | {"BATON_STATE__PASSWORD": password, "GOMP_SPINCOUNT": "0"}


@contextmanager
def _children(
    plan: StackPlan, state_dir: StateDir, url: str, keys_file: Path, environment: dict[str, str]
) -> Iterator[list[Child]]:
    """All service processes; stopped in reverse order, SIGTERM first, SIGKILL for what stays."""
    children: list[Child] = []
    try:
        for role, process_id in plan.services():
            log = state_dir.logs / f"{process_id}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    _command(plan, role, process_id, url, keys_file),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches the launcher alone, which then drains in order
                )
            log.chmod(0o600)
            children.append(Child(role, process_id, process, log))
        yield children
    finally:
        _stop(children)


def _command(plan: StackPlan, role: Role, process_id: str, url: str, keys_file: Path) -> list[str]:
    package = "gateway" if role is Role.GATEWAY else f"services.{role.value}"
    settings = [f"state.url={url}", f"engine.device={plan.device}"]
    settings += [f"engine.model={plan.model.engine_model}", f"engine.served_name={plan.model.name}"]
    if role is Role.GATEWAY:
        settings += [f"gateway.keys_file={keys_file}"]
        if plan.model.tokenizer_directory is not None:
            settings += [f"gateway.tokenizers={plan.model.name}={plan.model.tokenizer_directory}"]
    command = [sys.executable, "-m", package, "--id", process_id, "--parent-pid", str(os.getpid())]
    command += ["--config", str(plan.config)] if plan.config else []
    return command + [part for setting in [*settings, *plan.flags] for part in ("--set", setting)]


def _stop(children: Sequence[Child]) -> None:
    """The gateway first, so that its streams drain while workers still work."""
    for child in reversed(children):
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(signal.SIGTERM)
    for child in reversed(children):
        try:
            child.process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            say(f"{child.id} did not stop within {STOP_SECONDS:.0f} s; killed")
            child.process.kill()
            child.process.wait()


async def _until_ready(stack: Stack) -> None:
    """Wait for every process to register as ready, telling when each does; a process that ends ends the start."""
    waiting = {child.id for child in stack.children}
    deadline = asyncio.get_running_loop().time() + stack.plan.start_timeout
    while waiting:
        if ended := stack.report_ended():
            raise PeerUnavailable(f"{ended[0].id} could not start: {last_line(ended[0].log)}")
        if asyncio.get_running_loop().time() > deadline:
            raise PeerUnavailable(f"not ready after {stack.plan.start_timeout:.0f} s: {', '.join(sorted(waiting))}")
        for record in await _processes(stack.registry):
            if record.id in waiting and record.state is WorkerState.READY:
                waiting.discard(record.id)
                say(f"{record.id} ready at {record.address}")
        await asyncio.sleep(POLL_SECONDS)


async def _gateway_address(stack: Stack) -> str:
    return next(record.address for record in await stack.registry.processes() if record.role is Role.GATEWAY)


def _remote_tokens(plan: StackPlan) -> int:
    """A prompt length that the planner sends to a prefill worker; 0 when there is none to send to."""
    if not (plan.prefill and plan.decode):
        return 0
    settings = Settings.read(file=plan.config, environ=os.environ, flags=plan.flags)
    return settings.fill(Section("planner", PlannerConfig)).local_prefill_max_tokens + 2


async def _processes(registry: RegistryApi) -> Sequence[ProcessRecord]:
    try:
        return await registry.processes()
    except StateUnavailable:
        return ()


def last_line(log: Path) -> str:
    """The last line of a log that is not empty; the reason why a process ended, most likely."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
