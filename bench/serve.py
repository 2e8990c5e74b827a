"""``baton bench serve``: an open loop of requests through a gateway, by the client library, and what became of them.

Token ids go in; arrivals are a Poisson process or a trace. The requests of a warm-up phase are not judged, and load
goes on until every judged request has ended. Definitions: ``bench/metrics.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import secrets
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from baton.cli import door
from baton.cli.door import Door, find_door
from baton.cli.subcommands import integer
from baton.cli.terminal import say, table
from baton.core.errors import ConfigError
from baton.core.types import ModelInfo, Sampling
from bench.arrivals import read_trace, scaled
from bench.machine import hardware, versions
from bench.metrics import Objectives, Window, judge
from bench.open_loop import Load, Poisson, Share, ShareResult, Trace, run_share

COMMAND = "baton bench serve"
START_SECONDS = 5.0  # until all processes of a run are ready to send
MODEL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to offer, and how to judge it."""

    door: Door
    model: str
    source: Poisson | Trace
    window: Window
    objectives: Objectives
    seed: int
    prompt_seed: int
    sampling: Sampling
    timeout: float
    processes: int
    save: Path | None
    command: str


def run(plan: ServePlan) -> dict[str, Any]:
    """One run: the whole result, ready to be written."""
    info, shares = uvloop.run(_alone(plan)) if plan.processes == 1 else _shared(plan)
    records = sorted((record for share in shares for record in share.records), key=lambda record: record.due)
    return {
        "command": plan.command,
        "client_hardware": hardware(),
        "versions": versions(),
        "model": dataclasses.asdict(info),
        "load": _described(plan.source),
        "window": dataclasses.asdict(plan.window),
        "objectives": dataclasses.asdict(plan.objectives),
        "sampling": dataclasses.asdict(plan.sampling),
        "seed": plan.seed,
        "prompt_seed": plan.prompt_seed,
        "client": {
            "processes": plan.processes,
            "cpu_share_max": round(max(share.cpu_share for share in shares), 3),
            "lag_ms_max": round(max(share.lag_ms for share in shares), 3),
        },
        "result": judge(records, plan.window, plan.objectives),
    }


async def _alone(plan: ServePlan) -> tuple[ModelInfo, list[ShareResult]]:
    info = await _model(plan)
    return info, [await run_share(_load(plan, info), Share(0, 1), time.monotonic())]


def _shared(plan: ServePlan) -> tuple[ModelInfo, list[ShareResult]]:
    """The load split over processes: one Python process follows only so many streams."""
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    info = uvloop.run(_model(plan))
    load, start = _load(plan, info), time.monotonic() + START_SECONDS
    with ProcessPoolExecutor(plan.processes, mp_context=context) as pool:
        shares = [
            pool.submit(run_in_child, load, Share(index, plan.processes), start) for index in range(plan.processes)
        ]
        return info, [share.result() for share in shares]


async def _model(plan: ServePlan) -> ModelInfo:
    async with plan.door.client() as client:
        return await client.model(plan.model, timeout=MODEL_SECONDS)


def _load(plan: ServePlan, info: ModelInfo) -> Load:
    return Load(
        door=plan.door,
        model=info.model,
        vocab_size=info.vocab_size,
        source=plan.source,
        window=plan.window,
        seed=plan.seed,
        prompt_seed=plan.prompt_seed,
        sampling=plan.sampling,
        timeout=plan.timeout,
    )


def run_in_child(load: Load, share: Share, start: float) -> ShareResult:
    """What a process of its own does: see ``run_share``."""
    return uvloop.run(run_share(load, share, start))


def _described(source: Poisson | Trace) -> dict[str, object]:
    if isinstance(source, Poisson):
        return {"arrivals": "poisson", **dataclasses.asdict(source)}
    return {"arrivals": "trace", "requests": len(source.recorded)}


def show(document: dict[str, Any]) -> str:
    """The result as tables."""
    result = document["result"]
    rates = ("requests", "offered_per_second", "completed_per_second", "goodput_per_second", "output_tokens_per_second")
    times = ("ttft_ms", "tpot_ms", "itl_ms", "sent_late_ms")
    columns = ("p50", "p90", "p99", "max")
    rows = [[name, *(str(result[name][column]) for column in columns)] for name in times if result[name] is not None]
    parts = [table(rates, [[str(result[name]) for name in rates]])]
    if rows:
        parts.append(table(("", *columns), rows))
    if result["errors"]:
        parts.append(table(("error", "requests"), [[name, str(n)] for name, n in sorted(result["errors"].items())]))
    return "\n\n".join(parts)


