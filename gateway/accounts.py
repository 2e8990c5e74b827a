"""Who holds a key and pays for its requests, as the shared state says, remembered until a record changes.

``followed`` asks for the state's revision now and then: an account that was read under the same one is as good as read
anew, so requests wait for no look-up but after a change. Without news for ``max_age`` each key is looked up again, so
that a revoked one is refused within that time and one look-up, on every gateway. While Redis is away, keys seen before
go on for ``stale_seconds``: nobody can revoke one there meanwhile either. The first of them waits ``patience`` for a
look-up; until one succeeds the others wait for none.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from baton.core.background import background
from baton.core.clock import Clock
from baton.core.errors import InvalidRequest, StateUnavailable, Unauthenticated
from baton.core.tenancy import check_name
from baton.core.types import Account, KeyRecord, Principal
from gateway.credentials import ServerSecret

LATE_TURNS = 10  # of the event loop, from an answer in the socket's buffer to whoever waits for it
_NOBODY = KeyRecord("", "", "", "0" * 64)


@dataclass(frozen=True, slots=True)
class AccountPolicy:
    """``known``: how many key ids are remembered, unknown ones too, so that guessing costs Redis little. An account
    takes 3 kB with all limits on three levels, so all of them 150 MB.
    """

    max_age: float = 0.5
    stale_seconds: float = 300.0
    patience: float = 0.03
    known: int = 50_000


@dataclass(frozen=True, slots=True)
class _Seen:
    """``revision``: the newest one known when the account was asked for; None: none was known."""

    account: Account | None
    at: float
    revision: str | None


class AccountSource(Protocol):
    """Of ``TenancyApi``, what is asked here."""

    async def account(self, key_id: str) -> Account | None: ...

    async def revision(self) -> str: ...


class Accounts:
    def __init__(self, tenancy: AccountSource, secret: ServerSecret, clock: Clock, policy: AccountPolicy) -> None:
        self._tenancy = tenancy
        self._secret = secret
        self._clock = clock
        self._policy = policy
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._reading: dict[str, asyncio.Task[_Seen]] = {}
        self._is_away = False
        self._revision: str | None = None
        self._revision_at = 0.0  # meaningful with a revision

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """The state's revision is known while the block lasts."""
        async with background(self._follow(), "revision of accounts"):
            yield

    async def _follow(self) -> None:
        while True:
            asked_at = self._clock.now()
            with suppress(StateUnavailable):  # what is remembered grows old, and is looked up
                self._revision, self._revision_at = await self._tenancy.revision(), asked_at
            await self._clock.sleep(self._policy.max_age / 2)

    async def authenticate(self, presented: str | None) -> tuple[Principal, Account]:
        """Raises Unauthenticated without saying which part was wrong; StateUnavailable when nobody can tell."""
        if not presented:
            raise Unauthenticated("no API key: send the metadata 'authorization: Bearer KEY' or 'x-api-key: KEY'")
        key_id, _, secret = presented.partition(".")
        account = await self.known(key_id)
        key = account.key if account is not None else _NOBODY
        is_right = self._secret.proves(key, secret)
        if account is None or not is_right or not self.is_active(account):
            raise Unauthenticated("the API key is not valid")
        tenant = account.tenant
        return Principal(tenant.name, key.id, self._secret.salt(tenant), key.priority), account

    def is_active(self, account: Account) -> bool:
        return account.key.is_active(self._clock.wall())

    async def known(self, key_id: str) -> Account | None:
        """Whose key this is, whoever presents it. StateUnavailable when nobody can tell."""
        try:
            check_name("key.id", key_id)
        except InvalidRequest:
            return None
        seen = self._seen.get(key_id)
        age = None if seen is None else self._clock.now() - self._known_at(seen)
        if seen is not None and age is not None and age < self._policy.max_age:
            self._seen.move_to_end(key_id)
            return seen.account
        if seen is None or age is None or age > self._policy.stale_seconds:
            return (await self._read_once(key_id)).account
        try:
            async with asyncio.timeout(0 if self._is_away else self._policy.patience):
                return (await self._read_once(key_id)).account
        except (StateUnavailable, TimeoutError):
            if (found := await self._come_late(key_id, seen)) is not None:
                return found.account
            self._is_away = True
            return seen.account

    def _known_at(self, seen: _Seen) -> float:
        """When the account was last known to be as it was seen."""
        is_unchanged = seen.revision is not None and seen.revision == self._revision
        return max(seen.at, self._revision_at) if is_unchanged else seen.at

    async def _come_late(self, key_id: str, seen: _Seen) -> _Seen | None:
        """The answer of a look-up that was in time for everybody but a loop too busy to hear it before the alarm: a key
        that was revoked long ago must not get in for that. None: there is none."""
        for _ in range(LATE_TURNS):
            found = self._seen.get(key_id)
            if found is not None and found is not seen:
                return found
            if key_id not in self._reading:
                return None
            await asyncio.sleep(0)
        return None

    async def _read_once(self, key_id: str) -> _Seen:
        """All who ask for one key share a look-up; it goes on though one of them leaves."""
        reading = self._reading.get(key_id)
        if reading is None:
            reading = asyncio.create_task(self._read(key_id), name="read an account")
            self._reading[key_id] = reading
            reading.add_done_callback(lambda done: self._end(key_id, done))
        return await asyncio.shield(reading)

    def _end(self, key_id: str, done: asyncio.Task[_Seen]) -> None:
        """Also looks at the failure of a look-up that nobody waited for."""
        self._reading.pop(key_id, None)
        self._is_away = not done.cancelled() and done.exception() is not None

    async def _read(self, key_id: str) -> _Seen:
        # A change that comes while the answer is on its way is seen next time.
        asked_at, revision = self._clock.now(), self._revision
        account = await self._tenancy.account(key_id)
        known = self._seen.get(key_id)
        if known is not None and known.account == account:
            account = known.account  # the same object: what is computed for it stays valid
        seen = _Seen(account, asked_at, revision)
        self._seen[key_id] = seen
        self._seen.move_to_end(key_id)
        if len(self._seen) > self._policy.known:
            self._seen.popitem(last=False)
        return seen
