"""What a record says that has no effect as the fleet stands, or not the one meant. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from baton.core.types import RecordWarning, TenancyRecord, Tenant
from gateway.fleet import FleetFacts


def warnings_of(record: TenancyRecord, fleet: FleetFacts | None) -> tuple[RecordWarning, ...]:
    """None is refused for it: workers, and the planner's map, may come later. ``fleet`` None: nobody knows it yet."""
    if fleet is None or not isinstance(record, Tenant) or not record.pool:
        return ()
    return tuple(RecordWarning("tenant.pool", message) for message in _of_pool(record.pool, fleet))


def _of_pool(pool: str, fleet: FleetFacts) -> Iterator[str]:
    if pool not in fleet.labels:
        carried = ", ".join(sorted(fleet.labels)[:10]) or "none"
        yield f"no worker carries the label {pool!r}, so nothing of this tenant runs; labels of workers: {carried}"
    if pool not in fleet.pools.labels:
        yield f"other tenants' requests run on workers with the label {pool!r}, too: planner.pools does not name it"
