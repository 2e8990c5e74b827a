"""``baton chat`` and ``baton generate``: requests through the gateway, to the terminal or to JSON lines."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

from baton.cli.answers import Answer
from baton.cli.cases import Case
from baton.cli.terminal import Progress
from baton.client import Client
from baton.core.clock import Clock
from baton.core.errors import BatonError, InvalidRequest
from baton.core.types import GenerateChunk, GenerateRequest


def _ignore(chunk: GenerateChunk) -> None:
    del chunk


async def ask(
    client: Client, case: Case, clock: Clock, on_chunk: Callable[[GenerateChunk], None] = _ignore
) -> list[Answer]:
    """Stream one request to its end; one answer a choice. A typed error ends up in the answers that lack an end."""
    answers = [Answer(case.id, index, started=clock.now()) for index in range(case.request.n)]
    try:
        async with aclosing(client.stream(case.request)) as chunks:
            async for chunk in chunks:
                answers[chunk.index].add(chunk, clock.now())
                on_chunk(chunk)
    except BatonError as error:
        for answer in answers:
            if answer.finish is None:
                answer.error = error
    return answers


def print_text(chunk: GenerateChunk) -> None:
    """Show text as it comes (of the first choice only: several at once cannot be read)."""
    if chunk.index == 0:
        print(chunk.text, end="", flush=True)


async def ask_and_print(client: Client, request: GenerateRequest, clock: Clock, *, as_json: bool) -> int:
    """Exit status 0 when every choice came to its end."""
    answers = await ask(client, Case("request", request), clock, _ignore if as_json else print_text)
    if as_json:
        for answer in answers:
            print(json.dumps(answer.as_json(), ensure_ascii=False))
    else:
        print()
    for answer in answers:
        if answer.error is not None:
            print(f"error: {answer.error.reason}: {answer.error.message}", file=sys.stderr)
            return 1
    return 0


async def run_cases(client: Client, cases: list[Case], output: Path, concurrency: int, clock: Clock) -> int:
    """Answer every case that ``output`` does not hold yet, appending each answer as it ends. 0: all came through."""
    done = answered_ids(output)
    todo = [case for case in cases if case.id not in done]
    progress, finished, failed = Progress(output.name), len(cases) - len(todo), 0
    progress(finished, len(cases))
    with output.open("a", encoding="utf-8") as lines:
        async for answers in _concurrently(client, todo, concurrency, clock):
            for answer in answers:
                lines.write(json.dumps(answer.as_json(), ensure_ascii=False) + "\n")
            lines.flush()
            finished += 1
            failed += any(answer.error is not None for answer in answers)
            progress(finished, len(cases))
    return 1 if failed else 0


def answered_ids(output: Path) -> set[str]:
    """Ids of the cases that an earlier, interrupted run has answered without error."""
    if not output.exists():
        return set()
    found: set[str] = set()
    for line in output.read_text(encoding="utf-8").splitlines():
        try:
            answer = json.loads(line)
            if answer["error"] is None:
                found.add(answer["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f"{output}: holds a line that is no answer; name another file", field="output"
            ) from error
    return found


async def _concurrently(
    client: Client, cases: list[Case], concurrency: int, clock: Clock
) -> AsyncIterator[list[Answer]]:
    """At most ``concurrency`` requests at a time; answers in the order in which they end."""
    queue = list(reversed(cases))
    running: set[asyncio.Task[list[Answer]]] = set()
    try:
        while queue or running:
            while queue and len(running) < concurrency:
                running.add(asyncio.create_task(ask(client, queue.pop(), clock)))
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
