"""What a gateway process shares with the others through Redis: accounts, quotas, the ledger, the admin API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.core.clock import Clock, Ids
from baton.core.telemetry import Meter
from baton.state.audited_records import RedisRecords
from baton.state.config import StateConfig
from baton.state.quota.archived_ledger import ArchivedLedger
from baton.state.quota.ledger import RedisLedger
from baton.state.quota.ledger_files import LedgerFiles
from baton.state.quota.local_share import LocalShare
from baton.state.quota.memory import MemoryQuota
from baton.state.quota.shared import SharedQuota
from baton.state.redis_client import connect
from baton.state.refusals import RedisRefusals
from gateway.accounts import AccountPolicy, Accounts
from gateway.admin.parts import AdminParts
from gateway.admin.service import Admin
from gateway.admission import Admission, AdmissionPolicy
from gateway.callers import Callers, FileKeyAccounts
from gateway.delivery_log import DeliveryLog
from gateway.delivery_recovery import DeliveryRecovery, RecoveryPolicy
from gateway.fleet import FleetFacts
from gateway.keys import KeyRing
from gateway.ledger_upkeep import LedgerPolicy, LedgerUpkeep
from gateway.refusal_log import RefusalLog

LOCAL_ENTRIES = 1  # the ledger is in Redis; what is counted here while it is away is told to it afterwards


@dataclass(frozen=True, slots=True)
class Quotas:
    callers: Callers
    admission: Admission
    refusals: RefusalLog
    admin: Admin


@asynccontextmanager
async def shared_quotas(
    state: StateConfig,
    ring: KeyRing,
    fleet: Callable[[], FleetFacts | None],
    *,
    clock: Clock,
    ids: Ids,
    meter: Meter,
    policy: AdmissionPolicy,
    replicas: Callable[[], int],
    delivery_directory: Path | None,
    ledger_directory: Path | None,
    ledger_policy: LedgerPolicy,
) -> AsyncIterator[Quotas]:
    """Leases are renewed, refusals written, ledgers archived while the block lasts. Redis may be away, here as later.

    ``replicas``: gateways that share the limits while it is. ``delivery_directory`` None: what was delivered is told by
    renewals alone. ``ledger_directory`` None: ledgers stay in Redis. ConfigError when one cannot be written to.
    """
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect(state))
        records, refusals = RedisRecords(client, state), RedisRefusals(client, state)
        share, ledger = LocalShare(replicas), RedisLedger(client, state)
        quota = SharedQuota(client, state, clock, share.heard)
        archive = None if ledger_directory is None else LedgerFiles.opened(ledger_directory)
        upkeep = LedgerUpkeep(ledger, archive, clock, meter, ledger_policy)
        usage = ArchivedLedger(ledger, archive)
        remember = state.quota_remember_seconds
        local = MemoryQuota(clock, remember_seconds=remember, kept_entries=LOCAL_ENTRIES, terms=share.of)
        deliveries = None
        if delivery_directory is not None:
            deliveries = stack.enter_context(DeliveryLog.opened(delivery_directory, state.namespace, ids, meter))
            recovery = DeliveryRecovery(delivery_directory, state.namespace, quota, clock, meter, RecoveryPolicy())
            await stack.enter_async_context(recovery.running())
        accounts = Accounts(FileKeyAccounts(records, ring), ring.secret, clock, AccountPolicy())
        built = Quotas(
            callers=Callers(ring, accounts),
            admission=Admission(quota, local, clock=clock, ids=ids, meter=meter, policy=policy, deliveries=deliveries),
            refusals=RefusalLog(refusals, clock, meter),
            admin=Admin(AdminParts(records, quota, usage, refusals, ring.secret, clock, fleet)),
        )
        async with accounts.followed(), built.refusals.written(), built.admission.running(), upkeep.running():
            yield built
