"""What the admin commands have in common: names, the gateway that they talk to, and how they print."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar, cast

from baton.cli.door import add_door, find_door
from baton.cli.subcommands import Commands, Run
from baton.cli.terminal import table
from baton.core.clock import RandomIds
from baton.core.resource_names import parse_resource_name
from baton.core.types import (
    ANY_ETAG,
    Limits,
    RecordKind,
    ResourceName,
    Versioned,
    WriteOptions,
)
from baton.rpc.admin_client import AdminClient
from baton.rpc.channels import ChannelPool, ClientSecurity, ClientTls

E = TypeVar("E", bound=StrEnum)
Work = Callable[[argparse.Namespace, AdminClient], Awaitable[int]]
NONE = "none"


# --- the command line -------------------------------------------------------------------------------------------------


def add(commands: Commands, name: str, help: str, work: Work) -> argparse.ArgumentParser:
    """A command that asks a gateway."""
    parser = commands.add(name, help, _run(work))
    add_door(parser, "--address")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="how to print")
    return parser


def add_change(commands: Commands, name: str, help: str, work: Work) -> argparse.ArgumentParser:
    """A command that changes a record that is there."""
    parser = add_write(commands, name, help, work)
    parser.add_argument("--if-match", metavar="ETAG", default=ANY_ETAG, help="only if the record still has this etag")
    return parser


def add_write(commands: Commands, name: str, help: str, work: Work) -> argparse.ArgumentParser:
    """A command that writes."""
    parser = add(commands, name, help, work)
    parser.add_argument("--dry-run", action="store_true", help="check everything, change nothing")
    parser.add_argument("--request-id", help="repeat a call without doing it twice; a new one without it")
    return parser


def _run(work: Work) -> Run:
    def run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
        async def main() -> int:
            async with _client(arguments) as client:
                return await work(arguments, client)

        return asyncio.run(main())

    return run


@asynccontextmanager
async def _client(arguments: argparse.Namespace) -> AsyncIterator[AdminClient]:
    door = find_door(arguments)
    security = ClientSecurity(token=door.key, tls=ClientTls(door.ca) if door.ca else None)
    async with ChannelPool(security) as channels:
        yield AdminClient(channels.get(door.address))


def options(arguments: argparse.Namespace) -> WriteOptions:
    request_id = arguments.request_id or RandomIds().request_id()
    return WriteOptions(getattr(arguments, "if_match", ""), request_id, arguments.dry_run)


def name_of(field: str, text: str, *kinds: RecordKind) -> ResourceName:
    """``O``, ``O/T`` and ``O/T/K`` are short for resource names, which are taken, too."""
    parts = text.split("/")
    if len(parts) <= len(RecordKind) and parts[0] != "organizations":
        collections = ("organizations", "tenants", "keys")
        text = "/".join(f"{collection}/{part}" for collection, part in zip(collections, parts, strict=False))
    return parse_resource_name(field, text, *kinds)


def moment(text: str) -> float:
    """A day, or a day and a time, in UTC unless it says otherwise; seconds since the Unix epoch."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be like 2026-01-31 or 2026-01-31T12:00+01:00, got {text!r}") from error
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def names(text: str) -> tuple[str, ...] | None:
    """``a,b``, or ``none``, which lifts the restriction."""
    return None if text == NONE else tuple(part for part in text.split(",") if part)


def one_of(kind: type[E]) -> Callable[[str], E]:
    """A type for options that take one of a few words."""

    def parse(text: str) -> E:
        if text not in set(kind):
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(kind)}, got {text!r}")
        return kind(text)

    return parse


def limit(text: str) -> int | None:
    """Whether it makes sense is for the gateway to say."""
    if text == NONE:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a whole number or none, got {text!r}") from error


def label(text: str) -> str:
    """``none`` lifts it. Whether it is one is for the gateway to say."""
    return "" if text == NONE else text


# --- printing ---------------------------------------------------------------------------------------------------------


def show(arguments: argparse.Namespace, rows: Sequence[dict[str, Any]], *, one: bool = False) -> int:
    """``rows`` as a table of what is set in any of them, or as JSON: a list, or one object."""
    if arguments.output == "json":
        print(json.dumps(rows[0] if one else list(rows)))
        return 0
    if one:
        print(table(("field", "value"), list(_fields(rows[0]))))
        return 0
    columns = [name for name in (rows[0] if rows else {}) if any(_is_told(row[name]) for row in rows)]
    print(table(columns, [[_cell(row[name]) for name in columns] for row in rows]) if columns else "none")
    return 0


def record_row(found: Versioned) -> dict[str, Any]:
    """A record as it is printed: its resource name, its etag, and its fields."""
    fields = dataclasses.asdict(found.record)
    for hidden in ("name", "organisation", "id", "tenant", "secret_hmac"):
        fields.pop(hidden, None)
    fields["limits"] = limits_row(found.record.limits)
    rules = {rule.model: limits_row(rule.limits) for rule in found.record.model_limits}
    fields["model_limits"] = rules
    for name in ("created_at", "expires_at", "revoked_at"):
        if name in fields:
            fields[name] = when(fields[name])
    warnings = [f"{warning.field}: {warning.message}" for warning in found.warnings]
    return {"name": str(found.name), **fields, "etag": found.etag, "warnings": warnings}


def limits_row(limits: Limits) -> dict[str, Any]:
    fields = {name: value for name, value in dataclasses.asdict(limits).items() if value is not None}
    shadow = sorted(cast("frozenset[str]", fields.pop("shadow")))
    return fields | ({"shadow": shadow} if shadow else {})


def when(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _fields(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of what is set; of warnings, which are sentences, each on a line of its own."""
    for name, value in row.items():
        if name == "warnings":
            yield from ((name, warning) for warning in value)
        elif _is_told(value):
            yield name, _cell(value)


def _is_told(value: object) -> bool:
    return value is not None and value not in ("", {}, (), [])


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_cell(part)}" for name, part in cast("dict[str, object]", value).items())
    if isinstance(value, list | tuple):
        return ",".join(map(str, cast("Sequence[object]", value)))
    return "" if value is None else str(value)
