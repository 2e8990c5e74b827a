"""``make demo``: the main job, end to end. Starts everything, asks a question, holds a conversation, asks about a
document, and shows where each was computed."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from baton.cli import models
from baton.cli.answers import Answer
from baton.cli.ask import ask, print_text
from baton.cli.cases import Case
from baton.cli.door import door_of
from baton.cli.launcher import StackPlan, launched
from baton.cli.state_dir import StateDir
from baton.cli.terminal import say, table
from baton.client import Client
from baton.core.clock import Clock, SystemClock
from baton.core.errors import BatonError
from baton.core.types import ChatMessage, GenerateRequest

MAX_TOKENS = 64
FAKE_PROMPT = tuple(range(3, 503))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="baton demo", allow_abbrev=False)
    parser.add_argument("--model", default=models.DEFAULT_MODEL)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="baton-demo-") as directory:
            flags = ("gateway.port=0", *arguments.set)
            plan = StackPlan(models.resolve(arguments.model), flags=flags)
            return asyncio.run(run(plan, StateDir(Path(directory))))
    except BatonError as error:
        say(f"demo: {error.message}")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


async def run(plan: StackPlan, state_dir: StateDir) -> int:
    clock = SystemClock()
    say(f"starting gateway, planner, {plan.prefill} prefill and {plan.decode} decode worker with {plan.model.name}")
    async with launched(plan, state_dir) as stack, door_of(stack.record).client() as client:
        answers = await _questions(client, plan, clock)
    print(_table(answers))
    return 1 if any(answer.error is not None or not answer.token_ids for answer in answers) else 0


async def _questions(client: Client, plan: StackPlan, clock: Clock) -> list[Answer]:
    if plan.model.tokenizer_directory is None:
        request = GenerateRequest(model=plan.model.name, prompt_token_ids=FAKE_PROMPT, max_tokens=MAX_TOKENS)
        return await _show(client, "token ids", request, clock)
    model = plan.model.name
    answers = await _show(client, "short question", _chat(model, ["What is a relay race?"]), clock)
    answers += await _conversation(client, model, clock)
    document = resources.files("baton.cli").joinpath("demo_document.txt").read_text(encoding="utf-8")
    question = f"{document}\n\nHow many keepers were on duty at Skerra Light, and how long were their watches?"
    return answers + await _show(client, "document question", _chat(model, [question]), clock)


async def _conversation(client: Client, model: str, clock: Clock) -> list[Answer]:
    """Three turns; each sends the whole conversation so far, of which the earlier turns are prefix hits."""
    said: list[str] = []
    answers: list[Answer] = []
    for turn, question in enumerate(("Name a planet.", "Is it larger than the Earth?", "Why is that?"), start=1):
        said.append(question)
        answers += await _show(client, f"chat, turn {turn}", _chat(model, said), clock)
        said.append(answers[-1].text)
    return answers


def _chat(model: str, said: Sequence[str]) -> GenerateRequest:
    roles = ("user", "assistant")
    messages = tuple(ChatMessage(roles[index % 2], text) for index, text in enumerate(said))
    return GenerateRequest(model=model, messages=messages, max_tokens=MAX_TOKENS)


async def _show(client: Client, name: str, request: GenerateRequest, clock: Clock) -> list[Answer]:
    asked = request.messages[-1].content if request.messages else f"{len(request.prompt_token_ids or ())} token ids"
    shown = asked if len(asked) < 200 else f"[{len(asked.split())} words] ... {asked.rpartition(chr(10))[2]}"
    print(f"\n--- {name}: {shown}\n")
    answers = await ask(client, Case(name, request), clock, print_text)
    print(flush=True)
    for answer in answers:
        if answer.error is not None:
            say(f"{name}: {answer.error.reason}: {answer.error.message}")
    return answers


def _table(answers: Sequence[Answer]) -> str:
    header = ("request", "prefilled at", "decoded at", "KV bytes", "prompt", "cached", "output", "TTFT ms", "TPOT ms")
    rows: list[list[str]] = []
    for answer in answers:
        place, usage = answer.placement, answer.usage
        where = f"{place.prefill_worker or place.decode_worker} ({place.prefill_mode.value})"
        counts = [f"{n:,}" for n in (place.kv_bytes, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)]
        times = ["-" if value is None else f"{value:.1f}" for value in (answer.ttft_ms, answer.tpot_ms)]
        rows.append([answer.id, where, place.decode_worker, *counts, *times])
    return "\n" + table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
