"""``baton bench``: the benchmarks, each with a command line of its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from baton.cli.subcommands import Commands
from baton.core.errors import ConfigError

# By name: the module, which no other command needs and so is imported late, and what it measures.
BENCHMARKS = {
    "cpu": ("bench.cpu_speed", "the CPU engine beside transformers (needs the bench extra)"),
    "offline": ("bench.offline", "the bare engine over shapes: tokens a second, step time, time to the first token"),
    "quota": ("bench.quota", "admissions over loopback Redis: latency, throughput, memory, a stopped server"),
    "serve": ("bench.serve", "an open loop of requests through a gateway: TTFT, TPOT, ITL, goodput"),
    "transfer": ("bench.transfer", "the hand-over of KV between two workers, by each transport: GB/s beside memcpy"),
}


def add(commands: Commands) -> None:
    parser = commands.add("bench", "run a benchmark, JSON out", _run)
    listed = "; ".join(f"{name}: {what}" for name, (_, what) in BENCHMARKS.items())
    parser.add_argument("benchmark", help=listed)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the benchmark; `baton bench NAME --help`")


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    if arguments.benchmark not in BENCHMARKS:
        raise ConfigError(f"bench: must be one of {', '.join(BENCHMARKS)}, got {arguments.benchmark!r}")
    module, _what = BENCHMARKS[arguments.benchmark]
    return import_module(module).main(arguments.arguments)
