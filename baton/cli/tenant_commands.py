"""``baton tenant`` and ``baton key``."""

from __future__ import annotations

import argparse
from typing import Any

from baton.cli.admin import (
    add,
    add_change,
    add_write,
    label,
    limit,
    moment,
    name_of,
    names,
    one_of,
    options,
    record_row,
    show,
)
from baton.cli.subcommands import Commands, text
from baton.cli.terminal import say
from baton.core.errors import InvalidRequest
from baton.core.types import (
    AdminRole,
    AwayPolicy,
    KeyRecord,
    Organisation,
    Paging,
    RecordKind,
    RecordPage,
    ResourceName,
    Tenant,
    Tier,
    Versioned,
)
from baton.rpc.admin_client import AdminClient

ORGANISATION_OR_TENANT = (RecordKind.ORGANISATION, RecordKind.TENANT)
NAME = "ORGANIZATION or ORGANIZATION/TENANT"
KEY_NAME = "ORGANIZATION/TENANT/KEY"
PAGE = 500
FIELDS = (
    "tier",
    "models",
    "time_zone",
    "sharing_group",
    "away",
    "max_kv_blocks",
    "pool",
    "role",
    "priority",
    "expires_at",
)


def add_commands(commands: Commands) -> None:
    _add_tenant(Commands(commands.add("tenant", "organizations and their tenants"), "ACTION"))
    _add_key(Commands(commands.add("key", "API keys"), "ACTION"))


def _add_tenant(actions: Commands) -> None:
    create = add_write(actions, "create", "make an organization or a tenant", _create)
    update = add_change(actions, "update", "change the fields that are named", _update)
    delete = add_change(actions, "delete", "take no new requests; those in progress end and are charged", _delete)
    for parser in (create, update, delete, add(actions, "get", "show one", _get)):
        parser.add_argument("name", metavar="NAME", type=text, help=NAME)
    for parser in (create, update):
        _add_tenant_fields(parser)
    delete.add_argument("--force", action="store_true", help="with everything below it")
    listing = add(actions, "list", "organizations, or the tenants of one", _list)
    listing.add_argument("parent", metavar="ORGANIZATION", nargs="?", type=text, help="all organizations without it")


def _add_tenant_fields(parser: argparse.ArgumentParser) -> None:
    """Options that are not given are no attributes of what is parsed."""
    unsaid = argparse.SUPPRESS
    parser.add_argument("--tier", type=one_of(Tier), default=unsaid, help=f"one of {', '.join(Tier)}")
    parser.add_argument("--models", type=names, default=unsaid, metavar="A,B", help="may be used; none: all")
    parser.add_argument("--time-zone", type=text, default=unsaid, help="IANA name; bounds days and months")
    parser.add_argument("--sharing-group", type=text, default=unsaid, help="tenants of one share prefix hits")
    policies = f"without Redis: one of {', '.join(AwayPolicy)}"
    parser.add_argument("--away", type=one_of(AwayPolicy), default=unsaid, help=policies)
    cap = "it may hold of each worker at once; none: as the workers are set"
    parser.add_argument("--max-kv-blocks", type=limit, default=unsaid, metavar="N", help=f"KV blocks that {cap}")
    where = "label of the workers that its requests run on; none: as the planner is set"
    parser.add_argument("--pool", type=label, default=unsaid, metavar="LABEL", help=where)


def _add_key(actions: Commands) -> None:
    create = add_write(actions, "create", "issue a key; it is shown once", _issue)
    create.add_argument("name", metavar="NAME", type=text, help=f"{KEY_NAME}; without KEY an id is made up")
    rotate = add_change(actions, "rotate", "issue a successor; the key ends after the overlap", _rotate)
    rotate.add_argument("--overlap", type=float, default=3600.0, metavar="SECONDS", help="3600 without it")
    rotate.add_argument("--successor", type=text, default="", metavar="KEY", help="id of the new key")
    update = add_change(actions, "update", "change the fields that are named", _update)
    for parser in (create, update):
        _add_key_fields(parser)
    for parser in (create, rotate):
        parser.add_argument("--quiet", action="store_true", help="print the key alone")
    for parser in (
        rotate,
        update,
        add_change(actions, "revoke", "refuse a key from now on", _revoke),
        add_change(actions, "delete", "forget a key", _delete),
        add(actions, "get", "show one", _get),
    ):
        parser.add_argument("name", metavar="NAME", type=text, help=KEY_NAME)
    listing = add(actions, "list", "the keys of a tenant", _list_keys)
    listing.add_argument("parent", metavar="ORGANIZATION/TENANT", type=text)


