"""``baton status``: every process of the stack, as registered and as the kernel sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from baton.cli.state_dir import LaunchedProcess, StackRecord, is_alive
from baton.cli.terminal import table
from baton.core.errors import StateUnavailable
from baton.core.types import EngineStats, ProcessRecord, WorkerState
from baton.state.config import StateConfig
from baton.state.redis_client import connect
from baton.state.registry import RedisRegistry


async def registered(record: StackRecord) -> dict[str, ProcessRecord]:
    """The registry's records by process id; empty when Redis is away."""
    config = StateConfig(url=record.state_url, password=record.state_password, timeout_ms=1000)
    async with connect(config) as client:
        try:
            return {found.id: found for found in await RedisRegistry(client, config).processes()}
        except StateUnavailable:
            return {}


async def entries(record: StackRecord) -> list[dict[str, object]]:
    """One JSON object a process, in the form of ``baton status --json``."""
    known = await registered(record)
    return [_entry(process, known.get(process.id)) for process in record.processes]


def _entry(process: LaunchedProcess, found: ProcessRecord | None) -> dict[str, object]:
    entry: dict[str, object] = {
        "service": process.service,
        "role": found.role.value if found else process.service,
        "id": process.id,
        "epoch": found.epoch if found else 0,
        "pid": process.pid,
        "address": found.address if found else "",
        "http_address": found.http_address if found else "",
        "state": _state(process, found),
        "resident_mb": round(sum(resident_mb(pid) for pid in family(process.pid)), 1),
        "log": process.log,
    }
    if found is not None and found.card is not None:
        entry["model"] = found.card.model
        entry["tokens_per_second"] = round(found.tokens_per_second, 1)
        entry |= _load(found.stats)
    return entry


def _state(process: LaunchedProcess, found: ProcessRecord | None) -> str:
    if not is_alive(process.pid):
        return WorkerState.DEAD.value
    if found is None:
        return (WorkerState.READY if process.service == "redis" else WorkerState.LOADING).value
    return found.state.value


def _load(stats: EngineStats) -> dict[str, object]:
    blocks = {
        "total": stats.total_blocks,
        "free": stats.free_blocks,
        "held": stats.held_blocks,
        "cached": stats.cached_blocks,
    }
    counters = {
        name: getattr(stats, name)
        for name in (field.name for field in dataclasses.fields(stats))
        if not name.endswith("_blocks") and name not in ("waiting", "running")
    }
    return {"blocks": blocks, "queued": stats.waiting, "running": stats.running, "counters": counters}


def family(pid: int) -> list[int]:
    """The process and its descendants (a worker's front and its engine)."""
    found = [pid]
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = tasks.read_text(encoding="utf-8").split()
        except OSError:
            continue
        for child in children:
            found += family(int(child))
    return found


def resident_mb(pid: int) -> float:
    """Proportional resident memory in MB (shared pages count once over all who share them); 0 when it is gone."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    sizes = [int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")]
    return sum(sizes) * 1024 / 1e6


def as_table(processes: Sequence[dict[str, object]]) -> str:
    rows: list[list[str]] = []
    for entry in processes:
        blocks = cast(dict[str, int], entry.get("blocks") or {})
        load = "/".join(str(blocks[kind]) for kind in ("held", "cached", "free")) if blocks else ""
        running = f"{entry['running']}+{entry['queued']}" if "running" in entry else ""
        shown = [str(entry[name]) for name in ("id", "state", "pid", "address", "http_address", "resident_mb")]
        rows.append([*shown, running, load])
    header = ["process", "state", "pid", "address", "http", "MB", "running+queued", "blocks held/cached/free"]
    return table(header, rows)
