"""``baton chat`` and ``baton generate``: what their options ask of the gateway."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from baton.cli import ask, cases, door
from baton.cli.door import find_door
from baton.cli.subcommands import Commands, Run, integer, text
from baton.client import Client
from baton.core.clock import SystemClock
from baton.core.errors import ConfigError
from baton.core.types import ChatMessage, GenerateRequest, Sampling, StopRules

MAX_CONCURRENCY = 4096


def add(commands: Commands) -> None:
    parser = _add(commands, "chat", "ask a question, stream the answer", _chat)
    parser.add_argument("text", type=text)
    parser.add_argument("--system", type=text, help="system message")
    parser = _add(commands, "generate", "continue text or token ids; run files of cases", _generate)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt-ids", help="token ids, separated by commas")
    what.add_argument("--text", type=text, help="text to continue")
    what.add_argument("--input", type=Path, help="cases, one JSON object a line; other options are their defaults")
    parser.add_argument("--output", type=Path, help="answers; appended to, so that a run can be resumed")
    parser.add_argument("--concurrency", type=integer(1, MAX_CONCURRENCY), default=8, help="cases at a time")


def _add(commands: Commands, name: str, help: str, run: Run) -> argparse.ArgumentParser:
    parser = commands.add(name, help, run)
    door.add_options(parser, "--address")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of the answer; the gateway's default without it")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, draws greedily")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest; 0: from all")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest that sum to P")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="at least so much of the likeliest one's")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="1: none")
    parser.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="0: none")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="0: none")
    parser.add_argument("--seed", type=int, metavar="N", help="the same draws again; one is made up without it")
    parser.add_argument(
        "--stop", type=text, action="append", default=[], help="stop string; may be given several times"
    )
    parser.add_argument("--n", type=int, default=1, help="choices")
    logprobs = "log-probabilities, and those of the N likeliest beside each"
    parser.add_argument("--logprobs", type=int, metavar="N", help=f"{logprobs}; shown by --json")
    parser.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same of the prompt's tokens")
    parser.add_argument("--min-tokens", type=int, default=0, metavar="N", help="before which no end is drawn")
    parser.add_argument(
        "--stop-token-id", type=int, action="append", default=[], metavar="ID", help="may be given several times"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind the end that the model draws")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="for the whole answer")
    parser.add_argument("--json", action="store_true", help="one answer object a line, at the end")
    return parser


def _chat(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    system = (ChatMessage("system", arguments.system),) if arguments.system else ()
    messages = (*system, ChatMessage("user", arguments.text))
    return _ask(arguments, replace(_request(arguments), messages=messages))


def _generate(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    request = _request(arguments)
    if arguments.input is not None:
        return _cases(arguments, request)
    if arguments.output is not None:
        raise ConfigError("generate: --output goes with --input; redirect the output of a single request")
    if arguments.text is not None:
        return _ask(arguments, replace(request, text=arguments.text))
    return _ask(arguments, replace(request, prompt_token_ids=_prompt_ids(arguments.prompt_ids)))


def _prompt_ids(listed: str) -> tuple[int, ...]:
    if not listed.strip():
        return ()
    try:
        return tuple(int(part) for part in listed.split(","))
    except ValueError as error:
        raise ConfigError(f"generate: --prompt-ids must be integers separated by commas: {error}") from error


def _cases(arguments: argparse.Namespace, defaults: GenerateRequest) -> int:
    if arguments.output is None:
        raise ConfigError("generate: --input needs --output")
    listed = list(cases.read_cases(arguments.input, defaults))

    async def body(client: Client) -> int:
        return await ask.run_cases(client, listed, arguments.output, arguments.concurrency, SystemClock())

    return asyncio.run(_with_client(arguments, body))


def _ask(arguments: argparse.Namespace, request: GenerateRequest) -> int:
    async def body(client: Client) -> int:
        return await ask.ask_and_print(client, request, SystemClock(), as_json=arguments.json)

    return asyncio.run(_with_client(arguments, body))


async def _with_client(arguments: argparse.Namespace, body: Callable[[Client], Awaitable[int]]) -> int:
    async with find_door(arguments).client() as client:
        return await body(client)


def _request(arguments: argparse.Namespace) -> GenerateRequest:
    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
    )
    return GenerateRequest(
        model=arguments.model,
        sampling=sampling,
        seed=arguments.seed,
        stop=StopRules(
            min_tokens=arguments.min_tokens,
            stop_token_ids=tuple(arguments.stop_token_id),
            ignore_eos=arguments.ignore_eos,
        ),
        max_tokens=arguments.max_tokens,
        stop_strings=tuple(arguments.stop),
        n=arguments.n,
        logprobs=arguments.logprobs,
        prompt_logprobs=arguments.prompt_logprobs,
        timeout=arguments.timeout,
    )
