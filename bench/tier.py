"""Time to the first token of a long shared prefix: computed, and fetched from the cache tier after the worker lost it.

``python -m bench.tier`` starts a stack of its own with one decode worker, whose KV cache holds little more than one
prompt, and the cache tier. Each round asks a prompt that nobody has seen, waits until the tier has its blocks, drives
it out of the worker's cache with other prompts, and asks it again. The answers must be the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import uvloop

from baton.cli.answers import Answer
from baton.cli.ask import ask
from baton.cli.cases import Case
from baton.cli.launcher import Stack, StackPlan, launched
from baton.cli.models import resolve
from baton.cli.state_dir import StateDir
from baton.cli.terminal import say
from baton.client import Client
from baton.core.clock import SystemClock
from baton.core.errors import BatonError
from baton.core.types import GenerateRequest, ProcessRecord, TierStats
from bench.machine import hardware, versions

BLOCK = 16
WAIT_SECONDS = 60.0
POLL_SECONDS = 0.05
QUIET_LOOKS = 80  # longer than a worker takes to see that it is idle and the tier to tell its size
LEVELS = {"memory": 4096, "disk": 0}  # tier_memory_mb with which a fetch reads from this level


class Bench:
    """One running stack and what is asked of it."""

    def __init__(self, stack: Stack, client: Client, prompt_tokens: int, seed: int) -> None:
        self._stack = stack
        self._client = client
        self._length = prompt_tokens
        self._random = random.Random(seed)

    async def round(self) -> dict[str, float]:
        """Milliseconds to the first token: computed, and fetched."""
        prompt = self._prompt(self._length)
        cold = await self._ask(prompt)
        assert cold.usage.cached_tokens == 0
        await self._until_offloaded()
        for _ in range(2):
            await self._ask(self._prompt(self._length))
        await self._until_offloaded()
        fetched = await self._ask(prompt)
        if fetched.token_ids != cold.token_ids:
            raise BatonError("the fetched prefix led to other tokens than the computed one")
        if fetched.usage.cached_tokens < (self._length - 1) // BLOCK * BLOCK:
            raise BatonError(f"only {fetched.usage.cached_tokens} tokens were fetched")
        assert cold.ttft_ms is not None and fetched.ttft_ms is not None
        return {"computed_ms": cold.ttft_ms, "fetched_ms": fetched.ttft_ms}

    def _prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(100, 20_000) for _ in range(length))

    async def _ask(self, prompt: Sequence[int]) -> Answer:
        request = GenerateRequest(prompt_token_ids=tuple(prompt), max_tokens=4, timeout=WAIT_SECONDS)
        (answer,) = await ask(self._client, Case("tier", request), SystemClock())
        if answer.error is not None:
            raise answer.error
        return answer

    async def _until_offloaded(self) -> None:
        """Until the tier has not grown over several looks."""
        last, quiet = TierStats(), 0
        async with asyncio.timeout(WAIT_SECONDS):
            while quiet < QUIET_LOOKS:
                now = next((r.tier for r in await self._stack.processes() if r.tier is not None), TierStats())
                same = (now.memory_blocks, now.disk_blocks) == (last.memory_blocks, last.disk_blocks)
                quiet, last = quiet + 1 if same else 0, now
                await asyncio.sleep(POLL_SECONDS)


async def measure(options: argparse.Namespace, level: str) -> dict[str, object]:
    """Rounds with the tier's blocks in this level."""
    blocks = 2 * -(-options.prompt // BLOCK)
    flags = ["gateway.port=0", f"engine.kv_blocks={blocks}", "planner.local_prefill_max_tokens=1000000"]
    flags += [f"kvtransfer.tier_memory_mb={LEVELS[level]}", "kvtransfer.tier_offload_mb_per_second=1000"]
    flags += [f"kvtransfer.tier_disk_mb={options.disk_mb}", f"engine.block_size={BLOCK}", *options.set]
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        plan = StackPlan(resolve(options.model), prefill=0, decode=1, kvtransfer=1, flags=tuple(flags))
        async with (
            launched(plan, StateDir(Path(directory))) as stack,
            Client(stack.record.gateway, stack.record.key) as client,
        ):
            bench = Bench(stack, client, options.prompt, options.seed)
            await bench.round()  # warms every path, and lets the worker learn its rates
            rounds = [await bench.round() for _ in range(options.repeats)]
            worker = next(r for r in await stack.processes() if r.card is not None)
            rate = await asyncio.to_thread(fetch_rate, worker.http_address)
    return summary(rounds, worker, options.prompt) | {"fetch_mb_per_second": rate}


def fetch_rate(http_address: str) -> float:
    """Of all the worker's fetches: from the first call to the last verified block."""
    with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=WAIT_SECONDS) as response:
        lines = [line.rsplit(" ", 1) for line in response.read().decode().splitlines() if not line.startswith("#")]
    series = {name: float(value) for name, value in lines}
    seconds = series["baton_tier_fetch_seconds_sum"]
    return round(series["baton_tier_fetched_bytes_total"] / seconds / 1e6, 1) if seconds else 0.0


def summary(rounds: Sequence[dict[str, float]], worker: ProcessRecord, prompt_tokens: int) -> dict[str, object]:
    """Medians, every repeat, and what was fetched in each."""
    assert worker.card is not None
    computed, fetched = (statistics.median(r[key] for r in rounds) for key in ("computed_ms", "fetched_ms"))
    size = prompt_tokens // BLOCK * worker.card.format.block_bytes
    return {
        "computed_ttft_ms": round(computed, 1),
        "fetched_ttft_ms": round(fetched, 1),
        "speed_up": round(computed / fetched, 2),
        "prefix_mb": round(size / 1e6, 2),
        "rounds": [{key: round(value, 2) for key, value in each.items()} for each in rounds],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tier", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prefix")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--disk-mb", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args(arguments)
    result: dict[str, object] = {"model": options.model, "prompt_tokens": options.prompt}
    for level in LEVELS:
        result[level] = uvloop.run(measure(options, level))
        say(f"{level}: {json.dumps(result[level])}")
    result |= {"hardware": hardware(), "versions": versions(), "settings": options.set}
    text = json.dumps(result, indent=1)
    if options.save is not None:
        options.save.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
