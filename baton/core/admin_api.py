"""What administrators are offered, and what it stands on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from baton.core.tenancy_api import TenancyApi
from baton.core.types import (
    Account,
    AlertPage,
    AuditEntry,
    AuditPage,
    Commit,
    Committed,
    IssuedKey,
    KeyRecord,
    LedgerEntry,
    Paging,
    QuotaBalance,
    RecordPage,
    RefusalNote,
    ResourceName,
    TenancyRecord,
    UsageGroup,
    UsageQuery,
    UsageSum,
    Versioned,
    WriteOptions,
)


class RecordsApi(TenancyApi, Protocol):
    """The tenancy as administrators see it: records that are listed, changed together and audited in one step."""

    async def names(self, parent: ResourceName, after: str, limit: int) -> Sequence[ResourceName]:
        """The children of ``parent`` in the order of their ids, beginning behind the id ``after``."""
        ...

    async def commit(self, commit: Commit) -> Committed:
        """Do all of it, audit log included, or nothing. The earlier answer, if the request was done before.

        Conflict when a record is not the one expected, AlreadyExists when none was; NotFound when a parent is missing;
        InvalidRequest when something is left below ``emptied``.
        """
        ...

    async def committed(self, actor: str, request: str) -> Committed | None:
        """The answer to an earlier call with this request id."""
        ...

    async def audit(self, before: str, limit: int) -> Sequence[AuditEntry]:
        """Entries older than the id ``before`` ("": from the newest on), newest first."""
        ...


class RefusalsApi(Protocol):
    """Why requests were refused; the latest thousand of each tenant."""

    async def note(self, notes: Sequence[RefusalNote]) -> None: ...

    async def find(self, tenant: str, request_id: str) -> RefusalNote | None: ...


class AdminApi(Protocol):
    """What administrators ask of the gateway. ``caller`` is who asks, by the key that it showed.

    PermissionDenied when its key's role does not reach so far; NotFound when there is no such record; Conflict when the
    etag of the options is not the record's; InvalidRequest names the field, the limit and the value.
    """

    async def get(self, name: ResourceName, caller: Account) -> Versioned: ...

    async def list(self, parent: ResourceName, paging: Paging, caller: Account) -> RecordPage: ...

    async def create(
        self, name: ResourceName, record: TenancyRecord, options: WriteOptions, caller: Account
    ) -> Versioned:
        """An organisation or a tenant; keys are issued."""
        ...

    async def update(
        self, name: ResourceName, record: TenancyRecord, mask: Sequence[str], options: WriteOptions, caller: Account
    ) -> Versioned:
        """Take the fields that ``mask`` names (``limits.concurrency``, ``tier``; "*": all) from ``record``."""
        ...

    async def delete(self, name: ResourceName, options: WriteOptions, force: bool, caller: Account) -> None:
        """With ``force`` everything below it, too. Requests in progress run to their end and are charged."""
        ...

    async def issue_key(
        self, name: ResourceName, record: KeyRecord, options: WriteOptions, caller: Account
    ) -> IssuedKey: ...

    async def rotate_key(
        self, name: ResourceName, successor: str, overlap: float, options: WriteOptions, caller: Account
    ) -> IssuedKey:
        """A successor with the same rights; the key itself ends after ``overlap`` seconds."""
        ...

    async def revoke_key(self, name: ResourceName, options: WriteOptions, caller: Account) -> Versioned: ...

    async def quota(self, name: ResourceName, model: str, caller: Account) -> Sequence[QuotaBalance]:
        """What the limits for requests of ``model`` stand at, at the level of ``name`` and above it."""
        ...

    async def explain(self, tenant: ResourceName, request_id: str, caller: Account) -> RefusalNote:
        """Why a request was refused. Here the root stands for the caller's tenant, below for all that it may see."""
        ...

    async def alerts(self, parent: ResourceName, paging: Paging, caller: Account) -> AlertPage:
        """Of an organisation and all below it, or of a tenant and its keys, oldest first; for others than platform
        admins the root stands for their tenant."""
        ...

    def export_usage(self, query: UsageQuery, caller: Account) -> AsyncIterator[LedgerEntry]:
        """The ledger's entries, oldest first."""
        ...

    async def sum_usage(self, query: UsageQuery, group: UsageGroup, caller: Account) -> Sequence[UsageSum]: ...

    async def audit(self, parent: ResourceName, paging: Paging, caller: Account) -> AuditPage:
        """Changes of ``parent`` and of what is below it, newest first."""
        ...
