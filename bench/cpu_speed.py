"""Baton on the CPU beside Hugging Face transformers, same model directory, bfloat16, same threads, taking turns.

``python -m bench.cpu_speed`` starts the peer and a stack of one all-local worker, alternates them over every shape and
prints medians, spreads and ratios; then the split path, and the bare engine (what gateway and planner add). The result
is one JSON document with the command, the hardware and a digest of all ids that Baton produced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from baton.cli import models
from baton.cli.launcher import StackPlan, launched
from baton.cli.models import ResolvedModel
from baton.cli.state_dir import StateDir
from baton.cli.terminal import say, table
from baton.client import Client
from baton.core.clock import SystemClock
from baton.core.types import StopRules, TokenRequest
from baton.engine.client import spawn_engine
from baton.engine.config import EngineConfig
from baton.engine.weights.source import load_spec
from bench.bandwidth import read_bandwidth
from bench.machine import hardware
from bench.measure import Digest, Prompts, Shape, timed
from bench.metrics import spread

SHAPES = (Shape("decode 64/128", 1, 64, 128), Shape("prefill 1024", 1, 1024, 1), Shape("16 x 128/64", 16, 128, 64))
OVERHEAD = Shape("overhead 64/64", 1, 64, 64)
OVERHEAD_REPEATS = 15  # at least: a few milliseconds are to be told apart on machines that vary by more


class Peer:
    """A transformers process that answers timed jobs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.versions = self._read()["versions"]

    def run(self, prompts: Sequence[Sequence[int]], output: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": output}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        assert all(len(ids) == output for ids in answer["tokens"])
        return answer["seconds"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the transformers peer ended; is the bench extra installed?")
        return json.loads(line)


@contextmanager
def peer(directory: str, threads: int) -> Iterator[Peer]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.transformers_peer", directory, str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": str(threads)},
    )
    try:
        yield Peer(process)
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def stack(model: ResolvedModel, prefill: int, flags: Sequence[str]) -> AsyncIterator[Client]:
    settings = ("gateway.port=0", "engine.dtype=bfloat16", *flags)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        plan = StackPlan(model, prefill=prefill, decode=1, flags=settings)
        async with (
            launched(plan, StateDir(Path(directory))) as running,
            Client(running.record.gateway, running.record.key) as client,
        ):
            yield client


async def compare(model: ResolvedModel, repeats: int, prompts: Prompts, threads: int, digest: Digest) -> dict[str, Any]:
    """Both systems loaded, one working at a time: peer, Baton, peer, Baton ... over every shape."""
    found: dict[str, Any] = {}
    with peer(model.engine_model, threads) as other:
        async with stack(model, 0, [f"engine.threads={threads}"]) as client:
            for shape in SHAPES:
                theirs: list[float] = []
                ours: list[float] = []
                for repeat in range(repeats + 1):
                    peer_seconds = other.run(prompts.draw(shape), shape.output)
                    seconds, answers = await timed(client, model.name, prompts.draw(shape), shape.output)
                    for answer in answers:
                        digest.add(answer.token_ids)
                    if repeat:  # the first round warms both
                        theirs.append(shape.tokens_per_second(peer_seconds))
                        ours.append(shape.tokens_per_second(seconds))
                ratio = statistics.median(ours) / statistics.median(theirs)
                found[shape.name] = {"baton": spread(ours), "transformers": spread(theirs), "ratio": round(ratio, 3)}
                say(f"{shape.name}: {found[shape.name]}")
            found["peer_versions"] = other.versions
    return found


async def split(model: ResolvedModel, repeats: int, prompts: Prompts, threads: int) -> dict[str, Any]:
    """The same shapes with the prompt computed in one process and the answer in another, on the same two cores."""
    found: dict[str, Any] = {}
    flags = [f"engine.threads={threads}", "planner.local_prefill_max_tokens=0"]
    async with stack(model, 1, flags) as client:
        for shape in SHAPES:
            rates: list[float] = []
            for repeat in range(repeats + 1):
                seconds, _ = await timed(client, model.name, prompts.draw(shape), shape.output)
                if repeat:
                    rates.append(shape.tokens_per_second(seconds))
            found[shape.name] = spread(rates)
    return found


async def overhead(model: ResolvedModel, repeats: int, prompts: Prompts, threads: int) -> dict[str, Any]:
    """TTFT and TPOT of the bare engine and of the same engine behind planner, worker and gateway, in turns.

    What is added is the median of the differences inside a turn: the machine changes more between turns than within.
    """
    config = EngineConfig(model=model.engine_model, threads=threads)
    bare: list[tuple[float, float]] = []
    served: list[tuple[float, float]] = []
    async with spawn_engine(config) as engine, stack(model, 0, [f"engine.threads={threads}"]) as client:
        for repeat in range(repeats + 1):
            pair = await _bare_times(engine, tuple(prompts.draw(OVERHEAD)[0]), OVERHEAD.output, f"bare-{repeat}")
            _, (answer,) = await timed(client, model.name, prompts.draw(OVERHEAD), OVERHEAD.output)
            if repeat:
                bare.append(pair)
                served.append((answer.ttft_ms or 0.0, answer.tpot_ms or 0.0))
    turns = list(zip(served, bare, strict=True))
    return {
        "bare": {"ttft_ms": spread([t for t, _ in bare]), "tpot_ms": spread([p for _, p in bare])},
        "served": {"ttft_ms": spread([t for t, _ in served]), "tpot_ms": spread([p for _, p in served])},
        "ttft_added_ms": round(statistics.median(ours[0] - alone[0] for ours, alone in turns), 3),
        "tpot_ratio": round(statistics.median(ours[1] / alone[1] for ours, alone in turns), 4),
    }


async def _bare_times(engine: Any, prompt: tuple[int, ...], output: int, name: str) -> tuple[float, float]:
    clock = SystemClock()
    request = TokenRequest(name, prompt, stop=StopRules(max_tokens=output, ignore_eos=True))
    started, times = clock.now(), list[float]()
    async with engine.reserve(request) as reservation:
        async for chunk in reservation.decode(None):
            times += [clock.now()] * len(chunk.token_ids)
    return 1000 * (times[0] - started), 1000 * (times[-1] - times[0]) / (len(times) - 1)


async def run(model: ResolvedModel, repeats: int, threads: int, seed: int) -> dict[str, Any]:
    """Everything, as one JSON document; its command repeats it."""
    spec = load_spec(model.engine_model)
    prompts, digest = Prompts(spec.vocab_size, seed), Digest()
    bandwidth = read_bandwidth(threads)
    return {
        "command": f"baton bench cpu --model {model.name} --repeats {repeats} --threads {threads} --seed {seed}",
        "hardware": hardware(),
        "model": model.name,
        "read_gb_per_second": bandwidth,
        "against_transformers": await compare(model, repeats, prompts, threads, digest),
        "split": await split(model, repeats, prompts, threads),
        "overhead": await overhead(model, max(repeats, OVERHEAD_REPEATS), prompts, threads),
        "digest": digest.hex(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_speed", allow_abbrev=False)
    parser.add_argument("--model", default=models.DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args(argv)
    result = asyncio.run(run(models.resolve(arguments.model), arguments.repeats, arguments.threads, arguments.seed))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    rows = [
        [name, f"{r['baton']['median']:.1f}", f"{r['transformers']['median']:.1f}", f"{r['ratio']:.2f}"]
        for name, r in result["against_transformers"].items()
        if isinstance(r, dict)
    ]
    print(table(("shape", "baton tok/s", "transformers tok/s", "ratio"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
