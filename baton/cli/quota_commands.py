"""``baton quota``, ``baton usage`` and ``baton audit``."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import sys
import time
from collections.abc import Iterable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, cast

from baton.cli.admin import (
    ANY_ETAG,
    NONE,
    add,
    add_change,
    limit,
    moment,
    name_of,
    one_of,
    options,
    record_row,
    show,
    when,
)
from baton.cli.subcommands import Commands, integer, text
from baton.core.errors import InvalidRequest
from baton.core.types import (
    AuditPage,
    KeyRecord,
    LedgerEntry,
    Limits,
    Metric,
    ModelLimits,
    Organisation,
    Paging,
    QuotaAlert,
    RecordKind,
    ResourceName,
    TenancyRecord,
    Tenant,
    UsageGroup,
    UsageQuery,
)
from baton.rpc.admin_client import AdminClient

NAME = "ORGANIZATION, ORGANIZATION/TENANT or ORGANIZATION/TENANT/KEY"
WHOSE = f"{NAME}; all that the key may see without it"
UNITS = 10**12  # of a cost to one of the price book's currency
MAX_ENTRIES = 100_000
PAGE = 500
_LIMITS = tuple(metric.value for metric in Metric)
_EXPORTED = tuple(field.name for field in dataclasses.fields(LedgerEntry))


def add_commands(commands: Commands) -> None:
    _add_quota(Commands(commands.add("quota", "limits, and what they stand at"), "ACTION"))
    _add_usage(Commands(commands.add("usage", "what was used and what it cost"), "ACTION"))
    listing = add(Commands(commands.add("audit", "who changed what"), "ACTION"), "list", "newest first", _audit)
    listing.add_argument("name", metavar="NAME", nargs="?", default="", type=text, help=WHOSE)
    listing.add_argument("--limit", type=integer(1, MAX_ENTRIES), default=50, help="entries; 50 without it")


def _add_quota(actions: Commands) -> None:
    change = add_change(actions, "set", "change the limits that are named; none lifts one", _set)
    change.add_argument("name", metavar="NAME", type=text, help=NAME)
    change.add_argument("--model", type=text, default="", help="for requests of this model only")
    for name in _LIMITS:
        option = f"--{name.replace('_', '-')}"
        change.add_argument(option, dest=name, type=limit, default=argparse.SUPPRESS, metavar="N")
    shadow = "limits that only report; none: all refuse"
    change.add_argument("--shadow", type=_metrics, default=argparse.SUPPRESS, metavar="A,B", help=shadow)
    standing = add(actions, "show", "what the limits stand at", _show)
    standing.add_argument("name", metavar="NAME", type=text, help=NAME)
    standing.add_argument("--model", type=text, default="", help="its own limits, too")
    why = add(actions, "explain", "why a request was refused", _explain)
    why.add_argument("request_id", metavar="REQUEST_ID", type=text)
    why.add_argument(
        "--tenant", type=text, default="", metavar="ORGANIZATION/TENANT", help="who sent it; the caller without it"
    )
    alerts = add(actions, "alerts", "daily and monthly limits that were used to 50, 80 and 100 %%", _alerts)
    whose = "ORGANIZATION, with all below it, or ORGANIZATION/TENANT, with its keys; the key's own tenant without it"
    alerts.add_argument("name", metavar="NAME", nargs="?", default="", type=text, help=whose)


def _add_usage(actions: Commands) -> None:
    sums = add(actions, "show", "sums", _sums)
    sums.add_argument("--by", type=one_of(UsageGroup), default=UsageGroup.TENANT, help=f"{', '.join(UsageGroup)}")
    export = add(actions, "export", "every charge, oldest first, one JSON object a line", _export)
    export.add_argument("--csv", action="store_true", help="comma-separated values with a header instead")
    for parser in (sums, export):
        parser.add_argument("name", metavar="NAME", nargs="?", default="", type=text, help=WHOSE)
        parser.add_argument("--from", dest="start", type=moment, metavar="TIME", help="UTC; this month without it")
        parser.add_argument("--to", dest="end", type=moment, metavar="TIME", help="before this time; now without it")
        parser.add_argument("--model", type=text, default="", help="of this model only")


# --- quotas -----------------------------------------------------------------------------------------------------------


async def _set(arguments: argparse.Namespace, client: AdminClient) -> int:
    name = name_of("name", arguments.name, *RecordKind)
    said = {limit: value for limit, value in vars(arguments).items() if limit in (*_LIMITS, "shadow")}
    if not said:
        raise InvalidRequest("quota set: must name a limit; --help lists them", field="limits")
    limits, asked = Limits(**said), options(arguments)
    if not arguments.model:
        mask = tuple(f"limits.{limit}" for limit in said)
        done = await client.update(name, _holder(name, limits=limits), mask, asked)
    else:
        current = await client.get(name)
        rules = _with_rule(current.record.model_limits, arguments.model, said)
        seen = dataclasses.replace(asked, etag=current.etag if asked.etag == ANY_ETAG else asked.etag)
        done = await client.update(name, _holder(name, model_limits=rules), ("model_limits",), seen)
    return show(arguments, [record_row(done)], one=True)


def _holder(name: ResourceName, **fields: Any) -> TenancyRecord:
    if name.key:
        return KeyRecord("", "", "", "", **fields)
    return Tenant("", "", **fields) if name.tenant else Organisation("", **fields)


def _with_rule(rules: Iterable[ModelLimits], model: str, said: dict[str, Any]) -> tuple[ModelLimits, ...]:
    """The limits of ``model`` changed as ``said``; a rule that limits nothing any more is left out."""
    found = {rule.model: rule for rule in rules}
    before = found.get(model, ModelLimits(model, Limits()))
    found[model] = ModelLimits(model, dataclasses.replace(before.limits, **said))
    return tuple(rule for rule in found.values() if rule.limits != Limits())


async def _show(arguments: argparse.Namespace, client: AdminClient) -> int:
    balances = await client.quota(name_of("name", arguments.name, *RecordKind), arguments.model)
    rows = [balance._asdict() | {"remaining": balance.remaining} for balance in balances]
    return show(arguments, rows)


async def _explain(arguments: argparse.Namespace, client: AdminClient) -> int:
    tenant = name_of("tenant", arguments.tenant, RecordKind.TENANT) if arguments.tenant else ResourceName()
    note = await client.explain(tenant, arguments.request_id)
    if arguments.output == "json":
        print(json.dumps(dataclasses.asdict(note) | {"at": when(note.at)}))
        return 0
    asked = f"{note.input_tokens} input and up to {note.output_tokens} output tokens of {note.model}"
    print(f"{note.request_id}: refused at {when(note.at)}; key {note.key_id} of tenant {note.tenant} asked for {asked}")
    for refusal in note.refusals:
        print(f"  {refusal}")
    return 0


async def _alerts(arguments: argparse.Namespace, client: AdminClient) -> int:
    kinds = (RecordKind.ORGANISATION, RecordKind.TENANT)
    parent = name_of("name", arguments.name, *kinds) if arguments.name else ResourceName()
    page = await client.alerts(parent, Paging(PAGE))
    found = list(page.alerts)
    while page.next_token:
        page = await client.alerts(parent, Paging(PAGE, page.next_token))
        found += page.alerts
    return show(arguments, [_alert_row(alert) for alert in found])


def _alert_row(alert: QuotaAlert) -> dict[str, Any]:
    fields = dataclasses.asdict(alert)
    del fields["id"]
    return {"at": when(alert.at)} | fields | {"window_start": when(alert.window_start / 1e6)}


def _metrics(given: str) -> frozenset[Metric]:
    words = [] if given == NONE else [word for word in given.split(",") if word]
    parse = one_of(Metric)
    return frozenset(parse(word.replace("-", "_")) for word in words)


# --- usage and audit --------------------------------------------------------------------------------------------------


def _query(arguments: argparse.Namespace) -> UsageQuery:
    today = datetime.now(UTC)
    month = today.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
    start = month if arguments.start is None else arguments.start
    end = time.time() if arguments.end is None else arguments.end
    parent = name_of("name", arguments.name) if arguments.name else ResourceName()
    return UsageQuery(parent, start, end, arguments.model)


async def _sums(arguments: argparse.Namespace, client: AdminClient) -> int:
    sums = await client.sum_usage(_query(arguments), arguments.by)
    rows = [{arguments.by.value: used.subject} | _figures(dataclasses.asdict(used)) for used in sums]
    return show(arguments, rows)


def _figures(fields: dict[str, Any]) -> dict[str, Any]:
    fields.pop("subject")
    return fields | {"cost": _money(fields["cost"])}


def _money(units: int) -> str:
    """Exact, in the price book's currency."""
    whole, rest = divmod(units, UNITS)
    return f"{whole}.{rest:012d}".rstrip("0").rstrip(".")


