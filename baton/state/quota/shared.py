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
from baton.state.quota.buckets import NO_CHARGE, NO_COST, Bucket, Charge, Cost, Counters, FlowCounters, WindowCounters
from baton.state.quota.claims import check_claim, has_ended, member_of, size_in_use
from baton.state.quota.drawing import Drawing, Drawings
from baton.state.quota.keys import organisation_prefix, organisations_with
from baton.state.quota.scripts import Scripts
from baton.state.quota.verdict import balances, judge, undebited
from baton.state.quota.windows import MICROSECONDS, Calendar, Windows
from baton.state.redis_client import Patience, within

DUE_AT_ONCE = 100  # leases that one call ends: a script holds up the server
ATTEMPTS = 3  # a window may end between two of them, not between three
Listener = Callable[[str, Sequence[Bucket], Windows, Sequence[Counters]], None]


def nobody(_organisation: str, _buckets: Sequence[Bucket], _windows: Windows, _counters: Sequence[Counters]) -> None:
    pass


# Doubles in the scripts' arguments and answers, as the scripts explain them.
REFUSED, TAKEN, IN_USE, ELSEWHEN, ENDED = 1, 2, 3, 4, 5
CHARGED = (SettleOutcome.SETTLED, SettleOutcome.ALREADY, SettleOutcome.SUPERSEDED)
FLOW, WINDOW = 2, 9  # numbers of a bucket, and of each of its windows
_NOTHING = struct.pack("<2d", 0, 0)
_CLAIM = struct.Struct("<4d")
_CHARGE = struct.Struct("<7d")
_WINDOWS = struct.Struct("<12d")


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
        self._drawings = Drawings()
        self._scripts = Scripts(client, Patience(self._budget, config.quota_slow_ms / 1000))

    async def reserve(self, claim: QuotaClaim) -> QuotaGrant:
        lease = round(claim.lease_seconds * MICROSECONDS)
        numbers = _CLAIM.pack(claim.input_tokens, claim.output_tokens, lease, self._kept)
        status, now, answer, drawing, windows = await self._timely("reserve", claim, numbers)
        if status == IN_USE:
            raise size_in_use(claim)
        if status == ENDED:
            raise has_ended(claim)
        buckets, counters = drawing.buckets, _counters(answer[5:], drawing.buckets)
        self._listener(claim.account.organisation.name, buckets, windows, counters)
        if status == TAKEN:
            return QuotaGrant(balances(buckets, windows, counters, now), taken_over=True)
        cost = Cost(*answer[2:5])
        if status == REFUSED:
            raise QuotaExceeded.of(judge(buckets, windows, counters, cost, now).refused)
        shadowed: tuple[QuotaRefusal, ...] = ()
        if drawing.has_shadow:
            shadowed = judge(buckets, windows, _before(buckets, counters, cost), cost, now).shadowed
        return QuotaGrant(balances(buckets, windows, counters, now), shadowed)

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
            code = (await self._timely("charge", claim, _charge_text(total), self._charge_numbers(total)))[0]
            return CHARGED[code]
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
        now, buckets = self._now(), self._drawings.of(account, model).buckets
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
        prefix, member = organisation_prefix(self._namespace, claim.account.organisation.name), check_claim(claim)
        arguments = (claim.owner, _charge_text(total), self._charge_numbers(total))
        return cast(
            bytes, await self._scripts.call("settle", [f"{prefix}open", f"{prefix}r:{member}"], *arguments)
        ).decode()

    async def _timely(
        self, script: str, claim: QuotaClaim, *numbers: str | bytes
    ) -> tuple[int, int, list[int], Drawing, Windows]:
        """Call a script with windows that hold the server's time: status, now, all numbers of its answer, and what it
        was about."""
        account, prices, member = claim.account, claim.prices, check_claim(claim)
        drawing = self._drawings.of(account, claim.model)
        prefix = organisation_prefix(self._namespace, account.organisation.name)
        keys = [f"{prefix}open", f"{prefix}r:{member}", *(prefix + bucket.scope.name for bucket in drawing.buckets)]
        rates = f"{prices.input} {prices.cached} {prices.output} {prices.joule}"
        about = f"{rates}\n{account.tenant.name}\n{account.key.id}\n{claim.model}"
        for _ in range(ATTEMPTS):
            windows = self._windows(account, self._now())
            plan = _WINDOWS.pack(*windows.numbers) + drawing.plan
            reply = cast(bytes, await self._scripts.call(script, keys, claim.owner, about, *numbers, plan))
            answer = _numbers(reply)
            status, now = answer[:2]
            self._server_ahead = now - round(self._clock.wall() * MICROSECONDS)
            if status != ELSEWHEN:
                return status, now, answer, drawing, windows
        raise StateUnavailable("quota: the server's clock jumps")

    async def _read(self, account: Account, buckets: Sequence[Bucket], windows: Windows) -> list[Counters]:
        prefix = organisation_prefix(self._namespace, account.organisation.name)
        call = self._client.mget([prefix + bucket.scope.name for bucket in buckets])  # pyright: ignore
        values = cast("list[bytes | None]", await call)
        return [
            _stored_counters(_numbers(value or _NOTHING), bucket, windows)
            for bucket, value in zip(buckets, values, strict=True)
        ]

    def _charge_numbers(self, charge: Charge) -> bytes:
        return _CHARGE.pack(
            charge.requests, charge.input, charge.cached, charge.output, charge.cost, charge.energy, self._kept
        )

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


def _charge_text(charge: Charge) -> str:
    return f"{charge.requests} {charge.input} {charge.cached} {charge.output} {charge.cost} {charge.energy}"


def _numbers(text: bytes) -> list[int]:
    return list(map(int, struct.unpack(f"<{len(text) // 8}d", text)))


def _counters(numbers: Sequence[int], buckets: Sequence[Bucket]) -> list[Counters]:
    """From an answer, which has those of one bucket after the other."""
    found: list[Counters] = []
    at = 0
    for bucket in buckets:
        flow = FlowCounters(numbers[at], numbers[at + 1])
        at += FLOW
        end = at + WINDOW * len(bucket.kinds)
        windows = tuple([_window_counters(numbers, window) for window in range(at, end, WINDOW)])
        found.append(Counters(windows, flow))
        at = end
    return found


def _stored_counters(numbers: Sequence[int], bucket: Bucket, windows: Windows) -> Counters:
    """From a key, in which other windows may stand before the current ones."""
    places = {numbers[at]: at for at in range(FLOW, len(numbers), WINDOW)}
    current = [places.get(windows.each[bucket.place(kind)].id) for kind in bucket.kinds]
    counted = (WindowCounters() if at is None else _window_counters(numbers, at) for at in current)
    return Counters(tuple(counted), FlowCounters(numbers[0], numbers[1]))


def _window_counters(numbers: Sequence[int], at: int) -> WindowCounters:
    """Of a window that begins there, with its id."""
    return WindowCounters._make(numbers[at + 1 : at + 7])


def _before(buckets: Sequence[Bucket], after: Sequence[Counters], cost: Cost) -> list[Counters]:
    """The counters that a grant was judged by."""
    return [
        Counters(
            tuple(counted.moved(cost, NO_COST) for counted in held.windows),
            undebited(bucket, held.flow, cost.requests),
        )
        for bucket, held in zip(buckets, after, strict=True)
    ]
