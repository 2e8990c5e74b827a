"""``baton chat`` and ``baton generate``: requests through the gateway, to the terminal or to JSON lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from baton.cli import answer_file
from baton.cli.answers import Answer
from baton.cli.cases import Case
from baton.cli.terminal import Progress, printable, say
from baton.client import Client
from baton.core.clock import Clock, RandomIds
from baton.core.errors import BatonError, QuotaExceeded
from baton.core.streams import closing
from baton.core.types import GenerateChunk, GenerateRequest


def _ignore(chunk: GenerateChunk) -> None:
    del chunk


async def ask(
    client: Client, case: Case, clock: Clock, on_chunk: Callable[[GenerateChunk], None] = _ignore
) -> list[Answer]:
    """Stream one request to its end; one answer a choice. A typed error ends up in the answers that lack an end."""
    request = replace(case.request, request_id=case.request.request_id or RandomIds().request_id())
    choices = range(max(1, request.n))
    answers = [Answer(case.id, index, request_id=request.request_id, started=clock.now()) for index in choices]
    try:
        async with aclosing(client.stream(request)) as chunks:
            async for chunk in chunks:
                answers[chunk.index].add(chunk, clock.now())
                on_chunk(chunk)
    except BatonError as error:
        for answer in answers:
            if answer.finish is None:
                answer.error = error
    return answers


def print_text(chunk: GenerateChunk) -> None:
    """Show the first choice's text as it comes; several at once cannot be read."""
    if chunk.index == 0:
        print(printable(chunk.text), end="", flush=True)


async def ask_and_print(client: Client, request: GenerateRequest, clock: Clock, *, as_json: bool) -> int:
    """Exit status 0 when every choice came to its end."""
    answers = await ask(client, Case("request", request), clock, _ignore if as_json else print_text)
    if as_json:
        for answer in answers:
            print(json.dumps(answer.as_json(), ensure_ascii=False))
    else:
        _print_rest(answers)
    failed = next((answer.error for answer in answers if answer.error is not None), None)
    if failed is not None:
        say(f"error: {failed.reason}: {failed.message}")
        if isinstance(failed, QuotaExceeded):
            say(f"more: baton quota explain {answers[0].request_id} --tenant ORGANIZATION/TENANT")
        return 1
    return 0


def _print_rest(answers: Sequence[Answer]) -> None:
    """What ``print_text`` did not show: ids where there is no text, and the other choices."""
    for answer in answers:
        shown = answer.text if answer.text or not answer.token_ids else ",".join(map(str, answer.token_ids))
        if answer.error and not shown:  # is told once, for all choices
            continue
        if answer.index:
            print(f"\n--- choice {answer.index}\n\n{printable(shown)}")
        elif answer.text:
            print()
        elif shown:
            print(shown)


async def run_cases(client: Client, cases: list[Case], output: Path, concurrency: int, clock: Clock) -> int:
    """Answer every case that ``output`` does not hold yet, appending each answer as it ends. 0: all came through."""
    todo = answer_file.take_over(output, cases)
    progress, finished = Progress(output.name), len(cases) - len(todo)
    failed: list[Answer] = []
    progress(finished, len(cases))
    async with closing(_concurrently(client, todo, concurrency, clock)) as ended:
        async for answers in ended:
            answer_file.append(output, answers)
            finished += 1
            failed += [answer for answer in answers if answer.error is not None][:1]
            progress(finished, len(cases))
    if failed:
        last = failed[-1]
        reason = f"{last.error.reason}: {last.error.message}" if last.error else ""
        say(f"{len(failed)} of {len(cases)} cases failed, the last one {last.id}: {reason}")
    return 1 if failed else 0


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