def _add_key_fields(parser: argparse.ArgumentParser) -> None:
    unsaid = argparse.SUPPRESS
    parser.add_argument("--role", type=one_of(AdminRole), default=unsaid, help=f"one of {', '.join(AdminRole)}")
    parser.add_argument("--models", type=names, default=unsaid, metavar="A,B", help="may be used; none: its tenant's")
    parser.add_argument("--priority", type=int, default=unsaid, help="higher goes first among its tenant's")
    parser.add_argument("--expires-at", type=moment, default=unsaid, metavar="TIME", help="when it ends by itself")


# --- doing ------------------------------------------------------------------------------------------------------------


async def _create(arguments: argparse.Namespace, client: AdminClient) -> int:
    name = name_of("name", arguments.name, *ORGANISATION_OR_TENANT)
    record = Tenant("", "", **_said(arguments)) if name.tenant else Organisation("", **_of_organisation(arguments))
    return show(arguments, [record_row(await client.create(name, record, options(arguments)))], one=True)


async def _update(arguments: argparse.Namespace, client: AdminClient) -> int:
    name = name_of("name", arguments.name)
    said = _said(arguments)
    if not said:
        raise InvalidRequest(f"update_mask: must name a field of {name}; --help lists them", field="update_mask")
    record = KeyRecord("", "", "", "", **said) if name.key else Tenant("", "", **said)
    given = record if name.tenant else Organisation("", **_of_organisation(arguments))
    return show(arguments, [record_row(await client.update(name, given, tuple(said), options(arguments)))], one=True)


async def _delete(arguments: argparse.Namespace, client: AdminClient) -> int:
    name = name_of("name", arguments.name)
    await client.delete(name, options(arguments), getattr(arguments, "force", False))
    return show(arguments, [{"name": str(name), "deleted": not arguments.dry_run}], one=True)


async def _get(arguments: argparse.Namespace, client: AdminClient) -> int:
    return show(arguments, [record_row(await client.get(name_of("name", arguments.name)))], one=True)


async def _list(arguments: argparse.Namespace, client: AdminClient) -> int:
    parent = name_of("name", arguments.parent, RecordKind.ORGANISATION) if arguments.parent else ResourceName()
    return show(arguments, [record_row(found) for found in await _all(client, parent)])


async def _list_keys(arguments: argparse.Namespace, client: AdminClient) -> int:
    parent = name_of("parent", arguments.parent, RecordKind.TENANT)
    return show(arguments, [record_row(found) for found in await _all(client, parent)])


async def _all(client: AdminClient, parent: ResourceName) -> list[Versioned]:
    page: RecordPage = await client.list(parent, Paging(PAGE))
    found = list(page.records)
    while page.next_token:
        page = await client.list(parent, Paging(PAGE, page.next_token))
        found += page.records
    return found


async def _issue(arguments: argparse.Namespace, client: AdminClient) -> int:
    name = name_of("name", arguments.name, RecordKind.TENANT, RecordKind.KEY)
    record = KeyRecord("", "", "", "", **_said(arguments))
    issued = await client.issue_key(name, record, options(arguments))
    return _show_secret(arguments, issued.key, issued.secret)


async def _rotate(arguments: argparse.Namespace, client: AdminClient) -> int:
    name = name_of("name", arguments.name, RecordKind.KEY)
    issued = await client.rotate_key(name, arguments.successor, arguments.overlap, options(arguments))
    return _show_secret(arguments, issued.key, issued.secret)


async def _revoke(arguments: argparse.Namespace, client: AdminClient) -> int:
    name = name_of("name", arguments.name, RecordKind.KEY)
    return show(arguments, [record_row(await client.revoke_key(name, options(arguments)))], one=True)


def _show_secret(arguments: argparse.Namespace, key: Versioned, secret: str) -> int:
    if arguments.quiet:
        print(secret)
        return 0
    if secret:
        say("the key is shown this once")
    return show(arguments, [record_row(key) | {"key": secret}], one=True)


def _of_organisation(arguments: argparse.Namespace) -> dict[str, Any]:
    """InvalidRequest for an option that is a tenant's."""
    said = _said(arguments)
    if foreign := sorted(set(said) - {"time_zone"}):
        option = f"--{foreign[0].replace('_', '-')}"
        raise InvalidRequest(f"{option}: an organization has none; name ORGANIZATION/TENANT", field=foreign[0])
    return said


def _said(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that are fields of a record and were given."""
    return {name: value for name, value in vars(arguments).items() if name in FIELDS}