# --- command line -----------------------------------------------------------------------------------------------------


def _positive(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and below 1e9, got {given!r}")
    return value


def _not_negative(given: str) -> float:
    return 0.0 if given == "0" else _positive(given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__, allow_abbrev=False)
    door.add_options(parser, "--gateway")
    arrivals = parser.add_mutually_exclusive_group(required=True)
    arrivals.add_argument("--rate", type=_positive, metavar="REQUESTS/S", help="of a Poisson process")
    arrivals.add_argument("--trace", type=Path, help="a .jsonl or .csv trace (.gz too); its lengths count")
    parser.add_argument("--duration", type=_positive, default=60.0, metavar="SECONDS", help="that are judged")
    parser.add_argument("--warmup", type=_not_negative, default=10.0, metavar="SECONDS", help="before them")
    parser.add_argument("--input", type=integer(1, 1 << 20), default=2048, help="prompt tokens, with --rate")
    parser.add_argument("--output", type=integer(1, 1 << 20), default=256, help="tokens of an answer, with --rate")
    parser.add_argument("--scale", type=_positive, default=1.0, help="the trace's lengths times this")
    parser.add_argument("--speed", type=_positive, default=1.0, help="the trace this many times as fast")
    parser.add_argument("--slo-ttft-ms", type=_positive, help="a good request's first token comes within this")
    parser.add_argument("--slo-tpot-ms", type=_positive, help="a good request's tokens take this on average")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--timeout", type=_positive, default=300.0, metavar="SECONDS", help="for a whole answer")
    parser.add_argument("--seed", type=integer(0, 2**32 - 1), default=1, help="of arrivals")
    parser.add_argument(
        "--prompt-seed",
        type=integer(0, 2**32 - 1),
        help="of prompts; a new one for each run without it, so that no run meets the prefix cache of an earlier one",
    )
    parser.add_argument("--processes", type=integer(1, 64), default=1, help="of the client")
    parser.add_argument("--save", type=Path, metavar="FILE", help="JSON file to write; standard output without it")
    return parser


def plan_of(argv: Sequence[str]) -> ServePlan:
    arguments = _parser().parse_args(argv)
    save: Path | None = arguments.save
    if save is not None and not save.absolute().parent.is_dir():
        raise ConfigError(f"--save {save}: there is no such directory")
    window = Window(arguments.warmup, arguments.warmup + arguments.duration)
    return ServePlan(
        door=find_door(arguments),
        model=arguments.model,
        source=_source(arguments, window),
        window=window,
        objectives=Objectives(arguments.slo_ttft_ms, arguments.slo_tpot_ms),
        seed=arguments.seed,
        prompt_seed=secrets.randbits(32) if arguments.prompt_seed is None else arguments.prompt_seed,
        sampling=Sampling(temperature=arguments.temperature),
        timeout=arguments.timeout,
        processes=arguments.processes,
        save=save,
        command=_command(argv),
    )


def _source(arguments: argparse.Namespace, window: Window) -> Poisson | Trace:
    if arguments.trace is None:
        return Poisson(arguments.rate, arguments.input, arguments.output)
    recorded = scaled(read_trace(arguments.trace), lengths=arguments.scale, speed=arguments.speed)
    if recorded[-1].at < window.end:
        raise ConfigError(
            f"--duration: warm-up and duration must end within the trace, {recorded[-1].at:.0f} seconds at this speed, "
            f"got {window.end:.0f}"
        )
    return Trace(tuple(recorded))


def _command(argv: Sequence[str]) -> str:
    """The command as anyone may read it: without the key."""
    words = list(argv)
    for index, word in enumerate(words):
        if word.startswith("--key="):
            words[index] = "--key=***"
        elif index and words[index - 1] == "--key":
            words[index] = "***"
    return shlex.join([*COMMAND.split(), *words])


def main(argv: Sequence[str] | None = None) -> int:
    plan = plan_of(sys.argv[1:] if argv is None else argv)
    document = run(plan)
    text = json.dumps(document, indent=1)
    if plan.save is None:
        print(text)
    else:
        plan.save.write_text(text + "\n", encoding="utf-8")
    say(show(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
