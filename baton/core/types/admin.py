"""What the admin API speaks of: records by resource name, how they change, who changed them, what was used."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from baton.core.types.quota import QuotaAlert, QuotaRefusal
from baton.core.types.tenancy import KeyRecord, Organisation, Tenant

TenancyRecord = Organisation | Tenant | KeyRecord
ANY_ETAG = "*"  # in place of an etag: whichever the record has


class RecordKind(StrEnum):
    ORGANISATION = "organization"
    TENANT = "tenant"
    KEY = "key"


@dataclass(frozen=True, slots=True)
class ResourceName:
    """``organizations/O``, ``organizations/O/tenants/T`` or ``organizations/O/tenants/T/keys/K``; all empty: the root.

    Names of tenants and ids of keys are unique in the whole system; their parents say where they belong.
    """

    organisation: str = ""
    tenant: str = ""
    key: str = ""

    @property
    def kind(self) -> RecordKind:
        if self.key:
            return RecordKind.KEY
        return RecordKind.TENANT if self.tenant else RecordKind.ORGANISATION

    @property
    def id(self) -> str:
        """The last part."""
        return self.key or self.tenant or self.organisation

    @property
    def parent(self) -> ResourceName:
        if self.key:
            return ResourceName(self.organisation, self.tenant)
        return ResourceName(self.organisation) if self.tenant else ResourceName()

    def child(self, child_id: str) -> ResourceName:
        if not self.organisation:
            return ResourceName(child_id)
        return ResourceName(self.organisation, self.tenant or child_id, child_id if self.tenant else "")

    def __str__(self) -> str:
        parts = (("organizations", self.organisation), ("tenants", self.tenant), ("keys", self.key))
        return "/".join(f"{collection}/{name}" for collection, name in parts if name)


@dataclass(frozen=True, slots=True)
class RecordWarning:
    """What ``field`` of a record says has no effect as things stand, or not the one meant: no error, it may change."""

    field: str
    message: str


@dataclass(frozen=True, slots=True)
class Versioned:
    """A record as it was read or written. ``etag`` changes with it; empty: nothing was written (``validate_only``)."""

    name: ResourceName
    record: TenancyRecord
    etag: str
    warnings: tuple[RecordWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A key and, this once, the whole of it; ``secret`` is empty when a repeated call found it issued before."""

    key: Versioned
    secret: str


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """``etag``: of the record that the writer saw, or ANY_ETAG. ``request_id``: a repeated call with it changes nothing
    more and gets the first one's answer. ``validate_only``: check everything, change nothing."""

    etag: str = ""
    request_id: str = ""
    validate_only: bool = False


@dataclass(frozen=True, slots=True)
class Paging:
    """``token`` is the ``next_token`` of the page before; empty for the first one. ``size`` 0: the server's choice."""

    size: int = 0
    token: str = ""


@dataclass(frozen=True, slots=True)
class RecordPage:
    """``next_token`` empty: this is the last page."""

    records: tuple[Versioned, ...]
    next_token: str = ""


# --- as they are stored -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordChange:
    """One record of a commit. ``expected``: the etag that it must have, "" for a new one. ``after`` None: delete."""

    name: ResourceName
    expected: str
    before: TenancyRecord | None
    after: TenancyRecord | None


@dataclass(frozen=True, slots=True)
class Commit:
    """Changes that happen all or not at all, each with an entry in the audit log.

    ``parents`` must exist; below ``emptied`` nothing may be left. ``actor`` is the resource name of the key that asks;
    ``request`` its id for this call, or empty: not idempotent; ``digest`` tells a repeated call from another one.
    """

    actor: str
    action: str
    changes: tuple[RecordChange, ...]
    parents: tuple[ResourceName, ...] = ()
    emptied: tuple[ResourceName, ...] = ()
    request: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Committed:
    """The first change of a commit as it was written; ``record`` None: it was deleted. ``repeated``: by an earlier call
    with the same request id, whose ``digest`` this is."""

    record: TenancyRecord | None
    etag: str
    digest: str = ""
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Who changed what: ``before`` and ``after`` are the record as JSON without secrets, "" where there was none.

    ``at`` in seconds since the Unix epoch. ``actor`` is the resource name of a key.
    """

    id: str
    at: float
    actor: str
    action: str
    resource: str
    before: str
    after: str
    request_id: str


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Newest first. ``next_token`` empty: there is nothing older."""

    entries: tuple[AuditEntry, ...]
    next_token: str = ""


@dataclass(frozen=True, slots=True)
class AlertPage:
    """Oldest first. ``next_token`` empty: there is nothing newer."""

    alerts: tuple[QuotaAlert, ...]
    next_token: str = ""


# --- what was refused and used ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RefusalNote:
    """Why a request was refused. ``at`` in seconds since the Unix epoch."""

    request_id: str
    at: float
    tenant: str
    key_id: str
    model: str
    input_tokens: int
    output_tokens: int
    refusals: tuple[QuotaRefusal, ...]


class UsageGroup(StrEnum):
    """What usage is summed by."""

    TENANT = "tenant"
    KEY = "key"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Charges whose request was admitted in [start, end), seconds since the Unix epoch. Empty names: all."""

    parent: ResourceName
    start: float
    end: float
    model: str = ""


@dataclass(frozen=True, slots=True)
class UsageSum:
    """``cost`` is in the unit of ``Prices``."""

    subject: str
    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: int = 0
    energy_millijoules: int = 0
