"""README's guide to tenants, keys and quotas, command by command, on a stack as ``baton up`` starts it."""

from __future__ import annotations

import argparse
import io
import json
import re
import shlex
import signal
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.cli.main import build_parser, main
from tests.baton_command import Baton, stack

README = Path(__file__).parents[2] / "README.md"
SECTION = "## Tenants, keys and quotas"
MODEL_OF_README, MODEL = "smollm2-135m-instruct", "fake"
OTHER_COMMANDS = {"model", "bench"}  # with actions; all others that have any are administrators'


def guide() -> list[str]:
    section = README.read_text(encoding="utf-8").partition(SECTION)[2].partition("\n## ")[0]
    blocks = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


@dataclass
class Reader:
    """Somebody who types the guide's lines and fills in what it leaves open from what was printed before."""

    baton: Baton
    key: str = ""
    printed: str = ""
    outputs: dict[str, str] = field(default_factory=dict)

    def types(self, line: str) -> None:
        command, _, comment = line.partition("#")
        keeps_key = command.startswith("KEY=$(")
        command = command.removeprefix("KEY=$(").rstrip().removesuffix(")" if keeps_key else "")
        command = command.replace(MODEL_OF_README, MODEL).replace("$KEY", self.key)
        if "REQUEST_ID" in command:
            command = command.replace("REQUEST_ID", self._seen(r"quota explain (\S+)"))
        if "ETAG" in command:
            command = command.replace("ETAG", self._etag())
        program, name, *rest = shlex.split(command)
        assert program == "baton", line
        done = self.baton.run_action(name, *rest)
        self.printed = done.stdout + done.stderr
        self.outputs[line] = self.printed
        assert done.returncode == (1 if "refused" in comment else 0), f"{line}\n{self.printed}"
        if keeps_key:
            self.key = done.stdout.strip()

    def _seen(self, pattern: str) -> str:
        found = re.search(pattern, self.printed)
        assert found is not None, self.printed
        return found[1]

    def _etag(self) -> str:
        return json.loads(self.baton.run_action("tenant", "get", "acme/search", "-o", "json").stdout)["etag"]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with stack(tmp_path_factory.mktemp("guide"), "--prefill", "0", "--kvtransfer", "0") as baton:
        yield Reader(baton)


def test_every_command_of_the_guide_does_what_it_says(reader: Reader) -> None:
    for line in guide():
        reader.types(line)
    said = {line.partition("#")[0].strip(): output for line, output in reader.outputs.items()}
    [refused] = [output for line, output in reader.outputs.items() if "# refused" in line]
    assert "QUOTA_EXCEEDED: tenant 'search': requests_per_minute: limit 0, used" in refused
    [explained] = [output for line, output in said.items() if line.startswith("baton quota explain")]
    assert "can never fit" in explained and "key app-2 of tenant search asked for 3 input" in explained
    [exported] = [output for line, output in said.items() if line.startswith("baton usage export")]
    header, *charges = exported.splitlines()
    assert header.startswith("admitted_at,id,") and len(charges) == 1 and ",search,app,fake,1,3,0,4," in charges[0]
    assert "limits.requests_per_minute: 0 -> None" in said["baton audit list acme --limit 10"]


def admin_actions() -> dict[str, set[str]]:
    """By command, as the command line itself knows them."""
    found = {name: set(subcommands(parser)) for name, parser in subcommands(build_parser()).items()}
    return {name: actions for name, actions in found.items() if actions and name not in OTHER_COMMANDS}


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    kinds = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(kinds[0]) if kinds else {}


def test_the_guide_shows_every_action_of_every_admin_command() -> None:
    admin = admin_actions()
    shown: dict[str, set[str]] = {name: set() for name in admin}
    for line in guide():
        name, action = re.findall(r"baton (\w+) (\S+)", line)[0]
        if name in shown:
            shown[name].add(action)
    assert shown == admin and "quota" in admin


def test_whatever_of_the_guide_is_a_command_is_typed() -> None:
    """Also those in the midst of a sentence name commands and options that exist; none is left out for its place."""
    section = README.read_text(encoding="utf-8").partition(SECTION)[2].partition("\n## ")[0]
    for line in (line for line in section.splitlines() if re.match(r"\s*(KEY=\$\()?baton ", line)):
        assert line in guide(), line
    for name, action in re.findall(r"`baton (\w+)(?: (\w+))?", section):
        assert name in subcommands(build_parser()) and (not action or action in admin_actions().get(name, {action}))


def test_what_makes_no_sense_is_refused_by_field_limit_and_value(reader: Reader) -> None:
    bad = {
        ("tenant", "create", "a{b}"): "1 to 63 of a-z, 0-9, '.', '_' and '-'.*'a{b}'",
        ("tenant", "create", "local/x;FLUSHALL"): "1 to 63 of a-z",
        ("tenant", "create", "local/x\r\nDEL y"): "1 to 63 of a-z",
        ("tenant", "create", "local/x", "--tier", "lead"): "--tier: must be one of gold, silver, bronze, got 'lead'",
        ("tenant", "create", "local/x", "--models", "gpt"): "models: must be one of fake, got 'gpt'",
        ("tenant", "create", "local/x", "--time-zone", "Mars"): "time_zone: must be an IANA time zone, got 'Mars'",
        ("tenant", "update", "local/local", "--max-kv-blocks", "0"): "max_kv_blocks: must be from 1 to .*, got 0",
        ("tenant", "update", "local/local", "--max-kv-blocks", "-3"): "max_kv_blocks: must be .*, got -3",
        ("tenant", "update", "local/local", "--pool", "a pool"): "pool: must be a label .*, got 'a pool'",
        ("tenant", "create", "nowhere/x"): "organizations/nowhere: does not exist",
        ("tenant", "create", "local/local"): "exists already",
        ("tenant", "update", "local/local", "--tier", "gold", "--if-match", "x"): "etag:.*must be '.*', got 'x'",
        ("tenant", "update", "local/local", "--tier", "gold", "--if-match", ""): "etag: must be that of",
        ("quota", "set", "local/local", "--concurrency", "-1"): "limits.concurrency: must be from 0 to .*, got -1",
        ("quota", "set", "local/local", "--tokens-per-day", "9" * 30): f"limits.tokens_per_day.*{'9' * 30}",
        ("quota", "set", "local/local", "--burst", "5"): "burst.*requests_per_minute",
        ("quota", "explain", "req-nobody-sent"): "request_id: no refusal of 'req-nobody-sent'",
        ("usage", "show", "--from", "tomorrow"): "--from: must be like 2026-01-31",
        ("usage", "show", "--from", "2026-02-01", "--to", "2026-01-01"): "end: must be after the start",
    }
    for command, told in bad.items():
        status, said = in_this_process(*command, "--state-dir", str(reader.baton.path))
        assert status == 2 and re.search(told, said.replace("\n", " ")), (command, said)


def in_this_process(*words: str) -> tuple[object, str]:
    """The exit status of ``baton WORDS`` and what it says on standard error."""
    before, said = signal.getsignal(signal.SIGTERM), io.StringIO()
    try:
        with redirect_stderr(said):
            return main(words), said.getvalue()
    except SystemExit as end:
        return end.code, said.getvalue()
    finally:
        signal.signal(signal.SIGTERM, before)