async def _export(arguments: argparse.Namespace, client: AdminClient) -> int:
    """Streams: a month of charges need not fit into memory."""
    writer = csv.writer(sys.stdout, lineterminator="\n") if arguments.csv else None
    if writer is not None:
        writer.writerow(("admitted_at", *_EXPORTED))
    async with aclosing(client.export_usage(_query(arguments))) as entries:
        async for entry in entries:
            row = {"admitted_at": when(entry.debited_at / 1e6), **dataclasses.asdict(entry), "cost": _money(entry.cost)}
            if writer is not None:
                writer.writerow(map(_harmless, row.values()))
            else:
                print(json.dumps(row))
    return 0


def _harmless(cell: object) -> object:
    """Clients choose request ids; a spreadsheet must not take one for a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in {"=", "+", "-", "@", "\t", "\r"} else cell


async def _audit(arguments: argparse.Namespace, client: AdminClient) -> int:
    parent = name_of("name", arguments.name) if arguments.name else ResourceName()
    rows: list[dict[str, Any]] = []
    page = AuditPage((), "")
    while len(rows) < arguments.limit:
        page = await client.audit(parent, Paging(min(500, arguments.limit - len(rows)), page.next_token))
        for entry in page.entries:
            told = dataclasses.asdict(entry) | {"at": when(entry.at)}
            rows.append(told | {"before": json.loads(entry.before or "{}"), "after": json.loads(entry.after or "{}")})
        if not page.next_token:
            break
    if arguments.output == "table":
        rows = [row | _difference(row.pop("before"), row.pop("after")) for row in rows]
    return show(arguments, rows)


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    """What a table shows of a change: the fields that it touched."""
    if not before or not after:
        return {"change": "made" if after else "deleted"}
    old, new = _flat(before), _flat(after)
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    return {"change": "; ".join(f"{name}: {old.get(name)} -> {new.get(name)}" for name in names)}


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Limits by their own names, ``limits.concurrency`` or ``model_limits.M.concurrency``."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "model_limits":
            for rule in value:
                found |= _flat(rule["limits"], f"{name}.{rule['model']}.")
        elif isinstance(value, dict):
            found |= _flat(cast("dict[str, Any]", value), f"{name}.")
        else:
            found[prefix + name] = value
    return found
