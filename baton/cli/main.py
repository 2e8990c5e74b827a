"""The ``baton`` command."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.cli import ask, cases, logs, models, state_dir, status, up
from baton.cli.launcher import StackPlan
from baton.cli.state_dir import StateDir
from baton.cli.terminal import say
from baton.client import Client
from baton.core.clock import SystemClock
from baton.core.errors import BatonError, ConfigError
from baton.core.types import ChatMessage, GenerateRequest, Sampling, StopRules


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Errors are one line on standard error, status 2."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser().parse_args(given)
    try:
        return arguments.run(arguments, given)
    except BatonError as error:
        say(f"baton: {error.message}")
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton", description="Serve large language models from split pools.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_up(commands)
    _add_simple(commands)
    _add_chat(commands)
    _add_generate(commands)
    _add_model(commands)
    return parser


def _command(
    commands: Any, name: str, help: str, run: Callable[[argparse.Namespace, Sequence[str]], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, allow_abbrev=False)
    parser.add_argument("--state-dir", type=Path, default=state_dir.DEFAULT, help="where the stack keeps its record")
    parser.set_defaults(run=run)
    return parser


def _add_up(commands: Any) -> None:
    parser = _command(commands, "up", "start every service on this machine", _up)
    parser.add_argument(
        "--model", default=models.DEFAULT_MODEL, help="name, directory, .gguf file, random:CONFIG, fake"
    )
    parser.add_argument("--prefill", type=_count, default=1, metavar="N", help="prefill workers")
    parser.add_argument("--decode", type=_count, default=1, metavar="N", help="decode workers")
    parser.add_argument("--kvtransfer", type=_count, default=1, metavar="N", help="cache directory processes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--config", type=Path, help="TOML file with one table per section")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key")
    parser.add_argument("--detach", action="store_true", help="return when ready, leave a supervisor behind")


def _add_simple(commands: Any) -> None:
    _command(commands, "down", "stop what `up` started", _down)
    parser = _command(commands, "status", "show every process", _status)
    parser.add_argument("--json", action="store_true")
    parser = _command(commands, "logs", "show what processes wrote", _logs)
    parser.add_argument("service", nargs="?", help="a role or a process id; all without it")
    parser.add_argument("-f", "--follow", action="store_true")


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="")
    parser.add_argument("--key", help="API key; the local one without it")
    parser.add_argument("--address", help="gateway address; the local one without it")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--presence-penalty", type=float, default=0.0)
    parser.add_argument("--frequency-penalty", type=float, default=0.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", default=[], help="stop string; may be given several times")
    parser.add_argument("--n", type=int, default=1, help="choices")
    parser.add_argument("--logprobs", type=int, metavar="TOP_N")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--timeout", type=float, metavar="SECONDS")
    parser.add_argument("--json", action="store_true")


def _add_chat(commands: Any) -> None:
    parser = _command(commands, "chat", "ask a question, stream the answer", _chat)
    parser.add_argument("text")
    parser.add_argument("--system", help="system message")
    _add_request_options(parser)


def _add_generate(commands: Any) -> None:
    parser = _command(commands, "generate", "continue text or token ids; run files of cases", _generate)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt-ids", help="token ids, separated by commas")
    what.add_argument("--text")
    what.add_argument("--input", type=Path, help="cases, one JSON object a line")
    parser.add_argument("--output", type=Path, help="answers; appended to, so that a run can be resumed")
    parser.add_argument("--concurrency", type=_count, default=8)
    _add_request_options(parser)


def _add_model(commands: Any) -> None:
    parser = _command(commands, "model", "fetch, convert and list models", _model)
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    fetch = actions.add_parser("fetch", help="download a known model and convert it")
    fetch.add_argument("name")
    fetch.set_defaults(action="fetch")
    convert = actions.add_parser("convert", help="turn a .gguf file into a model directory")
    convert.add_argument("path", type=Path)
    convert.add_argument("--output", type=Path, help="directory to write")
    convert.set_defaults(action="convert")
    listing = actions.add_parser("list", help="known models and whether they are here")
    listing.set_defaults(action="list")


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def _print(text: object) -> int:
    print(text)
    return 0


# --- commands ---------------------------------------------------------------------------------------------------------


def _up(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    where = StateDir(arguments.state_dir)
    if arguments.decode + arguments.prefill < 1:
        raise ConfigError("up: at least one worker is needed, got --prefill 0 --decode 0")
    up.check_settings(arguments.config, arguments.set)
    if arguments.detach:
        return up.detach([word for word in given if word != "--detach"], where)
    plan = StackPlan(
        model=models.resolve(arguments.model),
        prefill=arguments.prefill,
        decode=arguments.decode,
        kvtransfer=arguments.kvtransfer,
        device=arguments.device,
        config=arguments.config,
        flags=tuple(arguments.set),
    )
    return asyncio.run(up.run(plan, where))


def _down(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    return up.down(StateDir(arguments.state_dir))


def _model(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    if arguments.action == "fetch":
        return _print(models.fetched(arguments.name))
    if arguments.action == "convert":
        return _print(models.convert(arguments.path, arguments.output))
    return _print(models.listing())


def _status(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    record = StateDir(arguments.state_dir).read()
    processes = asyncio.run(status.entries(record))
    return _print(json.dumps({"processes": processes}) if arguments.json else status.as_table(processes))


def _logs(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    files = logs.log_files(StateDir(arguments.state_dir).logs, arguments.service)
    for line in logs.follow(files) if arguments.follow else logs.lines(files):
        print(line, flush=arguments.follow)
    return 0


def _chat(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    system = (ChatMessage("system", arguments.system),) if arguments.system else ()
    messages = (*system, ChatMessage("user", arguments.text))
    return _ask(arguments, replace(_request(arguments), messages=messages))


def _generate(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    request = _request(arguments)
    if arguments.input is not None:
        return _cases(arguments, request)
    if arguments.text is not None:
        return _ask(arguments, replace(request, text=arguments.text))
    try:
        ids = tuple(int(part) for part in arguments.prompt_ids.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"--prompt-ids: {error}") from error
    return _ask(arguments, replace(request, prompt_token_ids=ids))


def _cases(arguments: argparse.Namespace, defaults: GenerateRequest) -> int:
    if arguments.output is None:
        raise ConfigError("generate: --input needs --output")
    if not arguments.input.is_file():
        raise ConfigError(f"generate: --input {arguments.input}: no such file")
    listed = list(cases.read_cases(arguments.input, defaults))
    concurrency = max(1, arguments.concurrency)

    async def body(client: Client) -> int:
        return await ask.run_cases(client, listed, arguments.output, concurrency, SystemClock())

    return asyncio.run(_with_client(arguments, body))


def _ask(arguments: argparse.Namespace, request: GenerateRequest) -> int:
    async def body(client: Client) -> int:
        return await ask.ask_and_print(client, request, SystemClock(), as_json=arguments.json)

    return asyncio.run(_with_client(arguments, body))


async def _with_client(arguments: argparse.Namespace, body: Callable[[Client], Awaitable[int]]) -> int:
    record = None if arguments.address and arguments.key else StateDir(arguments.state_dir).read()
    address = arguments.address or (record.gateway if record else "")
    key = arguments.key or (record.key if record else "")
    async with Client(address, key) as client:
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
        stop=StopRules(ignore_eos=arguments.ignore_eos),
        max_tokens=arguments.max_tokens,
        stop_strings=tuple(arguments.stop),
        n=arguments.n,
        logprobs=arguments.logprobs,
        timeout=arguments.timeout,
    )


if __name__ == "__main__":
    sys.exit(main())
