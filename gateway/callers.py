"""Who is calling: keys of the key file, which work without Redis, and keys that administrators issued."""

from __future__ import annotations

from dataclasses import replace

from baton.core.errors import StateUnavailable, Unauthenticated
from baton.core.tenancy_api import TenancyApi
from baton.core.types import Account, Principal
from gateway.accounts import Accounts
from gateway.keys import KeyRing


class FileKeyAccounts:
    """Accounts as the store has them; for a key that only the file has, that of its tenant, recorded or not."""

    def __init__(self, tenancy: TenancyApi, ring: KeyRing) -> None:
        self._tenancy = tenancy
        self._ring = ring

    async def revision(self) -> str:
        return await self._tenancy.revision()

    async def account(self, key_id: str) -> Account | None:
        found = await self._tenancy.account(key_id)
        own = self._ring.account(key_id)
        if own is None or (found is not None and found.tenant.name == own.tenant.name):
            return found
        tenant = await self._tenancy.tenant(own.tenant.name)
        organisation = await self._tenancy.organisation(tenant[0].organisation) if tenant is not None else None
        if tenant is None or organisation is None:
            return own
        return Account(organisation[0], tenant[0], own.key)


class Callers:
    def __init__(self, ring: KeyRing, accounts: Accounts) -> None:
        """``accounts`` look through ``FileKeyAccounts``."""
        self._ring = ring
        self._accounts = accounts

    async def authenticate(self, presented: str | None) -> Principal:
        """Raises Unauthenticated without saying which part was wrong; StateUnavailable when nobody can tell.

        A key of the file is let in by the file alone. What the store says of it (limits, an end) counts as soon as it
        says something.
        """
        key_id = (presented or "").partition(".")[0]
        if self._ring.account(key_id) is None:
            principal, account = await self._accounts.authenticate(presented)
            return replace(principal, account=account)
        principal = self._ring.authenticate(presented)
        try:
            account = await self._accounts.known(key_id)
        except StateUnavailable:
            return principal
        if account is None:
            return principal
        if not self._accounts.is_active(account):
            raise Unauthenticated("the API key is not valid")
        salt = self._ring.secret.salt(account.tenant)
        return replace(principal, salt=salt, priority=account.key.priority, account=account)
