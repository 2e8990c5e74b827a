"""Organisations, tenants and keys stored the way administrators store them, for tests that only want them there."""

from __future__ import annotations

from baton.core.admin_api import RecordsApi
from baton.core.types import (
    Commit,
    KeyRecord,
    Organisation,
    RecordChange,
    ResourceName,
    TenancyRecord,
    Tenant,
)

NOWHERE = "nowhere"  # the organisation of a key whose tenant is not recorded


async def store(records: RecordsApi, *given: TenancyRecord) -> list[str]:
    """Make each record, or put it in the place of the one of its name; their etags."""
    return [await _store(records, record) for record in given]


async def _store(records: RecordsApi, record: TenancyRecord) -> str:
    match record:
        case Organisation():
            name, found = ResourceName(record.name), await records.organisation(record.name)
        case Tenant():
            name, found = ResourceName(record.organisation, record.name), await records.tenant(record.name)
        case KeyRecord():
            tenant = await records.tenant(record.tenant)
            organisation = NOWHERE if tenant is None else tenant[0].organisation
            name, found = ResourceName(organisation, record.tenant, record.id), await records.key(record.id)
    before, etag = found or (None, "")
    done = await records.commit(Commit("test", "store", (RecordChange(name, etag, before, record),)))
    return done.etag
