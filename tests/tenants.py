"""Tenants of a running stack, made and asked about through its gateway's admin API."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from baton.core.types import (
    KeyRecord,
    LedgerEntry,
    Limits,
    Organisation,
    QuotaBalance,
    ResourceName,
    Tenant,
    UsageQuery,
)
from baton.rpc.admin_client import AdminClient
from baton.rpc.channels import ChannelPool, ClientSecurity
from tests.admin_world import NEW
from tests.gateways import eventually
from tests.launched import RunningStack

UMBRELLA = ResourceName("umbrella")
ANY_KEY = KeyRecord("", "", "", "")


@dataclass(frozen=True)
class Tenants:
    """Of the organisation ``umbrella``, each with a key."""

    admin: AdminClient
    model: str

    async def made(self, tenant: str, limits: Limits) -> str:
        """The secret of its key."""
        await self.admin.create(UMBRELLA.child(tenant), Tenant("", "", limits=limits), NEW)
        return (await self.admin.issue_key(UMBRELLA.child(tenant).child(f"{tenant}-key"), ANY_KEY, NEW)).secret

    async def settled(self, tenant: str) -> Sequence[QuotaBalance]:
        """Its balances, once nothing is reserved any more."""
        found: list[QuotaBalance] = []

        async def nothing_is_reserved() -> bool:
            found[:] = await self.admin.quota(UMBRELLA.child(tenant), self.model)
            return not any(balance.reserved for balance in found)

        await eventually(nothing_is_reserved, f"nothing is reserved for {tenant}")
        return found

    async def charged(self, tenant: str) -> list[LedgerEntry]:
        """Its part of the ledger."""
        return await self._charged(UMBRELLA.child(tenant))

    async def charged_to_local(self) -> list[LedgerEntry]:
        """What is charged to the organisation of the stack's own key."""
        return await self._charged(ResourceName("local"))

    async def _charged(self, parent: ResourceName) -> list[LedgerEntry]:
        query = UsageQuery(parent, time.time() - 86_400, time.time() + 60)
        return [entry async for entry in self.admin.export_usage(query)]


@asynccontextmanager
async def tenants_at(running: RunningStack, address: str = "") -> AsyncIterator[Tenants]:
    """``address``: of the gateway that is asked, unless it is the stack's own."""
    record = running.stack.record
    async with ChannelPool(ClientSecurity(token=record.key)) as channels:
        admin = AdminClient(channels.get(address or record.gateway))
        await admin.create(UMBRELLA, Organisation(""), NEW)
        yield Tenants(admin, running.model)


def delivered(entries: Sequence[LedgerEntry]) -> dict[str, int]:
    """Output tokens by request."""
    sums: dict[str, int] = {}
    for entry in entries:
        sums[entry.request_id] = sums.get(entry.request_id, 0) + entry.output_tokens
    return sums
