"""What the admin API is joined from, and how it finds a record by its resource name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.core.admin_api import RecordsApi, RefusalsApi
from baton.core.clock import Clock
from baton.core.errors import NotFound
from baton.core.tenancy_api import LedgerReader, QuotaApi
from baton.core.types import RecordKind, ResourceName, Versioned
from gateway.credentials import ServerSecret
from gateway.fleet import FleetFacts


@dataclass(frozen=True, slots=True)
class AdminParts:
    """``fleet`` tells what is known of it, None while nobody knows."""

    records: RecordsApi
    quota: QuotaApi
    ledger: LedgerReader
    refusals: RefusalsApi
    secret: ServerSecret
    clock: Clock
    fleet: Callable[[], FleetFacts | None]


async def find(records: RecordsApi, name: ResourceName) -> Versioned:
    """The record of ``name``. NotFound also when it has other parents than the name says."""
    match name.kind:
        case RecordKind.ORGANISATION:
            found = await records.organisation(name.organisation)
        case RecordKind.TENANT:
            found = await records.tenant(name.tenant)
            found = None if found is None or found[0].organisation != name.organisation else found
        case RecordKind.KEY:
            await find(records, name.parent)
            found = await records.key(name.key)
            found = None if found is None or found[0].tenant != name.tenant else found
    if found is None:
        raise NotFound(f"{name or 'organizations/'}: does not exist")
    return Versioned(name, *found)
