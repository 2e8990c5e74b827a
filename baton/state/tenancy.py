"""Organisations, tenants and keys, in Redis or in memory."""

from __future__ import annotations

import secrets
from importlib import resources
from typing import cast

from redis.asyncio import Redis

from baton.core.errors import Conflict, StateUnavailable
from baton.core.tenancy import check_key, check_organisation, check_tenant
from baton.core.types import ANY_ETAG, Account, KeyRecord, Organisation, Tenant
from baton.state.config import StateConfig
from baton.state.redis_client import within_budget
from baton.state.tenancy_records import Record, decode, encode


class RedisTenancy:
    """Implements ``TenancyApi``: one hash a record, ``<namespace>:{tenancy}:<kind>:<name>``.

    One hash tag for all: records are small, seldom written and remembered by their readers, and a key can be read with
    its tenant and organisation in one step.
    """

    def __init__(self, client: Redis, config: StateConfig) -> None:
        self._client = client
        self._config = config
        self._prefix = f"{config.namespace}:{{tenancy}}:"
        folder = resources.files("baton.state")
        self._put = folder.joinpath("tenancy_put.lua").read_text(encoding="utf-8")
        self._account = folder.joinpath("tenancy_account.lua").read_text(encoding="utf-8")

    async def account(self, key_id: str) -> Account | None:
        call = self._client.eval(  # pyright: ignore
            self._account, 1, self._key("key", key_id), self._key("tenant", ""), self._key("organisation", "")
        )
        found = cast("list[bytes]", await within_budget(call, self._config, "read an account"))  # pyright: ignore
        if len(found) < 3:
            return None
        key, tenant, organisation = found
        return Account(_read(Organisation, organisation), _read(Tenant, tenant), _read(KeyRecord, key))

    async def organisation(self, name: str) -> tuple[Organisation, str] | None:
        return await self._get(Organisation, "organisation", name)

    async def tenant(self, name: str) -> tuple[Tenant, str] | None:
        return await self._get(Tenant, "tenant", name)

    async def key(self, key_id: str) -> tuple[KeyRecord, str] | None:
        return await self._get(KeyRecord, "key", key_id)

    async def put_organisation(self, organisation: Organisation, etag: str) -> str:
        check_organisation(organisation)
        return await self._write("organisation", organisation.name, encode(organisation), etag)

    async def put_tenant(self, tenant: Tenant, etag: str) -> str:
        check_tenant(tenant)
        return await self._write("tenant", tenant.name, encode(tenant), etag)

    async def put_key(self, key: KeyRecord, etag: str) -> str:
        check_key(key)
        return await self._write("key", key.id, encode(key), etag)

    async def _get(self, kind: type[Record], name: str, subject: str) -> tuple[Record, str] | None:
        call = self._client.hmget(self._key(name, subject), ["data", "etag"])
        data, etag = cast("list[bytes | None]", await within_budget(call, self._config, f"read {name} {subject}"))
        return None if data is None or etag is None else (_read(kind, data), etag.decode())

    async def _write(self, name: str, subject: str, data: bytes, etag: str) -> str:
        fresh = new_etag()
        call = self._client.eval(self._put, 1, self._key(name, subject), etag, fresh, data)  # pyright: ignore
        answer = cast("int | bytes", await within_budget(call, self._config, f"write {name} {subject}"))  # pyright: ignore
        if isinstance(answer, bytes):
            raise _conflict(name, subject, etag, answer.decode())
        return fresh

    def _key(self, kind: str, name: str) -> str:
        return f"{self._prefix}{kind}:{name}"


class MemoryTenancy:
    """The twin of ``RedisTenancy`` for one process."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], tuple[bytes, str]] = {}

    async def account(self, key_id: str) -> Account | None:
        key = await self.key(key_id)
        tenant = None if key is None else await self.tenant(key[0].tenant)
        organisation = None if tenant is None else await self.organisation(tenant[0].organisation)
        if key is None or tenant is None or organisation is None:
            return None
        return Account(organisation[0], tenant[0], key[0])

    async def organisation(self, name: str) -> tuple[Organisation, str] | None:
        return self._get(Organisation, "organisation", name)

    async def tenant(self, name: str) -> tuple[Tenant, str] | None:
        return self._get(Tenant, "tenant", name)

    async def key(self, key_id: str) -> tuple[KeyRecord, str] | None:
        return self._get(KeyRecord, "key", key_id)

    async def put_organisation(self, organisation: Organisation, etag: str) -> str:
        check_organisation(organisation)
        return self._write("organisation", organisation.name, encode(organisation), etag)

    async def put_tenant(self, tenant: Tenant, etag: str) -> str:
        check_tenant(tenant)
        return self._write("tenant", tenant.name, encode(tenant), etag)

    async def put_key(self, key: KeyRecord, etag: str) -> str:
        check_key(key)
        return self._write("key", key.id, encode(key), etag)

    def _get(self, kind: type[Record], name: str, subject: str) -> tuple[Record, str] | None:
        found = self._records.get((name, subject))
        return None if found is None else (_read(kind, found[0]), found[1])

    def _write(self, name: str, subject: str, data: bytes, etag: str) -> str:
        _, found = self._records.get((name, subject), (b"", ""))
        if etag not in {ANY_ETAG, found}:
            raise _conflict(name, subject, etag, found)
        fresh = new_etag()
        self._records[name, subject] = data, fresh
        return fresh


def new_etag() -> str:
    return secrets.token_hex(8)


def _conflict(name: str, subject: str, expected: str, found: str) -> Conflict:
    if not found:
        return Conflict(f"etag: {name} {subject!r} does not exist, got {expected!r}")
    if not expected:
        return Conflict(f"etag: {name} {subject!r} exists already, with etag {found!r}")
    return Conflict(f"etag: {name} {subject!r} has changed: must be {found!r}, got {expected!r}")


def _read(kind: type[Record], data: bytes) -> Record:
    """What cannot be read is an outage of this record, never an absent one: absence would let a limit fall away."""
    try:
        return decode(kind, data)
    except ValueError as error:
        raise StateUnavailable(f"tenancy: {error}") from error
