from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from baton.cli.state_dir import LaunchedProcess, StackRecord
from baton.cli.status import as_table, entries, family
from baton.core.types import (
    EngineStats,
    KvFormat,
    ModelCard,
    ProcessRecord,
    Role,
    Tier,
    TierLoad,
    TierStats,
    WorkerState,
)
from baton.state.config import StateConfig
from baton.state.embedded import embedded_server
from baton.state.redis_client import connect
from baton.state.registry import RedisRegistry
from baton.telemetry.http import Endpoints, serve_http
from tests.ports import free_port

PASSWORD = "a-password-for-tests"
ME = os.getpid()
CARD = ModelCard("m", "llama", 64, 32, "hash", KvFormat("float32", 16, 1, 1, 8), ())
TIERS = (
    TierLoad(Tier.GOLD, tenants=2, running=1, blocks=2),
    TierLoad(Tier.BRONZE, tenants=1, waiting=4, preemptions=7),
)
STATS = EngineStats(total_blocks=10, free_blocks=5, held_blocks=2, cached_blocks=3, waiting=4, running=1, tiers=TIERS)
WORKER = ProcessRecord(
    "decode-0", Role.DECODE, "h:1", 77, ME, "h:2", WorkerState.DRAINING, CARD, STATS, tokens_per_second=12.34
)


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    with embedded_server(PASSWORD) as (url, _):
        yield url


def shown(url: str, *processes: LaunchedProcess, registered: tuple[ProcessRecord, ...] = ()) -> list[dict[str, Any]]:
    record = StackRecord(ME, "h:3", "key", "m", url, PASSWORD, "tests", processes, ready=True)

    async def main() -> list[dict[str, Any]]:
        config = StateConfig(url=url, password=PASSWORD, namespace="tests", timeout_ms=1000)
        async with connect(config) as client:
            for one in registered:
                await RedisRegistry(client, config).register(one, 1.0)
            found = await entries(record)
            for one in registered:
                await RedisRegistry(client, config).deregister(one.id, one.epoch)
        return found

    return asyncio.run(main())


def test_a_worker_shows_what_it_registered(redis: str) -> None:
    [entry] = shown(redis, LaunchedProcess("decode", "decode-0", ME, "log"), registered=(WORKER,))
    del entry["resident_mb"], entry["counters"]
    assert entry == {
        "service": "decode",
        "role": "decode",
        "id": "decode-0",
        "epoch": 77,
        "pid": ME,
        "address": "h:1",
        "http_address": "h:2",
        "state": "draining",
        "log": "log",
        "model": "m",
        "tokens_per_second": 12.3,
        "blocks": {"total": 10, "free": 5, "held": 2, "cached": 3},
        "queued": 4,
        "running": 1,
        "tenant_tiers": {
            "gold": {"tenants": 2, "queued": 0, "running": 1, "blocks": 2, "preemptions": 0, "backlog_tokens": 0},
            "bronze": {"tenants": 1, "queued": 4, "running": 0, "blocks": 0, "preemptions": 7, "backlog_tokens": 0},
        },
    }


def test_a_dead_process_is_dead_whatever_its_lease_says(redis: str) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    record = replace(WORKER, pid=process.pid)
    [entry] = shown(redis, LaunchedProcess("decode", "decode-0", process.pid), registered=(record,))
    assert (entry["state"], entry["resident_mb"]) == ("dead", 0.0)


def test_the_lease_of_an_earlier_process_says_nothing_about_this_one(redis: str) -> None:
    earlier = replace(WORKER, pid=1)
    [entry] = shown(redis, LaunchedProcess("decode", "decode-0", ME), registered=(earlier,))
    assert (entry["state"], entry["epoch"]) == ("loading", 0)


