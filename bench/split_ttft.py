"""Time to the first token of prompts that a decode worker computes itself, and of prompts that a prefill worker
computes and hands over.

``python -m bench.split_ttft`` starts two stacks, one with a decode worker alone, one with a prefill worker besides, and
asks them by turns, one request at a time: new prompts through the gateway, by each transport. So the split path's
figure has everything in it: placement, computing, hand-over, the decode worker's first step.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from baton.cli.ask import ask
from baton.cli.cases import Case
from baton.cli.launcher import StackPlan, launched
from baton.cli.models import ResolvedModel, resolve
from baton.cli.state_dir import StateDir
from baton.cli.subcommands import integer
from baton.cli.terminal import say
from baton.client import Client
from baton.core.clock import SystemClock
from baton.core.errors import BatonError
from baton.core.types import GenerateRequest, PrefillMode, StopRules
from bench.machine import hardware, versions
from bench.measure import Prompts, Shape

COMMAND = "python -m bench.split_ttft"
LOCAL = "local"
TRANSPORTS = ("shm", "tcp")
ANSWER_TOKENS = 2
WAIT_SECONDS = 120.0


@asynccontextmanager
async def stack(model: ResolvedModel, prefill: int, flags: Sequence[str]) -> AsyncIterator[Client]:
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        plan = StackPlan(model, prefill=prefill, decode=1, kvtransfer=0, flags=("gateway.port=0", *flags))
        async with (
            launched(plan, StateDir(Path(directory))) as running,
            Client(running.record.gateway, running.record.key) as client,
        ):
            yield client


async def first_token_ms(client: Client, prompt: Sequence[int], mode: PrefillMode) -> float:
    request = GenerateRequest(
        prompt_token_ids=tuple(prompt),
        max_tokens=ANSWER_TOKENS,
        stop=StopRules(ignore_eos=True),
        timeout=WAIT_SECONDS,
    )
    (answer,) = await ask(client, Case("ttft", request), SystemClock())
    if answer.error is not None:
        raise answer.error
    found = answer.placement.prefill_mode
    if found is not mode or answer.usage.cached_tokens or answer.ttft_ms is None:
        raise BatonError(f"the prompt was to be computed, {mode}: got {found}, {answer.usage}")
    return answer.ttft_ms


async def run(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    model = resolve(arguments.model)
    taken: dict[str, list[float]] = {}
    async with AsyncExitStack() as stacks:
        clients = {LOCAL: await stacks.enter_async_context(stack(model, 0, arguments.flags))}
        for transport in TRANSPORTS:
            flags = ("planner.local_prefill_max_tokens=0", f"kvtransfer.transports={transport}", *arguments.flags)
            clients[transport] = await stacks.enter_async_context(stack(model, 1, flags))
        vocabulary = (await clients[LOCAL].model(model.name)).vocab_size
        shape = Shape("ttft", arguments.repeats + 1, arguments.prompt, ANSWER_TOKENS)
        for turn, prompt in enumerate(Prompts(vocabulary, arguments.seed).draw(shape)):
            for way, client in clients.items():
                mode = PrefillMode.LOCAL if way == LOCAL else PrefillMode.REMOTE
                milliseconds = await first_token_ms(client, prompt, mode)
                if turn:  # the first one opens connections and touches memory
                    taken.setdefault(way, []).append(round(milliseconds, 2))
    medians = {way: statistics.median(each) for way, each in taken.items()}
    return {
        "command": command,
        "hardware": hardware(),
        "versions": versions(),
        "model": arguments.model,
        "prompt_tokens": arguments.prompt,
        "median_ttft_ms": medians,
        "of_local": {way: round(medians[way] / medians[LOCAL], 3) for way in TRANSPORTS},
        "ttft_ms": taken,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompt", type=integer(2, 1 << 20), default=1024, help="tokens")
    parser.add_argument("--repeats", type=integer(1, 1000), default=9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], dest="flags", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--save", type=Path, help="JSON file to write; standard output without it")
    arguments = parser.parse_args(argv)
    document = uvloop.run(run(arguments, shlex.join([*COMMAND.split(), *(sys.argv[1:] if argv is None else argv)])))
    text = json.dumps(document, indent=1)
    if arguments.save is None:
        print(text)
    else:
        arguments.save.write_text(text + "\n", encoding="utf-8")
    say(f"{document['median_ttft_ms']}, of local: {document['of_local']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
