"""``baton bench transfer``: the hand-over of a prompt's KV between two workers of this machine, by each transport.

Each worker is what it is in production: a front and an engine process. The prompt is computed before; what is timed is
the hand-over of all its blocks, from the first one's reading to the last one's confirmation: checksums, copies,
verification and both phases of the acknowledgement. In the same run, by turns: one thread's memcpy of as many bytes,
and a bare grpc.aio loop that moves as many between the same two fronts.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shlex
import statistics
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from baton.cli.subcommands import integer
from baton.cli.terminal import say, table
from baton.core.api import PrefillRun
from baton.core.clock import SystemClock
from baton.core.errors import ConfigError
from baton.core.memory import keep_large_buffers
from baton.core.streams import closing
from baton.core.telemetry import SilentMeter
from baton.engine.client import EngineClient, spawn_engine
from baton.engine.config import EngineConfig
from baton.rpc.channels import open_channel
from baton.rpc.kvreceiver import KvReceiverClient
from bench.bare_grpc import BareLoop, bare_loop
from bench.machine import hardware, versions
from bench.metrics import spread
from bench.prefill_runs import ClockedRun, ComputedRun, computed
from bench.random_model import with_context
from bench.shapes import Batch, Range
from bench.transfer_peer import Peer, peer, request_of
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.sender import KvSender
from services.kvtransfer.transport import Outgoing, TransportName
from services.kvtransfer.transports import open_transports

COMMAND = "baton bench transfer"
EPOCH = 1
CHUNKS = 8
MEMCPY, BARE = "memcpy", "bare_grpc"
BARE_MESSAGE_BYTES = 2 << 20  # at which the bare loop is fastest here, of 0.25 to 8 MB


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What to hand over, and how often."""

    model: str
    dtype: str
    tokens: tuple[int, ...]
    repeats: int
    checksums: str
    overlap: bool
    output: Path | None
    command: str


class Memcpy:
    """One thread's copy between two buffers that no cache holds."""

    def __init__(self, size: int) -> None:
        self._source, self._target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    async def __call__(self) -> None:
        np.copyto(self._target, self._source)


class Tail(NamedTuple):
    """Seconds from a prompt's last blocks to its first token, and to the later of that and the last confirmation."""

    token: float
    end: float