@pytest.mark.parametrize(("reason", "state"), [(None, "ready"), ("draining", "draining"), ("busy", "loading")])
def test_without_redis_a_process_is_asked_itself(reason: str | None, state: str) -> None:
    async def main() -> list[dict[str, object]]:
        async with serve_http("127.0.0.1", 0, Endpoints(lambda: b"", lambda: reason)) as http:
            process = LaunchedProcess("planner", "planner-0", ME, "", "h:1", http, 5)
            nowhere = f"redis://127.0.0.1:{free_port()}/0"
            return await entries(StackRecord(ME, "h:3", "key", "m", nowhere, "", "baton", (process,), ready=True))

    [entry] = asyncio.run(main())
    assert (entry["state"], entry["epoch"], entry["address"]) == (state, 5, "h:1")


def test_a_gateway_is_asked_what_it_does_without_though_redis_knows_it(redis: str) -> None:
    async def main() -> dict[str, Any]:
        endpoints = Endpoints(lambda: b"", lambda: None, lambda: "counters are away")
        async with serve_http("127.0.0.1", 0, endpoints) as http:
            gateway = ProcessRecord("gateway-0", Role.GATEWAY, "h:1", 78, ME, http, WorkerState.READY)
            [entry] = await asyncio.to_thread(
                shown, redis, LaunchedProcess("gateway", "gateway-0", ME), registered=(gateway,)
            )
            return entry

    entry = asyncio.run(main())
    assert (entry["state"], entry["degraded"]) == ("ready", "counters are away")
    assert "ready (counters are away)" in as_table([entry])


def test_a_process_that_neither_redis_nor_itself_vouches_for_is_dead() -> None:
    process = LaunchedProcess("planner", "planner-0", ME, "", "h:1", f"127.0.0.1:{free_port()}", 5)
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    record = StackRecord(ME, "h:3", "key", "m", nowhere, "", "baton", (process,), ready=True)
    [entry] = asyncio.run(entries(record))
    assert entry["state"] == "dead"


def test_memory_counts_the_children_of_a_process() -> None:
    waiting = [sys.executable, "-c", "input()"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE) as child:
        assert child.pid in family(ME)
        child.communicate(b"\n")
    assert child.pid not in family(ME)


def test_a_redis_that_does_not_answer_is_dead_though_its_process_lives() -> None:
    redis = LaunchedProcess("redis", "redis-0", ME)
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    [entry] = asyncio.run(entries(StackRecord(ME, "h:3", "key", "m", nowhere, "", "baton", (redis,), ready=True)))
    assert entry["state"] == "dead"


def test_the_table_has_a_row_a_process(redis: str) -> None:
    processes = shown(
        redis,
        LaunchedProcess("redis", "redis-0", ME),
        LaunchedProcess("decode", "decode-0", ME),
        registered=(WORKER,),
    )
    head, _, first, second = as_table(processes).splitlines()
    assert head.split()[:3] == ["process", "state", "pid"]
    assert first.split()[:3] == ["redis-0", "ready", str(ME)]
    assert second.split()[0:2] == ["decode-0", "draining"]
    assert second.split()[-2:] == ["2/3/5", "12.3"]
    assert "1+4 (gold 1+0, bronze 0+4)" in second


def test_the_cache_tier_shows_its_size_hits_and_misses(redis: str) -> None:
    stats = TierStats(memory_blocks=3, memory_bytes=12_000_000, disk_blocks=5, disk_bytes=34_000_000, hits=7, misses=2)
    tier = ProcessRecord("kvtransfer-0", Role.KVTRANSFER, "h:1", 78, ME, "h:2", WorkerState.READY, tier=stats)
    [entry] = shown(redis, LaunchedProcess("kvtransfer", "kvtransfer-0", ME), registered=(tier,))
    assert entry["tier"] == {
        "memory_blocks": 3,
        "memory_bytes": 12_000_000,
        "disk_blocks": 5,
        "disk_bytes": 34_000_000,
        "pinned_blocks": 0,
        "hits": 7,
        "misses": 2,
        "corrupt": 0,
        "disk_errors": 0,
    }
    assert "tier 12+34 MB, 7 hits, 2 misses" in as_table([entry])
