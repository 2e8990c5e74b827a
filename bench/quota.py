"""``baton bench quota``: admissions over loopback Redis. Latency of one, throughput of many, memory of a tenant.

* latency: one gateway, one admission after the other: reserve and settle, each a script of its own;
* throughput: several gateway processes, each with many admissions at once, over many tenants. The server's processor
  time a script says how many one core of it answers, whatever the gateways on the same machine take away from it;
* frozen: the server is stopped under load: the longest that a request waited to be admitted without it;
* memory: what the server keeps for a tenant with three keys, all limits on;
* crowd: with all those tenants there, and known to the gateway, latency for 1,000 of them and for all, in turn.

"all limits on" are the eight of a tenant; ``--levels 3`` has them at organisation and key, too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import uvloop

from baton.cli.terminal import say, table
from baton.core.clock import RandomIds, SystemClock
from baton.core.deadline import Deadline
from baton.core.telemetry import SilentMeter
from baton.core.types import Account, Delivered, KeyRecord, Limits, Organisation, QuotaClaim, Tenant
from baton.state.config import StateConfig
from baton.state.embedded import embedded_server
from baton.state.quota.local_share import LocalShare
from baton.state.quota.memory import MemoryQuota
from baton.state.quota.shared import SharedQuota
from baton.state.redis_client import connect
from bench.machine import hardware, versions
from bench.metrics import percentiles
from gateway.admission import Admission, AdmissionPolicy

PASSWORD = "bench"
PATIENT_MS = 30_000.0  # a benchmark of one machine measures, it does not give up
PLENTY = 10**10
ROOMY = Limits(PLENTY, PLENTY, PLENTY, PLENTY, PLENTY, PLENTY, PLENTY, PLENTY)
KEYS = 3  # of a tenant
FEW = 1000  # tenants
LATENCIES = {
    "reserve_ms": "reserve_ms",
    "first_reserve_ms": "reserve_ms, the first of a key",
    "again_reserve_ms": "reserve_ms, not the first",
    "settle_ms": "settle_ms",
    "balances_ms": "balances_ms, read from a grant",
}


@dataclass(frozen=True, slots=True)
class QuotaPlan:
    admissions: int
    tenants: int
    levels: int
    gateways: int
    at_once: int
    seed: int


def account(tenant: int, key: int, levels: int) -> Account:
    """Each tenant is an organisation of its own."""
    above = ROOMY if levels == 3 else Limits()
    name = f"tenant-{tenant}"
    record = KeyRecord(f"key-{tenant}-{key}", name, "", "", limits=above)
    return Account(Organisation(name, above), Tenant(name, name, limits=ROOMY), record)


def state(url: str, budget_ms: float = PATIENT_MS) -> StateConfig:
    return StateConfig(url, PASSWORD, budget_ms, budget_ms, namespace="bench", quota_budget_ms=budget_ms)


@cache
def accounts(plan: QuotaPlan) -> list[Account]:
    """The same objects each time, as a gateway remembers those of its keys."""
    if plan.tenants > FEW:
        few = accounts(replace(plan, tenants=FEW))
        return few + [account(tenant, key, plan.levels) for tenant in range(FEW, plan.tenants) for key in range(KEYS)]
    return [account(tenant, key, plan.levels) for tenant in range(plan.tenants) for key in range(KEYS)]


def claims(plan: QuotaPlan, label: str) -> list[QuotaClaim]:
    draw, payers = random.Random(f"{plan.seed}/{label}"), accounts(plan)
    return [
        QuotaClaim(f"{label}-{number}", label, draw.choice(payers), "model", 1000, 200)
        for number in range(plan.admissions)
    ]


# --- latency ----------------------------------------------------------------------------------------------------------


async def latency(url: str, plan: QuotaPlan) -> dict[str, Any]:
    """Milliseconds of reserve and settle, one after the other, the first eighth apart, which warms up.

    Of reserve also those that are the first of their key, and the others. ``balances``: of reading what a grant tells.
    """
    reserved: list[float] = []
    settled: list[float] = []
    read: list[float] = []
    is_first: list[bool] = []
    keys = set[str]()
    config = state(url)
    async with connect(config) as client:
        quota = SharedQuota(client, config, SystemClock(), LocalShare(lambda: 1).heard)
        for claim in claims(plan, "latency"):
            started = time.perf_counter()
            grant = await quota.reserve(claim)
            granted = time.perf_counter()
            tuple(grant.balances)
            between = time.perf_counter()
            await quota.settle(claim, Delivered(1000, 0, 100))
            settled.append((time.perf_counter() - between) * 1000)
            reserved.append((granted - started) * 1000)
            read.append((between - granted) * 1000)
            is_first.append(claim.account.key.id not in keys)
            keys.add(claim.account.key.id)
    warm = plan.admissions // 8
    apart = list(zip(reserved, is_first, strict=True))[warm:]
    return {
        "reserve_ms": percentiles(reserved[warm:]),
        "first_reserve_ms": percentiles([each for each, first in apart if first]),
        "again_reserve_ms": percentiles([each for each, first in apart if not first]),
        "settle_ms": percentiles(settled[warm:]),
        "balances_ms": percentiles(read[warm:]),
    }


# --- throughput -------------------------------------------------------------------------------------------------------


async def admit_all(url: str, plan: QuotaPlan, name: str) -> float:
    """Seconds in which one gateway reserves and settles all its claims, ``at_once`` of them at a time."""
    config = state(url)
    waiting = iter(claims(plan, name))
    async with connect(config) as client:
        quota = SharedQuota(client, config, SystemClock(), LocalShare(lambda: 1).heard)

        async def worker() -> None:
            for claim in waiting:
                await quota.reserve(claim)
                await quota.settle(claim, Delivered(1000, 0, 100))

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(plan.at_once)))
        return time.perf_counter() - started


def throughput(url: str, pid: int, plan: QuotaPlan) -> dict[str, Any]:
    server = psutil.Process(pid)
    before = _cpu_seconds(server)
    command = [sys.executable, "-m", "bench.quota", "--gateway", url, json.dumps(asdict(plan))]
    gateways = [subprocess.Popen([*command, f"g{number}"], stdout=subprocess.PIPE) for number in range(plan.gateways)]
    seconds = [float(gateway.communicate()[0]) for gateway in gateways]
    used = max(_cpu_seconds(server) - before, 1 / os.sysconf("SC_CLK_TCK"))  # it is counted in ticks
    admissions = plan.gateways * plan.admissions
    return {
        "admissions_per_second": admissions / max(seconds),
        "server_us_per_admission": used / admissions * 1e6,
        "admissions_per_second_of_one_server_core": admissions / used,
        "scripts_per_second_of_one_server_core": 2 * admissions / used,
    }


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


# --- frozen -----------------------------------------------------------------------------------------------------------


async def frozen(url: str, pid: int, plan: QuotaPlan) -> dict[str, Any]:
    """Milliseconds until a request was admitted, for requests that come while the server is stopped."""
    config, clock = state(url, StateConfig().quota_budget_ms), SystemClock()
    waits: list[float] = []
    async with connect(config) as client:
        share = LocalShare(lambda: 1)
        shared, local = SharedQuota(client, config, clock, share.heard), MemoryQuota(clock, terms=share.of)
        admission = Admission(
            shared, local, clock=clock, ids=RandomIds(), meter=SilentMeter(), policy=AdmissionPolicy()
        )

        async def ask(claim: QuotaClaim) -> None:
            started = time.perf_counter()
            async with admission.admitted(claim, Deadline(None)):
                waits.append((time.perf_counter() - started) * 1000)

        gc.collect()
        gc.freeze()  # to go through what the other measurements hold would take as long as the server's silence
        async with admission.running():
            with stopped(pid):
                async with asyncio.TaskGroup() as group:
                    for claim in claims(plan, "frozen")[:1000]:
                        group.create_task(ask(claim))
                        await asyncio.sleep(0.001)
            while admission.degraded or admission.waiting:  # noqa: ASYNC110 (nobody tells when it is over)
                await asyncio.sleep(0.01)
    return {"admitted_after_ms": percentiles(waits), "longest_ms": max(waits)}


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# --- memory and crowd -------------------------------------------------------------------------------------------------


async def tenants(url: str, plan: QuotaPlan) -> dict[str, dict[str, Any]]:
    """``memory`` and ``crowd`` of one gateway that has seen every key before."""
    config = state(url)
    async with connect(config) as client:
        quota = SharedQuota(client, config, SystemClock())
        return {"memory": await memory(client, quota, plan), "crowd": await crowd(quota, plan)}


async def memory(client: Any, quota: SharedQuota, plan: QuotaPlan) -> dict[str, Any]:
    """Bytes that the server uses for each tenant after one admission of each of its keys, its ledger included."""
    await client.execute_command("FLUSHALL", "SYNC")  # and not freed in the background, while we count
    before = (await client.info("memory"))["used_memory"]
    for payer in accounts(plan):
        claim = QuotaClaim(f"m-{payer.key.id}", "memory", payer, "model", 1000, 200)
        await quota.reserve(claim)
        await quota.settle(claim, Delivered(1000, 0, 100))
    after = (await client.info("memory"))["used_memory"]
    return {"bytes_per_tenant": round((after - before) / plan.tenants)}


async def crowd(quota: SharedQuota, plan: QuotaPlan) -> dict[str, Any]:
    """Milliseconds of reserve beside all tenants: among ``FEW`` of them, and among all."""
    crowds = {"few": replace(plan, tenants=min(FEW, plan.tenants)), "all": plan}
    reserved: dict[str, list[float]] = {name: [] for name in crowds}
    for pair in zip(*(claims(part, name) for name, part in crowds.items()), strict=True):
        for name, claim in zip(crowds, pair, strict=True):
            started = time.perf_counter()
            await quota.reserve(claim)
            reserved[name].append((time.perf_counter() - started) * 1000)
            await quota.settle(claim, Delivered(1000, 0, 100))
    warm = plan.admissions // 8
    return {f"{name}_reserve_ms": percentiles(values[warm:]) for name, values in reserved.items()}


# --- the command ------------------------------------------------------------------------------------------------------


def run(plan: QuotaPlan) -> dict[str, Any]:
    with embedded_server(PASSWORD) as (url, pid):
        figures: dict[str, Any] = {"latency": uvloop.run(latency(url, plan))}
        figures["throughput"] = throughput(url, pid, plan)
        figures |= uvloop.run(tenants(url, plan))
        figures["frozen"] = uvloop.run(frozen(url, pid, plan))
    return figures


def show(document: dict[str, Any]) -> str:
    figures = document["figures"]
    latencies, many, beside, plan = figures["latency"], figures["throughput"], figures["crowd"], document["plan"]
    rows = [
        [label, f"{latencies[name]['p50']:.3f} ms", f"{latencies[name]['p99']:.3f} ms"]
        for name, label in LATENCIES.items()
        if latencies[name]  # with few claims each key's may be the first
    ]
    rows += [
        [f"{name}, of {tenants:,} tenants", f"{beside[name]['p50']:.3f} ms", f"{beside[name]['p99']:.3f} ms"]
        for name, tenants in (("few_reserve_ms", min(FEW, plan["tenants"])), ("all_reserve_ms", plan["tenants"]))
    ]
    rows += [
        [name, f"{many[name]:,.0f}", ""]
        for name in (
            "admissions_per_second",
            "admissions_per_second_of_one_server_core",
            "scripts_per_second_of_one_server_core",
        )
    ]
    rows.append(["longest wait with a stopped server", f"{figures['frozen']['longest_ms']:.1f} ms", ""])
    rows.append(["bytes a tenant", f"{figures['memory']['bytes_per_tenant']:,}", ""])
    return table(["", "p50 or value", "p99"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["--gateway"]:
        _, url, plan_text, name = arguments
        print(uvloop.run(admit_all(url, QuotaPlan(**json.loads(plan_text)), name)))
        return 0
    parser = argparse.ArgumentParser(prog="baton bench quota", description=__doc__)
    parser.add_argument("--admissions", type=int, default=4000, help="of each gateway (default %(default)s)")
    parser.add_argument("--tenants", type=int, default=1000, help="with three keys each (default %(default)s)")
    parser.add_argument("--levels", type=int, choices=(1, 3), default=1, help="levels with all limits on")
    parser.add_argument("--gateways", type=int, default=2, help="processes for the throughput (default %(default)s)")
    parser.add_argument("--at-once", type=int, default=64, help="admissions at once of each (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="write the JSON document here")
    given = parser.parse_args(arguments)
    plan = QuotaPlan(given.admissions, given.tenants, given.levels, given.gateways, given.at_once, given.seed)
    document = {
        "command": shlex.join(["baton", "bench", "quota", *arguments]),
        "hardware": hardware(),
        "versions": versions(),
        "load_average": statistics.fmean(os.getloadavg()),
        "plan": asdict(plan),
        "figures": run(plan),
    }
    if given.save is None:
        print(json.dumps(document, indent=1))
    else:
        given.save.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    say(show(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
