"""``baton up`` and ``baton down``: start the whole system on this machine, and end it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from baton.cli.launcher import Stack, StackPlan, last_line, launched
from baton.cli.state_dir import StateDir, is_alive
from baton.cli.terminal import say, table
from baton.core.config import Section, Settings
from baton.core.errors import ConfigError
from baton.engine.config import EngineConfig
from baton.state.config import StateConfig
from gateway.config import GatewayConfig
from services.decode.config import DecodeConfig
from services.kvtransfer.config import KvTransferConfig
from services.planner.config import PlannerConfig
from services.prefill.config import PrefillConfig

SECTIONS: tuple[Section[object], ...] = (
    Section("gateway", GatewayConfig),
    Section("planner", PlannerConfig),
    Section("prefill", PrefillConfig),
    Section("decode", DecodeConfig),
    Section("kvtransfer", KvTransferConfig),
    Section("engine", EngineConfig),
    Section("state", StateConfig),
)
SUPERVISE_SECONDS = 0.1
DOWN_SECONDS = 60.0


def check_settings(config: Path | None, flags: Sequence[str]) -> None:
    """Fill every section once, so that a bad key or value is told before anything starts."""
    settings = Settings.read(file=config, environ=os.environ, flags=flags)
    for section in SECTIONS:
        settings.fill(section)


async def run(plan: StackPlan, state_dir: StateDir) -> int:
    """Start, print the addresses, watch until told to stop. The exit status: 0 unless everything died."""
    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(_serve(plan, state_dir))
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, serving.cancel)
    try:
        return await serving
    except asyncio.CancelledError:
        return 0


async def _serve(plan: StackPlan, state_dir: StateDir) -> int:
    started = time.monotonic()
    async with launched(plan, state_dir) as stack:
        say(f"ready in {time.monotonic() - started:.1f} s")
        say(await _addresses(stack))
        say(f'try: baton chat "What is a baton?" --state-dir {state_dir.path}')
        while not stack.all_ended:
            stack.report_ended()
            await asyncio.sleep(SUPERVISE_SECONDS)
    return 1


async def _addresses(stack: Stack) -> str:
    records = sorted(await stack.registry.processes(), key=lambda record: record.id)
    return table(("process", "address", "http"), [(r.id, r.address, f"http://{r.http_address}") for r in records])


def detach(arguments: Sequence[str], state_dir: StateDir) -> int:
    """Start the same command without --detach in a session of its own and wait until it is ready."""
    state_dir.prepare()
    log = state_dir.logs / "supervisor.log"
    with log.open("wb") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "baton.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    shown = 0
    while True:
        text = log.read_text(encoding="utf-8", errors="replace")
        for line in text[shown:].splitlines():
            say(line)
        shown = len(text)
        record = state_dir.find()
        if record is not None and record.supervisor_pid == supervisor.pid and record.ready:
            return 0
        if supervisor.poll() is not None:
            say(f"could not start: {last_line(log)}")
            return supervisor.returncode or 1
        time.sleep(SUPERVISE_SECONDS)


def down(state_dir: StateDir) -> int:
    """Ask the supervisor to stop and wait until it has."""
    record = state_dir.find()
    if record is None:
        say(f"nothing runs under {state_dir.path}")
        return 0
    os.kill(record.supervisor_pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_SECONDS
    while is_alive(record.supervisor_pid):
        if time.monotonic() > deadline:
            raise ConfigError(f"down: pid {record.supervisor_pid} did not stop within {DOWN_SECONDS:.0f} s")
        time.sleep(SUPERVISE_SECONDS)
    say("stopped")
    return 0
