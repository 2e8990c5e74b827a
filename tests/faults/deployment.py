"""Every service as a process of its own, each worker behind a proxy, on addresses that outlive the processes.

``async with deployment(logs) as found`` starts two workers of each role, a planner, the kvtransfer process, two
gateways and Redis, with fake engines. Whatever a test broke, ``heal`` brings back; ``assert_sound`` checks what has to
hold then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Self

from baton.client import Client, GenerateRequest, ResumePolicy
from baton.client.answer import Answer
from baton.core.errors import BatonError
from baton.core.reserved_port import reserved_port
from baton.core.types import ProcessRecord, Role, WorkerState
from baton.rpc.channels import ChannelPool, ClientSecurity
from baton.state import embedded
from baton.state.config import StateConfig
from baton.state.redis_client import connect
from baton.state.registry import RedisRegistry
from gateway.keys import dump_keys, new_key, new_server_secret
from tests.faults.proxy import Barrier, Proxy
from tests.processes import PASSWORD, TOKEN, Fleet, is_alive

HOST, PROXY_HOST = "127.0.0.1", "127.0.0.2"  # a worker listens at the first and is known by the second
WORKERS = (Role.PREFILL, Role.DECODE)
SERVICES = (
    (Role.PREFILL, "prefill-0"),
    (Role.PREFILL, "prefill-1"),
    (Role.DECODE, "decode-0"),
    (Role.DECODE, "decode-1"),
    (Role.PLANNER, "planner-0"),
    (Role.KVTRANSFER, "kvtransfer-0"),
    (Role.GATEWAY, "gateway-0"),
    (Role.GATEWAY, "gateway-1"),
)
SETTINGS = (
    "engine.kv_blocks=600",
    "engine.max_step_tokens=128",
    "planner.local_prefill_max_tokens=0",
    "state.timeout_ms=250",
    "gateway.planner_budget_ms=500",
    "gateway.recovery_patience_seconds=20",
    "gateway.drain_seconds=20",
    "decode.drain_seconds=20",
    "prefill.drain_seconds=20",
    "prefill.heartbeat_seconds=0.1",  # two are waited for after each test
    "decode.heartbeat_seconds=0.1",
    "kvtransfer.transport_rest_seconds=0.5",  # what one test broke is in use again in the next
    "kvtransfer.local_calls=false",  # all calls pass the proxies
)
PATIENT = ResumePolicy(attempts=40, attempts_unanswered=40, longest_pause=0.5)


class RedisServer:
    """A Redis at one address, that can be killed and started again, empty."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._life = ExitStack()
        self.pid = 0

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self._port}/0"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._life.close()

    def start(self) -> None:
        self.pid = self._life.enter_context(embedded._running(self._port, PASSWORD, subprocess.DEVNULL))

    def restart(self) -> None:
        """Nothing of what it held is left."""
        self.signal(signal.SIGKILL)
        self._life.close()
        self.start()

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@dataclass
class Deployment:
    """See the module."""

    fleet: Fleet
    redis: RedisServer
    client: Client
    key: str
    addresses: tuple[str, ...]
    proxies: dict[str, Proxy]
    settings: dict[str, tuple[str, ...]]
    roles: dict[str, Role]
    stopped: set[str] = field(default_factory=set[str])
    ending: set[str] = field(default_factory=set[str])

    @property
    def gateway_in_use(self) -> str:
        """The gateway that ``client`` talks to."""
        names = [name for name, role in self.roles.items() if role is Role.GATEWAY]
        return names[self.addresses.index(self.client._address)]

    # --- breaking -----------------------------------------------------------------------------------------------------

    def signal(self, process_id: str, number: signal.Signals) -> None:
        """Redis has an id too: ``redis``."""
        if number is signal.SIGSTOP:
            self.stopped.add(process_id)
        elif number is signal.SIGCONT:
            self.stopped.discard(process_id)
        else:
            self.ending.add(process_id)
        if process_id == "redis":
            self.redis.signal(number)
        else:
            self.fleet.signal(process_id, number)

    def hold(self, role: Role, barrier: Barrier) -> Barrier:
        """At every worker of ``role``; the first fitting frame is held."""
        for process_id, proxy in self.proxies.items():
            if self.roles[process_id] is role:
                proxy.hold(barrier)
        return barrier

    def asked(self, role: Role) -> str:
        """The worker of ``role`` that was sent a prompt since the last ``heal``."""
        return next(name for name, proxy in self.proxies.items() if self.roles[name] is role and proxy.prompts)

    def unhold(self) -> None:
        for proxy in self.proxies.values():
            proxy.heal()

    # --- mending ------------------------------------------------------------------------------------------------------

    async def heal(self) -> None:
        """Everything passes, goes on, or is started again; returns when all are ready and nothing is under way."""
        self.unhold()
        for process_id in tuple(self.stopped):
            self.signal(process_id, signal.SIGCONT)
        for process_id in ("redis", *self.settings):
            if process_id in self.ending or self._has_ended(process_id):
                await self.replace(process_id)
        await self.fleet.ready(*self.settings)
        await self._seen()
        for proxy in self.proxies.values():
            proxy.forget()

    async def replace(self, process_id: str) -> None:
        """Wait until the process, which was told to end, has ended, and start another in its place."""
        if process_id == "redis":
            self.redis.restart()
        else:
            await self.fleet.ended(process_id)
            self.start(process_id)
        self.ending.discard(process_id)

    def _has_ended(self, process_id: str) -> bool:
        if process_id == "redis":
            return not is_alive(self.redis.pid)
        return self.fleet.started[process_id].poll() is not None

    def start(self, process_id: str) -> None:
        self.fleet.start(self.roles[process_id], process_id, *self.settings[process_id])

    async def _seen(self) -> None:
        """Until gateways and planner use all workers: short requests find every decode worker again, and a prefill
        worker where there is one, without which the next prompt would stay where it is decoded."""
        used: set[str] = set()
        of_role = {role: {name for name, own in self.roles.items() if own is role} for role in WORKERS}
        short = GenerateRequest(prompt_token_ids=(5,) * 20, max_tokens=1, timeout=20)

        async def all_used() -> bool:
            with contextlib.suppress(BatonError):
                answer = await self.client.ask(short)
                placement = answer.choices[0].placement
                used.update((placement.decode_worker, placement.prefill_worker))
            return of_role[Role.DECODE] <= used and (not of_role[Role.PREFILL] or bool(of_role[Role.PREFILL] & used))

        await self.fleet.until(all_used, "all decode workers are used")

    # --- checking -----------------------------------------------------------------------------------------------------

    async def workers(self) -> dict[str, ProcessRecord]:
        return {key: record for key, record in (await self.fleet.records()).items() if record.role in WORKERS}

    async def assert_sound(self) -> None:
        """Nobody holds anything, free + cached = total, on every worker, as of two heartbeats from now on."""
        seen = {key: record.beats for key, record in (await self.workers()).items()}
        last: dict[str, ProcessRecord] = {}

        async def idle() -> bool:
            last.update(await self.workers())
            if len(last) < len(self.proxies):
                return False
            fresh = all(record.beats >= seen.get(key, 0) + 2 for key, record in last.items())
            return fresh and not any(r.stats.held_blocks or r.stats.running or r.stats.waiting for r in last.values())

        try:
            await self.fleet.until(idle, "all workers idle")
        except TimeoutError as error:
            raise AssertionError(f"blocks or requests are left: {last}") from error
        for record in last.values():
            assert record.state is WorkerState.READY, record
            stats = record.stats
            assert stats.free_blocks + stats.cached_blocks == stats.total_blocks, record


