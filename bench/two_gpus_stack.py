"""Stacks on the GPUs of ``bench.two_gpus``, started as users start them, and load on them from processes of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.cli.door import Door
from baton.cli.launcher import Stack, StackPlan, launched
from baton.cli.models import resolve
from baton.cli.state_dir import StateDir
from baton.client import Client
from baton.core.errors import BatonError
from baton.core.types import GenerateRequest, ModelInfo, Role, Sampling, StopRules
from bench.metrics import Objectives, Record, Timeline, Window, judge, percentiles
from bench.open_loop import Load, Poisson, Share
from bench.serve import run_in_child

LOOSE, STRICT = Objectives(500.0, 20.0), Objectives(300.0, 8.0)
START_SECONDS = 0.5  # from the word to the beginning of a load
REQUEST_SECONDS = 120.0
SETTLE_SECONDS = 0.6  # two heartbeats: then the registry has the engines' newest figures
THIRDS = 3
_NOISE = re.compile(r"^\w+_(bucket|created)\b")  # of what /metrics says: too much for a result
COUNTERS = ("steps", "prompt_tokens_computed", "tokens_generated", "preemptions")
SECONDS = ("host_seconds", "device_seconds", "device_idle_seconds")


@dataclass(frozen=True, slots=True)
class Site:
    """Where stacks run: which device, on a GPU which ones, which model, and settings that all of them have."""

    device: str
    gpus: tuple[str, ...]
    model: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests of one shape, at a rate a second."""

    rate: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class RunningStack:
    stack: Stack
    client: Client
    info: ModelInfo

    @property
    def door(self) -> Door:
        return Door(self.stack.record.gateway, self.stack.record.key)

    async def engines(self) -> dict[str, dict[str, float]]:
        """Counters of each worker's engine, as of its last heartbeat."""
        await asyncio.sleep(SETTLE_SECONDS)
        workers = [r for r in await self.stack.processes() if r.role in (Role.PREFILL, Role.DECODE)]
        return {r.id: {name: getattr(r.stats, name) for name in (*COUNTERS, *SECONDS)} for r in workers}

    async def series(self, *names: str) -> dict[str, list[str]]:
        """Lines of each worker's /metrics that begin with one of ``names``."""
        workers = [r for r in await self.stack.processes() if r.role in (Role.PREFILL, Role.DECODE)]
        found: dict[str, list[str]] = {}
        for worker in workers:
            lines = (await _fetched(worker.http_address, "/metrics")).splitlines()
            found[worker.id] = [line for line in lines if line.startswith(names) and not _NOISE.search(line)]
        return found


@asynccontextmanager
async def running_stack(site: Site, *flags: str, prefill: int = 1, decode: int = 1) -> AsyncIterator[RunningStack]:
    with tempfile.TemporaryDirectory(prefix="baton-two-gpus-") as directory:
        plan = StackPlan(
            resolve(site.model),
            prefill=prefill,
            decode=decode,
            kvtransfer=0,
            device=site.device,
            gpus=site.gpus,
            flags=("gateway.port=0", *site.flags, *flags),
        )
        async with AsyncExitStack() as resources:
            stack = await resources.enter_async_context(launched(plan, StateDir(Path(directory))))
            client = await resources.enter_async_context(Client(stack.record.gateway, stack.record.key))
            yield RunningStack(stack, client, await client.model(timeout=REQUEST_SECONDS))


async def _fetched(address: str, path: str) -> str:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        return (await reader.read()).decode("utf-8", "replace")
    finally:
        writer.close()


class Clients:
    """Processes that offer load. They stay: starting them takes longer than a rate may wait."""

    def __init__(self, pool: ProcessPoolExecutor, count: int) -> None:
        self._pool = pool
        self._count = count

    async def offer(self, stack: RunningStack, shape: Shape, window: Window, seed: int) -> list[Record]:
        """All requests of an open loop with arrivals and prompts of ``seed``; see ``bench.open_loop``."""
        load = Load(
            door=stack.door,
            model=stack.info.model,
            vocab_size=stack.info.vocab_size,
            source=Poisson(shape.rate, shape.prompt, shape.output),
            window=window,
            seed=seed,
            prompt_seed=seed,
            sampling=Sampling(),
            timeout=REQUEST_SECONDS,
        )
        start, loop = time.monotonic() + START_SECONDS, asyncio.get_running_loop()
        shares = [
            loop.run_in_executor(self._pool, run_in_child, load, Share(index, self._count), start)
            for index in range(self._count)
        ]
        found = [record for share in await asyncio.gather(*shares) for record in share.records]
        return sorted(found, key=lambda record: record.due)


