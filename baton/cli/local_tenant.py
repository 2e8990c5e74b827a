"""The tenant that ``baton up`` makes: organisation and tenant ``local``, to whom the local key belongs."""

from __future__ import annotations

from contextlib import suppress

from baton.core.admin_api import RecordsApi
from baton.core.errors import AlreadyExists
from baton.core.types import Commit, Organisation, RecordChange, ResourceName, TenancyRecord, Tenant

LOCAL = "local"
_MADE: tuple[tuple[ResourceName, TenancyRecord], ...] = (
    (ResourceName(LOCAL), Organisation(LOCAL)),
    (ResourceName(LOCAL, LOCAL), Tenant(LOCAL, LOCAL)),
)


async def make_local_tenant(records: RecordsApi) -> None:
    """Without limits; one that is there already, in a Redis of the user's own, stays as it is."""
    for name, record in _MADE:
        parents = (name.parent,) if name.parent.organisation else ()
        change = RecordChange(name, "", None, record)
        with suppress(AlreadyExists):
            await records.commit(Commit("baton up", f"create {name.kind}", (change,), parents))