class TransferBench:
    def __init__(
        self, engine: EngineClient, step_tokens: int, other: Peer, senders: dict[str, KvSender], bare: BareLoop
    ) -> None:
        """``step_tokens``: how many of a prompt the engine computes in a step, a chunk."""
        self._engine = engine
        self._step_tokens = step_tokens
        self._other = other
        self._senders = senders
        self._bare = bare
        self._clock = SystemClock()

    async def measure(self, tokens: int, repeats: int, message: int) -> dict[str, Any]:
        """GB/s of every way, by turns; the first turn is not counted."""
        layout = self._engine.card.format
        size = tokens * (layout.block_bytes // layout.block_size)
        payload, memcpy = b"\1" * message, Memcpy(size)
        seconds: dict[str, list[float]] = {}
        async with computed(self._engine, tokens) as run:
            for turn in range(repeats + 1):
                ways = {MEMCPY: memcpy, BARE: lambda: self._bare.move(size, payload)}
                taken = {name: await self._timed(way) for name, way in ways.items()}
                for name in self._senders:
                    taken[name] = await self._hand_over(name, run, tokens)
                if turn:
                    for name, each in taken.items():
                        seconds.setdefault(name, []).append(each)
        return _summary(tokens, size, seconds)

    async def overlap(self, name: str, repeats: int) -> dict[str, Any]:
        """What the hand-over of a prompt of ``CHUNKS`` chunks adds to its first token, in time from the last chunk's
        blocks being there: to the later of token and confirmation, and without a hand-over to the token. Beside it, the
        time that handing over one chunk takes by itself, long after it was computed, when caches and cores are free."""
        tails: list[Tail] = []
        unshipped: list[float] = []
        alone: list[float] = []
        tokens = CHUNKS * self._step_tokens
        async with computed(self._engine, self._step_tokens) as chunk:
            for turn in range(repeats):
                alone.append(await self._hand_over(name, chunk, self._step_tokens))
                unshipped.append(await self._without_hand_over(tokens, salt=1 + turn))
                tails.append(await self._streamed(name, tokens, salt=1 + repeats + turn))
        end_ms, beside_ms, token_ms, chunk_ms = (
            1000 * statistics.median(taken)
            for taken in ([tail.end for tail in tails], [tail.token for tail in tails], unshipped, alone)
        )
        return {
            "transport": name,
            "tokens": tokens,
            "chunks": CHUNKS,
            "token_ms": round(token_ms, 3),
            "token_beside_hand_over_ms": round(beside_ms, 3),
            "end_ms": round(end_ms, 3),
            "added_ms": round(end_ms - token_ms, 3),
            "chunk_ms": round(chunk_ms, 3),
            "added_chunk_times": round((end_ms - token_ms) / chunk_ms, 3),
        }

    async def _streamed(self, name: str, tokens: int, *, salt: int) -> Tail:
        """The end of a prompt that is handed over while it is computed."""
        sender = self._senders[name]
        async with self._other.ticket(tokens) as ticket:
            await sender.connect(ticket)
            async with self._engine.prefill(request_of(tokens, salt)) as computing, asyncio.TaskGroup() as group:
                run = ClockedRun(computing, self._clock)
                drawn = group.create_task(self._first_token_at(computing))
                await sender.ship(ticket, run, 0)
                ended = self._clock.now()
        token = drawn.result()
        return Tail(token - run.filled_at, max(ended, token) - run.filled_at)

    async def _without_hand_over(self, tokens: int, *, salt: int) -> float:
        """Seconds from the last blocks to the first token where nothing is handed over."""
        async with self._engine.prefill(request_of(tokens, salt)) as computing, asyncio.TaskGroup() as group:
            run = ClockedRun(computing, self._clock)
            drawn = group.create_task(self._first_token_at(computing))
            async with closing(run.filled()) as filled:
                async for _ in filled:
                    pass
        return drawn.result() - run.filled_at

    async def _first_token_at(self, run: PrefillRun) -> float:
        await run.first_token()
        return self._clock.now()

    async def _hand_over(self, name: str, run: ComputedRun, tokens: int) -> float:
        async with self._other.ticket(tokens) as ticket:
            sender = self._senders[name]
            await sender.connect(ticket)
            return await self._timed(lambda: sender.ship(ticket, run, 0))

    async def _timed(self, way: Callable[[], Awaitable[object]]) -> float:
        began = self._clock.now()
        await way()
        return self._clock.now() - began


def _summary(tokens: int, size: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    rates = {name: spread([size / each / 1e9 for each in taken]) for name, taken in seconds.items()}
    medians = {name: rate["median"] for name, rate in rates.items()}
    ratios = {f"{name}_of_memcpy": medians[name] / medians[MEMCPY] for name in medians if name != MEMCPY}
    if TransportName.TCP in medians:
        ratios["tcp_of_bare_grpc"] = medians[TransportName.TCP] / medians[BARE]
    milliseconds = {name: round(1000 * sorted(taken)[len(taken) // 2], 3) for name, taken in seconds.items()}
    return {
        "tokens": tokens,
        "bytes": size,
        "gb_per_second": rates,
        "median_ms": milliseconds,
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
    }


# --- the two workers --------------------------------------------------------------------------------------------------


async def run(plan: TransferPlan, model: str) -> dict[str, Any]:
    kvtransfer = KvTransferConfig(checksums=plan.checksums)
    config = EngineConfig(model=model, dtype=plan.dtype)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(spawn_engine(_roomy(config, plan), on_progress=say))
        other = await stack.enter_async_context(peer(_roomy(config, plan), kvtransfer))
        senders = senders_of(stack, engine, other, kvtransfer)
        bare = await stack.enter_async_context(bare_loop(other.bare_address, kvtransfer.offers_in_flight))
        bench = TransferBench(engine, config.max_step_tokens, other, senders, bare)
        results: list[dict[str, Any]] = []
        for tokens in plan.tokens:
            results.append(await bench.measure(tokens, plan.repeats, BARE_MESSAGE_BYTES))
            say(_line(results[-1]))
        overlaps = [await bench.overlap(name, plan.repeats) for name in senders] if plan.overlap else []
    return {
        "command": plan.command,
        "hardware": hardware(),
        "versions": versions(),
        "kv_format": str(engine.card.format),
        "kvtransfer": {"checksums": plan.checksums, "max_message_bytes": kvtransfer.max_message_bytes},
        "bare_message_bytes": BARE_MESSAGE_BYTES,
        "hand_overs": results,
        "overlap": overlaps,
    }


def _roomy(config: EngineConfig, plan: TransferPlan) -> EngineConfig:
    longest = max(*plan.tokens, CHUNKS * config.max_step_tokens if plan.overlap else 0)
    return dataclasses.replace(config, kv_blocks=-(-longest // config.block_size) + 64)


def senders_of(
    stack: AsyncExitStack,
    engine: EngineClient,
    other: Peer,
    kvtransfer: KvTransferConfig,
    watched: Callable[[Outgoing], Outgoing] = lambda way: way,
) -> dict[str, KvSender]:
    """One for each transport, which has no other to fall back to, and is used as ``watched`` makes it."""
    channel = open_channel(other.address)
    stack.push_async_callback(channel.close)
    client = KvReceiverClient(channel)
    transports = stack.enter_context(open_transports(engine, "sender", EPOCH, kvtransfer))
    return {
        way.name.value: KvSender(
            dataclasses.replace(transports.hello, transports=(way.name.value,)),
            lambda _: client,
            [watched(way)],
            config=kvtransfer,
            meter=SilentMeter(),
            clock=SystemClock(),
        )
        for way in transports.outgoing
    }


def _line(result: dict[str, Any]) -> str:
    rates = ", ".join(f"{name} {rate['median']:.2f}" for name, rate in result["gb_per_second"].items())
    return f"{result['tokens']} tokens, {result['bytes'] / 1e6:.1f} MB: {rates} GB/s"


def show(document: dict[str, Any]) -> str:
    """The results as a table."""
    rows = [
        [str(each["tokens"]), name, f"{rate['median']:.2f}", f"{each['median_ms'][name]:.2f}"]
        for each in document["hand_overs"]
        for name, rate in each["gb_per_second"].items()
    ]
    return table(("tokens", "way", "GB/s", "ms"), rows)


# --- command line -----------------------------------------------------------------------------------------------------


def plan_of(argv: Sequence[str]) -> TransferPlan:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--model", default="random:smollm2-135m", help="whose KV format it is: a directory, random:CONFIG"
    )
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 (the default) or float32")
    parser.add_argument("--tokens", default="512,2048,8192", help="of the prompts, separated by commas")
    parser.add_argument("--repeats", type=integer(1, 1000), default=9)
    parser.add_argument("--checksums", default="full", help="full (the default) or off")
    parser.add_argument("--overlap", action="store_true", help="also: what handing over adds to a first token")
    parser.add_argument("--output", type=Path, help="JSON file to write; standard output without it")
    arguments = parser.parse_args(argv)
    tokens = tuple(int(each) for each in arguments.tokens.split(",") if each.isdecimal() and int(each))
    if len(tokens) != len(arguments.tokens.split(",")):
        raise ConfigError(f"--tokens must be numbers above 0, separated by commas, got {arguments.tokens}")
    return TransferPlan(
        arguments.model,
        arguments.dtype,
        tokens,
        arguments.repeats,
        arguments.checksums,
        arguments.overlap,
        arguments.output,
        shlex.join([*COMMAND.split(), *argv]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    plan = plan_of(sys.argv[1:] if argv is None else argv)
    keep_large_buffers()
    longest = max(*plan.tokens, CHUNKS * EngineConfig().max_step_tokens)
    with with_context(plan.model, [Batch("transfer", 1, Range(longest, longest), Range(1, 1))]) as model:
        document = uvloop.run(run(plan, model))
    text = json.dumps(document, indent=1)
    if plan.output is None:
        print(text)
    else:
        plan.output.write_text(text + "\n", encoding="utf-8")
    say(show(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
