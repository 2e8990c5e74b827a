"""``baton up`` and ``baton down``: start the whole system on this machine, and end it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.cli.launcher import Stack, StackPlan, launched
from baton.cli.state_dir import DEFAULT, StateDir, is_alive
from baton.cli.terminal import say, table
from baton.core.config import Section, Settings
from baton.core.errors import ConfigError
from baton.engine.config import EngineConfig, device_defaults
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
    Section("engine", EngineConfig, device_defaults),
    Section("state", StateConfig),
)
SUPERVISE_SECONDS = 0.1
DOWN_SECONDS = 60.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def check_settings(config: Path | None, flags: Sequence[str]) -> None:
    """Fill every section once, so that a bad key or value is told before anything starts."""
    settings = Settings.read(file=config, environ=os.environ, flags=flags)
    for section in SECTIONS:
        settings.fill(section)


def check_own_settings(config: Path | None, flags: Sequence[str], *, model: str, device: str) -> None:
    """ConfigError for settings that `up` makes itself: nobody shall believe that another value holds."""
    settings = Settings.read(file=config, environ=os.environ, flags=flags)
    own = (
        ("engine", "model", model, "--model"),
        ("engine", "device", device, "--device"),
        ("gateway", "keys_file", None, "a key for this stack (`baton key create` makes others)"),
    )
    for section, key, value, instead in own:
        given = settings.last(section, key)
        if given is not None and given.value != value:
            raise ConfigError(f"{given.origin}: {section}.{key}: `baton up` sets it, by {instead}; got {given.value!r}")


@dataclass
class _Stop:
    """Which signal told the stack to stop, and whether it was serving by then."""

    signum: int = 0
    serving: bool = False


async def run(plan: StackPlan, state_dir: StateDir) -> int:
    """Start, print the addresses, watch until told to stop. The exit status: 0 after serving, 128 + signal when told
    to stop before, 1 when everything died.
    """
    stop = _Stop()
    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(_serve(plan, state_dir, stop))

    def on_signal(signum: int) -> None:
        stop.signum = signum
        serving.cancel()

    for signum in STOP_SIGNALS:
        loop.add_signal_handler(signum, on_signal, signum)
    try:
        return await serving
    except asyncio.CancelledError:
        return 0 if stop.serving else 128 + stop.signum


async def _serve(plan: StackPlan, state_dir: StateDir, stop: _Stop) -> int:
    begun = time.monotonic()
    async with launched(plan, state_dir) as stack:
        stop.serving = True
        say(f"ready in {time.monotonic() - begun:.1f} s")
        say(_addresses(stack))
        say(f"try: {_example(stack, state_dir)}")
        while not stack.all_ended:
            stack.report_ended()
            await asyncio.sleep(SUPERVISE_SECONDS)
        say("every service has ended")
    return 1


def _addresses(stack: Stack) -> str:
    known = [p for p in stack.record.processes if p.http_address]
    return table(("process", "address", "http"), [(p.id, p.address, f"http://{p.http_address}") for p in known])


def _example(stack: Stack, state_dir: StateDir) -> str:
    asks = 'chat "What is a relay race?"' if stack.plan.model.tokenizer_directory else "generate --prompt-ids 1,2,3"
    return f"baton {asks}" if state_dir.path == DEFAULT else f"baton {asks} --state-dir {state_dir.path}"


def detach(arguments: Sequence[str], state_dir: StateDir) -> int:
    """Start the same command without --detach in a session of its own and wait until it is ready.

    Whatever ends the waiting before that ends the supervisor, too.
    """
    state_dir.prepare()
    if (pid := state_dir.supervisor()) is not None:
        raise ConfigError(f"state-dir {state_dir.path}: a stack runs here already (pid {pid})")
    with state_dir.new_log("supervisor") as output:
        log = Path(output.name)
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "baton.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return _follow_start(supervisor, log, state_dir)
    except BaseException:
        supervisor.terminate()
        supervisor.wait()
        raise


def _follow_start(supervisor: subprocess.Popen[bytes], log: Path, state_dir: StateDir) -> int:
    """Show what the supervisor says until it is ready (0) or has ended (its status)."""
    with log.open(encoding="utf-8", errors="replace") as said:
        while True:
            status = supervisor.poll()
            record = state_dir.find()
            ready = record is not None and record.supervisor_pid == supervisor.pid and record.ready
            while line := said.readline():
                print(line, end="", file=sys.stderr, flush=True)
            if ready:
                return 0
            if status is not None:
                return status or 1
            time.sleep(SUPERVISE_SECONDS)


def down(state_dir: StateDir) -> int:
    """Ask the supervisor to stop and wait until it has."""
    pid = state_dir.supervisor()
    if pid is None:
        say(f"nothing runs under {state_dir.path}")
        return 0
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_SECONDS
    while state_dir.supervisor() is not None or is_alive(pid):
        if time.monotonic() > deadline:
            raise ConfigError(f"down: pid {pid} did not stop within {DOWN_SECONDS:.0f} s")
        time.sleep(SUPERVISE_SECONDS)
    say("stopped")
    return 0
