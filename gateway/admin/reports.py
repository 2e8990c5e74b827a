"""Reading: records, quotas as they stand, why something was refused, what was used, who changed what."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from baton.core.errors import InvalidRequest, NotFound
from baton.core.streams import closing
from baton.core.types import (
    Account,
    AlertPage,
    AuditEntry,
    AuditPage,
    KeyRecord,
    LedgerEntry,
    Level,
    Organisation,
    Paging,
    QuotaAlert,
    QuotaBalance,
    RecordKind,
    RecordPage,
    RefusalNote,
    ResourceName,
    Tenant,
    UsageGroup,
    UsageQuery,
    UsageSum,
    Versioned,
)
from gateway.admin.parts import AdminParts, find
from gateway.admin.record_warnings import warnings_of
from gateway.admin.rights import check_platform, check_reads, home, seen_from

DEFAULT_PAGE, MAX_PAGE = 50, 1000
LEDGER_AT_ONCE = 1000
LATE_SECONDS = 86_400.0  # a charge may be written so long after its request was admitted
AUDIT_AT_ONCE = 500
AUDIT_READS = 20  # batches that one call looks through for entries of its parent
NOBODY = "-"  # no name of ours: stands in an account for a level that nobody asked for
_STREAM_ID = re.compile(r"\d{1,20}-\d{1,20}")
_LEVELS = {
    RecordKind.ORGANISATION: (Level.ORGANISATION,),
    RecordKind.TENANT: (Level.ORGANISATION, Level.TENANT),
    RecordKind.KEY: (Level.ORGANISATION, Level.TENANT, Level.KEY),
}


class AdminReports:
    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts

    async def get(self, name: ResourceName, caller: Account) -> Versioned:
        check_reads(caller, name)
        return await self._found(name)

    async def list(self, parent: ResourceName, paging: Paging, caller: Account) -> RecordPage:
        """Organisations below the root, tenants below an organisation, keys below a tenant."""
        if parent.tenant:
            check_reads(caller, parent)
        else:
            check_platform(caller, "listing tenants and organizations")
        if parent.organisation:
            await find(self._parts.records, parent)
        size = page_size(paging)
        names = await self._parts.records.names(parent, paging.token, size + 1)
        found: list[Versioned] = []
        for name in names[:size]:
            try:
                found.append(await self._found(name))
            except NotFound:
                continue  # it went between the two reads
        return RecordPage(tuple(found), names[size - 1].id if len(names) > size else "")

    async def quota(self, name: ResourceName, model: str, caller: Account) -> Sequence[QuotaBalance]:
        check_reads(caller, name)
        balances = await self._parts.quota.balances(await self._account(name), model)
        levels = _LEVELS[name.kind]
        return tuple(balance for balance in balances if balance.level in levels)

    async def explain(self, tenant: ResourceName, request_id: str, caller: Account) -> RefusalNote:
        tenant = tenant if tenant.organisation else home(caller)
        if tenant.kind is not RecordKind.TENANT:
            raise InvalidRequest.out_of_range("parent", repr(str(tenant)), "must name a tenant")
        check_reads(caller, tenant)
        found = await self._found(tenant)
        note = await self._parts.refusals.find(tenant.tenant, request_id)
        if note is None:
            kept = "the latest thousand of a tenant are kept"
            doubts = "".join(f"; {doubt.field}: {doubt.message}" for doubt in found.warnings)
            raise NotFound(f"request_id: no refusal of {request_id!r:.150} is known in {tenant}: {kept}{doubts}")
        return note

    async def alerts(self, parent: ResourceName, paging: Paging, caller: Account) -> AlertPage:
        parent = seen_from(parent, caller)
        if not parent.organisation or parent.key:
            raise InvalidRequest.out_of_range("parent", repr(str(parent)), "must name an organization or a tenant")
        if not parent.tenant:
            check_platform(caller, "reading the alerts of an organization")
        check_reads(caller, parent)
        await find(self._parts.records, parent)
        size, after = page_size(paging), stream_token(paging)
        found: list[QuotaAlert] = []
        while batch := await self._parts.ledger.alerts(parent.organisation, after, LEDGER_AT_ONCE):
            for alert in batch:
                after = alert.id
                if not parent.tenant or await self._concerns(alert, parent.tenant):
                    found.append(alert)
                if len(found) == size:
                    return AlertPage(tuple(found), after)
        return AlertPage(tuple(found))

    async def _concerns(self, alert: QuotaAlert, tenant: str) -> bool:
        """Whether it is the tenant's or one of its keys'. Whose a key was that is gone nobody knows."""
        if alert.level is not Level.KEY:
            return alert.level is Level.TENANT and alert.subject == tenant
        key = await self._parts.records.key(alert.subject)
        return key is not None and key[0].tenant == tenant

    # --- usage ------------------------------------------------------------------------------------------------------

    async def export_usage(self, query: UsageQuery, caller: Account) -> AsyncIterator[LedgerEntry]:
        query = replace(query, parent=seen_from(query.parent, caller))
        self._check_usage(query, caller)
        async with closing(self._organisations(query.parent)) as organisations:
            async for organisation in organisations:
                async with closing(self._charges(organisation, query)) as entries:
                    async for entry in entries:
                        yield entry

    async def sum_usage(self, query: UsageQuery, group: UsageGroup, caller: Account) -> Sequence[UsageSum]:
        sums: dict[str, UsageSum] = {}
        async with closing(self.export_usage(query, caller)) as entries:
            async for entry in entries:
                subject = _subject(entry, group)
                sums[subject] = _added(sums.get(subject, UsageSum(subject)), entry)
        return [sums[subject] for subject in sorted(sums)]

    def _check_usage(self, query: UsageQuery, caller: Account) -> None:
        if not query.parent.tenant:
            check_platform(caller, "usage beyond one tenant")
        check_reads(caller, query.parent)
        if not 0 <= query.start < query.end:
            limit = f"must be after the start {query.start}"
            raise InvalidRequest.out_of_range("end", query.end, limit)

    async def _organisations(self, parent: ResourceName) -> AsyncIterator[str]:
        """All that were ever charged, deleted ones and tenants of the key file that nobody recorded among them."""
        if parent.organisation:
            yield parent.organisation
            return
        async with closing(self._parts.ledger.organisations()) as names:
            found = [name async for name in names]
        for name in sorted(found):
            yield name

    async def _charges(self, organisation: str, query: UsageQuery) -> AsyncIterator[LedgerEntry]:
        """Entries grow by when they were written, and belong to the time of admission, which was earlier."""
        after = f"{max(0, round(query.start * 1000) - 1):013d}-18446744073709551615"
        last = (query.end + LATE_SECONDS) * 1000
        while entries := await self._parts.ledger.entries(organisation, after, LEDGER_AT_ONCE):
            for entry in entries:
                if int(entry.id.partition("-")[0]) > last:
                    return
                if _is_asked_for(entry, query):
                    yield entry
            after = entries[-1].id

    # --- the audit log ----------------------------------------------------------------------------------------------

    async def audit(self, parent: ResourceName, paging: Paging, caller: Account) -> AuditPage:
        """A page may hold fewer entries than asked for and still have a next one: the log is read in bounded steps."""
        parent = seen_from(parent, caller)
        if not parent.tenant:
            check_platform(caller, "the audit log beyond one tenant")
        check_reads(caller, parent)
        size, before = page_size(paging), stream_token(paging)
        found: list[AuditEntry] = []
        for _ in range(AUDIT_READS):
            batch = await self._parts.records.audit(before, AUDIT_AT_ONCE)
            for entry in batch:
                before = entry.id
                if _is_below(entry.resource, parent):
                    found.append(entry)
                if len(found) == size:
                    return AuditPage(tuple(found), before)
            if len(batch) < AUDIT_AT_ONCE:
                return AuditPage(tuple(found))
        return AuditPage(tuple(found), before)

    async def _found(self, name: ResourceName) -> Versioned:
        found = await find(self._parts.records, name)
        return replace(found, warnings=warnings_of(found.record, self._parts.fleet()))

    async def _account(self, name: ResourceName) -> Account:
        """Everybody who pays for requests at the level of ``name``; below it stands nobody."""
        tenant = Tenant(NOBODY, name.organisation)
        key = KeyRecord(NOBODY, name.tenant or NOBODY, "", "")
        own = (await find(self._parts.records, name)).record
        above = name.parent
        while True:
            match own:
                case Organisation():
                    return Account(own, tenant, key)
                case Tenant():
                    tenant = own
                case KeyRecord():
                    key = own
            own, above = (await find(self._parts.records, above)).record, above.parent


def page_size(paging: Paging) -> int:
    if paging.size < 0:
        raise InvalidRequest.out_of_range("page_size", paging.size, "must not be negative")
    return min(paging.size, MAX_PAGE) or DEFAULT_PAGE


def stream_token(paging: Paging) -> str:
    """The id that ended the page before."""
    if paging.token and not _STREAM_ID.fullmatch(paging.token):
        raise InvalidRequest.out_of_range("page_token", repr(paging.token[:50]), "must come from the page before")
    return paging.token


def _is_asked_for(entry: LedgerEntry, query: UsageQuery) -> bool:
    parent = query.parent
    return (
        query.start <= entry.debited_at / 1e6 < query.end
        and parent.tenant in {"", entry.tenant}
        and parent.key in {"", entry.key_id}
        and query.model in {"", entry.model}
    )


def _subject(entry: LedgerEntry, group: UsageGroup) -> str:
    return {UsageGroup.TENANT: entry.tenant, UsageGroup.KEY: entry.key_id, UsageGroup.MODEL: entry.model}[group]


def _added(sums: UsageSum, entry: LedgerEntry) -> UsageSum:
    return replace(
        sums,
        requests=sums.requests + entry.requests,
        input_tokens=sums.input_tokens + entry.input_tokens,
        cached_tokens=sums.cached_tokens + entry.cached_tokens,
        output_tokens=sums.output_tokens + entry.output_tokens,
        cost=sums.cost + entry.cost,
        energy_millijoules=sums.energy_millijoules + entry.energy_millijoules,
    )


def _is_below(resource: str, parent: ResourceName) -> bool:
    return not parent.organisation or resource == str(parent) or resource.startswith(f"{parent}/")