def content(answer: Answer) -> tuple[object, ...]:
    """What has to be equal wherever, and in however many hops, the answer was computed."""
    return tuple(
        (c.text, c.token_ids, c.logprobs, c.prompt_logprobs, c.finish, c.usage.completion_tokens)
        for c in answer.choices
    )


@asynccontextmanager
async def deployment(
    logs: Path,
    *settings: str,
    services: Sequence[tuple[Role, str]] = SERVICES,
    tokenizer: Path | None = None,
    of_one: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> AsyncIterator[Deployment]:
    """Yields when all are ready. ``tokenizer``: a directory, for text and stop strings; ``of_one``: settings of single
    processes, by id."""
    logs.mkdir(parents=True, exist_ok=True)
    key, api_key = new_key("tests", "acme")
    keys_file = logs / "keys.json"
    keys_file.write_text(dump_keys(new_server_secret(), [api_key]))
    gateway = [f"gateway.keys_file={keys_file}", *([f"gateway.tokenizers=fake={tokenizer}"] if tokenizer else [])]
    async with AsyncExitStack() as stack:
        ports = {name: stack.enter_context(reserved_port(HOST, 0)) for _, name in services}
        redis = stack.enter_context(RedisServer(stack.enter_context(reserved_port(HOST, 0))))
        config = StateConfig(url=redis.url, password=PASSWORD, timeout_ms=1000)
        registry = RedisRegistry(await stack.enter_async_context(connect(config)), config)
        channels = await stack.enter_async_context(ChannelPool(ClientSecurity(TOKEN)))
        proxies = {name: Proxy(name, PROXY_HOST, ports[name], HOST) for role, name in services if role in WORKERS}
        for proxy in proxies.values():
            await stack.enter_async_context(proxy.running())
        addresses = tuple(f"{HOST}:{ports[name]}" for role, name in services if role is Role.GATEWAY)
        client = await stack.enter_async_context(Client(addresses, key, resume=PATIENT))
        found = Deployment(
            fleet=Fleet(redis.url, redis.pid, registry, channels, logs),
            redis=redis,
            client=client,
            key=key,
            addresses=addresses,
            proxies=proxies,
            settings={},
            roles={name: role for role, name in services},
        )
        for role, name in services:
            own = [f"{role.value}.port={ports[name]}", *(gateway if role is Role.GATEWAY else ())]
            own += [f"{role.value}.advertise_host={PROXY_HOST}"] if role in WORKERS else []
            found.settings[name] = (*SETTINGS, *own, *settings, *of_one.get(name, ()))
        try:
            for name in found.settings:
                found.start(name)
            await found.fleet.ready(*found.settings)
            await found._seen()
            yield found
        finally:
            for process in found.fleet.started.values():
                process.kill()
                process.wait()
