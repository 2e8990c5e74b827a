"""An admin API over stores in memory, with a caller of each role."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.core.clock import ManualClock
from baton.core.types import (
    ANY_ETAG,
    Account,
    AdminRole,
    KeyRecord,
    Organisation,
    ResourceName,
    Tenant,
    WriteOptions,
)
from baton.state.audited_records import MemoryRecords
from baton.state.quota.memory import MemoryQuota
from baton.state.refusals import MemoryRefusals
from gateway.admin.parts import AdminParts
from gateway.admin.service import Admin
from gateway.credentials import ServerSecret
from gateway.fleet import FleetFacts

NOON = 1_764_417_600.0
ROOT = ResourceName()
UMBRELLA = ResourceName("umbrella")
ACME = ResourceName("umbrella", "acme")
WHICHEVER = WriteOptions(ANY_ETAG)
NEW = WriteOptions()


@dataclass
class AdminWorld:
    """Organisation ``umbrella`` with the tenants ``acme`` and ``zeta``, once ``made``; ``m`` and ``big`` are served."""

    clock: ManualClock = field(default_factory=lambda: ManualClock(NOON))
    fleet: FleetFacts | None = FleetFacts(models=("m", "big"))

    def __post_init__(self) -> None:
        self.records, self.refusals = MemoryRecords(self.clock), MemoryRefusals()
        self.quota = MemoryQuota(self.clock)
        self.secret = ServerSecret("0" * 64)
        self.admin = Admin(
            AdminParts(self.records, self.quota, self.quota, self.refusals, self.secret, self.clock, lambda: self.fleet)
        )
        self.root = self.caller(AdminRole.PLATFORM_ADMIN, "platform", "platform")

    def caller(self, role: AdminRole, organisation: str = "umbrella", tenant: str = "acme") -> Account:
        key = KeyRecord(f"{tenant}-{role}".replace("_", "-"), tenant, "", "", role=role)
        return Account(Organisation(organisation), Tenant(tenant, organisation), key)

    async def made(self) -> AdminWorld:
        await self.admin.create(UMBRELLA, Organisation(""), NEW, self.root)
        for name in ("acme", "zeta"):
            await self.admin.create(UMBRELLA.child(name), Tenant("", ""), NEW, self.root)
        return self

    async def issue(self, key_id: str, tenant: ResourceName = ACME, **fields: object) -> str:
        record = replace(KeyRecord("", "", "", ""), **fields)  # type: ignore[arg-type]
        return (await self.admin.issue_key(tenant.child(key_id), record, NEW, self.root)).secret
