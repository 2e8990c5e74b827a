"""Organisations, tenants and keys, in Redis or in memory."""

from __future__ import annotations

import secrets
from importlib import resources
from typing import cast

from redis.asyncio import Redis

from baton.core.errors import StateUnavailable
from baton.core.types import Account, KeyRecord, Organisation, RecordKind, Tenant
from baton.state.config import StateConfig
from baton.state.redis_client import within_budget
from baton.state.tenancy_records import Record, decode

ORGANISATION, TENANT, KEY = RecordKind.ORGANISATION, RecordKind.TENANT, RecordKind.KEY


class RedisTenancy:
    """Implements ``TenancyApi``: one hash a record, ``<namespace>:{tenancy}:<kind>:<name>``.

    One hash tag for all: records are small, seldom written and remembered by their readers, and a key can be read with
    its tenant and organisation in one step.
    """

    def __init__(self, client: Redis, config: StateConfig) -> None:
        self._client = client
        self._config = config
        self._prefix = f"{config.namespace}:{{tenancy}}:"
        self._audit = f"{self._prefix}audit"
        self._account = resources.files("baton.state").joinpath("tenancy_account.lua").read_text(encoding="utf-8")

    async def account(self, key_id: str) -> Account | None:
        call = self._client.eval(  # pyright: ignore
            self._account, 1, self._key(KEY, key_id), self._key(TENANT, ""), self._key(ORGANISATION, "")
        )
        found = cast("list[bytes]", await within_budget(call, self._config, "read an account"))  # pyright: ignore
        if len(found) < 3:
            return None
        key, tenant, organisation = found
        return Account(_read(Organisation, organisation), _read(Tenant, tenant), _read(KeyRecord, key))

    async def revision(self) -> str:
        """The id of the newest entry of the audit log, which every change is written to in the same step."""
        call = self._client.xrevrange(self._audit, count=1)  # pyright: ignore
        found = cast("list[tuple[bytes, object]]", await within_budget(call, self._config, "read the revision"))
        return found[0][0].decode() if found else ""

    async def organisation(self, name: str) -> tuple[Organisation, str] | None:
        return await self._get(Organisation, ORGANISATION, name)

    async def tenant(self, name: str) -> tuple[Tenant, str] | None:
        return await self._get(Tenant, TENANT, name)

    async def key(self, key_id: str) -> tuple[KeyRecord, str] | None:
        return await self._get(KeyRecord, KEY, key_id)

    async def _get(self, kind: type[Record], name: RecordKind, subject: str) -> tuple[Record, str] | None:
        call = self._client.hmget(self._key(name, subject), ["data", "etag"])
        data, etag = cast("list[bytes | None]", await within_budget(call, self._config, f"read {name} {subject}"))
        return None if data is None or etag is None else (_read(kind, data), etag.decode())

    def _key(self, kind: str, name: str) -> str:
        return f"{self._prefix}{kind}:{name}"


class MemoryTenancy:
    """The twin of ``RedisTenancy`` for one process."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], tuple[bytes, str]] = {}
        self._changes = 0

    async def account(self, key_id: str) -> Account | None:
        key = await self.key(key_id)
        tenant = None if key is None else await self.tenant(key[0].tenant)
        organisation = None if tenant is None else await self.organisation(tenant[0].organisation)
        if key is None or tenant is None or organisation is None:
            return None
        return Account(organisation[0], tenant[0], key[0])

    async def revision(self) -> str:
        return str(self._changes)

    async def organisation(self, name: str) -> tuple[Organisation, str] | None:
        return self._get(Organisation, ORGANISATION, name)

    async def tenant(self, name: str) -> tuple[Tenant, str] | None:
        return self._get(Tenant, TENANT, name)

    async def key(self, key_id: str) -> tuple[KeyRecord, str] | None:
        return self._get(KeyRecord, KEY, key_id)

    def _get(self, kind: type[Record], name: RecordKind, subject: str) -> tuple[Record, str] | None:
        found = self._records.get((name, subject))
        return None if found is None else (_read(kind, found[0]), found[1])


def new_etag() -> str:
    return secrets.token_hex(8)


def _read(kind: type[Record], data: bytes) -> Record:
    """What cannot be read is an outage of this record, never an absent one: absence would let a limit fall away."""
    try:
        return decode(kind, data)
    except ValueError as error:
        raise StateUnavailable(f"tenancy: {error}") from error