@asynccontextmanager
async def clients(count: int) -> AsyncIterator[Clients]:
    """Started, and with all that they need imported, when the block begins."""
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(pool, time.sleep, START_SECONDS) for _ in range(count)))
        yield Clients(pool, count)


async def rate_row(
    clients: Clients, stack: RunningStack, shape: Shape, *, warm_up: float, seconds: float, seed: int
) -> dict[str, Any]:
    """One rate's figures: requests due after the warm-up, for so many seconds, by both pairs of objectives."""
    before = await stack.engines()
    window = Window(warm_up, warm_up + seconds)
    began = time.monotonic()
    records = await clients.offer(stack, shape, window, seed)
    lasted = time.monotonic() - began
    found = judge(records, window, LOOSE)
    offered = sum(window.holds(record.due) for record in records)
    return {
        "rate": shape.rate,
        "prompt": shape.prompt,
        "output": shape.output,
        "seconds": seconds,
        "offered": offered,
        "loose_share": _share(records, window, LOOSE),
        "strict_share": _share(records, window, STRICT),
        "loose_share_by_third": [_share(records, third, LOOSE) for third in _thirds(window)],
        "strict_share_by_third": [_share(records, third, STRICT) for third in _thirds(window)],
        "loose_goodput_per_second": found.pop("goodput_per_second"),
        "strict_goodput_per_second": judge(records, window, STRICT)["goodput_per_second"],
        **found,
        "first_to_second_token_ms": percentiles(_second_gaps(records, window)),
        "whole_run_seconds": round(lasted, 1),
        "engines": _differences(before, await stack.engines()),
    }


def _second_gaps(records: Sequence[Record], window: Window) -> list[float]:
    """Milliseconds from each first token to the second one, which after a hand-over is the decode worker's first."""
    lines = [record.timeline for record in records if window.holds(record.due)]
    return [1000 * line.gaps[0] for line in lines if line.gaps]


def _share(records: Sequence[Record], window: Window, objectives: Objectives) -> float | None:
    """Of the requests offered inside the window, those that met them; None without any."""
    counted = [record for record in records if window.holds(record.due)]
    return round(sum(map(objectives.met, counted)) / len(counted), 4) if counted else None


def _thirds(window: Window) -> list[Window]:
    size = window.seconds / THIRDS
    return [Window(window.start + index * size, window.start + (index + 1) * size) for index in range(THIRDS)]


def _differences(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    return {
        worker: {name: round(value - before[worker][name], 3) for name, value in figures.items()}
        for worker, figures in after.items()
        if worker in before
    }


async def followed(stack: RunningStack, prompt: Sequence[int], output: int) -> tuple[Timeline, tuple[int, ...]]:
    """One greedy answer: when its tokens came, and which they are. RuntimeError when it fails."""
    stop = StopRules(ignore_eos=True)
    request = GenerateRequest(
        prompt_token_ids=tuple(prompt), max_tokens=output, stop=stop, seed=1, timeout=REQUEST_SECONDS
    )
    line, ids = Timeline(time.monotonic()), list[int]()
    try:
        async with aclosing(stack.client.stream(request)) as chunks:
            async for chunk in chunks:
                line.add(time.monotonic(), len(chunk.token_ids))
                ids += chunk.token_ids
    except BatonError as error:
        raise RuntimeError(f"a request failed: {error.reason}: {error.message}") from error
    return line, tuple(ids)


async def idle_row(stack: RunningStack, prompts: Sequence[Sequence[int]], output: int) -> dict[str, Any]:
    """Requests one after another: what the path takes when nothing else is to be done."""
    lines = [(await followed(stack, prompt, output))[0] for prompt in prompts]
    steps = [1000 * gap for line in lines for gap in line.gaps[1:]]
    seconds = [1000 * line.gaps[0] for line in lines if line.gaps]
    return {
        "prompt": len(prompts[0]),
        "requests": len(lines),
        "ttft_ms": percentiles([1000 * line.ttft for line in lines if line.ttft is not None]),
        "first_to_second_token_ms": percentiles(seconds),
        "step_ms": percentiles(steps),
    }
