"""Who holds a key and pays for its requests, as the shared state says, remembered for a moment.

A revoked key is refused within ``max_age`` and one look-up, on every gateway, without anybody being told. While Redis
is away, keys seen before go on for ``stale_seconds``: nobody can revoke one there meanwhile either.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from baton.core.api import TenancyApi
from baton.core.clock import Clock
from baton.core.errors import InvalidRequest, StateUnavailable, Unauthenticated
from baton.core.tenancy import check_name
from baton.core.types import Account, KeyRecord, Principal
from gateway.credentials import ServerSecret

_NOBODY = KeyRecord("", "", "", "0" * 64)


@dataclass(frozen=True, slots=True)
class AccountPolicy:
    """``known``: how many key ids are remembered, unknown ones too, so that guessing costs Redis little."""

    max_age: float = 0.5
    stale_seconds: float = 300.0
    known: int = 20_000


@dataclass(frozen=True, slots=True)
class _Seen:
    account: Account | None
    at: float


class Accounts:
    def __init__(self, tenancy: TenancyApi, secret: ServerSecret, clock: Clock, policy: AccountPolicy) -> None:
        self._tenancy = tenancy
        self._secret = secret
        self._clock = clock
        self._policy = policy
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._reading: dict[str, asyncio.Task[_Seen]] = {}

    async def authenticate(self, presented: str | None) -> tuple[Principal, Account]:
        """Raises Unauthenticated without saying which part was wrong; StateUnavailable when nobody can tell."""
        if not presented:
            raise Unauthenticated("no API key: send the metadata 'authorization: Bearer KEY' or 'x-api-key: KEY'")
        key_id, _, secret = presented.partition(".")
        account = await self._account(key_id)
        key = account.key if account is not None else _NOBODY
        is_right = self._secret.proves(key, secret)
        if account is None or not is_right or not key.is_active(self._clock.wall()):
            raise Unauthenticated("the API key is not valid")
        tenant = account.tenant
        return Principal(tenant.name, key.id, self._secret.salt(tenant), key.priority), account

    async def _account(self, key_id: str) -> Account | None:
        try:
            check_name("key.id", key_id)
        except InvalidRequest:
            return None
        seen = self._seen.get(key_id)
        if seen is not None and self._clock.now() - seen.at < self._policy.max_age:
            return seen.account
        try:
            return (await self._read_once(key_id)).account
        except StateUnavailable:
            if seen is None or self._clock.now() - seen.at > self._policy.stale_seconds:
                raise
            return seen.account

    async def _read_once(self, key_id: str) -> _Seen:
        """All who ask for one key share a look-up; it goes on though one of them leaves."""
        reading = self._reading.get(key_id)
        if reading is None:
            reading = asyncio.create_task(self._read(key_id), name="read an account")
            self._reading[key_id] = reading
            reading.add_done_callback(lambda _: self._reading.pop(key_id, None))
        return await asyncio.shield(reading)

    async def _read(self, key_id: str) -> _Seen:
        asked_at = self._clock.now()  # a change that comes while the answer is on its way is seen next time
        account = await self._tenancy.account(key_id)
        known = self._seen.get(key_id)
        if known is not None and known.account == account:
            account = known.account  # the same object: what is computed for it stays valid
        seen = _Seen(account, asked_at)
        self._seen[key_id] = seen
        self._seen.move_to_end(key_id)
        if len(self._seen) > self._policy.known:
            self._seen.popitem(last=False)
        return seen
