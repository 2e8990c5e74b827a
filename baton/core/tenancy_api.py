"""Who is let in and what it may use: tenants, quotas and the ledger, as the gateway asks the store for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from baton.core.types import (
    Account,
    Delivered,
    KeyRecord,
    LeaseState,
    LedgerEntry,
    LedgerExtent,
    Organisation,
    Progress,
    QuotaAlert,
    QuotaBalance,
    QuotaClaim,
    QuotaGrant,
    SettleOutcome,
    Tenant,
)


class TenancyApi(Protocol):
    """Organisations, tenants and keys as everybody sees them. StateUnavailable within the budget of a call.

    Every record has an etag that changes with it. They are changed through ``RecordsApi`` alone, which keeps their
    indexes and the audit log with them.
    """

    async def account(self, key_id: str) -> Account | None:
        """A key with its tenant and organisation, all of one moment; None when one of them does not exist."""
        ...

    async def revision(self) -> str:
        """Another one after every change of any record: what was read since it was asked for first is still so if it
        is the same."""
        ...

    async def organisation(self, name: str) -> tuple[Organisation, str] | None:
        """The record and its etag; None when there is none."""
        ...

    async def tenant(self, name: str) -> tuple[Tenant, str] | None: ...

    async def key(self, key_id: str) -> tuple[KeyRecord, str] | None: ...


class QuotaApi(Protocol):
    """The counters that all gateways share. A reservation is Open, then ends once: settled, released or expired.

    Every call raises StateUnavailable within its budget.
    """

    async def reserve(self, claim: QuotaClaim) -> QuotaGrant:
        """Debit every bucket of the claim, or none. QuotaExceeded explains each limit in the way; InvalidRequest when
        another request of this id and another size is open."""
        ...

    async def renew(self, organisation: str, progress: Sequence[Progress], lease_seconds: float) -> list[LeaseState]:
        """Extend leases and note what was delivered so far, unless more was told before; the answers are in the order
        of ``progress``. What an owner tells that is superseded is noted, too."""
        ...

    async def recover(self, organisation: str, progress: Sequence[Progress]) -> int:
        """Note what a gateway that died had delivered. How many reservations were still its own.

        No lease grows longer. One that has ended is charged for what it was not told of, and so is one that somebody
        else has taken over, once. Telling again changes nothing.
        """
        ...

    async def settle(self, claim: QuotaClaim, delivered: Delivered) -> SettleOutcome:
        """Charge what was delivered, refund the rest, write the ledger. A claim without a reservation (served while
        the counters were away, or lost with them) is charged as well. An admission and all that took it over come to
        the most that one of them delivered, in whatever order they settle, as long as their ends are remembered."""
        ...

    async def release(self, claim: QuotaClaim) -> SettleOutcome:
        """Give everything back: the request was not served, for a reason of ours. The burst refills by itself.

        What another owner had told of it, before this one took it over, is charged; the client may go on once more.
        """
        ...

    async def expire(self) -> int:
        """End all reservations whose lease has ended, charged for their last progress; how many."""
        ...

    async def balances(self, account: Account, model: str) -> tuple[QuotaBalance, ...]:
        """What the limits for requests of ``model`` stand at; they change nothing."""
        ...


class LedgerReader(Protocol):
    """What was charged, append-only, written in one step with the counters. Ids grow; "" is before the first."""

    def organisations(self) -> AsyncIterator[str]:
        """Names of those that have a ledger, recorded or not, in no order."""
        ...

    async def entries(self, organisation: str, after: str = "", limit: int = 1000) -> Sequence[LedgerEntry]: ...

    async def alerts(self, organisation: str, after: str = "", limit: int = 1000) -> Sequence[QuotaAlert]:
        """Alerts behind the id ``after``, oldest first; a bounded number of the latest ones is kept."""
        ...


class LedgerApi(LedgerReader, Protocol):
    """The ledger as the counters' store has it, until it is trimmed."""

    async def extent(self, organisation: str) -> LedgerExtent: ...

    async def trim(self, organisation: str, through: str) -> None:
        """Forget entries up to and with the id ``through``, once they are kept elsewhere."""
        ...


class LedgerArchive(Protocol):
    """Where a ledger is kept for good: files, a warehouse. StateUnavailable when it cannot be read or written."""

    async def organisations(self) -> Sequence[str]:
        """Names of those of which something is kept."""
        ...

    async def latest(self, organisation: str) -> str:
        """The id of the last entry that is kept; "" for none."""
        ...

    async def append(self, organisation: str, entries: Sequence[LedgerEntry]) -> None:
        """Returns when they are kept. Entries come in order; those up to ``latest`` are kept already and left out."""
        ...

    async def entries(self, organisation: str, after: str = "", limit: int = 1000) -> Sequence[LedgerEntry]: ...
