"""Callers and admission without Redis, for gateways inside a test."""

from __future__ import annotations

from baton.core.clock import Clock, CountingIds, SystemClock
from baton.core.telemetry import Meter, SilentMeter
from baton.state.quota.memory import MemoryQuota
from baton.state.tenancy import MemoryTenancy
from gateway.accounts import AccountPolicy, Accounts
from gateway.admission import Admission, AdmissionPolicy
from gateway.callers import Callers, FileKeyAccounts
from gateway.keys import KeyRing


def memory_admission(clock: Clock, meter: Meter | None = None, quota: MemoryQuota | None = None) -> Admission:
    """Every caller draws on counters in this process; without ``quota`` on ones of its own."""
    shared, policy = quota or MemoryQuota(clock), AdmissionPolicy()
    return Admission(
        shared, MemoryQuota(clock), clock=clock, ids=CountingIds(), meter=meter or SilentMeter(), policy=policy
    )


def file_callers(ring: KeyRing, tenancy: MemoryTenancy | None = None) -> Callers:
    """The holders of the ring's keys, of tenants that ``tenancy`` may know."""
    source = FileKeyAccounts(tenancy or MemoryTenancy(), ring)
    return Callers(ring, Accounts(source, ring.secret, SystemClock(), AccountPolicy()))
