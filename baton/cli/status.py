"""``baton status``: every process of the stack, as registered and as the kernel sees it."""

from __future__ import annotations

import asyncio
import dataclasses
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from baton.cli.state_dir import LaunchedProcess, StackRecord, is_alive
from baton.cli.terminal import table
from baton.core.errors import StateUnavailable
from baton.core.types import EngineStats, ProcessRecord, Role, TierLoad, WorkerState
from baton.state.config import StateConfig
from baton.state.redis_client import connect
from baton.state.registry import RedisRegistry

PROBE_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """A process's state, and what it does without for now, if anything."""

    state: WorkerState
    degraded: str | None = None


async def registered(record: StackRecord) -> dict[str, ProcessRecord]:
    """The registry's records by process id. StateUnavailable when Redis is away."""
    config = StateConfig(
        url=record.state_url, password=record.state_password, namespace=record.state_namespace, timeout_ms=1000
    )
    async with connect(config) as client:
        return {found.id: found for found in await RedisRegistry(client, config).processes()}


async def entries(record: StackRecord) -> list[dict[str, object]]:
    """One JSON object a process, in the form of ``baton status --json``."""
    try:
        known, redis = await registered(record), WorkerState.READY
    except StateUnavailable:
        known, redis = {}, WorkerState.DEAD  # one that is silent is dead
    found = [known.get(process.id) for process in record.processes]
    # An id of an earlier process, whose lease has not ended yet, says nothing about this one.
    mine = [f if f and f.pid == p.pid else None for f, p in zip(found, record.processes, strict=True)]
    said = await asyncio.gather(*(_said(*pair, redis) for pair in zip(record.processes, mine, strict=True)))
    return [_entry(*each) for each in zip(record.processes, mine, said, strict=True)]


def _entry(process: LaunchedProcess, found: ProcessRecord | None, said: Said) -> dict[str, object]:
    entry: dict[str, object] = {
        "service": process.service,
        "role": found.role.value if found else process.service,
        "id": process.id,
        "epoch": found.epoch if found else process.epoch,
        "pid": process.pid,
        "address": found.address if found else process.address,
        "http_address": found.http_address if found else process.http_address,
        "state": said.state.value,
        "resident_mb": round(sum(resident_mb(pid) for pid in family(process.pid)), 1),
        "log": process.log,
    }
    if said.degraded is not None:
        entry["degraded"] = said.degraded
    if found is not None and found.card is not None:
        entry["model"] = found.card.model
        entry["tokens_per_second"] = round(found.tokens_per_second, 1)
        entry |= _load(found.stats)
    if found is not None and found.tier is not None:
        entry["tier"] = dataclasses.asdict(found.tier)
    return entry


async def _said(process: LaunchedProcess, found: ProcessRecord | None, redis: WorkerState) -> Said:
    """Of gateways, too, what they do without: no registry tells that. ``redis``: what Redis turned out to be."""
    if not is_alive(process.pid):
        return Said(WorkerState.DEAD)
    if process.service == "redis":
        return Said(redis)
    address = process.http_address if found is None else found.http_address
    if not address:
        return Said(WorkerState.LOADING if found is None else found.state)
    if found is not None and found.role is not Role.GATEWAY:
        return Said(found.state)
    itself = await asyncio.to_thread(_asked_itself, address)
    return itself if found is None else Said(found.state, itself.degraded)


def _asked_itself(http_address: str) -> Said:
    """What a process says of itself, for those that Redis does not know (any more); one that is silent is dead."""
    try:
        with urllib.request.urlopen(f"http://{http_address}/readyz", timeout=PROBE_SECONDS) as answer:
            _, _, degraded = answer.read().decode(errors="replace").partition("degraded: ")
            return Said(WorkerState.READY, degraded.strip() or None)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace").strip()
        return Said(WorkerState(said) if said in set(WorkerState) else WorkerState.LOADING)
    except OSError:
        return Said(WorkerState.DEAD)


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
        if not name.endswith("_blocks") and name not in ("waiting", "running", "tiers")
    }
    return {
        "blocks": blocks,
        "queued": stats.waiting,
        "running": stats.running,
        "tenant_tiers": {load.tier.value: _of_tier(load) for load in stats.tiers},
        "counters": counters,
    }


def _of_tier(load: TierLoad) -> dict[str, int]:
    return {
        "tenants": load.tenants,
        "queued": load.waiting,
        "running": load.running,
        "blocks": load.blocks,
        "preemptions": load.preemptions,
        "backlog_tokens": load.backlog_tokens,
    }


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


def _tier(entry: dict[str, object]) -> str:
    """The cache tier in a few words; nothing for other processes."""
    stats = cast(dict[str, int], entry.get("tier") or {})
    if not stats:
        return ""
    memory, disk = (round(stats[f"{level}_bytes"] / 1e6) for level in ("memory", "disk"))
    return f"tier {memory}+{disk} MB, {stats['hits']} hits, {stats['misses']} misses"


def _requests(entry: dict[str, object]) -> str:
    """Running and queued ones; by tier, too, while there are any."""
    tiers = cast("dict[str, dict[str, int]]", entry["tenant_tiers"])
    by_tier = [f"{name} {load['running']}+{load['queued']}" for name, load in tiers.items() if load["tenants"]]
    return f"{entry['running']}+{entry['queued']}" + (f" ({', '.join(by_tier)})" if by_tier else "")


def as_table(processes: Sequence[dict[str, object]]) -> str:
    rows: list[list[str]] = []
    for entry in processes:
        blocks = cast(dict[str, int], entry.get("blocks") or {})
        load = "/".join(str(blocks[kind]) for kind in ("held", "cached", "free")) if blocks else _tier(entry)
        running = _requests(entry) if "running" in entry else ""
        shown = [str(entry[name]) for name in ("id", "state", "pid", "address", "http_address", "resident_mb")]
        if "degraded" in entry:
            shown[1] += f" ({entry['degraded']})"
        rows.append([*shown, running, load, str(entry.get("tokens_per_second", ""))])
    header = ["process", "state", "pid", "address", "http", "MB", "running+queued", "blocks held/cached/free", "tok/s"]
    return table(header, rows)
