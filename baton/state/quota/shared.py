"""Quotas that all gateways share, in Redis: one atomic script a decision, on the server's own time.

Every key of an organisation has its hash tag, ``<namespace>:{<organisation>}:quota:...``: a claim draws on buckets of
the organisation, the tenant and the key at once, and one script can be atomic over one slot only. So organisations
spread over the shards of a cluster, and one organisation's admissions are bounded by one core of its shard. Days and
months come from the caller, who knows time zones; the script refuses windows that do not hold its own time, and the
caller names them again by the time that the refusal brought. Clocks of gateways may differ as they like.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import cast

from redis.asyncio import Redis

from baton.core.clock import Clock
from baton.core.errors import QuotaExceeded, StateUnavailable
from baton.core.streams import closing
from baton.core.types import (
    Account,
    Delivered,
    LeaseState,
    Progress,
    QuotaBalance,
    QuotaClaim,
    QuotaGrant,
    QuotaRefusal,
    SettleOutcome,
)
from baton.state.config import StateConfig
from baton.state.quota.buckets import NO_CHARGE, NO_COST, Bucket, Charge, Cost, Counters, buckets_of
from baton.state.quota.claims import check_request, has_ended, member_of, size_in_use
from baton.state.quota.drawing import Drawings
from baton.state.quota.keys import organisation_prefix, organisations_with
from baton.state.quota.scripts import Scripts
from baton.state.quota.standing import Standing, StandingBalances, stored_counters
from baton.state.quota.verdict import balances, judge, undebited
from baton.state.quota.windows import MICROSECONDS, Calendar, Windows
from baton.state.redis_client import Patience, within

DUE_AT_ONCE = 100  # leases that one call ends: a script holds up the server
ATTEMPTS = 3  # a window may end between two of them, not between three
REFUSED, TAKEN, IN_USE, ELSEWHEN, ENDED = 1, 2, 3, 4, 5  # answers of ``reserve`` but for 0: granted
CHARGED = (SettleOutcome.SETTLED, SettleOutcome.ALREADY, SettleOutcome.SUPERSEDED)  # by the answer of ``charge``
# Doubles in the scripts' arguments and answers, as the scripts explain them.
_CLAIM = struct.Struct("<6d")
_CHARGE = struct.Struct("<7d")
_CHARGE_IN_TIME = struct.Struct("<9d")
_STATUS_AND_NOW = struct.Struct("<2d")

Listener = Callable[[Standing], None]


def nobody(_: Standing) -> None:
    pass


class SharedQuota:
    """Implements ``QuotaApi``. A server that is silent for ``quota_budget_ms`` is StateUnavailable.

    How an admission ended is remembered for ``quota_remember_seconds``, so that telling it again changes nothing.
    ``listener`` is told what the counters stand at, as each claim's answer says it.
    """

    def __init__(self, client: Redis, config: StateConfig, clock: Clock, listener: Listener = nobody) -> None:
        self._client = client
        self._listener = listener
        self._namespace = config.namespace
        self._budget = config.quota_budget_ms / 1000
        self._kept = round(config.quota_remember_seconds * 1000)
        self._clock = clock
        self._server_ahead = 0  # microseconds, as the latest answer told
        self._calendar = Calendar()
        self._drawings = Drawings(config.namespace)
        self._scripts = Scripts(client, Patience(self._budget, config.quota_slow_ms / 1000))

    async def reserve(self, claim: QuotaClaim) -> QuotaGrant:
        lease = round(claim.lease_seconds * MICROSECONDS)
        claimed = (claim.input_tokens, claim.output_tokens, lease, self._kept)
        status, standing = await self._timely("reserve", claim, lambda seconds: _CLAIM.pack(*claimed, *seconds))
        if status == IN_USE:
            raise size_in_use(claim)
        if status == ENDED:
            raise has_ended(claim)
        self._listener(standing)
        if status == TAKEN:
            return QuotaGrant(StandingBalances(standing), taken_over=True)
        if status == REFUSED:
            raise QuotaExceeded.of(_refused(standing))
        shadowed = _shadowed(standing) if standing.drawing.has_shadow else ()
        return QuotaGrant(StandingBalances(standing), shadowed)

    async def renew(self, organisation: str, progress: Sequence[Progress], lease_seconds: float) -> list[LeaseState]:
        prefix, lease = organisation_prefix(self._namespace, organisation), round(lease_seconds * MICROSECONDS)
        call = self._scripts.call("renew", [f"{prefix}open"], lease, *_rows(progress))
        return [LeaseState(state.decode()) for state in cast("list[bytes]", await call)]

    async def recover(self, organisation: str, progress: Sequence[Progress]) -> int:
        prefix = organisation_prefix(self._namespace, organisation)
        return cast(int, await self._scripts.call("recover", [f"{prefix}open"], *_rows(progress)))

    async def settle(self, claim: QuotaClaim, delivered: Delivered) -> SettleOutcome:
        total = Charge.of(delivered, claim.prices)
        status = await self._end(claim, total)
        if status == "missing":
            return await self._charge(claim, total)
        return SettleOutcome(status)

    async def release(self, claim: QuotaClaim) -> SettleOutcome:
        status = await self._end(claim, NO_CHARGE)
        return SettleOutcome.ALREADY if status == "missing" else SettleOutcome(status)

    async def expire(self) -> int:
        """Of every organisation that has reservations, whoever made them. Each of its calls has the budget anew."""
        ended = 0
        found = organisations_with("open", self._client, self._namespace, self._budget)
        async with closing(found) as organisations:
            async for organisation in organisations:
                ended += await self._expire(organisation_prefix(self._namespace, organisation))
        return ended

    async def balances(self, account: Account, model: str) -> tuple[QuotaBalance, ...]:
        now, buckets = self._now(), buckets_of(account, model)
        windows = self._windows(account, now)
        counters = await within(self._read(account, buckets, windows), self._budget, "read quota counters")
        return balances(buckets, windows, counters, now)

    async def _expire(self, prefix: str) -> int:
        ended, found = 0, DUE_AT_ONCE
        while found == DUE_AT_ONCE:
            found = cast(int, await self._scripts.call("expire", [f"{prefix}open"], DUE_AT_ONCE))
            ended += found
        return ended

    # --- parts of a call --------------------------------------------------------------------------------------------

    async def _end(self, claim: QuotaClaim, total: Charge) -> str:
        prefix, member = self._drawings.of(claim.account, claim.model).prefix, check_request(claim)
        call = self._scripts.call(
            "settle",
            (f"{prefix}open", f"{prefix}r:{member}"),
            claim.owner,
            _charge_text(total),
            _CHARGE.pack(*_parts(total), self._kept),
        )
        return cast(bytes, await call).decode()

    async def _charge(self, claim: QuotaClaim, total: Charge) -> SettleOutcome:
        charged, text = (*_parts(total), self._kept), _charge_text(total)
        status, _ = await self._timely("charge", claim, lambda seconds: _CHARGE_IN_TIME.pack(*charged, *seconds), text)
        return CHARGED[status]

    async def _timely(
        self, script: str, claim: QuotaClaim, head: Callable[[tuple[int, int]], bytes], *more: str
    ) -> tuple[int, Standing]:
        """Call a script with windows that hold the server's time: the status, and what else its answer tells.

        ``head`` makes the beginning of the plan, of the seconds between which the windows hold; ``more`` are the last
        arguments.
        """
        account, prices = claim.account, claim.prices
        drawing, member = self._drawings.of(account, claim.model), check_request(claim)
        prefix = drawing.prefix
        keys = (f"{prefix}open", f"{prefix}r:{member}", *[scope.key for scope in drawing.scopes])
        about = f"{prices.input} {prices.cached} {prices.output} {prices.joule}\n{drawing.about}"
        for _ in range(ATTEMPTS):
            windows = self._windows(account, self._now())
            plan, drawn = drawing.packed(windows)
            arguments = (claim.owner, about, head(windows.seconds) + plan, drawn, *more)
            reply = cast(bytes, await self._scripts.call(script, keys, *arguments))
            status, now = map(int, _STATUS_AND_NOW.unpack_from(reply))
            self._server_ahead = now - round(self._clock.wall() * MICROSECONDS)
            if status != ELSEWHEN:
                return status, Standing(drawing, windows, now, reply)
        raise StateUnavailable("quota: the server's clock jumps")

    async def _read(self, account: Account, buckets: Sequence[Bucket], windows: Windows) -> list[Counters]:
        prefix = organisation_prefix(self._namespace, account.organisation.name)
        call = self._client.mget([prefix + bucket.scope.name for bucket in buckets])  # pyright: ignore
        values = cast("list[bytes | None]", await call)
        return [stored_counters(value, bucket, windows) for bucket, value in zip(buckets, values, strict=True)]

    def _windows(self, account: Account, now: int) -> Windows:
        return self._calendar.windows(account.organisation.time_zone, account.tenant.time_zone, now)

    def _now(self) -> int:
        return round(self._clock.wall() * MICROSECONDS) + self._server_ahead


# --- the scripts' arguments and answers -------------------------------------------------------------------------------


def _rows(progress: Sequence[Progress]) -> list[str]:
    rows: list[str] = []
    for each in progress:
        told = each.delivered
        numbers = f"{told.input_tokens} {told.cached_tokens} {told.output_tokens} {told.energy_millijoules}"
        rows += [member_of(each.tenant, each.request_id), each.owner, numbers]
    return rows


def _parts(charge: Charge) -> tuple[int, ...]:
    return charge.requests, charge.input, charge.cached, charge.output, charge.cost, charge.energy


def _charge_text(charge: Charge) -> str:
    return f"{charge.requests} {charge.input} {charge.cached} {charge.output} {charge.cost} {charge.energy}"


def _refused(standing: Standing) -> tuple[QuotaRefusal, ...]:
    """Why a claim was, which stands as it was judged."""
    return judge(standing.drawing.buckets, standing.windows, standing.counters, standing.cost, standing.now).refused


def _shadowed(standing: Standing) -> tuple[QuotaRefusal, ...]:
    """What limits in shadow would have refused of a claim that was granted."""
    buckets, cost = standing.drawing.buckets, standing.cost
    return judge(buckets, standing.windows, _before(buckets, standing.counters, cost), cost, standing.now).shadowed


def _before(buckets: Sequence[Bucket], after: Sequence[Counters], cost: Cost) -> list[Counters]:
    """The counters that a grant was judged by."""
    return [
        Counters(
            tuple(counted.moved(cost, NO_COST) for counted in held.windows),
            undebited(bucket, held.flow, cost.requests),
        )
        for bucket, held in zip(buckets, after, strict=True)
    ]
